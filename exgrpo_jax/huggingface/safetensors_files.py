"""Find, check, open and write a checkpoint's safetensors files.

A checkpoint contains either model.safetensors, or several files and an index that lists the tensors
in each file. The folder may be remote (gs://). safetensors needs local files, so remote files are
copied to the machine's temporary folder one at a time.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface.tensor_names import Tensor, text_name

_SINGLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}
_DERIVED = 'rotary_emb.inv_freq'  # stored in old checkpoints, but derivable from config.json


# ---- Reading ----


def locate(folder: epath.Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
  """Return a map from tensor name to file name, including any derived rotary frequencies.

  Raises InputError if a file or tensor is missing, or if there is an unexpected tensor.
  """
  path, listing = list_tensors(folder)
  files = {name: file for full_name, file in listing.items() if (name := text_name(full_name))}
  check_names(path, files, tensors, 'config.json')
  return files


def check_names(
  path: epath.PathLike, names: Collection[str], tensors: Mapping[str, Tensor], source: str
) -> None:
  """Raise InputError unless `names` are exactly the names of the required `tensors`.

  Derived rotary frequencies are allowed too.
  """
  missing = [name for name in tensors if name not in names]
  unexpected = [name for name in names if name not in tensors and not name.endswith(_DERIVED)]
  if missing:
    shape = list(tensors[missing[0]].shape)
    raise InputError(
      f'{path}: tensor {missing[0]} is missing, but {source} requires it with shape '
      f'{shape}{_and_more(missing)}.'
    )
  if unexpected:
    raise InputError(
      f'{path}: tensor {unexpected[0]} is unexpected because {source} does not require it'
      f'{_and_more(unexpected)}.'
    )


def list_tensors(folder: epath.Path) -> tuple[epath.Path, dict[str, str]]:
  """Return the file that lists a checkpoint's tensors, and a map from tensor name to file name.

  Raises InputError if a file is missing or the index is invalid.
  """
  index = folder / _INDEX
  if index.is_file():
    try:
      files = dict(json.loads(index.read_text())['weight_map'])
    except (ValueError, KeyError, TypeError) as error:
      raise InputError(
        f'{index}: not an index of safetensors files ({error!r}). It must be JSON with a '
        "'weight_map' that maps tensors to files."
      ) from error
    for file in sorted(set(files.values())):
      if not (folder / file).is_file():
        tensor = next(name for name, holder in files.items() if holder == file)
        raise InputError(
          f'{index}: the index lists {tensor} in {file}, but that file does not exist. '
          'Download the checkpoint again.'
        )
    return index, files
  path = folder / _SINGLE
  if not path.is_file():
    if (folder / 'adapter_model.safetensors').is_file():
      raise InputError(
        f'{folder}: the folder contains only adapters. Export the merged model, without --adapters.'
      )
    raise InputError(
      f'{folder}: the folder contains neither {_SINGLE} nor {_INDEX}. Weights must be in '
      'safetensors format because other formats can execute code when they are loaded.'
    )
  with _local_copy(path) as local, _open(local, path) as reader:
    return path, dict.fromkeys(reader.keys(), _SINGLE)


def _and_more(names: Sequence[str]) -> str:
  return f' (and {len(names) - 1} more)' if len(names) > 1 else ''


@contextlib.contextmanager
def open_checked(path: epath.Path, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
  """Check a file's tensors against the expected ones and yield a `Slice` for each, by name.

  `path` may be remote. Raises InputError if the file is damaged, or a tensor is missing or
  unexpected, or has the wrong shape or an unsupported dtype.
  """
  with _local_copy(path) as local:
    with _open(local, path) as reader:
      full_names = {
        name: full_name for full_name in list(reader.keys()) if (name := text_name(full_name))
      }
      _check(reader, full_names, path, tensors)
    yield {name: Slice(local, full_names[name]) for name in tensors}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A tensor in a file; indexing it reads only the indexed part."""

  file: str
  name: str

  def __getitem__(self, index: Any) -> np.ndarray:
    # Open the file for each read: pages read through a mapping count as this process's memory until
    # the file is closed, so they would amount to a second copy of the weights.
    with safe_open(self.file, 'np') as reader:
      return reader.get_slice(self.name)[index]


@contextlib.contextmanager
def _local_copy(path: epath.Path) -> Iterator[str]:
  """Yield a local path to the content of `path`, because safetensors can only map local files."""
  if '://' not in str(path):
    yield os.fspath(path)
    return
  with tempfile.TemporaryDirectory() as folder:
    copy = os.path.join(folder, path.name)
    path.copy(copy)
    yield copy


@contextlib.contextmanager
def _open(local: str, path: epath.Path) -> Iterator[Any]:
  try:
    reader = safe_open(local, 'np')
  except SafetensorError as error:
    raise InputError(
      f'{path}: not a complete safetensors file ({os.path.getsize(local)} bytes; '
      f'{error}). Download it again.'
    ) from error
  with reader:
    yield reader


def _check(
  reader: Any, names: Mapping[str, str], path: epath.Path, tensors: Mapping[str, Tensor]
) -> None:
  """Raise InputError if the file does not match the index and config.json.

  `names` maps each tensor's name to its name in the file.
  """
  check_names(path, names, tensors, f'the list for this file in {_INDEX}')
  for name, tensor in tensors.items():
    shape = list(tensor.shape)
    tensor_slice = reader.get_slice(names[name])
    if tensor_slice.get_shape() != shape:
      raise InputError(
        f'{path}: tensor {name} has shape {tensor_slice.get_shape()}, but config.json requires '
        f'{shape}. Use the config.json that belongs to this checkpoint.'
      )
    if tensor_slice.get_dtype() not in _DTYPES:
      raise InputError(
        f'{path}: tensor {name} has dtype {tensor_slice.get_dtype()}. It must be one of '
        f'{", ".join(_DTYPES)} because quantized weights are not supported.'
      )


# ---- Writing ----


def names(count: int) -> list[str]:
  """Return file names for a checkpoint of `count` files."""
  if count == 1:
    return [_SINGLE]
  return [f'model-{number:05d}-of-{count:05d}.safetensors' for number in range(1, count + 1)]


def write(path: epath.Path, arrays: dict[str, np.ndarray]) -> None:
  """Write one file, local or remote; the arrays must be C-contiguous."""
  is_remote = '://' in str(path)
  with (
    tempfile.TemporaryDirectory() if is_remote else contextlib.nullcontext(path.parent) as folder
  ):
    local = os.path.join(folder, path.name)
    with open(local, 'wb') as file:
      mode = os.stat(file.fileno()).st_mode
    # transformers requires this metadata; 'pt' means PyTorch's layout, which NumPy shares.
    save_file(arrays, local, {'format': 'pt'})
    os.chmod(local, mode)  # safetensors lets only the owner read the file, regardless of the umask
    if is_remote:
      epath.Path(local).copy(path, overwrite=True)


def write_index(folder: epath.Path, files: Mapping[str, str], total_size: int) -> None:
  """Write the index of a multi-file checkpoint.

  `files` maps tensor names to file names. `total_size` is the size of all tensors in bytes.
  """
  index = {'metadata': {'total_size': total_size}, 'weight_map': dict(files)}
  (folder / _INDEX).write_text(json.dumps(index, indent=2))
