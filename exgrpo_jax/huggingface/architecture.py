"""Convert Hugging Face's config.json to our ShapeConfig and back.

Unsupported options are rejected with an error that names them. Otherwise, an almost compatible
model would load and silently compute something slightly different.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import families
from exgrpo_jax.huggingface.families import FAMILIES, Family
from exgrpo_jax.policy import model, rotary

# ---- Rotary positions ----

# Old format: rope_theta and rope_scaling, plus a family-specific name for the base of layers with a
# window. New format: rope_parameters with all fields, per layer type in families with two bases.
# Ministral 3 adds a factor for queries that grows with position.


_SCALINGS = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3', 'yarn': 'yarn'}
_TYPES = ('full_attention', 'sliding_attention')
# Rope type -> {required field of rotary.RopeConfig: its name in config.json}.
_LINEAR = {'factor': 'factor'}
_YARN = {'original_positions': 'original_max_position_embeddings'}
_REQUIRED_FIELDS = {
  'default': {},
  'linear': _LINEAR,
  'llama3': _LINEAR
  | _YARN
  | {'low_frequency_factor': 'low_freq_factor', 'high_frequency_factor': 'high_freq_factor'},
  'yarn': _LINEAR | _YARN,
}
_YARN_TURNS = {'beta_fast': 32.0, 'beta_slow': 1.0}
_MSCALES = ('mscale', 'mscale_all_dim')  # determine yarn's factor for queries and keys


def parse_rope(
  values: Mapping[str, Any], path: str, family: Family
) -> tuple[rotary.RopeConfig, rotary.RopeConfig]:
  """Parse (rope, local_rope) from a config.json in either format, with defaults filled in.

  The two are equal if all layers share a base. Raises InputError if the scaling in the file at
  `path` is not supported or lacks a field.
  """
  full, local = _by_type(values, path, family)
  theta = values['rope_theta']
  local_name, local_theta = family.local_theta or ('rope_theta', theta)
  overrides = values if not family.local_theta else {}
  extra_fields = _YARN if 'query_beta' in family.options else {}
  return (
    _rope_config({'rope_theta': theta} | full, overrides, path, extra_fields),
    _rope_config(
      {'rope_theta': values.get(local_name, local_theta)} | local, overrides, path, extra_fields
    ),
  )


def _by_type(
  values: Mapping[str, Any], path: str, family: Family
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Merge the rotary fields of the old and the new format as transformers does.

  Returns the fields for layers without a window, and the fields for layers with one.
  """
  parameters = values.get('rope_parameters')
  if parameters is None:
    parameters = family.defaults.get('rope_parameters')
  new = _mapping(parameters, 'rope_parameters', path)
  old = _mapping(values.get('rope_scaling'), 'rope_scaling', path)
  if family.local_theta:
    full, local = (_mapping(new.get(kind), f'rope_parameters.{kind}', path) for kind in _TYPES)
    if {*new} - {*_TYPES}:
      raise InputError(
        f'{path}: rope_parameters={new} may only have the fields {" and ".join(_TYPES)}. Other '
        'fields have no effect because layers with and without a window have separate bases.'
      )
    if {*old} & {*_TYPES}:
      raise InputError(
        f'{path}: rope_scaling={old} must not name layer types because rope_scaling applies to all '
        'layers without a window. Put the layer types in rope_parameters.'
      )
    return (full or {'rope_type': 'default'}) | old, local
  fields = old or new
  if {*fields} & {*_TYPES}:
    raise InputError(
      f'{path}: {"rope_scaling" if old else "rope_parameters"}={fields} must not name layer types '
      'because all layers of this architecture share one base. Write the fields without a layer '
      'type.'
    )
  lost_theta, theta = new.get('rope_theta'), values['rope_theta']
  if old and 'rope_theta' not in old and lost_theta not in (None, theta):
    raise InputError(
      f'{path}: rope_scaling={old} replaces rope_parameters, so rope_theta={theta} '
      f'overrides rope_theta={lost_theta} in rope_parameters. Put all fields in rope_parameters.'
    )
  return fields, fields


