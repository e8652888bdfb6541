"""Rotary positions in config.json: in transformers' old format, and in that of version 5.

Old: rope_theta and rope_scaling, and a family's own name for the base of layers with a window. New:
rope_parameters with all of it, in families with two bases by the type of layer. Ministral 3 has
beside it by how much queries grow with their position.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import families
from exgrpo_jax.huggingface.families import Family
from exgrpo_jax.policy import model, rotary

_SCALINGS = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3', 'yarn': 'yarn'}
_TYPES = ('full_attention', 'sliding_attention')
# Field of rotary.Config -> its name in config.json, for the rope types that need it.
_LINEAR = {'factor': 'factor'}
_YARN = {'original_positions': 'original_max_position_embeddings'}
_NEEDED = {
  'default': {},
  'linear': _LINEAR,
  'llama3': _LINEAR
  | _YARN
  | {'low_frequency_factor': 'low_freq_factor', 'high_frequency_factor': 'high_freq_factor'},
  'yarn': _LINEAR | _YARN,
}


def parse(
  values: Mapping[str, Any], path: str, family: Family
) -> tuple[rotary.Config, rotary.Config]:
  """(rope, local_rope) of a config.json with defaults, in either format; equal with one base.

  Raises:
    InputError: at `path` there is a scaling that is not computed, or it lacks a field.
  """
  full, local = _by_type(values, path, family)
  theta = values['rope_theta']
  local_name, local_theta = family.local_theta or ('rope_theta', theta)
  own = values if not family.local_theta else {}
  always = _YARN if 'query_beta' in family.options else {}
  return (
    _parse_one({'rope_theta': theta} | full, own, path, always),
    _parse_one({'rope_theta': values.get(local_name, local_theta)} | local, own, path, always),
  )


def query_beta(values: Mapping[str, Any], path: str, family: Family) -> float:
  """Return by how much queries grow with their position; it stands among the rotary parameters.

  Raises:
    InputError: at `path` it is missing or not a number from 0.
  """
  name, given = family.options['query_beta'], _by_type(values, path, family)[0]
  if given.get(name) == 0:
    return 0.0
  return families.read(given, name, path, float, 'by which queries grow')


def _by_type(
  values: Mapping[str, Any], path: str, family: Family
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return the parameters of layers without and with a window, merged as transformers does it."""
  given = values.get('rope_parameters')
  given = family.defaults.get('rope_parameters') if given is None else given
  new = _mapping(given, 'rope_parameters', path)
  old = _mapping(values.get('rope_scaling'), 'rope_scaling', path)
  if family.local_theta:
    full, local = (_mapping(new.get(kind), f'rope_parameters.{kind}', path) for kind in _TYPES)
    if {*new} - {*_TYPES}:
      raise InputError(
        f'{path}: rope_parameters={new} must have no other fields than {" and ".join(_TYPES)}: '
        'layers with and without a window have a base each, and others have no effect.'
      )
    if {*old} & {*_TYPES}:
      raise InputError(
        f'{path}: rope_scaling={old} must be of all layers without a window, and types of layers '
        'have no effect in it. Write them into rope_parameters.'
      )
    return (full or {'rope_type': 'default'}) | old, local
  given = old or new
  if {*given} & {*_TYPES}:
    raise InputError(
      f'{path}: {"rope_scaling" if old else "rope_parameters"}={given} must not be by type of '
      'layer: those of this architecture share one base. Write the fields of one type directly.'
    )
  lost, theta = new.get('rope_theta'), values['rope_theta']
  if old and 'rope_theta' not in old and lost not in (None, theta):
    raise InputError(
      f'{path}: rope_scaling={old} takes the place of rope_parameters, with rope_theta={theta} '
      f'instead of its {lost}. Write all of it into rope_parameters.'
    )
  return given, given


def _mapping(given: Any, name: str, path: str) -> dict[str, Any]:
  if not isinstance(given or {}, Mapping):
    raise InputError(f'{path}: {name}={given!r} must be an object or null.')
  return dict(given or {})


