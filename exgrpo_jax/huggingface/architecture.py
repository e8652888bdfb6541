"""Hugging Face's config.json and tensor names, in our terms and back.

What is not supported is refused by name: a model that almost fits computes
something, and nobody would notice.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model, rotary

SUPPORTED = {'Qwen2ForCausalLM': 'qwen2', 'Qwen3ForCausalLM': 'qwen3', 'LlamaForCausalLM': 'llama'}
_SCALINGS = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}

# config.json's name of each of our fields, and what transformers takes where it is absent.
_FIELDS = {
  'vocab_size': ('vocab_size', None),
  'width': ('hidden_size', None),
  'num_layers': ('num_hidden_layers', None),
  'num_heads': ('num_attention_heads', None),
  'mlp_width': ('intermediate_size', None),
  'norm_epsilon': ('rms_norm_eps', 1e-6),
  'tied_embeddings': ('tie_word_embeddings', False),
}
_LINEAR = {'factor': 'factor'}
_LLAMA3 = {
  'low_frequency_factor': 'low_freq_factor',
  'high_frequency_factor': 'high_freq_factor',
  'original_positions': 'original_max_position_embeddings',
}


@dataclasses.dataclass(frozen=True)
class Extension:
  """What replaces a checkpoint's own, so that it reads longer texts than it was trained on."""

  rope_theta: float = setting(
    '[0, inf)', "base of the rotary wavelengths, in positions; 0 keeps the checkpoint's"
  )
  max_position_embeddings: int = setting(
    '[0, inf)', "longest prompt and response together, in tokens; 0 keeps the checkpoint's"
  )


Path = tuple[str, ...]  # of names, in a nested dict


class Tensor(NamedTuple):
  """Where one of our parameters is in Hugging Face's files."""

  name: str
  shape: tuple[int, ...]  # theirs: a projection's matrix is [out, in]
  num_inputs: int  # leading dimensions of ours that are a projection's input; 0 for none


# ---- config.json ----


def read_json(directory: epath.PathLike) -> dict[str, Any]:
  """The content of a checkpoint's config.json.

  Raises InputError where the folder or the file is not there, or it is not JSON.
  """
  folder = epath.Path(directory).expanduser()
  path = folder / 'config.json'
  if not path.is_file():
    what = 'holds no config.json' if folder.is_dir() else 'is not a folder'
    raise InputError(
      f'config.model.path={directory} {what}; it must be a Hugging Face checkpoint: '
      'config.json, safetensors files and a tokenizer.'
    )
  try:
    values = json.loads(path.read_text())
  except ValueError as error:
    raise InputError(f'{path}: not valid JSON ({error}); fetch the checkpoint again.') from error
  if not isinstance(values, dict):
    raise InputError(f'{path}: not a JSON object; fetch the checkpoint again.')
  return values


def parse(values: Mapping[str, Any], place: str, dtype: str) -> model.Config:
  """The shape that a config.json describes.

  Args:
    values: its content.
    place: its path, for messages.
    dtype: of activations, which is ours to choose.

  Raises:
    InputError: it describes what this decoder does not compute, or lacks a field.
  """
  _check_supported(values, place)
  found = {ours: values.get(theirs, default) for ours, (theirs, default) in _FIELDS.items()}
  for ours, (theirs, _) in _FIELDS.items():
    if found[ours] is None:
      raise InputError(f"{place}: no '{theirs}'; a checkpoint must say its shape.")
  family = SUPPORTED[values['architectures'][0]]
  num_kv_heads = values.get('num_key_value_heads') or found['num_heads']
  head_size = values.get('head_dim')
  if head_size is None:
    head_size = 128 if family == 'qwen3' else found['width'] // found['num_heads']
  return model.Config(
    **found,
    num_kv_heads=num_kv_heads,
    head_size=head_size,
    rope=_rope(values, place),
    attention_bias=family == 'qwen2',
    query_key_norm=family == 'qwen3',
    dtype=dtype,
  )


def extended(values: Mapping[str, Any], extension: Extension) -> dict[str, Any]:
  """A config.json for longer contexts, in the spelling that it has."""
  changed = dict(values)
  if extension.max_position_embeddings:
    changed['max_position_embeddings'] = extension.max_position_embeddings
  if extension.rope_theta:
    if values.get('rope_parameters'):
      changed['rope_parameters'] = values['rope_parameters'] | {'rope_theta': extension.rope_theta}
    else:
      changed['rope_theta'] = extension.rope_theta
  return changed


def _check_supported(values, place):
  name = (values.get('architectures') or [None])[0]
  if name not in SUPPORTED:
    raise InputError(
      f"{place}: architecture '{name}' is not supported; supported are {', '.join(SUPPORTED)}."
    )

  def refuse(field, why):
    raise InputError(f'{place}: {field}={values[field]!r} is not supported: {why}.')

  if values.get('quantization_config'):
    refuse('quantization_config', 'weights must be float32, bfloat16 or float16')
  if values.get('use_sliding_window') and values.get('sliding_window'):
    refuse('use_sliding_window', 'every layer must attend to all that came before')
  if set(values.get('layer_types') or []) - {'full_attention'}:
    refuse('layer_types', 'every layer must be full_attention')
  if values.get('hidden_act', 'silu') != 'silu':
    refuse('hidden_act', 'the MLP is gated by silu')
  if values.get('mlp_bias'):
    refuse('mlp_bias', 'the MLP has no biases')
  if values.get('attention_bias') and name != 'Qwen2ForCausalLM':
    refuse('attention_bias', 'in this architecture it puts a bias on the output projection too')