def _mapping(value: Any, name: str, path: str) -> dict[str, Any]:
  if not isinstance(value or {}, Mapping):
    raise InputError(f'{path}: {name}={value!r} must be an object or null.')
  return dict(value or {})


def _rope_config(
  rope: dict[str, Any], values: Mapping[str, Any], path: str, extra_fields: Mapping[str, str]
) -> rotary.RopeConfig:
  """Parse one rotary base and its scaling. All rope types require the fields in `extra_fields`.

  The pretraining context length in `values` overrides the length in `rope`.
  """
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind not in [*_SCALINGS]:  # a list, because JSON objects are unhashable
    raise InputError(
      f"{path}: rope type '{kind}' is not supported. Use one of {', '.join(_SCALINGS)}."
    )
  if rope.get('type', kind) != kind:
    raise InputError(
      f"{path}: type='{rope['type']}' is ignored because rope_type='{kind}' takes precedence. "
      'Use only rope_type.'
    )
  partial = rope.get('partial_rotary_factor', 1)
  if partial != 1:
    raise InputError(
      f'{path}: partial_rotary_factor={partial} is not supported: rotary positions apply to '
      'all dimensions of a head, so partial_rotary_factor must be 1.'
    )
  length_name = _YARN['original_positions']
  if kind in ('llama3', 'yarn') and length_name in values:
    rope = rope | {length_name: values[length_name]}

  def read(name: str) -> Any:
    why = f"which rope type '{kind}' needs"
    return families.read(rope, name, path, int if name == length_name else float, why)

  fields = {field: read(name) for field, name in (_REQUIRED_FIELDS[kind] | extra_fields).items()}
  if fields.get('factor', 1) < 1:
    raise InputError(
      f'{path}: factor={rope["factor"]} must be at least 1 because it extends the context.'
    )
  if kind == 'yarn':
    fields |= _yarn_options(rope, path, read)
  theta = float(read('rope_theta'))
  try:
    return rotary.RopeConfig(theta=theta, scaling=_SCALINGS[kind], **fields)
  except InputError as error:
    raise InputError(f'{path}: {error}') from error


def _yarn_options(
  rope: Mapping[str, Any], path: str, read: Callable[[str], Any]
) -> dict[str, float]:
  if not rope.get('truncate', True):
    raise InputError(
      f'{path}: truncate={rope["truncate"]} is not supported: yarn interpolates whole '
      'pairs, so truncate must be true.'
    )
  fields = {
    name: float(read(name) if rope.get(name) else turns) for name, turns in _YARN_TURNS.items()
  }
  if rope.get('attention_factor') is not None:
    return fields | {'attention_factor': float(read('attention_factor'))}
  scales = [read(name) for name in _MSCALES] if all(map(rope.get, _MSCALES)) else (1, 0)
  above, below = (0.1 * scale * math.log(rope['factor']) + 1 for scale in scales)
  return fields | {'attention_factor': above / below}


def extended_rope(values: Mapping[str, Any], base: float) -> dict[str, Any]:
  """Return the config.json fields that change if layers without a window get a new base."""
  theta = {'rope_theta': base}
  new, old = (values.get(name) or {} for name in ('rope_parameters', 'rope_scaling'))
  if 'rope_theta' in old:
    return {'rope_scaling': old | theta}
  if any(kind in new for kind in _TYPES):
    full = (new.get('full_attention') or {}) | theta
    return {'rope_parameters': new | {'full_attention': full}}
  changes = {'rope_parameters': new | theta} if new else {}
  return changes | (theta if old or not new else {})


