"""Expression trees to numbers, and whether two trees are the same quantity.

Rational numbers are exact. Others are worked out to 100 digits, or to 600 where the
first do not decide. An expression in letters is worked out at several points.
Everything is bounded: what would be too large to hold has no value here.
"""

import zlib
from collections.abc import Mapping
from fractions import Fraction

from exgrpo_jax.grading.answers.cursor import symbols
from exgrpo_jax.grading.answers.number import (
  ERRORS,
  context_of,
  converted,
  divided,
  heads,
  is_complex,
  value_of,
)

_DIGITS = (100, 600)
_MAX_NODES_TWICE = 80  # larger trees are worked out to 100 digits only
_POINTS = 6  # three positive, two of mixed sign, one negative
_WHOLE = frozenset({'floor', 'ceil', 'binom', 'factorial'})


def exact(tree) -> Fraction | None:
  """The rational number a tree without letters is, where it is one by its form."""
  try:
    value = value_of(tree, {}, context_of(_DIGITS[0]))
  except ERRORS:
    return None
  return value if isinstance(value, Fraction) else None


def approximate(tree) -> float | None:
  """A closed tree as a real number, for ordering; None where it has none."""
  try:
    value = value_of(tree, {}, context_of(_DIGITS[0]))
    return None if is_complex(value) else float(value)
  except ERRORS:
    return None


def between(tree, low: Fraction, high: Fraction) -> bool:
  """Whether a tree without letters is a real number from `low` to `high`."""
  context = context_of(_DIGITS[0])
  try:
    value = value_of(tree, {}, context)
  except ERRORS:
    return False
  if is_complex(value):
    return False
  return converted(low, context) <= context.re(value) <= converted(high, context)


def same(x, y) -> bool:
  """Whether two trees are the same quantity wherever both have a value."""
  if x == y:
    return True
  letters = symbols(x) | symbols(y)
  if not letters:
    return _same_at(x, y, {}) is True
  return _agree(x, y, letters)


def proportional(x, y, positive: bool) -> bool:
  """Whether x is a constant times y, neither being zero; `positive`: a positive constant."""
  letters = symbols(x) | symbols(y)
  if not letters or symbols(x) != symbols(y):
    return False
  ratios = [
    ratio
    for index in range(_POINTS)
    if (ratio := _ratio(x, y, _point(letters, index, False))) is not None
  ]
  if len(ratios) < 3 or any(is_complex(r) or r == 0 or (positive and r < 0) for r in ratios):
    return False
  return all(_close(ratio, ratios[0], _DIGITS[0]) for ratio in ratios[1:])


def linear(tree, letter: str) -> tuple[Fraction, Fraction] | None:
  """A and b where the tree is a·letter + b with rational a and b."""
  values = []
  for at in (0, 1, 2, -3):
    try:
      values.append(value_of(tree, {letter: Fraction(at)}, context_of(_DIGITS[0])))
    except ERRORS:
      return None
  if not all(isinstance(v, Fraction) for v in values):
    return None
  b, a = values[0], values[1] - values[0]
  return (a, b) if values[2] == 2 * a + b and values[3] == -3 * a + b else None


def _agree(x, y, letters) -> bool:
  """Whether two trees in letters have the same value at every point where both have one."""
  used_x, used_y = heads(x) & _WHOLE, heads(y) & _WHOLE
  decided = 0
  if used_x or used_y:
    for index in range(3 * _POINTS):
      verdict = _same_at(x, y, _point(letters, index, True))
      if verdict is False:
        return False
      decided += verdict is True
    if decided < 3:
      return False
    if (used_x and used_y) or (used_x | used_y) & {'binom', 'factorial'}:
      return True
  decided = 0
  for index in range(_POINTS):
    verdict = _same_at(x, y, _point(letters, index, False), real=index >= 3)
    if verdict is False:
      return False
    decided += verdict is True
  return decided >= 2


def _point(letters, index: int, whole: bool) -> dict:
  """A value for each letter, by its name: the same in every comparison.

  Letters with an index, such as a radius r_0, stand for quantities above zero.
  """
  point = {}
  for letter in letters:
    draw = zlib.crc32(f'{letter} {index}'.encode()) % 10007
    value = Fraction(1 + draw % 14) if whole else Fraction(draw + 4000, 5003)
    side = (zlib.crc32(letter.encode()) >> 4) % 2
    negative = index == 5 or (index >= 3 and index % 2 == side)
    point[letter] = -value if negative and not whole and '_' not in letter else value
  return point


def _rounded_point(point: Mapping, context) -> dict:
  # A large power of a fraction has too many digits to be kept exactly.
  return {
    letter: value if value.denominator == 1 else converted(value, context)
    for letter, value in point.items()
  }


def _same_at(x, y, point: Mapping, real: bool = False) -> bool | None:
  """Equal, different, or None where one of them has no value (or none that is real)."""
  for digits in _DIGITS[: 1 + (_size(x) + _size(y) < _MAX_NODES_TWICE)]:
    context = context_of(digits)
    try:
      at = _rounded_point(point, context)
      a, b = value_of(x, at, context), value_of(y, at, context)
    except ERRORS:
      continue
    if real and (is_complex(a) or is_complex(b)):
      return None
    if isinstance(a, Fraction) and isinstance(b, Fraction):
      return a == b
    if not _close(a, b, digits):
      return False
    if max(_length(a), _length(b)) < digits // 4:
      return True
  return None


def _ratio(x, y, point):
  context = context_of(_DIGITS[0])
  try:
    at = _rounded_point(point, context)
    a, b = value_of(x, at, context), value_of(y, at, context)
    return divided(a, b, context)
  except ERRORS:
    return None


def _length(value) -> int:
  """Digits of a rational number; an approximation has none to compare with."""
  if not isinstance(value, Fraction):
    return 0
  return (value.numerator.bit_length() + value.denominator.bit_length()) * 3 // 10


def _close(a, b, digits: int) -> bool:
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return a == b
  context = context_of(digits)
  a, b = converted(a, context), converted(b, context)
  return abs(a - b) <= context.mpf(10) ** -(digits // 2) * max(abs(a), abs(b))


def _size(tree) -> int:
  return 1 + sum(_size(child) for child in tree if isinstance(child, tuple))
