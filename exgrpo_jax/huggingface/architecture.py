"""Translates Hugging Face's config.json and tensor names to ours and back.

Unsupported options are refused by name: otherwise an almost compatible model would load, compute
something slightly different, and nobody would notice.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model, rotary


class Family(NamedTuple):
  """How an architecture of Hugging Face differs from the others that this decoder computes."""

  model_type: str
  attention_bias: bool = False  # on queries, keys and values
  query_key_norm: bool = False
  head_size: int = 0  # where config.json gives none; 0 is width / num_heads
  any_head_size: bool = True  # otherwise it must be width / num_heads


FAMILIES = {
  'Qwen2ForCausalLM': Family('qwen2', attention_bias=True, any_head_size=False),
  'Qwen3ForCausalLM': Family('qwen3', query_key_norm=True, head_size=128),
  'LlamaForCausalLM': Family('llama'),
}
_SCALINGS = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}

# Field of model.Config -> its name in config.json, and the default of transformers.
_FIELDS = {
  'vocab_size': ('vocab_size', None),
  'width': ('hidden_size', None),
  'num_layers': ('num_hidden_layers', None),
  'num_heads': ('num_attention_heads', None),
  'mlp_width': ('intermediate_size', None),
  'norm_epsilon': ('rms_norm_eps', 1e-6),
  'tied_embeddings': ('tie_word_embeddings', False),
}
# Field of rotary.Config -> its name in config.json, for the rope types that need it.
_LINEAR = {'factor': 'factor'}
_LLAMA3 = {
  'low_frequency_factor': 'low_freq_factor',
  'high_frequency_factor': 'high_freq_factor',
  'original_positions': 'original_max_position_embeddings',
}


@dataclasses.dataclass(frozen=True)
class Extension:
  """Overrides of a checkpoint's config.json, for longer contexts than it was trained on."""

  rope_theta: float = setting(
    0.0, '[0, inf)', "base of the rotary wavelengths, in positions; 0 keeps the checkpoint's"
  )
  max_position_embeddings: int = setting(
    0,
    '[0, inf)',
    "maximum length of prompt and response together, in tokens; 0 keeps the checkpoint's",
  )


ParamPath = tuple[str, ...]  # keys in the nested dict of parameters


class Tensor(NamedTuple):
  """One tensor in Hugging Face's files, and how it relates to our parameter."""

  name: str
  shape: tuple[int, ...]  # in the file; a projection's matrix is [out, in]
  num_inputs: int  # leading dimensions of ours that are a projection's inputs, or 0


# ---- config.json ----


def read_json(directory: epath.PathLike) -> dict[str, Any]:
  """The content of a checkpoint's config.json.

  Raises:
    InputError: the folder or the file does not exist, or the file is not a JSON object.
  """
  folder = epath.Path(directory).expanduser()
  path = folder / 'config.json'
  if not path.is_file():
    problem = 'holds no config.json' if folder.is_dir() else 'is not a folder'
    raise InputError(
      f'config.model.path={directory} {problem}; it must be a Hugging Face checkpoint: '
      'config.json, safetensors files and a tokenizer.'
    )
  try:
    values = json.loads(path.read_text())
  except ValueError as error:
    raise InputError(f'{path}: not valid JSON ({error}); download the checkpoint again.') from error
  if not isinstance(values, dict):
    raise InputError(f'{path}: not a JSON object; download the checkpoint again.')
  return values


def parse(values: Mapping[str, Any], path: str, dtype: str) -> model.Config:
  """The model.Config that a config.json describes.

  Args:
    values: the content of config.json.
    path: where it is, for error messages.
    dtype: of activations; config.json's own dtype is ignored.

  Raises:
    InputError: it describes a model that this decoder does not implement, or lacks a field.
  """
  _check_supported(values, path)
  fields = {field: values.get(hf_name, default) for field, (hf_name, default) in _FIELDS.items()}
  for field, (hf_name, _) in _FIELDS.items():
    if fields[field] is None:
      raise InputError(f"{path}: no '{hf_name}', which determines the model's shape.")
    if not isinstance(fields[field], (int, float)):
      raise InputError(
        f"{path}: {hf_name}={fields[field]!r} must be a number: it determines the model's shape; "
        'download the checkpoint again.'
      )
  family = FAMILIES[values['architectures'][0]]
  head_size = values.get('head_dim')
  if head_size is None:
    head_size = family.head_size or fields['width'] // fields['num_heads']
  return model.Config(
    **fields,
    num_kv_heads=values.get('num_key_value_heads') or fields['num_heads'],
    head_size=head_size,
    rope=_parse_rope(values, path),
    attention_bias=family.attention_bias,
    query_key_norm=family.query_key_norm,
    dtype=dtype,
  )