def rope_to_json(config: model.ShapeConfig, family: Family) -> dict[str, Any]:
  """Return config.json's rotary fields, in the old format unless the family needs the new one."""
  rope = config.rope
  if 'query_beta' in family.options:
    queries = {family.options['query_beta']: config.query_beta}
    positions = {hf_name: getattr(rope, field) for field, hf_name in _YARN.items()}
    return {'rope_parameters': _parameters(rope) | positions | queries}
  if not family.local_theta:
    return {'rope_theta': rope.theta, 'rope_scaling': _scaling(rope)}
  return {
    'rope_parameters': {
      'full_attention': _parameters(rope),
      'sliding_attention': _parameters(config.local_rope),
    }
  }


def _parameters(rope: rotary.RopeConfig) -> dict[str, Any]:
  """Return the rotary fields in the new format."""
  return {'rope_theta': rope.theta} | (_scaling(rope) or {'rope_type': 'default'})


def _scaling(rope: rotary.RopeConfig) -> dict[str, Any] | None:
  if rope.scaling == 'none':
    return None
  names = _REQUIRED_FIELDS[rope.scaling]
  if rope.scaling == 'yarn':
    names = names | {name: name for name in (*_YARN_TURNS, 'attention_factor')}
  return {'rope_type': rope.scaling} | {
    hf_name: getattr(rope, field) for field, hf_name in names.items()
  }


# Activation name in config.json -> our name.
_ACTIVATIONS = {
  **dict.fromkeys(('silu', 'swish'), 'silu'),
  **dict.fromkeys(('gelu_pytorch_tanh', 'gelu_new'), 'gelu'),
  **{'gelu': 'exact_gelu', 'relu': 'relu'},
}
_LAYER_TYPES = {'full_attention': 'f', 'sliding_attention': 's'}
_SHAPE = "which determines the model's shape"
# Top-level fields of an image model that also apply to its text part.
_SHARED_FIELDS = (
  *('tie_word_embeddings', 'quantization_config', 'transformers_weights', 'dtype', 'torch_dtype'),
  *('bos_token_id', 'eos_token_id', 'pad_token_id', 'transformers_version'),
)
_WITHOUT_POSITIONS = {'f': 'n', 's': 'w'}


@dataclasses.dataclass(frozen=True)
class Extension:
  """Settings that override a checkpoint's config.json, for longer contexts than in pretraining."""

  rope_theta: float = setting(
    0.0, '[0, inf)', "base of the rotary wavelengths, in positions; 0 keeps the checkpoint's value"
  )
  max_position_embeddings: int = setting(
    0,
    '[0, inf)',
    "maximum length of prompt plus response, in tokens; 0 keeps the checkpoint's value",
  )


def read_json(directory: epath.PathLike) -> dict[str, Any]:
  """Read a checkpoint's config.json. For image models, return only the text part.

  Raises InputError if the folder or the file does not exist, or the file does not contain a JSON
  object.
  """
  folder = epath.Path(directory).expanduser()
  path = folder / 'config.json'
  if not path.is_file():
    problem = 'contains no config.json' if folder.is_dir() else 'is not a folder'
    raise InputError(
      f'config.model.path={directory} {problem}. Use the folder of a Hugging Face checkpoint '
      '(config.json, safetensors files and a tokenizer) or a name on the Hub, such as '
      'Qwen/Qwen2.5-0.5B.'
    )
  try:
    values = json.loads(path.read_text())
  except ValueError as error:
    raise InputError(f'{path}: not valid JSON ({error}). Download the checkpoint again.') from error
  if not isinstance(values, dict):
    raise InputError(f'{path}: not a JSON object. Download the checkpoint again.')
  names = values.get('architectures') or ['']
  if names[0] in families.WITH_IMAGES:
    text_config = dict(values.get('text_config') or {})
    architectures = [
      name
      for name, family in FAMILIES.items()
      if family.model_type == text_config.get('model_type')
    ]
    shared_fields = {name: values[name] for name in _SHARED_FIELDS if name in values}
    if 'tie_word_embeddings' in shared_fields:  # the unembedding is outside the text model
      text_config.pop('tie_word_embeddings', None)
    values = {**shared_fields, **text_config, 'architectures': architectures or names}
  return values


