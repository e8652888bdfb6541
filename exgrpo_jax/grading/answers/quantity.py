"""Values of expression trees, and comparison of two trees as quantities.

Rational numbers are compared exactly. Other numbers are compared to 100 digits, or to 600 if 100
are inconclusive. Expressions with unknowns are compared at several points. All sizes are bounded; a
number that is too large counts as undefined. If the values are inconclusive, algebra (identity.py)
decides. Algebra can also overrule a match if there are unknowns in binomials,
factorials, gcd, lcm or rounding, because such expressions may agree at all points by chance.
"""

import zlib
from collections.abc import Iterable
from fractions import Fraction

from exgrpo_jax.grading.answers import operators
from exgrpo_jax.grading.answers.identity import proportional_expressions, same_expression
from exgrpo_jax.grading.answers.number import (
  ERRORS,
  Context,
  Number,
  Point,
  context_of,
  divide,
  evaluate,
  is_complex,
  to_float,
)
from exgrpo_jax.grading.answers.tree import Tree, heads, nodes, size, symbols

_DIGITS = (100, 600)
_MAX_NODES_TWICE = 80  # two trees with more nodes in total are only evaluated to 100 digits
_NUM_POINTS = 6  # three positive, two of mixed sign, one negative
_INTEGERS = frozenset('ijklmnNMKpq')  # letters treated as integers under floor and ceil
_LARGEST_COUNTS = (14, 14, 14, 60, 14, 900)
_ROUNDING = frozenset({'floor', 'ceil'})
_WHOLE = frozenset({'binom', 'factorial', 'gcd', 'lcm'})  # defined for integers only
_COUNTING = _ROUNDING | _WHOLE
_NUM_ROUNDED_POINTS = 24


def exact(tree: Tree) -> Fraction | None:
  """Return the value of a tree without unknowns if it evaluates to a Fraction; else None."""
  value = _value(tree, {})
  return value if isinstance(value, Fraction) else None


def real_value(tree: Tree) -> Number | None:
  """Evaluate a tree without unknowns to 100 digits; return None if it has no real value."""
  value, context = _value(tree, {}), context_of(_DIGITS[0])
  return None if value is None or is_complex(value) else context.re(to_float(value, context))


def _value(tree: Tree, point: Point) -> Number | None:
  """Evaluate a tree at a point to 100 digits; return None if it has no value there."""
  try:
    return evaluate(tree, point, context_of(_DIGITS[0]))
  except ERRORS:
    return None


def is_between(tree: Tree, low: Fraction, high: Fraction) -> bool:
  """Return True if a tree without unknowns has a real value in the interval [`low`, `high`]."""
  value, context = real_value(tree), context_of(_DIGITS[0])
  return value is not None and to_float(low, context) <= value <= to_float(high, context)


def same(x: Tree, y: Tree) -> bool:
  """Return True if two trees are the same quantity wherever both have a value.

  `y` is the ground truth, whose notation may show that letters commute (operators.py).
  """
  if x == y:
    return True
  unknowns = symbols(x) | symbols(y)
  if unknowns:
    x = operators.without_differentials(x) if 'd' in symbols(y) else x
    x, y = operators.in_one_face(x, y)
    unknowns = symbols(x) | symbols(y)
    if letters := operators.ordered_letters(x, y):
      return x == y or operators.same_in_order(x, y, letters)
  verdict = _same_at_all_points(x, y, unknowns) if unknowns else _same_at(x, y, {})
  if verdict is None:
    return same_expression(x, y) is True
  if verdict and unknowns and (heads(x) | heads(y)) & _COUNTING:
    return same_expression(x, y) is not False
  return verdict


def proportional(x: Tree, y: Tree, positive: bool) -> bool:
  """Return True if x is a constant times y, and neither is zero.

  Trees with different unknowns are not proportional. `positive` requires a positive constant.
  """
  x, y = operators.in_one_face(x, y)
  if letters := operators.ordered_letters(x, y):
    return operators.proportional_in_order(x, y, letters, positive)
  unknowns = symbols(x) | symbols(y)
  if not unknowns or symbols(x) != symbols(y):
    return False
  points = (_real_point(unknowns, index) for index in range(_NUM_POINTS))
  ratios = [ratio for point in points if (ratio := _ratio_at(x, y, point)) is not None]
  if any(is_complex(r) or r == 0 or (positive and r < 0) for r in ratios):
    return False
  if not all(_is_close(ratio, ratios[0], _DIGITS[0]) for ratio in ratios[1:]):
    return False
  return len(ratios) >= 3 or proportional_expressions(x, y, positive)


def linear(tree: Tree, unknown: str) -> tuple[Fraction, Fraction] | None:
  """Return (a, b) if the tree is a·unknown + b with rational a and b, else None."""
  values: list[Number] = [_value(tree, {unknown: Fraction(x)}) for x in (0, 1, 2, -3)]
  if not all(isinstance(v, Fraction) for v in values):
    return None
  b, a = values[0], values[1] - values[0]
  return (a, b) if values[2] == 2 * a + b and values[3] == -3 * a + b else None