def _parse_one(
  given: dict[str, Any], values: Mapping[str, Any], path: str, always: Mapping[str, str]
) -> rotary.Config:
  """One base and scaling; `always` is needed whatever the rope type.

  Of `values` the context length of pretraining is preferred to that in `given`.
  """
  kind = given.get('rope_type', given.get('type', 'default'))
  if kind not in [*_SCALINGS]:  # a list, because JSON's objects have no hash
    raise InputError(
      f"{path}: rope type '{kind}' is not supported; supported are {', '.join(_SCALINGS)}."
    )
  if given.get('type', kind) != kind:
    raise InputError(
      f"{path}: type='{given['type']}' has no effect beside rope_type='{kind}'. Write rope_type "
      'alone.'
    )
  partial = given.get('partial_rotary_factor', 1)
  if partial != 1:
    raise InputError(
      f'{path}: partial_rotary_factor={partial} is not supported: rotary positions apply to '
      'all dimensions of a head. It must be 1.'
    )
  whole = _YARN['original_positions']
  if kind in ('llama3', 'yarn') and whole in values:
    given = given | {whole: values[whole]}

  def read(name: str) -> Any:
    why = f"which rope type '{kind}' needs"
    return families.read(given, name, path, int if name == whole else float, why)

  fields = {field: read(name) for field, name in (_NEEDED[kind] | always).items()}
  if fields.get('factor', 1) < 1:
    raise InputError(f'{path}: factor={given["factor"]} must be at least 1: it stretches contexts.')
  if kind == 'yarn':
    if not given.get('truncate', True):
      raise InputError(
        f'{path}: truncate={given["truncate"]} is not supported: yarn interpolates whole pairs. It '
        'must be true.'
      )
    fields |= {
      name: float(read(name) if given.get(name) else size) for name, size in _YARN_TURNS.items()
    }
    is_given = given.get('attention_factor') is not None
    fields['attention_factor'] = float(
      read('attention_factor') if is_given else _attention_factor(given, read)
    )
  theta = float(read('rope_theta'))
  try:
    return rotary.Config(theta=theta, scaling=_SCALINGS[kind], **fields)
  except InputError as error:
    raise InputError(f'{path}: {error}') from error


_YARN_TURNS = {'beta_fast': 32.0, 'beta_slow': 1.0}


def _attention_factor(given: Mapping[str, Any], read: Callable[[str], float]) -> float:
  """What yarn multiplies queries and keys by where config.json does not say it."""

  def of(scale: float) -> float:
    return 0.1 * scale * math.log(given['factor']) + 1

  if given.get('mscale') and given.get('mscale_all_dim'):
    return of(read('mscale')) / of(read('mscale_all_dim'))
  return of(1)


def extended(values: Mapping[str, Any], base: float) -> dict[str, Any]:
  """Return the fields that change for another base of layers without a window."""
  theta = {'rope_theta': base}
  new, old = (values.get(name) or {} for name in ('rope_parameters', 'rope_scaling'))
  if 'rope_theta' in old:
    return {'rope_scaling': old | theta}
  if any(kind in new for kind in _TYPES):
    full = (new.get('full_attention') or {}) | theta
    return {'rope_parameters': new | {'full_attention': full}}
  changed = {'rope_parameters': new | theta} if new else {}
  return changed | (theta if old or not new else {})


def to_json(config: model.Config, family: Family) -> dict[str, Any]:
  """The fields of config.json; in the old format, which all versions read, where that has room."""
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


def _parameters(rope: rotary.Config) -> dict[str, Any]:
  """The new format."""
  return {'rope_theta': rope.theta} | (_scaling(rope) or {'rope_type': 'default'})


def _scaling(rope: rotary.Config) -> dict[str, Any] | None:
  if rope.scaling == 'none':
    return None
  names = _NEEDED[rope.scaling]
  if rope.scaling == 'yarn':
    names = names | {name: name for name in (*_YARN_TURNS, 'attention_factor')}
  return {'rope_type': rope.scaling} | {
    hf_name: getattr(rope, field) for field, hf_name in names.items()
  }
