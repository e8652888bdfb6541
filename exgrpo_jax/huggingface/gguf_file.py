"""GGUF, llama.cpp's model format: one file with metadata, tokenizer and quantized tensors.

The `gguf` package reads GGUFs (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Tensors
are dequantized slice by slice from the memory-mapped file, so at most one device's slice is in
memory at a time.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from huggingface_hub import constants

from exgrpo_jax.data import tokenizer_json
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture, families, safetensors_files
from exgrpo_jax.huggingface.tensor_names import Tensor
from exgrpo_jax.policy import rotary
from exgrpo_jax.runtime.replacement import replacing

ROPE_FACTORS = 'rope_freqs.weight'  # Llama 3's rotary scaling, converted to a config.json entry


def is_one(path: epath.PathLike) -> bool:
  """Return True if a path names a GGUF file."""
  return os.fspath(path).endswith('.gguf') and not os.path.isdir(path)


def opened(path: str) -> Any:
  """Open a file as a `gguf.GGUFReader`.

  Raises InputError if the package or the file is missing, or the file is damaged, split or
  big-endian.
  """
  if not os.path.isfile(path):
    raise InputError(f'{path}: there is no such file. A GGUF model must be a local file.')
  gguf = library(path)
  try:
    reader = gguf.GGUFReader(path)
  except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
    raise InputError(
      f'{path}: not a complete GGUF file ({os.path.getsize(path)} bytes; '
      f'{type(error).__name__}: {error}). Download it again, or update the gguf package.'
    ) from error
  if reader.byte_order != 'I':
    raise InputError(f'{path}: this file is big-endian. Convert it to little-endian.')
  if (parts := reader.fields.get('split.count')) and parts.contents() > 1:
    raise InputError(
      f'{path}: this is one of {parts.contents()} files, but a model must be a single file. Join '
      'the files with llama-gguf-split --merge.'
    )
  return reader


def library(path: str) -> Any:
  """Import the `gguf` package; if it is not installed, raise an InputError that names `path`."""
  try:
    package = importlib.import_module('gguf')
  except ImportError:
    package = None
  if not hasattr(package, 'GGUFReader'):  # a folder gguf/ can be imported too
    raise InputError(
      f'{path}: reading a GGUF file requires the gguf package, which is not installed. Run '
      "pip install 'exgrpo_jax[gguf]', or use a Hugging Face folder."
    )
  return package


def slices(path: str, tensors: Mapping[str, Tensor], head_size: int) -> dict[str, 'Slice']:
  """Check the file's tensors against the expected ones and return a `Slice` for each.

  `tensors` are keyed by their Hugging Face names; `head_size` is the size of query and key heads.
  Raises InputError if the file is damaged, or a tensor is missing or unexpected, or has the wrong
  shape or a type that the `gguf` package cannot dequantize.
  """
  file = opened(path)
  gguf = library(path)
  family = file.fields['general.architecture'].contents()
  model_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  names = gguf.get_tensor_name_map(model_arch, file.fields[f'{family}.block_count'].contents())
  hf_names = {names.get_name(name, ('.weight', '.bias')): name for name in tensors}
  stored_tensors = {tensor.name: tensor for tensor in file.tensors if tensor.name != ROPE_FACTORS}
  safetensors_files.check_names(
    path,
    stored_tensors,
    {gguf_name: tensors[name] for gguf_name, name in hf_names.items()},
    'the metadata',
  )
  slice_of_name = {}
  for gguf_name, name in hf_names.items():
    tensor, shape = stored_tensors[gguf_name], list(tensors[name].shape)
    if (stored_shape := tensor.shape.tolist()[::-1]) != shape:
      raise InputError(
        f'{path}: tensor {gguf_name} has shape {stored_shape}, but the metadata requires {shape}. '
        'Convert the model again.'
      )
    is_permuted = family == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight'))
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    try:
      gguf.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.tensor_type)
    except NotImplementedError as error:
      raise InputError(
        f'{path}: tensor {gguf_name} has type {tensor.tensor_type.name}, which the gguf package '
        'cannot dequantize. Convert the model to a different type, such as F16, Q8_0 or Q4_K.'
      ) from error
    slice_of_name[name] = Slice(gguf, tensor, head_size if is_permuted else 0)
  return slice_of_name


_VALUES = 2**21  # values dequantized at a time; 8 MiB


@dataclasses.dataclass(frozen=True)
class Slice:
  """A tensor read on demand: indexing it reads only the indexed part, as float32."""

  gguf: Any  # the package
  tensor: Any  # a `gguf.ReaderTensor`
  head_size: int  # 0 unless llama.cpp permuted the rows

  def __getitem__(self, index: Any) -> np.ndarray:
    """Read the part given by one slice per dimension.

    If llama.cpp permuted the rows, the slice of the rows must cover whole heads.
    """
    *rows, columns = index if isinstance(index, tuple) else (index,)
    start, stop, _ = columns.indices(int(self.tensor.shape[0]))  # ggml lists the row length first
    values, size = self.gguf.GGML_QUANT_SIZES[self.tensor.tensor_type]  # per block: count, bytes
    first, last = start // values, -(-stop // values)
    blocks = np.asarray(self.tensor.data).view(np.uint8)[(*rows, slice(first * size, last * size))]
    part = self._dequantize(blocks, (last - first) * values)
    part = part[..., start - first * values : stop - first * values]
    if not self.head_size:
      return part
    # llama.cpp's RoPE pairs neighbors, ours i and i + H/2. Undo the interleaving of the halves.
    pairs = part.reshape(-1, self.head_size // 2, 2, part.shape[-1])
    return pairs.swapaxes(1, 2).reshape(part.shape)

  def _dequantize(self, blocks: np.ndarray, columns: int) -> np.ndarray:
    if blocks.ndim == 1:
      return self.gguf.dequantize(blocks, self.tensor.tensor_type)
    # Dequantize some rows at a time: the package needs several times its result's memory.
    values, num_rows = np.empty((len(blocks), columns), np.float32), max(1, _VALUES // columns)
    for start in range(0, len(blocks), num_rows):
      rows = slice(start, start + num_rows)
      values[rows] = self.gguf.dequantize(blocks[rows], self.tensor.tensor_type)
    return values


# ---- The folder of a GGUF file ----

# The folder is created once in huggingface_hub's asset cache (HF_HOME). All other code reads
# config.json and the tokenizer from this folder; the weights stay in the GGUF.


_VERSION = '1'  # increment this when the conversion of metadata to files changes
_HEAD_BYTES = 2**26  # more than the metadata, which comes first in the file

_FAMILIES = {
  family.model_type: name for name, family in families.FAMILIES.items() if family.has_gguf
}
# Metadata key without the family prefix -> config.json key.
_REQUIRED = {
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'block_count': 'num_hidden_layers',
  'feed_forward_length': 'intermediate_size',
  'attention.head_count': 'num_attention_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
}
_OPTIONAL = {
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.key_length': 'head_dim',
  'rope.freq_base': 'rope_theta',
}
_HEAD_SIZES = ('attention.value_length', 'rope.dimension_count')
# Other known keys. _rope_scaling reads the type and the factor; the rest have no effect.
_IGNORED = ('vocab_size', 'tensor_data_layout', 'rope.scaling.type', 'rope.scaling.factor',
            'rope.scaling.original_context_length', 'rope.scaling.finetuned')  # fmt: skip
# Values for Llama 3.1, 3.2 and 3.3, which differ only in the factor.
_LLAMA3: dict[str, Any] = dict(
  low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def gguf_folder(path: str) -> str:
  """Return the folder with a GGUF's config.json and tokenizer, creating it if needed.

  Raises InputError if the file cannot be read, the model or its tokenizer is not supported, or the
  folder cannot be written.
  """
  # The digest covers everything that the files depend on, so all copies of a GGUF share a folder.
  digest = hashlib.sha256(_VERSION.encode())
  if os.path.isfile(path):  # `opened` rejects other paths
    with open(path, 'rb') as file:
      digest.update(file.read(_HEAD_BYTES))
  cache = pathlib.Path(constants.HF_ASSETS_CACHE, 'exgrpo_jax', 'gguf')
  folder = cache / f'{pathlib.Path(path).stem}-{digest.hexdigest()[:24]}'
  if folder.exists():
    return str(folder)
  reader = opened(path)
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  files = tokenizer_json.of_gguf(metadata, path)
  values = gguf_config(metadata, reader, path) | json.loads(files['generation_config.json'])
  files['config.json'] = json.dumps(values, indent=2).encode()
  try:
    with replacing(folder, shared=True) as unfinished:
      unfinished.mkdir()
      for name, content in files.items():
        (unfinished / name).write_bytes(content)
  except OSError as error:
    raise InputError(
      f'{path}: its config.json and tokenizer cannot be written to {cache} ({error}). Set '
      'HF_HOME to a different folder.'
    ) from error
  return str(folder)


def gguf_config(metadata: Mapping[str, Any], reader: Any, path: str) -> dict[str, Any]:
  """Return the content of config.json, with dtype float32 to keep dequantized weights exact.

  `reader` is the file's `gguf.GGUFReader`; `metadata` maps its keys to values. Raises InputError if
  the architecture is not in `families.FAMILIES` or this decoder does not implement the variant.
  """
  family = metadata.get('general.architecture')
  if family not in _FAMILIES:
    raise InputError(
      f"{path}: general.architecture='{family}' is not supported. Use one of "
      f'{", ".join(_FAMILIES)}.'
    )
  prefix = f'{family}.'
  fields = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
  _check_description(fields, family, path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  if 'token_embd.weight' not in tensors:
    raise InputError(f'{path}: no tensor token_embd.weight. The file must contain a full model.')
  values = {
    name: _shortest(fields[key]) for key, name in (_REQUIRED | _OPTIONAL).items() if key in fields
  }
  values = {
    'architectures': [_FAMILIES[family]],
    'model_type': family,
    'vocab_size': int(tensors['token_embd.weight'].shape[1]),
    'head_dim': values['hidden_size'] // values['num_attention_heads'],
    'hidden_act': 'silu',
    'rope_theta': 1e4,
    'tie_word_embeddings': 'output.weight' not in tensors,
    'torch_dtype': 'float32',
    'dtype': 'float32',
    **values,
  }
  for key in _HEAD_SIZES:
    if fields.get(key, values['head_dim']) != values['head_dim']:
      raise InputError(
        f'{path}: {family}.{key}={fields[key]} must be the head size, {values["head_dim"]}, '
        'because this decoder uses one head size for queries and values and applies RoPE to the '
        'full head.'
      )
  factors = tensors.get(ROPE_FACTORS)
  values['rope_scaling'] = (
    _rope_scaling(fields) if factors is None else _llama3(values, factors, path)
  )
  architecture.parse(values, path, 'float32')  # raises an InputError that names this file
  return values


def _check_description(fields: Mapping[str, Any], family: str, path: str) -> None:
  """Raise InputError if the family's metadata lacks a key or contains an unsupported one."""
  for key in _REQUIRED:
    if key not in fields:
      raise InputError(
        f'{path}: {family}.{key} is missing, but it determines {_REQUIRED[key]} in config.json. '
        'Convert the model again.'
      )
  for key, value in fields.items():
    if key in (*_REQUIRED, *_OPTIONAL) and not isinstance(value, int | float):
      raise InputError(f'{path}: {family}.{key}={value} must be a single number for all layers.')
    if value and key not in (*_REQUIRED, *_OPTIONAL, *_HEAD_SIZES, *_IGNORED):
      raise InputError(
        f'{path}: {family}.{key}={value} is not supported because this decoder does not implement '
        f'this variant of {family}.'
      )