def extended(values: Mapping[str, Any], extension: Extension) -> dict[str, Any]:
  """The content of a config.json with `extension` applied, in the format it already uses."""
  changed = dict(values)
  if extension.max_position_embeddings:
    changed['max_position_embeddings'] = extension.max_position_embeddings
  if extension.rope_theta:
    if values.get('rope_parameters'):
      changed['rope_parameters'] = values['rope_parameters'] | {'rope_theta': extension.rope_theta}
    else:
      changed['rope_theta'] = extension.rope_theta
  return changed


def _check_supported(values: Mapping[str, Any], path: str) -> None:
  name = (values.get('architectures') or [None])[0]
  if name not in FAMILIES:
    raise InputError(
      f"{path}: architecture '{name}' is not supported; supported are {', '.join(FAMILIES)}."
    )

  def refuse(field: str, reason: str) -> None:
    raise InputError(f'{path}: {field}={values[field]!r} is not supported: {reason}.')

  if values.get('quantization_config'):
    refuse('quantization_config', 'weights must be float32, bfloat16 or float16')
  if values.get('use_sliding_window') and values.get('sliding_window'):
    refuse('use_sliding_window', 'every layer must attend to all previous tokens')
  if set(values.get('layer_types') or []) - {'full_attention'}:
    refuse('layer_types', 'every layer must be full_attention')
  if values.get('hidden_act', 'silu') != 'silu':
    refuse('hidden_act', "the MLP's gate uses silu")
  if values.get('mlp_bias'):
    refuse('mlp_bias', 'the MLP has no biases')
  if values.get('attention_bias') and not FAMILIES[name].attention_bias:
    refuse('attention_bias', 'in this architecture it also adds a bias to the output projection')


def _parse_rope(values: Mapping[str, Any], path: str) -> rotary.Config:
  """Reads both formats: rope_theta and rope_scaling, or rope_parameters with all of it."""
  given = values.get('rope_parameters') or values.get('rope_scaling') or {}
  theta = given.get('rope_theta', values.get('rope_theta', 1e4))
  rope_type = given.get('rope_type', given.get('type', 'default'))
  if rope_type not in _SCALINGS:
    raise InputError(
      f"{path}: rope type '{rope_type}' is not supported; supported are {', '.join(_SCALINGS)}."
    )
  partial = given.get('partial_rotary_factor', values.get('partial_rotary_factor', 1))
  if partial != 1:
    raise InputError(
      f'{path}: partial_rotary_factor={partial} is not supported: rotary positions apply to '
      'all dimensions of a head.'
    )
  needed = {'default': {}, 'linear': _LINEAR, 'llama3': _LINEAR | _LLAMA3}[rope_type]
  for hf_name in needed.values():
    if hf_name not in given:
      raise InputError(f"{path}: no '{hf_name}', which rope type '{rope_type}' needs.")
  return rotary.Config(
    theta=float(theta),
    scaling=_SCALINGS[rope_type],
    **{field: given[hf_name] for field, hf_name in needed.items()},
  )


def to_json(config: model.Config, max_positions: int) -> dict[str, Any]:
  """The content of config.json for a model trained from scratch; `parse` inverts it.

  Uses rope_theta and rope_scaling, which old and new versions of transformers read.

  Args:
    config: the decoder's shape.
    max_positions: the longest context, in tokens.

  Raises:
    InputError: no architecture of Hugging Face has this shape.
  """
  name = _family_of(config)
  family = FAMILIES[name]
  if not family.any_head_size and config.head_size * config.num_heads != config.width:
    raise InputError(
      f'config.model.head_size={config.head_size} must be width / num_heads for an export: {name} '
      'supports no other.'
    )
  return {hf_name: getattr(config, field) for field, (hf_name, _) in _FIELDS.items()} | {
    'architectures': [name],
    'model_type': family.model_type,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_size,
    'hidden_act': 'silu',
    'rope_theta': config.rope.theta,
    'rope_scaling': _rope_scaling(config.rope),
    'max_position_embeddings': max_positions,
  }


