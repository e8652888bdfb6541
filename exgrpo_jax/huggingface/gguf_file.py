"""GGUF, llama.cpp's format of a model: one file with metadata, tokenizer and quantised tensors.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read by the package `gguf`. Tensors are
dequantised a slice at a time out of the mapped file, so that a device's slice is all that is ever
in memory.
"""

import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import safetensors_files
from exgrpo_jax.huggingface.tensor_names import Tensor

ROPE_FACTORS = 'rope_freqs.weight'  # of Llama 3's rotary scaling; it becomes part of config.json


def is_one(path: epath.PathLike) -> bool:
  """Whether a path names a GGUF file."""
  return os.fspath(path).endswith('.gguf') and not os.path.isdir(path)


def opened(path: str) -> Any:
  """The `gguf.GGUFReader` of a file.

  Raises:
    InputError: the package is missing, or the file is absent, damaged, in parts or big-endian.
  """
  if not os.path.isfile(path):
    raise InputError(f'{path}: there is no such file; a GGUF is read where it lies, on a disk.')
  gguf = library(path)
  try:
    reader = gguf.GGUFReader(path)
  except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
    raise InputError(
      f'{path}: not a complete GGUF file, at {os.path.getsize(path)} bytes '
      f'({type(error).__name__}: {error}); download it again, or update the package gguf.'
    ) from error
  if reader.byte_order != 'I':
    raise InputError(f'{path}: its numbers are big-endian, which are not read; convert it anew.')
  if (parts := reader.fields.get('split.count')) and parts.contents() > 1:
    raise InputError(
      f'{path}: one of {parts.contents()} files, and a model must be one; '
      'llama-gguf-split --merge joins them.'
    )
  return reader


def library(path: str) -> Any:
  """The package `gguf`; InputError, for the file at `path`, if it is not installed."""
  try:
    package = importlib.import_module('gguf')
  except ImportError:
    package = None
  if not hasattr(package, 'GGUFReader'):  # a folder gguf/ can be imported too
    raise InputError(
      f'{path}: a GGUF is read by the package gguf, which is not installed: pip install '
      "'exgrpo_jax[gguf]', or name a Hugging Face folder."
    )
  return package


def slices(path: str, tensors: Mapping[str, Tensor], head_size: int) -> dict[str, 'Slice']:
  """What reads parts of each tensor, after checking the file's against the expected ones.

  Args:
    path: local.
    tensors: the tensors that the file must hold, by Hugging Face's names.
    head_size: of queries and keys.

  Raises:
    InputError: the file is damaged, or a tensor is missing, unexpected, of another shape, or of a
      type that the package `gguf` does not dequantise.
  """
  file = opened(path)
  gguf = library(path)
  family = file.fields['general.architecture'].contents()
  architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  names = gguf.get_tensor_name_map(architecture, file.fields[f'{family}.block_count'].contents())
  expected = {names.get_name(name, ('.weight', '.bias')): name for name in tensors}
  found = {tensor.name: tensor for tensor in file.tensors if tensor.name != ROPE_FACTORS}
  safetensors_files.check_names(
    path, found, {own: tensors[name] for own, name in expected.items()}, 'the metadata'
  )
  found_slices = {}
  for own, name in expected.items():
    stored, shape = found[own], list(tensors[name].shape)
    if (found_shape := stored.shape.tolist()[::-1]) != shape:
      raise InputError(
        f'{path}: tensor {own} has shape {found_shape}; the metadata requires {shape}.'
      )
    is_permuted = family == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight'))
    _check_type(path, gguf, stored)
    found_slices[name] = Slice(gguf, stored, head_size if is_permuted else 0)
  return found_slices


def _check_type(path: str, gguf: Any, stored: Any) -> None:
  """Raises InputError unless the package dequantises the tensor's type; tries it on a block."""
  _, size = gguf.GGML_QUANT_SIZES[stored.tensor_type]
  try:
    gguf.dequantize(np.zeros((1, size), np.uint8), stored.tensor_type)
  except NotImplementedError as error:
    raise InputError(
      f'{path}: tensor {stored.name} has type {stored.tensor_type.name}, which the package gguf '
      'does not dequantise; convert the model to another, such as F16, Q8_0 or Q4_K.'
    ) from error


_VALUES = 2**21  # that are dequantised together; 8 MiB


@dataclasses.dataclass(frozen=True)
class Slice:
  """A tensor, of which an index gives a part in float32."""

  gguf: Any  # the package
  stored: Any  # its ReaderTensor
  head_size: int  # where llama.cpp has permuted the rows, else 0

  def __getitem__(self, index: Any) -> np.ndarray:
    """The part at a slice of each dimension; of permuted rows, those of whole heads."""
    *rows, columns = index if isinstance(index, tuple) else (index,)
    start, stop, _ = columns.indices(int(self.stored.shape[0]))  # ggml names the rows' length first
    values, size = self.gguf.GGML_QUANT_SIZES[self.stored.tensor_type]  # of a block: count, bytes
    first, last = start // values, -(-stop // values)
    blocks = np.asarray(self.stored.data).view(np.uint8)[(*rows, slice(first * size, last * size))]
    part = self._dequantized(blocks, (last - first) * values)
    part = part[..., start - first * values : stop - first * values]
    if not self.head_size:
      return part
    # llama.cpp rotates neighbours, Hugging Face i with i + H/2; conversion interleaved the halves.
    pairs = part.reshape(-1, self.head_size // 2, 2, part.shape[-1])
    return pairs.swapaxes(1, 2).reshape(part.shape)

  def _dequantized(self, blocks: np.ndarray, columns: int) -> np.ndarray:
    """All values of some blocks, float32."""
    if blocks.ndim == 1:
      return self.gguf.dequantize(blocks, self.stored.tensor_type)
    # Some rows at a time: the package needs several times the memory of what it dequantises.
    part, together = np.empty((len(blocks), columns), np.float32), max(1, _VALUES // columns)
    for start in range(0, len(blocks), together):
      some = slice(start, start + together)
      part[some] = self.gguf.dequantize(blocks[some], self.stored.tensor_type)
    return part
