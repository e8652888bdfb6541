"""Rotary positions in config.json: in transformers' old format, and in that of version 5.

Old: rope_theta and rope_scaling, and a family's own name for the base of layers with a window. New:
rope_parameters with all of it, in families with two bases by the type of layer. Ministral 3 has
beside it by how much queries grow with their position.
"""

import math
from collections.abc import Mapping
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface.families import Family
from exgrpo_jax.policy import model, rotary

_SCALINGS = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3', 'yarn': 'yarn'}
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
  given, theta = _given(values), values['rope_theta']
  local_theta = values[family.local_theta] if family.local_theta else theta
  full, local = given, given
  if isinstance(given.get('full_attention', given.get('sliding_attention')), Mapping):
    full, local = (given.get(name) or {} for name in ('full_attention', 'sliding_attention'))
  elif family.local_theta:
    local = {}
  partial = values.get('partial_rotary_factor', 1)
  always = _YARN if 'query_beta' in family.options else {}
  return (
    _parse_one(full, theta, partial, path, always),
    _parse_one(local, local_theta, partial, path, always),
  )


def of_queries(values: Mapping[str, Any], path: str, family: Family) -> dict[str, float]:
  """What stands among the rotary parameters and concerns queries alone, by its name there.

  Raises:
    InputError: the family needs it, and at `path` it is missing.
  """
  name = family.options.get('query_beta')
  if not name:
    return {}
  given = _given(values).get(name)
  if given is None:
    raise InputError(f"{path}: no '{name}' in rope_parameters, by which queries grow.")
  return {name: given}


def _given(values: Mapping[str, Any]) -> Mapping[str, Any]:
  return values.get('rope_parameters') or values.get('rope_scaling') or {}


def _parse_one(
  given: Mapping[str, Any], theta: float, partial: float, path: str, always: Mapping[str, str]
) -> rotary.Config:
  """One base and scaling; `always` is needed whatever the rope type."""
  kind = given.get('rope_type', given.get('type', 'default'))
  if kind not in _SCALINGS:
    raise InputError(
      f"{path}: rope type '{kind}' is not supported; supported are {', '.join(_SCALINGS)}."
    )
  partial = given.get('partial_rotary_factor', partial)
  if partial != 1:
    raise InputError(
      f'{path}: partial_rotary_factor={partial} is not supported: rotary positions apply to '
      'all dimensions of a head.'
    )
  needed = _NEEDED[kind] | always
  for hf_name in needed.values():
    if given.get(hf_name) is None:
      raise InputError(f"{path}: no '{hf_name}', which rope type '{kind}' needs.")
  fields = {field: given[hf_name] for field, hf_name in needed.items()}
  if kind == 'yarn':
    if not given.get('truncate', True):
      raise InputError(f'{path}: truncate=False is not supported: yarn interpolates whole pairs.')
    fields |= {name: float(given.get(name) or size) for name, size in _YARN_TURNS.items()}
    fields['attention_factor'] = float(given.get('attention_factor') or _attention_factor(given))
  theta = given.get('rope_theta', theta)
  return rotary.Config(theta=float(theta), scaling=_SCALINGS[kind], **fields)


_YARN_TURNS = {'beta_fast': 32.0, 'beta_slow': 1.0}


def _attention_factor(given: Mapping[str, Any]) -> float:
  """What yarn multiplies queries and keys by where config.json does not say it."""

  def of(scale: float) -> float:
    return 0.1 * scale * math.log(given['factor']) + 1

  if given.get('mscale') and given.get('mscale_all_dim'):
    return of(given['mscale']) / of(given['mscale_all_dim'])
  return of(1)


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