def parse(values: Mapping[str, Any], path: str, dtype: str) -> model.ShapeConfig:
  """Parse a config.json into a model.ShapeConfig with activations of `dtype`.

  The dtype in config.json is ignored. Raises InputError if a field is missing, or this decoder does
  not implement the model; the message names `path`.
  """
  family = _family(values, path)
  values = {**families.DEFAULTS, **family.defaults, **values}
  # Published checkpoints have num_experts; transformers 5 saves num_local_experts.
  values['num_experts'] = values.get('num_local_experts', values.get('num_experts'))
  _check_supported(values, family, path)
  rope, local_rope = parse_rope(values, path, family)
  fields: dict[str, Any] = {}
  for field, name in families.numbers(family).items():
    kind = type(getattr(model.ShapeConfig, field))
    fields[field] = families.read(values, name, path, kind, _SHAPE)
  # In families that set a default head_dim, transformers rejects null.
  sizes = {'num_key_value_heads': fields['num_heads']}
  if 'head_dim' not in family.defaults:
    sizes['head_dim'] = fields['width'] // fields['num_heads']
  sizes |= {name: values[name] for name in (*sizes, 'head_dim') if values.get(name) is not None}
  num_kv_heads, head_size = (
    families.read(sizes, name, path, int, _SHAPE) for name in ('num_key_value_heads', 'head_dim')
  )
  layers = _layers(values, family, fields['num_layers'], path)
  has_windows = 's' in layers or 'w' in layers
  options = _options(values, family, path)
  try:
    return model.ShapeConfig(
      **families.PLAIN | dict(family.fixed) | options | fields,
      num_kv_heads=num_kv_heads,
      head_size=head_size,
      layers=layers,
      window=values['sliding_window'] if has_windows else 0,
      rope=rope,
      local_rope=local_rope if has_windows else rotary.RopeConfig(),
      dtype=dtype,
    )
  except InputError as error:
    raise InputError(f'{path}: {error}') from error


def extended(values: Mapping[str, Any], extension: Extension) -> dict[str, Any]:
  """Apply `extension` to the content of a config.json without changing its format."""
  new_values = dict(values)
  if extension.max_position_embeddings:
    new_values['max_position_embeddings'] = extension.max_position_embeddings
  if extension.rope_theta:
    new_values |= extended_rope(values, extension.rope_theta)
  return new_values


def _family(values: Mapping[str, Any], path: str) -> Family:
  name = (values.get('architectures') or [None])[0]
  if name not in [*FAMILIES]:  # a list, because JSON objects are unhashable
    raise InputError(
      f"{path}: architecture '{name}' is not supported. Use one of {', '.join(FAMILIES)}."
    )
  family = FAMILIES[name]
  kind = values.get('model_type', family.model_type)
  if kind == family.model_type == 'mistral' and 'layer_types' in values:
    return FAMILIES['MinistralForCausalLM']  # as in transformers
  if kind != family.model_type:
    raise InputError(
      f"{path}: model_type='{kind}' does not match architecture '{name}', whose model_type is "
      f"'{family.model_type}'. transformers uses model_type. Correct one of the two fields."
    )
  return family


def _check_supported(values: Mapping[str, Any], family: Family, path: str) -> None:
  biases = {
    name: ('this architecture has no such biases', (False, None))
    for name in ('mlp_bias', 'attention_bias')
    if name not in {*family.fixed, *family.options}
  }
  for field, (reason, allowed) in (families.REFUSED | biases).items():
    if field in values and values[field] not in allowed:
      raise InputError(
        f'{path}: {field}={values[field]!r} is not supported: {reason}, so {field} must be '
        f'{allowed[0]!r}.'
      )
  if 'max_position_embeddings' in values:
    families.read(values, 'max_position_embeddings', path, int, 'which limits the context')


