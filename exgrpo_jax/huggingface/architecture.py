"""Translates Hugging Face's config.json to our description of a model and back.

Unsupported options are refused by name: otherwise an almost compatible model would load, compute
something slightly different, and nobody would notice.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import families, rope_parameters
from exgrpo_jax.huggingface.families import FAMILIES, Family
from exgrpo_jax.policy import model, rotary

# config.json's name of an activation -> ours.
_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_new': 'gelu',
  'gelu': 'exact_gelu',
  'relu': 'relu',
}
_LAYER_TYPES = {'full_attention': 'f', 'sliding_attention': 's'}
_WITHOUT_POSITIONS = {'f': 'n', 's': 'w'}


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


def read_json(directory: epath.PathLike) -> dict[str, Any]:
  """The content of a checkpoint's config.json; of a model with images, what describes the text.

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
  names = values.get('architectures') or ['']
  if names[0] in families.WITH_IMAGES:
    text = dict(values.get('text_config', {}))
    own = [name for name, family in FAMILIES.items() if family.model_type == text.get('model_type')]
    if 'tie_word_embeddings' in values:  # the unembedding is outside the text's model
      text.pop('tie_word_embeddings', None)
    values = {**values, **text, 'architectures': own or names}
    for part in ('text_config', 'vision_config'):
      values.pop(part, None)
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
  family = _family(values, path)
  defaults = families.DEFAULTS | dict(family.defaults)
  values = {**defaults, **values}
  # Published checkpoints say num_experts, and those that transformers 5 saved say this.
  values['num_experts'] = values.get('num_local_experts') or values.get('num_experts')
  _check_supported(values, family, path)
  rope, local_rope = rope_parameters.parse(values, path, family)
  values |= rope_parameters.of_queries(values, path, family)
  numbers = families.numbers(family)
  fields: dict[str, Any] = {field: values.get(name) for field, name in numbers.items()}
  for field, hf_name in numbers.items():
    if fields[field] is None:
      raise InputError(f"{path}: no '{hf_name}', which determines the model's shape.")
    if not isinstance(fields[field], (int, float)):
      raise InputError(
        f"{path}: {hf_name}={fields[field]!r} must be a number: it determines the model's shape; "
        'download the checkpoint again.'
      )
  for name in ('head_dim', family.options['activation']):  # of these null is the default too
    values[name] = values.get(name) or defaults.get(name)
  layers = _layers(values, family, fields['num_layers'], path)
  has_windows = 's' in layers or 'w' in layers
  return model.Config(
    **families.PLAIN | dict(family.fixed) | _options(values, family, path) | fields,
    num_kv_heads=values.get('num_key_value_heads') or fields['num_heads'],
    head_size=values['head_dim'] or fields['width'] // fields['num_heads'],
    layers=layers,
    window=values['sliding_window'] if has_windows else 0,
    rope=rope,
    local_rope=local_rope if has_windows else rotary.Config(),
    dtype=dtype,
  )


def extended(values: Mapping[str, Any], extension: Extension) -> dict[str, Any]:
  """The content of a config.json with `extension` applied, in the format it already uses."""
  changed = dict(values)
  if extension.max_position_embeddings:
    changed['max_position_embeddings'] = extension.max_position_embeddings
  if extension.rope_theta:
    given = values.get('rope_parameters')
    if given and isinstance(given.get('full_attention'), dict):
      full = given['full_attention'] | {'rope_theta': extension.rope_theta}
      changed['rope_parameters'] = given | {'full_attention': full}
    elif given:
      changed['rope_parameters'] = given | {'rope_theta': extension.rope_theta}
    else:
      changed['rope_theta'] = extension.rope_theta
  return changed


def _family(values: Mapping[str, Any], path: str) -> Family:
  name = (values.get('architectures') or [None])[0]
  if name not in FAMILIES:
    raise InputError(
      f"{path}: architecture '{name}' is not supported; supported are {', '.join(FAMILIES)}."
    )
  return FAMILIES[name]


def _check_supported(values: Mapping[str, Any], family: Family, path: str) -> None:
  def refuse(field: str, reason: str) -> None:
    raise InputError(f'{path}: {field}={values[field]!r} is not supported: {reason}.')

  if values.get('quantization_config'):
    refuse('quantization_config', 'weights must be float32, bfloat16 or float16')
  if set(values.get('layer_types') or []) - {*_LAYER_TYPES}:
    refuse('layer_types', f'a layer must be {" or ".join(_LAYER_TYPES)}')
  if values.get('use_bidirectional_attention'):
    refuse('use_bidirectional_attention', 'a token must attend to earlier ones alone')
  if values.get('mlp_only_layers'):
    refuse('mlp_only_layers', 'all layers must have experts')
  if 'num_experts' in family.numbers and values.get('decoder_sparse_step', 1) != 1:
    refuse('decoder_sparse_step', 'all layers must have experts')
  for name in ('mlp_bias', 'attention_bias'):
    if values.get(name) and name not in {*family.fixed, *family.options}:
      refuse(name, 'this architecture has no such biases')


def _options(values: Mapping[str, Any], family: Family, path: str) -> dict[str, Any]:
  """What config.json decides; as in the plainest family where it says null."""
  options = {
    field: values.get(name) or families.PLAIN[field] for field, name in family.options.items()
  }
  name = family.options['activation']
  given = values[name]
  if given not in _ACTIVATIONS:
    raise InputError(
      f"{path}: {name}='{given}' is not supported: the MLP's gate uses one of "
      f'{", ".join(_ACTIVATIONS)}.'
    )
  return options | {'activation': _ACTIVATIONS[given]}


