"""Settings: a ConfigDict becomes a frozen dataclass, and what it must not hold is refused."""

import dataclasses
import math

import pytest
from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Inner:
  path: str = setting(None, 'where it is')


@dataclasses.dataclass(frozen=True)
class Example:
  ratio: float = setting('[0, 1)', "the share of each step's questions drawn from the buffer")
  steps: int = setting('(0, inf)', 'updates')
  clip: str = setting(('always', 'never'), 'when ratios are clipped')
  shape: bool = setting(None, 'whether weights are shaped')
  mesh: tuple[int, ...] = setting(None, 'devices along each axis')
  inner: Inner


GOOD = {
  'ratio': 0.5,
  'steps': 1,
  'clip': 'never',
  'shape': True,
  'mesh': (4, 2),
  'inner': {'path': 'x'},
}


def build(**changes):
  return config.build(Example, ConfigDict({**GOOD, **changes}), 'config.replay')


def test_good_values_become_a_frozen_dataclass():
  built = build()
  assert built == Example(
    ratio=0.5, steps=1, clip='never', shape=True, mesh=(4, 2), inner=Inner(path='x')
  )
  with pytest.raises(dataclasses.FrozenInstanceError):
    built.ratio = 0.0


def test_an_int_becomes_a_float_where_a_float_is_due():
  assert type(build(ratio=0).ratio) is float


def test_a_list_becomes_a_tuple():
  assert build(mesh=[8, 1]).mesh == (8, 1)


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    pytest.param('ratio', 0.0, id='closed_end'),
    pytest.param('ratio', math.nextafter(1.0, 0.0), id='just_below_the_open_end'),
    pytest.param('steps', 10**12, id='unbounded'),
    pytest.param('mesh', (), id='empty_tuple'),
  ],
)
def test_what_the_range_includes_is_accepted(name, value):
  assert getattr(build(**{name: value}), name) == value


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    pytest.param(
      'ratio',
      1.0,
      r'config\.replay\.ratio=1\.0 must lie in \[0, 1\): the share '
      r"of each step's questions drawn from the buffer\.",
      id='open_end',
    ),
    pytest.param('ratio', -0.1, r'config\.replay\.ratio=-0\.1 must lie in \[0, 1\)', id='below'),
    pytest.param('ratio', math.nan, r'config\.replay\.ratio=nan must lie in \[0, 1\)', id='nan'),
    pytest.param(
      'steps', 0, r'config\.replay\.steps=0 must lie in \(0, inf\): updates\.', id='open_start'
    ),
    pytest.param(
      'clip',
      'sometimes',
      r"config\.replay\.clip='sometimes' must be one of always, "
      r'never: when ratios are clipped\.',
      id='choice',
    ),
    pytest.param(
      'steps',
      1.5,
      r'config\.replay\.steps=1\.5 must be of type int, not float: updates',
      id='float_for_int',
    ),
    pytest.param(
      'steps', True, 'steps=True must be of type int, not bool: updates', id='bool_for_int'
    ),
    pytest.param('ratio', False, r'must be of type float, not bool', id='bool_for_float'),
    pytest.param(
      'shape', 1, r'config\.replay\.shape=1 must be of type bool, not int', id='int_for_bool'
    ),
    pytest.param('clip', 3, r'must be of type str, not int', id='int_for_str'),
    pytest.param(
      'mesh',
      (4, '2'),
      r"config\.replay\.mesh='2' must be of type int, not str: devices along each axis",
      id='item_of_a_tuple',
    ),
    pytest.param('mesh', '42', r'must be of type tuple, not str', id='str_for_tuple'),
    pytest.param(
      'inner',
      {'path': None},
      r'config\.replay\.inner\.path=None must be of type str',
      id='nested',
    ),
  ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(name, value, message):
  with pytest.raises(InputError, match=message):
    build(**{name: value})


def test_an_unknown_name_is_answered_with_the_nearest():
  with pytest.raises(InputError, match=r"config\.replay has no 'ratoi'; did you mean 'ratio'\?"):
    build(ratoi=0.25)


def test_an_unknown_name_near_none_is_answered_with_all():
  with pytest.raises(InputError, match="has no 'zzz'; it has: ratio, steps, clip, shape"):
    build(zzz=1)


def test_a_missing_name_is_reported():
  values = {name: value for name, value in GOOD.items() if name != 'steps'}
  with pytest.raises(InputError, match=r"config\.replay lacks 'steps'; start from configs/base"):
    config.build(Example, values, 'config.replay')


def test_a_field_has_no_default():
  with pytest.raises(TypeError):
    Example()