def _options(values: Mapping[str, Any], family: Family, path: str) -> dict[str, Any]:
  """Return the optional fields set by config.json. A null cap means no cap."""
  options: dict[str, Any] = {}
  for field, name in family.options.items():
    value = values.get(name)
    if field == 'activation':
      if value not in [*_ACTIVATIONS]:
        raise InputError(
          f'{path}: {name}={value!r} is not supported: the gate activation must be one of '
          f'{", ".join(_ACTIVATIONS)}.'
        )
      options[field] = _ACTIVATIONS[value]
    elif field == 'query_beta':  # one of the rotary parameters
      rope, _ = _by_type(values, path, family)
      is_zero = rope.get(name) == 0
      options[field] = (
        0.0 if is_zero else families.read(rope, name, path, float, 'which scales queries')
      )
    elif value is not None or field not in ('attention_cap', 'logit_cap'):
      kind = type(families.PLAIN[field])
      options[field] = families.read(values, name, path, kind, 'which changes all logits')
  return options


def _layers(values: Mapping[str, Any], family: Family, num_layers: int, path: str) -> str:
  """Return `model.ShapeConfig.layers`, the shortest repeating pattern of the layers' letters."""
  types, rope_flags = _of_each_layer(values, family, num_layers, path)
  letters = _default_layers(values, family, num_layers, rope_flags, path)
  if family.has_layer_types and types:
    letters = types
  if rope_flags:
    letters = ''.join(
      letter if flag else _WITHOUT_POSITIONS[letter] for letter, flag in zip(letters, rope_flags)
    )
  if types and not family.has_layer_types and types != letters:
    raise InputError(
      f'{path}: layer_types={values["layer_types"]} is not supported: this architecture has no '
      'layer types, so layer_types must be null.'
    )
  if 's' in letters or 'w' in letters:
    is_off = family.has_window_flag and not values['use_sliding_window']
    if is_off or values.get('sliding_window') is None:
      name = 'use_sliding_window' if is_off else 'sliding_window'
      raise InputError(
        f'{path}: {name}={values.get(name)} leaves sliding_attention layers without a window. '
        f'Set {name}, or set layer_types to full_attention for every layer.'
      )
    families.read(values, 'sliding_window', path, int, 'which limits attention')
  return next(  # the shortest period
    letters[:period]
    for period in range(1, num_layers + 1)
    if (letters[:period] * num_layers)[:num_layers] == letters
  )


def _of_each_layer(
  values: Mapping[str, Any], family: Family, num_layers: int, path: str
) -> tuple[str, list[Any]]:
  """Return (layer_types as letters, each layer's RoPE flag).

  The letters are '' if there is no layer_types. The flags are [] if the family has none.
  """
  names = ['layer_types', *(['no_rope_layers'] if family.no_rope else [])]
  for name in names:
    value = values.get(name)
    if value is not None and (not isinstance(value, list) or len(value) != num_layers):
      raise InputError(
        f'{path}: {name}={value!r} must be a list of num_hidden_layers={num_layers} entries, one '
        'per layer.'
      )
  types = values.get('layer_types') or []
  if any(kind not in [*_LAYER_TYPES] for kind in types):
    raise InputError(
      f'{path}: layer_types={types!r} is not supported: each layer must be '
      f'{" or ".join(_LAYER_TYPES)}.'
    )
  rope_flags = values.get('no_rope_layers') if family.no_rope else []
  if rope_flags is None:
    interval = families.read(values, 'no_rope_layer_interval', path, int, _SHAPE)
    rope_flags = [(layer + 1) % interval for layer in range(num_layers)]
  return ''.join(_LAYER_TYPES[kind] for kind in types), rope_flags