def _shortest(value: float) -> float:
  """Round a float32 to its shortest decimal: 1e-05 instead of 9.999999747378752e-06."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
  kind = fields.get('rope.scaling.type', 'none')
  if kind == 'none':
    return None
  return {'rope_type': kind, 'factor': _shortest(fields.get('rope.scaling.factor', 1.0))}


def _llama3(values: Mapping[str, Any], factors: Any, path: str) -> dict[str, Any]:
  """Recover Llama 3's rotary scaling from `factors`, which multiply the wavelengths."""
  factor_P = np.asarray(factors.data, np.float32)
  factor = _shortest(float(factor_P.max()))
  theta, head_size = values['rope_theta'], values['head_dim']
  scaled_rope = rotary.RopeConfig(theta, 'llama3', factor, *_LLAMA3.values())
  plain_P = rotary.frequencies(rotary.RopeConfig(theta), head_size)
  expected_P = plain_P / rotary.frequencies(scaled_rope, head_size)
  if factor_P.shape != expected_P.shape or not np.allclose(factor_P, expected_P, rtol=1e-4):
    raise InputError(
      f"{path}: {ROPE_FACTORS} does not match Llama 3's rotary scaling with factor {factor}. No "
      'other scaling is supported.'
    )
  return {'rope_type': 'llama3', 'factor': factor} | _LLAMA3
