"""From the name of a model to the folder of its files: on the Hugging Face Hub, or in a GGUF."""

import os

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import gguf_description, gguf_file
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


def named(path: str) -> hub.Repository | None:
  """The repository that `path` names as owner/name or owner/name@revision.

  None where it has another form, or is a file or folder.
  """
  return None if os.path.exists(path) else hub.parse('model', path)


def folder(path: str, key: str, weights: bool = False) -> str:
  """The folder of a checkpoint's files: `path` itself, unless that is a GGUF or a name on the Hub.

  All hosts must call it, because they agree on the commit; the first one fetches first, so that
  hosts which share a cache fetch once.

  Args:
    path: a setting's value, perhaps ''.
    key: the setting, for error messages.
    weights: whether to fetch them too, beside config.json and the tokenizer's files; of a GGUF
      they are the file itself, and only what describes it becomes a folder.

  Raises:
    InputError: it cannot be fetched, or not read as a GGUF.
  """
  if gguf_file.is_one(path := os.path.expanduser(path)):
    with hosts.first_host_first(key):
      return path if weights else gguf_description.folder(path)
  repository = named(path)
  if not repository:
    return path
  try:
    repository = hub.pinned(repository)
    with hosts.first_host_first(key):
      return hub.fetch(repository, _DESCRIPTION + _WEIGHTS if weights else _DESCRIPTION)
  except InputError as error:
    raise InputError(f'{key}={path}: {error}') from error