def _default_layers(
  values: Mapping[str, Any], family: Family, num_layers: int, rope_flags: list[Any], path: str
) -> str:
  """Return the letters that apply by default, one per layer, if there is no layer_types."""
  is_local = not family.has_window_flag or families.read(
    values, 'use_sliding_window', path, bool, 'which turns windows on'
  )
  # Families with windows in only some layers use them regardless of sliding_window.
  if len(family.layers) == 1 and (not is_local or values.get('sliding_window') is None):
    return 'f' * num_layers
  if rope_flags:
    return ''.join('f' if flag else 's' for flag in rope_flags)
  if 'max_window_layers' in family.defaults:
    first = values['max_window_layers']
    if first:  # 0 means windows in all layers
      families.read(values, 'max_window_layers', path, int, 'which determines the windows')
    return ('f' * first + 's' * num_layers)[:num_layers]
  pattern = family.layers
  if family.pattern and not values.get('layer_types'):
    period = families.read(values, family.pattern, path, int, 'which determines the windows')
    pattern = 's' * (period - 1) + 'f'
  return (pattern * num_layers)[:num_layers]


def to_json(config: model.ShapeConfig, max_positions: int) -> dict[str, Any]:
  """Return the config.json content for a model trained from scratch; `parse` is the inverse.

  `max_positions` is the longest context, in tokens. Raises InputError if no supported Hugging Face
  architecture has this shape.
  """
  name = _name_of(config)
  family = FAMILIES[name]
  if family.heads_divide_width and config.width % config.num_heads:
    raise InputError(
      f'config.model.num_heads={config.num_heads} must divide width={config.width} for export, '
      f'because transformers requires this for {name}.'
    )
  if not family.any_head_size and config.head_size * config.num_heads != config.width:
    raise InputError(
      f'config.model.head_size={config.head_size} must be width / num_heads for export, because '
      f'{name} supports no other head size.'
    )
  options = {}
  for field, hf_name in family.options.items():
    if field == 'query_beta':
      continue  # one of the rotary parameters
    value = getattr(config, field)
    options[hf_name] = value if value or isinstance(value, bool) else None
  if 'query_scale' in family.options:
    scale = config.query_scale or config.head_size
    if scale != int(scale):
      raise InputError(
        f'config.model.query_scale={scale} must be a whole number for export, because '
        f'transformers requires this for {name}.'
      )
    options[family.options['query_scale']] = int(scale)
  activation = next(
    name for name, our_name in _ACTIVATIONS.items() if our_name == config.activation
  )
  return {
    **{hf_name: getattr(config, field) for field, hf_name in families.numbers(family).items()},
    'architectures': [name],
    'model_type': family.model_type,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_size,
    **options,
    family.options['activation']: activation,
    **_layers_to_json(config, family),
    **rope_to_json(config, family),
    'max_position_embeddings': max_positions,
    # Otherwise transformers uses the family's published ids, which are for other vocabularies.
    **dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id')),
  }


def _layers_to_json(config: model.ShapeConfig, family: Family) -> dict[str, Any]:
  values: dict[str, Any] = {}
  has_windows = any(kind.is_local for kind in config.kinds)
  if family.has_window_flag:
    values['use_sliding_window'] = has_windows
  # Without layer types in config.json, transformers uses the family's default.
  has_types = family.has_layer_types and (has_windows or 's' in family.layers)
  if has_windows or 'sliding_window' in family.defaults:
    # transformers builds Gemma's window mask even if no layer uses it.
    default_window = family.defaults.get('sliding_window') if has_types else None
    values['sliding_window'] = config.window or default_window
  if has_types:
    types = {letter: name for name, letter in _LAYER_TYPES.items()}
    values['layer_types'] = [types['s' if kind.is_local else 'f'] for kind in config.kinds]
  if family.no_rope:
    values['no_rope_layers'] = [int(kind.has_positions) for kind in config.kinds]
  return values


def _name_of(config: model.ShapeConfig) -> str:
  """Return the first architecture that supports this shape."""
  for name, family in FAMILIES.items():
    if families.has(family, config):
      return name
  raise InputError(
    f'config.model has {families.described(config)}, so it cannot be exported: none of '
    f'{", ".join(FAMILIES)} supports this combination. Change these settings.'
  )
