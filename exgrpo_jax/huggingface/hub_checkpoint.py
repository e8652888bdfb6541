"""From a model's name to the folder of its files: on the Hub, in a GGUF, or in this package."""

import os
import pathlib

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import gguf_file
from exgrpo_jax.runtime import hosts, hub

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
