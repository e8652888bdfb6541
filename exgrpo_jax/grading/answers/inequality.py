"""Inequalities, solved for their unknown where that is simple."""

from collections.abc import Sequence
from fractions import Fraction

from exgrpo_jax.grading.answers import quantity
from exgrpo_jax.grading.answers.tree import (
  INFINITY,
  MINUS_INFINITY,
  Reading,
  Tree,
  is_label,
  make_interval,
  make_labelled,
  subtract,
  symbols,
)

_REVERSED = {'>': '<', '>=': '<='}


def interpret_inequality(operators: Sequence[str], sides: Sequence[Tree | None]) -> Reading:
  """The interval in which an inequality's unknown lies, or a 'chain' where it is not solved.

  Args:
    operators: of any relations but membership.
    sides: one more than operators; None where the text has none, as in '< 5'.
  """
  directions = {operator[0] for operator in operators}
  if directions not in ({'<'}, {'>'}):
    return 'chain', operators, sides
  if operators[0] in _REVERSED:
    operators = tuple(_REVERSED[operator] for operator in reversed(operators))
    sides = sides[::-1]
  reading = None
  if len(sides) == 2:
    reading = _solve_two_sided(operators[0], *sides)
  elif len(sides) == 3:
    reading = _solve_three_sided(operators[0], operators[1], *sides)
  return reading or ('chain', operators, sides)


def _solve_two_sided(operator: str, low: Tree | None, high: Tree | None) -> Reading | None:
  """The unknown of 'low < high'."""
  if low is None or high is None:
    return make_interval(low or MINUS_INFINITY, operator, operator, high or INFINITY)
  for inner, outer, is_inside in ((low, high, True), (high, low, False)):
    if inner[:2] == ('function', 'abs') and not symbols(outer):
      return _solve_absolute(inner[2][0], operator, outer, is_inside)
  if is_label(high) and not symbols(low):
    return make_labelled(high, make_interval(low, operator, operator, INFINITY))
  if is_label(low) and not symbols(high):
    return make_labelled(low, make_interval(MINUS_INFINITY, operator, operator, high))
  line = _linear(subtract(low, high))
  if not line:
    return None
  unknown, slope, intercept = line
  end: Tree = ('number', -intercept / slope)
  ends = (MINUS_INFINITY, end) if slope > 0 else (end, INFINITY)
  return make_labelled(unknown, make_interval(ends[0], operator, operator, ends[1]))


def _solve_absolute(inner: Tree, operator: str, bound: Tree, is_inside: bool) -> Reading | None:
  """Solve '|inner| < bound', or '|inner| > bound', for its unknown."""
  if is_inside:
    return _solve_three_sided(operator, operator, ('negate', bound), inner, bound)
  above = _solve_two_sided(operator, bound, inner)
  below = _solve_two_sided(operator, inner, ('negate', bound))
  if not above or not below or (above[0], below[0]) != ('labelled', 'labelled'):
    return None
  return make_labelled(above[1], ('union', (below[2], above[2])))


def _solve_three_sided(
  low_operator: str, high_operator: str, low: Tree | None, middle: Tree | None, high: Tree | None
) -> Reading | None:
  """The unknown of 'low < middle < high' between two numbers."""
  if low is None or middle is None or high is None or symbols(low) or symbols(high):
    return None
  if middle[:2] == ('function', 'abs') and middle[2][0][0] == 'symbol':
    intervals = (
      make_interval(('negate', high), high_operator, low_operator, ('negate', low)),
      make_interval(low, low_operator, high_operator, high),
    )
    return make_labelled(middle[2][0], ('union', intervals))
  if is_label(middle):
    return make_labelled(middle, make_interval(low, low_operator, high_operator, high))
  line = _linear(middle)
  if not line:
    return None
  unknown, slope, intercept = line
  low, high = (
    ('divide', subtract(end, ('number', intercept)), ('number', slope)) for end in (low, high)
  )
  if slope < 0:
    low, high, low_operator, high_operator = high, low, high_operator, low_operator
  return make_labelled(unknown, make_interval(low, low_operator, high_operator, high))


def _linear(tree: Tree) -> tuple[Tree, Fraction, Fraction] | None:
  """Unknown, slope and intercept where the tree is linear in its only unknown."""
  unknowns = symbols(tree)
  if len(unknowns) != 1:
    return None
  (unknown,) = unknowns
  line = quantity.linear(tree, unknown)
  if not line or not line[0]:
    return None
  return ('symbol', unknown), *line
