"""Units of measurement: their normal spelling, and how many of one another is."""

from fractions import Fraction

import pytest

from exgrpo_jax.grading.answers.units import conversion, normalize_unit


@pytest.mark.parametrize(
  ('unit', 'other', 'factor'),
  [
    ('m', 'cm', 100),
    ('cm^2', 'm^2', Fraction(1, 10_000)),
    ('h', 'min', 60),
    ('km/h', 'm/s', Fraction(5, 18)),
    ('mi/h', 'mph', 1),
    ('mi', 'ft', 5280),
    ('lb', 'oz', 16),
    ('l', 'cm^3', 1000),
    ('gallon', 'pint', 8),
    ('n', 'kg m/s^2', 1),
    ('m s^-1', 'm/s', 1),
    ('year', 'month', 12),
    ('dollar', 'cent', 100),
    ('year', 'day', None),
    ('m', 'g', None),
    ('m', 'm^2', None),
    ('apple', 'm', None),
    ('apple', 'apple', None),
  ],
)
def test_units_of_one_kind_are_converted(unit, other, factor):
  assert conversion(unit, other) == factor


def test_a_unit_has_one_spelling():
  spelled = {
    'square centimeters': 'cm^2',
    'miles per hour': 'mi/h',
    'kg m/s^{2}': 'kg m/s^2',
    'units^2': '',
    'Green Apples': 'green apple',
  }
  assert {name: normalize_unit(name) for name in spelled} == spelled
