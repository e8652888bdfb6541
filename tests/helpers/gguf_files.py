"""Writes a Hugging Face checkpoint as a GGUF file, as llama.cpp's convert_hf_to_gguf.py does.

Needs the package `gguf`.
"""

import json

import gguf
import numpy as np

from tests.helpers.paths import CHECKPOINTS
from tests.huggingface.stored_checkpoints import read_tensors

KINDS = gguf.GGMLQuantizationType
WITH_TOKENIZER = CHECKPOINTS / 'qwen2_tied'


def metadata(folder):
  """Key -> value of a stored checkpoint, with the tokenizer of qwen2_tied."""
  values = json.loads((folder / 'config.json').read_text())
  own = {
    'context_length': values['max_position_embeddings'],
    'embedding_length': values['hidden_size'],
    'block_count': values['num_hidden_layers'],
    'feed_forward_length': values['intermediate_size'],
    'attention.head_count': values['num_attention_heads'],
    'attention.head_count_kv': values['num_key_value_heads'],
    'attention.layer_norm_rms_epsilon': values['rms_norm_eps'],
    'rope.freq_base': float(values['rope_parameters']['rope_theta']),
  }
  if values.get('head_dim'):
    own |= {'attention.key_length': values['head_dim'], 'rope.dimension_count': values['head_dim']}
  if values['rope_parameters']['rope_type'] == 'linear':
    own |= {'rope.scaling.type': 'linear', 'rope.scaling.factor': 2.0}
  return {f'{values["model_type"]}.{key}': value for key, value in own.items()} | tokenizer(
    values['vocab_size']
  )


def tokenizer(vocab_size):
  """Key -> value of qwen2_tied's tokenizer, filled up to a model's vocabulary."""
  content = json.loads((WITH_TOKENIZER / 'tokenizer.json').read_text())
  settings = json.loads((WITH_TOKENIZER / 'tokenizer_config.json').read_text())
  vocabulary = content['model']['vocab'] | {t['content']: t['id'] for t in content['added_tokens']}
  tokens = sorted(vocabulary, key=vocabulary.get)
  unused = [f'[PAD{number}]' for number in range(len(tokens), vocab_size)]
  return {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'qwen2',
    'tokenizer.ggml.tokens': tokens + unused,
    'tokenizer.ggml.token_type': [3] * 3 + [1] * (len(tokens) - 3) + [5] * len(unused),
    'tokenizer.ggml.merges': [' '.join(merge) for merge in content['model']['merges']],
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.padding_token_id': 0,
    'tokenizer.chat_template': settings['chat_template'],
  }


def permuted(rows, heads):
  """As `LlamaModel.permute` of convert_hf_to_gguf.py."""
  return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def tensors(folder):
  """Name -> float32 array of a stored checkpoint, under llama.cpp's names."""
  values = json.loads((folder / 'config.json').read_text())
  family = values['model_type']
  architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  names = gguf.get_tensor_name_map(architecture, values['num_hidden_layers'])
  found = {}
  for name, array in read_tensors(folder).items():
    for part, heads in (('q_proj', 'num_attention_heads'), ('k_proj', 'num_key_value_heads')):
      if family == 'llama' and part in name:
        array = permuted(array, values[heads])
    found[names.get_name(name, ('.weight', '.bias'))] = array.astype(np.float32)
  return found


def stored(array, kind):
  """(bytes or numbers, kind) of a tensor; one whose rows are no whole blocks stays float32."""
  block = gguf.GGML_QUANT_SIZES[kind][0]
  if array.ndim == 1 or array.shape[-1] % block:
    kind = KINDS.F32
  return gguf.quantize(array, kind), kind


def write(path, folder, kind=KINDS.F32, changes=(), **arrays):
  """Writes a stored checkpoint; returns the path as text.

  `changes` replace keys of the metadata, and None removes one; `arrays` are (array, kind) or None
  by a tensor's name, in which '__' stands for '.'.
  """
  keys = metadata(folder) | dict(changes)
  content = {name: stored(array, kind) for name, array in tensors(folder).items()}
  content |= {name.replace('__', '.'): value for name, value in arrays.items()}
  family = json.loads((folder / 'config.json').read_text())['model_type']
  writer = gguf.GGUFWriter(path, keys.pop('general.architecture', family))
  adders = {bool: 'bool', int: 'uint32', float: 'float32', str: 'string', list: 'array'}
  for key, value in keys.items():
    if value is not None:
      getattr(writer, f'add_{adders[type(value)]}')(key, value)
  for name, value in content.items():
    if value is not None:
      writer.add_tensor(name, value[0], raw_dtype=value[1])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)