def _rope(values, place):
  """In either spelling: rope_theta and rope_scaling, or both in rope_parameters."""
  given = values.get('rope_parameters') or values.get('rope_scaling') or {}
  theta = given.get('rope_theta', values.get('rope_theta', 1e4))
  kind = given.get('rope_type', given.get('type', 'default'))
  if kind not in _SCALINGS:
    raise InputError(
      f"{place}: rope type '{kind}' is not supported; supported are {', '.join(_SCALINGS)}."
    )
  partial = given.get('partial_rotary_factor', values.get('partial_rotary_factor', 1))
  if partial != 1:
    raise InputError(
      f'{place}: partial_rotary_factor={partial} is not supported: all entries of a head turn.'
    )
  needed = {'default': {}, 'linear': _LINEAR, 'llama3': _LINEAR | _LLAMA3}[kind]
  for theirs in needed.values():
    if theirs not in given:
      raise InputError(f"{place}: no '{theirs}'; rope type '{kind}' needs it.")
  unused = {
    'factor': 1.0,
    'low_frequency_factor': 1.0,
    'high_frequency_factor': 4.0,
    'original_positions': 4096,
  }  # as in configs/base.py
  return rotary.Config(
    theta=float(theta),
    scaling=_SCALINGS[kind],
    **unused | {ours: given[theirs] for ours, theirs in needed.items()},
  )


def to_json(config: model.Config, max_positions: int) -> dict[str, Any]:
  """The config.json of a model that came from none; `parse` gives the shape back.

  Written in the spelling of before rope_parameters, which old and new readers know.
  """
  if config.attention_bias and config.query_key_norm:
    raise InputError(
      'config.model.attention_bias and config.model.query_key_norm together are no '
      f'architecture of Hugging Face; exported are {", ".join(SUPPORTED)}.'
    )
  family = 'qwen3' if config.query_key_norm else 'qwen2' if config.attention_bias else 'llama'
  (name,) = (name for name, own in SUPPORTED.items() if own == family)
  if family == 'qwen2' and config.head_size * config.num_heads != config.width:
    raise InputError(
      f'config.model.head_size={config.head_size} must be width / num_heads '
      'for an export: Qwen2ForCausalLM has no other.'
    )
  rope = config.rope
  scaling = None if rope.scaling == 'none' else {'rope_type': rope.scaling, 'factor': rope.factor}
  if rope.scaling == 'llama3':
    scaling |= {theirs: getattr(rope, ours) for ours, theirs in _LLAMA3.items()}
  return {theirs: getattr(config, ours) for ours, (theirs, _) in _FIELDS.items()} | {
    'architectures': [name],
    'model_type': family,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_size,
    'hidden_act': 'silu',
    'rope_theta': rope.theta,
    'rope_scaling': scaling,
    'max_position_embeddings': max_positions,
  }


# ---- Tensors ----


def tensors(config: model.Config) -> dict[tuple[Path, int | None], Tensor]:
  """Each tensor of the files, in their order.

  By the path of our parameter in the tree of `model.init`, and the layer in it, or None
  where it is whole.
  """
  D, F, H = config.width, config.mlp_width, config.head_size
  query, kv = config.num_heads * H, config.num_kv_heads * H
  found = {
    (('embedding_VD',), None): Tensor('model.embed_tokens.weight', (config.vocab_size, D), 0)
  }
  for layer in range(config.num_layers):
    name = f'model.layers.{layer}'
    own = {
      ('attention_norm', 'scale'): Tensor(f'{name}.input_layernorm.weight', (D,), 0),
      ('attention', 'query_DNH'): Tensor(f'{name}.self_attn.q_proj.weight', (query, D), 1),
      ('attention', 'key_DGH'): Tensor(f'{name}.self_attn.k_proj.weight', (kv, D), 1),
      ('attention', 'value_DGH'): Tensor(f'{name}.self_attn.v_proj.weight', (kv, D), 1),
      ('attention', 'out_NHD'): Tensor(f'{name}.self_attn.o_proj.weight', (D, query), 2),
      ('mlp_norm', 'scale'): Tensor(f'{name}.post_attention_layernorm.weight', (D,), 0),
      ('mlp', 'gate_DF'): Tensor(f'{name}.mlp.gate_proj.weight', (F, D), 1),
      ('mlp', 'up_DF'): Tensor(f'{name}.mlp.up_proj.weight', (F, D), 1),
      ('mlp', 'down_FD'): Tensor(f'{name}.mlp.down_proj.weight', (D, F), 1),
    }
    if config.attention_bias:
      own |= {
        ('attention', 'query_bias_NH'): Tensor(f'{name}.self_attn.q_proj.bias', (query,), 0),
        ('attention', 'key_bias_GH'): Tensor(f'{name}.self_attn.k_proj.bias', (kv,), 0),
        ('attention', 'value_bias_GH'): Tensor(f'{name}.self_attn.v_proj.bias', (kv,), 0),
      }
    if config.query_key_norm:
      own |= {
        ('attention', 'query_norm', 'scale'): Tensor(f'{name}.self_attn.q_norm.weight', (H,), 0),
        ('attention', 'key_norm', 'scale'): Tensor(f'{name}.self_attn.k_norm.weight', (H,), 0),
      }
    found |= {(('layers', *path), layer): tensor for path, tensor in own.items()}
  found[('final_norm', 'scale'), None] = Tensor('model.norm.weight', (D,), 0)
  if not config.tied_embeddings:
    found[('unembedding_DV',), None] = Tensor('lm_head.weight', (config.vocab_size, D), 1)
  return found
