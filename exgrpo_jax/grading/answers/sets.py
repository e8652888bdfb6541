"""Sets of real numbers: intervals, finite sets, and their unions, intersections and differences.

sympy decides whether two sets are equal. Only the order of their endpoints matters, so each
endpoint is replaced with its rank among all endpoints, and sympy sees only small integers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exgrpo_jax.grading.answers import quantity
from exgrpo_jax.grading.answers.tree import INFINITY, MINUS_INFINITY, Reading, Tree, symbols

Set = Any  # a sympy.Set; sympy takes most of a second to import, so it is imported on demand

_MAX_ENDS = 16  # distinct endpoints, compared pairwise
_MAX_MEMBERS = 100
_OPERATIONS = {'union': 'Union', 'intersection': 'Intersection', 'minus': 'Complement'}


class _NoSetError(ValueError):
  """Raised if a reading is not a set of real numbers or has too many endpoints."""


def same_set(x: Reading, y: Reading) -> bool:
  """Return True if two readings are the same set of real numbers; False if either is not a set."""
  if 'quantity' in (x[0], y[0]):
    return False
  try:
    ends = (*_ends(x), *_ends(y))
    if len(ends) > _MAX_MEMBERS:
      return False
    ranks = _rank(tuple(dict.fromkeys(ends)))
    return _build(x, ranks) == _build(y, ranks)
  except _NoSetError:
    return False


def is_interval(reading: Reading) -> bool:
  """Return True if a pair in brackets can only be an interval: [0, 1) or (0, ∞), but not (0, 1)."""
  if reading[0] != 'group' or len(reading[3]) != 2:
    return False
  is_closed = '[' in reading[1] or ']' in reading[2]
  return is_closed or any(end[0] == 'quantity' and _is_infinite(end[1]) for end in reading[3])


def _is_infinite(tree: Tree) -> bool:
  return tree in (INFINITY, MINUS_INFINITY)


def _members(reading: Reading) -> Sequence[Reading]:
  match reading:
    case 'group', _, _, members:
      return members
    case 'set' | 'braces' | 'list' | 'union' | 'intersection', members:
      return members
    case 'minus' | 'differs', *members:
      return members
  raise _NoSetError


def _ends(reading: Reading) -> Iterator[Tree]:
  """Yield the numbers in a set: endpoints of intervals and members of finite sets."""
  if reading[0] != 'quantity':
    for member in _members(reading):
      yield from _ends(member)
  elif reading[2] or any(name.startswith('mathbb') for name in symbols(reading[1])):
    raise _NoSetError
  else:
    yield reading[1]


def _rank(ends: Sequence[Tree]) -> Mapping[Tree, Any]:
  """Rank the endpoints; raises _NoSetError if they are too many or cannot be ordered."""
  import sympy

  equal: list[list[Tree]] = []  # endpoints grouped by value
  for end in ends:
    if _is_infinite(end):
      continue
    if place := next((trees for trees in equal if quantity.same(trees[0], end)), None):
      place.append(end)
    else:
      equal.append([end])
    if len(equal) > _MAX_ENDS:
      raise _NoSetError
  if len(equal) > 1:
    values = [value for trees in equal if (value := quantity.real_value(trees[0])) is not None]
    if len(set(values)) < len(equal):
      raise _NoSetError
    equal = [trees for _, trees in sorted(zip(values, equal), key=lambda pair: pair[0])]
  ranks = {end: sympy.Integer(rank) for rank, trees in enumerate(equal) for end in trees}
  return ranks | {INFINITY: sympy.oo, MINUS_INFINITY: -sympy.oo}


def _build(reading: Reading, ranks: Mapping[Tree, Any]) -> Set:
  import sympy

  head, members = reading[0], _members(reading)
  if head == 'group':
    if len(members) != 2 or any(end[0] != 'quantity' for end in members):
      raise _NoSetError
    low, high = (ranks[end[1]] for end in members)
    if low > high or (low == high and reading[1:3] != ('[', ']')):
      raise _NoSetError
    return sympy.Interval(low, high, reading[1] == '(', reading[2] == ')')
  if head in ('set', 'braces'):
    return sympy.FiniteSet(*(_point(member, ranks) for member in members))
  if head == 'differs':
    return sympy.Complement(sympy.S.Reals, _excluded(reading[1], ranks))
  if head == 'minus':
    return sympy.Complement(_build(reading[1], ranks), _excluded(reading[2], ranks))
  sets = [_build(member, ranks) for member in members]
  return _combine(reading, sets) if head == 'list' else getattr(sympy, _OPERATIONS[head])(*sets)


def _combine(conditions: Reading, sets: Sequence[Set]) -> Set:
  """Combine conditions: all must hold in 'x > 0, x != 9', but one is enough in 'x < 2 or x > 3'.

  By now, commas have replaced 'and' and 'or', so overlapping intervals are ambiguous and rejected.
  """
  import sympy

  if any(condition[0] == 'differs' for condition in conditions[1]):
    return sympy.Intersection(*sets)
  if not all(map(is_interval, conditions[1])):
    raise _NoSetError
  union = sympy.EmptySet
  for part in sets:
    if union.intersect(part) != sympy.EmptySet:
      raise _NoSetError
    union = union.union(part)
  return union


def _excluded(reading: Reading, ranks: Mapping[Tree, Any]) -> Set:
  r"""Return the set to subtract; '\setminus 9' is read as '\setminus \{9\}'."""
  return _build(('set', (reading,)) if reading[0] == 'quantity' else reading, ranks)


def _point(reading: Reading, ranks: Mapping[Tree, Any]) -> Any:
  if reading[0] != 'quantity' or _is_infinite(reading[1]):
    raise _NoSetError
  return ranks[reading[1]]
