import dataclasses
import math

import pytest
from absl.testing import parameterized
from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Inner:
  path: str = setting(None, 'where it lies')


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


class BuildTest(parameterized.TestCase):
  def test_good_values_become_a_frozen_dataclass(self):
    built = build()
    self.assertEqual(built, Example(0.5, 1, 'never', True, (4, 2), Inner('x')))
    with self.assertRaises(dataclasses.FrozenInstanceError):
      built.ratio = 0.0

  def test_an_int_becomes_a_float_where_a_float_is_due(self):
    self.assertIs(type(build(ratio=0).ratio), float)

  def test_a_list_becomes_a_tuple(self):
    self.assertEqual(build(mesh=[8, 1]).mesh, (8, 1))

  @parameterized.named_parameters(
    ('lowest', 'ratio', 0.0),
    ('just_below_the_end', 'ratio', math.nextafter(1.0, 0.0)),
    ('unbounded', 'steps', 10**12),
    ('empty_tuple', 'mesh', ()),
  )
  def test_what_the_range_includes_is_taken(self, name, value):
    self.assertEqual(getattr(build(**{name: value}), name), value)

  @parameterized.named_parameters(
    (
      'the_open_end',
      'ratio',
      1.0,
      r'config\.replay\.ratio=1\.0 must lie in \[0, 1\): the share '
      r"of each step's questions drawn from the buffer\.",
    ),
    ('below', 'ratio', -0.1, r'config\.replay\.ratio=-0\.1 must lie in \[0, 1\)'),
    ('nan', 'ratio', math.nan, r'config\.replay\.ratio=nan must lie in \[0, 1\)'),
    ('the_open_start', 'steps', 0, r'config\.replay\.steps=0 must lie in \(0, inf\): updates\.'),
    (
      'choice',
      'clip',
      'sometimes',
      r"config\.replay\.clip='sometimes' must be one of always, "
      r'never: when ratios are clipped\.',
    ),
    (
      'float_is_no_int',
      'steps',
      1.5,
      r'config\.replay\.steps=1\.5 must be of type int, not '
      'float: updates',
    ),
    ('bool_is_no_int', 'steps', True, 'steps=True must be of type int, not bool: updates'),
    ('bool_is_no_float', 'ratio', False, r'must be of type float, not bool'),
    ('int_is_no_bool', 'shape', 1, r'config\.replay\.shape=1 must be of type bool, not int'),
    ('number_is_no_text', 'clip', 3, r'must be of type str, not int'),
    (
      'item_of_a_tuple',
      'mesh',
      (4, '2'),
      r"config\.replay\.mesh='2' must be of type int, not "
      'str: devices along each axis',
    ),
    ('text_is_no_tuple', 'mesh', '42', r'must be of type tuple, not str'),
    (
      'within_a_nested_config',
      'inner',
      {'path': None},
      r'config\.replay\.inner\.path=None must '
      'be of type str',
    ),
  )
  def test_refuses(self, name, value, message):
    with self.assertRaisesRegex(InputError, message):
      build(**{name: value})

  def test_an_unknown_name_is_answered_with_the_nearest(self):
    with self.assertRaisesRegex(InputError, "config.replay has no 'ratoi'; did you mean 'ratio'?"):
      build(ratoi=0.25)

  def test_an_unknown_name_near_none_is_answered_with_all(self):
    with self.assertRaisesRegex(InputError, "has no 'zzz'; it has: ratio, steps, clip, shape"):
      build(zzz=1)

  def test_a_missing_name_is_told(self):
    values = {name: value for name, value in GOOD.items() if name != 'steps'}
    with self.assertRaisesRegex(InputError, "config.replay lacks 'steps'; start from configs/base"):
      config.build(Example, values, 'config.replay')


def test_a_field_has_no_default():
  with pytest.raises(TypeError):
    Example()