def _same_at_all_points(x: Tree, y: Tree, unknowns: frozenset[str]) -> bool | None:
  """Return True if two trees agree wherever both have values; None if there are too few points."""
  x_heads, y_heads = heads(x), heads(y)
  if (x_heads | y_heads) & _COUNTING:
    points = (_integer_point(unknowns, index) for index in range(3 * _NUM_POINTS))
    verdict = _all_same((_same_at(x, y, point) for point in points), min_count=3)
    if not verdict or (x_heads | y_heads) & _WHOLE:
      return verdict
    if x_heads & _ROUNDING and y_heads & _ROUNDING:
      real_letters = _letters_between_integers(x, y, unknowns)
      points = (
        _point_to_round(unknowns, real_letters, index) for index in range(_NUM_ROUNDED_POINTS)
      )
      return _all_same((_same_at(x, y, point) for point in points), min_count=3)
  # From index 3 on, unknowns may be negative; complex values are then skipped,
  # because they may differ only by a branch.
  verdicts = (
    _same_at(x, y, _real_point(unknowns, index), must_be_real=index >= 3)
    for index in range(_NUM_POINTS)
  )
  return _all_same(verdicts, min_count=2)


def _all_same(verdicts: Iterable[bool | None], min_count: int) -> bool | None:
  """Return False if any verdict is False, True if at least `min_count` are True, else None."""
  count = 0
  for verdict in verdicts:
    if verdict is False:
      return False
    count += verdict is True
  return True if count >= min_count else None


# Points are pseudo-random but depend only on the name and the index, so every comparison uses the
# same points.


def _integer_point(unknowns: Iterable[str], index: int) -> dict[str, Fraction]:
  """Return an integer point; some values are large enough that n/20 and n/30 round differently."""
  limit = _LARGEST_COUNTS[index % len(_LARGEST_COUNTS)]
  return {name: Fraction(1 + _checksum(name, index) % limit) for name in unknowns}


def _real_point(unknowns: Iterable[str], index: int) -> dict[str, Fraction]:
  """Return a rational point; unknowns with a subscript, like a radius r_0, are positive."""
  point = {}
  for name in unknowns:
    value = Fraction(_checksum(name, index) + 4000, 5003)
    side = (zlib.crc32(name.encode()) >> 4) % 2
    is_negative = index == 5 or (index >= 3 and index % 2 == side)
    point[name] = -value if is_negative and '_' not in name else value
  return point


def _letters_between_integers(x: Tree, y: Tree, unknowns: Iterable[str]) -> set[str]:
  """Return the letters to treat as real numbers in expressions with floor or ceil.

  Letters such as n and k are integers, as in the ceiling of n/2, unless that would leave
  nothing to round.
  """
  real_letters = {name for name in unknowns if name.partition('_')[0] not in _INTEGERS}
  for node in (*nodes(x), *nodes(y)):
    if node[0] == 'function' and node[1] in _ROUNDING and not symbols(node[2]) & real_letters:
      points = (_integer_point(unknowns, index) for index in range(_NUM_POINTS))
      values = [_value(node[2][0], point) for point in points]
      if all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
        real_letters |= symbols(node[2])
  return real_letters


def _point_to_round(
  unknowns: Iterable[str], real_letters: Iterable[str], index: int
) -> dict[str, Fraction]:
  """Return a point where `real_letters` lie between integers or very close to an integer."""
  point = _integer_point(unknowns, index)
  if index % 8 == 7:
    point = {name: value * 101 for name, value in point.items()}
  for name in real_letters:
    value = Fraction(_checksum(name, index), 1201)  # from 0 to 8
    if index % 4 < 2:  # next to an integer, on either side
      value = round(value) + Fraction(1 - index % 4 * 2, 10**6)
    elif index % 8 == 3:
      value *= 997
    point[name] = -value if _checksum(name, index + 99) % 3 == 0 else value
  return point


def _checksum(name: str, index: int) -> int:
  return zlib.crc32(f'{name} {index}'.encode()) % 10007


def _round_point(point: Point, context: Context) -> Point:
  # A large power of a fraction has too many digits to be kept exactly.
  return {
    name: value if value.denominator == 1 else to_float(value, context)
    for name, value in point.items()
  }


def _same_at(x: Tree, y: Tree, point: Point, must_be_real: bool = False) -> bool | None:
  """Return True if two trees agree at a point; None if either has no value there.

  With `must_be_real`, complex values do not count.
  """
  may_repeat = size(x) + size(y) < _MAX_NODES_TWICE
  for digits in _DIGITS if may_repeat else _DIGITS[:1]:
    context = context_of(digits)
    try:
      rounded_point = _round_point(point, context)
      a, b = evaluate(x, rounded_point, context), evaluate(y, rounded_point, context)
    except ERRORS:
      continue
    if must_be_real and (is_complex(a) or is_complex(b)):
      return None
    if isinstance(a, Fraction) and isinstance(b, Fraction):
      return a == b
    if not _is_close(a, b, digits):
      return False
    # An approximation cannot confirm a rational number with that many digits.
    if max(_num_digits(a), _num_digits(b)) < digits // 4:
      return True
  return None


def _ratio_at(x: Tree, y: Tree, point: Point) -> Number | None:
  context = context_of(_DIGITS[0])
  try:
    rounded_point = _round_point(point, context)
    return divide(evaluate(x, rounded_point, context), evaluate(y, rounded_point, context), context)
  except ERRORS:
    return None


def _num_digits(value: Number) -> int:
  """Return the number of digits of a rational number; 0 for an approximation."""
  if not isinstance(value, Fraction):
    return 0
  return (value.numerator.bit_length() + value.denominator.bit_length()) * 3 // 10


def _is_close(a: Number, b: Number, digits: int) -> bool:
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return a == b
  context = context_of(digits)
  a, b = to_float(a, context), to_float(b, context)
  return abs(a - b) <= context.mpf(10) ** -(digits // 2) * max(abs(a), abs(b))