def _layers(values: Mapping[str, Any], family: Family, num_layers: int, path: str) -> str:
  """`model.Config.layers`, as short as it can be."""
  types = values.get('layer_types') if family.has_layer_types else None
  rotates = values.get('no_rope_layers') if family.no_rope else None
  for name, given in {'layer_types': types, 'no_rope_layers': rotates}.items():
    if given and len(given) < num_layers:
      raise InputError(
        f'{path}: {name} has {len(given)} layers, and must have the {num_layers} of '
        'num_hidden_layers.'
      )
  if family.no_rope and not rotates:
    every = values.get('no_rope_layer_interval', 4)
    rotates = [(layer + 1) % every for layer in range(num_layers)]
  is_allowed = values.get('use_sliding_window') or not family.has_window_flag
  if not is_allowed or not values.get('sliding_window'):
    letters = 'f' * num_layers
  elif types:
    letters = ''.join(_LAYER_TYPES[name] for name in types)
  elif rotates:
    letters = ''.join('f' if own else 's' for own in rotates)
  else:
    letters = _default_layers(values, family, num_layers)
  if rotates:
    letters = ''.join(
      letter if own else _WITHOUT_POSITIONS[letter] for letter, own in zip(letters, rotates)
    )
  return _shortest(letters[:num_layers])


def _default_layers(values: Mapping[str, Any], family: Family, num_layers: int) -> str:
  """The kinds of all layers where config.json does not name their types."""
  if family.has_window_flag and family.layers == 'f':
    first = min(values.get('max_window_layers', 28), num_layers)
    return 'f' * first + 's' * (num_layers - first)
  pattern = family.layers
  if 'sliding_window_pattern' in values and family.has_layer_types:
    pattern = 's' * (values['sliding_window_pattern'] - 1) + 'f'
  return (pattern * num_layers)[:num_layers]


def _shortest(letters: str) -> str:
  """What gives these letters if it is repeated."""
  size = len(letters)
  return next(
    letters[:period] for period in range(1, size + 1) if (letters[:period] * size)[:size] == letters
  )


def to_json(config: model.Config, max_positions: int) -> dict[str, Any]:
  """The content of config.json for a model trained from scratch; `parse` inverts it.

  Args:
    config: the decoder's shape.
    max_positions: the longest context, in tokens.

  Raises:
    InputError: no architecture of Hugging Face has this shape.
  """
  name = _name_of(config)
  family = FAMILIES[name]
  if family.heads_divide_width and config.width % config.num_heads:
    raise InputError(
      f'config.model.num_heads={config.num_heads} must divide width={config.width} for an export: '
      f'transformers refuses a {name} otherwise.'
    )
  if not family.any_head_size and config.head_size * config.num_heads != config.width:
    raise InputError(
      f'config.model.head_size={config.head_size} must be width / num_heads for an export: {name} '
      'supports no other.'
    )
  options = {}
  for field, hf_name in family.options.items():
    if field == 'query_beta':
      continue  # it stands among the rotary parameters
    value = getattr(config, field)
    options[hf_name] = value if value or isinstance(value, bool) else None
  if 'query_scale' in family.options:
    scale = config.query_scale or config.head_size
    if scale != int(scale):
      raise InputError(
        f'config.model.query_scale={scale} must be a whole number for an export: transformers '
        f'refuses a {name} otherwise.'
      )
    options[family.options['query_scale']] = int(scale)
  activation = next(name for name, own in _ACTIVATIONS.items() if own == config.activation)
  return {
    **{hf_name: getattr(config, field) for field, hf_name in families.numbers(family).items()},
    'architectures': [name],
    'model_type': family.model_type,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_size,
    **options,
    family.options['activation']: activation,
    **_layers_to_json(config, family),
    **rope_parameters.to_json(config, family),
    'max_position_embeddings': max_positions,
    # Otherwise transformers takes those of the family's published models, of other vocabularies.
    **dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id')),
  }


def _layers_to_json(config: model.Config, family: Family) -> dict[str, Any]:
  values: dict[str, Any] = {}
  has_windows = any(kind.is_local for kind in config.kinds)
  if family.has_window_flag:
    values['use_sliding_window'] = has_windows
  # Where config.json has no types of layers, transformers takes those of the family.
  has_types = family.has_layer_types and (has_windows or 's' in family.layers)
  if has_windows or 'sliding_window' in family.defaults:
    # transformers makes Gemma's mask of windows also where no layer uses it.
    unused = family.defaults.get('sliding_window') if has_types else None
    values['sliding_window'] = config.window or unused
  if has_types:
    types = {letter: name for name, letter in _LAYER_TYPES.items()}
    values['layer_types'] = [types['s' if kind.is_local else 'f'] for kind in config.kinds]
  if family.no_rope:
    values['no_rope_layers'] = [int(kind.has_positions) for kind in config.kinds]
  return values


def _name_of(config: model.Config) -> str:
  """The first architecture that has models like this."""
  for name, family in FAMILIES.items():
    if families.has(family, config):
      return name
  raise InputError(
    f'config.model has {families.described(config)}, and none of {", ".join(FAMILIES)} has all of '
    'it: the model cannot be exported.'
  )
