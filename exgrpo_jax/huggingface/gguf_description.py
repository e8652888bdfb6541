"""A GGUF file's metadata as the files that describe a Hugging Face model.

They are made once, into a folder of huggingface_hub's cache of assets (HF_HOME), and say to
everything else what the model is; the weights stay in the GGUF.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from huggingface_hub import constants

from exgrpo_jax.data import gguf_tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture, families, gguf_file
from exgrpo_jax.policy import rotary
from exgrpo_jax.runtime.replacement import replacing

_VERSION = '1'  # increase it when the same metadata becomes other files
_HEAD_BYTES = 2**26  # more than metadata takes; it comes first in the file

_FAMILIES = {
  family.model_type: name for name, family in families.FAMILIES.items() if family.has_gguf
}
# Key of the metadata, after the family's name -> key of config.json.
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
# Known, and of no consequence beside the above.
_IGNORED = ('vocab_size', 'tensor_data_layout', 'rope.scaling.type', 'rope.scaling.factor',
            'rope.scaling.original_context_length', 'rope.scaling.finetuned')  # fmt: skip
# Of Llama 3.1, 3.2 and 3.3, which differ in the factor alone.
_LLAMA3 = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


def folder(path: str) -> str:
  """The folder with config.json and the tokenizer's files of a GGUF file; made if it is not there.

  Raises:
    InputError: the file cannot be read, the model or its tokenizer is none that can be
      computed here, or the folder cannot be written.
  """
  name = pathlib.Path(path).stem
  cache = pathlib.Path(constants.HF_ASSETS_CACHE, 'exgrpo_jax', 'gguf')
  made = cache / f'{name}-{_digest(path)}'
  if made.exists():
    return str(made)
  reader = gguf_file.opened(path)
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  files = gguf_tokenizer.files(metadata, path)
  values = config(metadata, reader, path) | json.loads(files['generation_config.json'])
  files['config.json'] = json.dumps(values, indent=2).encode()
  try:
    with replacing(made, shared=True) as unfinished:
      unfinished.mkdir()
      for file, content in files.items():
        (unfinished / file).write_bytes(content)
  except OSError as error:
    raise InputError(
      f'{path}: what describes it cannot be written into {cache} ({error}); HF_HOME names '
      'another folder.'
    ) from error
  return str(made)


def _digest(path: str) -> str:
  """Digest of all that shapes the files, so that copies of a GGUF share a folder on all hosts."""
  digest = hashlib.sha256(_VERSION.encode())
  if os.path.isfile(path):  # `gguf_file.opened` says where it is not
    with open(path, 'rb') as file:
      digest.update(file.read(_HEAD_BYTES))
  return digest.hexdigest()[:24]


def config(metadata: Mapping[str, Any], reader: Any, path: str) -> dict[str, Any]:
  """The content of config.json; its dtype is float32, which holds dequantised weights exactly.

  Args:
    metadata: the file's, by key.
    reader: the file's `gguf.GGUFReader`.
    path: the file's, for error messages.

  Raises:
    InputError: the architecture is none of `families.FAMILIES`, or a variant of one that this
      decoder does not compute.
  """
  family = metadata.get('general.architecture')
  if family not in _FAMILIES:
    raise InputError(
      f"{path}: general.architecture='{family}' is not supported; supported are "
      f'{", ".join(_FAMILIES)}.'
    )
  own = {
    key.removeprefix(f'{family}.'): value
    for key, value in metadata.items()
    if key.startswith(f'{family}.')
  }
  _check(own, family, path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  if 'token_embd.weight' not in tensors:
    raise InputError(f'{path}: no tensor token_embd.weight; the file must hold a whole model.')
  values = {
    name: _shortest(own[key]) for key, name in (_REQUIRED | _OPTIONAL).items() if key in own
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
    if own.get(key, values['head_dim']) != values['head_dim']:
      raise InputError(
        f"{path}: {family}.{key}={own[key]} must be the heads' size, {values['head_dim']}: this "
        'decoder has no other values, and rotates all of a head.'
      )
  factors = tensors.get(gguf_file.ROPE_FACTORS)
  values['rope_scaling'] = _rope_scaling(own) if factors is None else _llama3(values, factors, path)
  architecture.parse(values, path, 'float32')  # refuses, in the name of this file
  return values


def _check(own: Mapping[str, Any], family: str, path: str) -> None:
  """Raises InputError where the family's metadata lacks something or has what is not computed."""
  for key in _REQUIRED:
    if key not in own:
      raise InputError(f"{path}: no {family}.{key}, which determines the model's shape.")
  for key, value in own.items():
    if key in (*_REQUIRED, *_OPTIONAL) and not isinstance(value, int | float):
      raise InputError(f'{path}: {family}.{key}={value} must be one number, for all layers.')
    if value and key not in (*_REQUIRED, *_OPTIONAL, *_HEAD_SIZES, *_IGNORED):
      raise InputError(
        f'{path}: {family}.{key}={value} is not supported: this decoder computes no such variant '
        f'of {family}.'
      )


def _shortest(value: float) -> float:
  """The shortest decimal of a float32, as people write it: 1e-05 and not 9.999999747378752e-06."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(own: Mapping[str, Any]) -> dict[str, Any] | None:
  kind = own.get('rope.scaling.type', 'none')
  if kind == 'none':
    return None
  return {'rope_type': kind, 'factor': _shortest(own.get('rope.scaling.factor', 1.0))}


def _llama3(values: Mapping[str, Any], factors: Any, path: str) -> dict[str, Any]:
  """Llama 3's rotary scaling, of which the file has how far each wavelength is stretched."""
  given_P = np.asarray(factors.data, np.float32)
  factor = _shortest(float(given_P.max()))
  theta, head_size = values['rope_theta'], values['head_dim']
  scaled = rotary.Config(theta, 'llama3', factor, *_LLAMA3.values())
  plain_P = rotary.frequencies(rotary.Config(theta), head_size)
  expected_P = plain_P / rotary.frequencies(scaled, head_size)
  if given_P.shape != expected_P.shape or not np.allclose(given_P, expected_P, rtol=1e-4):
    raise InputError(
      f"{path}: {gguf_file.ROPE_FACTORS} is not Llama 3's rotary scaling by a factor ({factor}); "
      'others are not supported.'
    )
  return {'rope_type': 'llama3', 'factor': factor} | _LLAMA3