def _family_of(config: model.Config) -> str:
  """The first architecture with the config's biases and norms."""
  options = config.attention_bias, config.query_key_norm
  for name, family in FAMILIES.items():
    if (family.attention_bias, family.query_key_norm) == options:
      return name
  raise InputError(
    'config.model.attention_bias and config.model.query_key_norm are both True, and none of '
    f'{", ".join(FAMILIES)} has both: the model cannot be exported.'
  )


def _rope_scaling(rope: rotary.Config) -> dict[str, Any] | None:
  if rope.scaling == 'none':
    return None
  scaling = {'rope_type': rope.scaling, 'factor': rope.factor}
  if rope.scaling == 'llama3':
    scaling |= {hf_name: getattr(rope, field) for field, hf_name in _LLAMA3.items()}
  return scaling


# ---- Tensors ----


def tensors(config: model.Config) -> dict[tuple[ParamPath, int | None], Tensor]:
  """All tensors of a checkpoint, in file order.

  Returns:
    (path, layer) -> Tensor: the path of our parameter in the tree of `model.init`, and the
    layer within it, or None if the parameter is not stacked over layers.
  """
  V, D = config.vocab_size, config.width
  layout: dict[tuple[ParamPath, int | None], Tensor] = {
    (('embedding_VD',), None): Tensor(name='model.embed_tokens.weight', shape=(V, D), num_inputs=0)
  }
  for layer in range(config.num_layers):
    for path, tensor in _layer_tensors(config, f'model.layers.{layer}').items():
      layout[('layers', *path), layer] = tensor
  layout[('final_norm', 'scale'), None] = _vector('model.norm.weight', D)
  if not config.tied_embeddings:
    layout[('unembedding_DV',), None] = _projection('lm_head.weight', D, V)
  return layout


def _layer_tensors(config: model.Config, prefix: str) -> dict[ParamPath, Tensor]:
  D, F, H = config.width, config.mlp_width, config.head_size
  query, kv = config.num_heads * H, config.num_kv_heads * H
  attention, mlp = f'{prefix}.self_attn', f'{prefix}.mlp'
  layout: dict[ParamPath, Tensor] = {
    ('attention_norm', 'scale'): _vector(f'{prefix}.input_layernorm.weight', D),
    ('attention', 'query_DNH'): _projection(f'{attention}.q_proj.weight', D, query),
    ('attention', 'key_DGH'): _projection(f'{attention}.k_proj.weight', D, kv),
    ('attention', 'value_DGH'): _projection(f'{attention}.v_proj.weight', D, kv),
    ('attention', 'out_NHD'): _projection(f'{attention}.o_proj.weight', query, D, num_inputs=2),
    ('mlp_norm', 'scale'): _vector(f'{prefix}.post_attention_layernorm.weight', D),
    ('mlp', 'gate_DF'): _projection(f'{mlp}.gate_proj.weight', D, F),
    ('mlp', 'up_DF'): _projection(f'{mlp}.up_proj.weight', D, F),
    ('mlp', 'down_FD'): _projection(f'{mlp}.down_proj.weight', F, D),
  }
  if config.attention_bias:
    layout |= {
      ('attention', 'query_bias_NH'): _vector(f'{attention}.q_proj.bias', query),
      ('attention', 'key_bias_GH'): _vector(f'{attention}.k_proj.bias', kv),
      ('attention', 'value_bias_GH'): _vector(f'{attention}.v_proj.bias', kv),
    }
  if config.query_key_norm:
    layout |= {
      ('attention', 'query_norm', 'scale'): _vector(f'{attention}.q_norm.weight', H),
      ('attention', 'key_norm', 'scale'): _vector(f'{attention}.k_norm.weight', H),
    }
  return layout


def _vector(name: str, size: int) -> Tensor:
  return Tensor(name=name, shape=(size,), num_inputs=0)


def _projection(name: str, in_size: int, out_size: int, num_inputs: int = 1) -> Tensor:
  return Tensor(name=name, shape=(out_size, in_size), num_inputs=num_inputs)
