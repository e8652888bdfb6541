"""Sets of real numbers: intervals, finite sets, and their unions, intersections and differences.

Only the order of the endpoints matters, so each endpoint is replaced with its rank among all
endpoints. The endpoints divide the line into pieces, and a set is a frozenset of pieces: piece 2r
is the endpoint with rank r, and pieces 2r - 1 and 2r + 1 are the gaps on either side of it.
"""

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

from exgrpo_jax.grading.answers import quantity
from exgrpo_jax.grading.answers.tree import INFINITY, MINUS_INFINITY, Reading, Tree, symbols

Pieces = frozenset[int]

_MAX_ENDS = 16  # distinct endpoints, compared pairwise
_MAX_MEMBERS = 100
_ALL: Pieces = frozenset(range(-1, 2 * _MAX_ENDS))
_OPERATIONS = {'union': operator.or_, 'intersection': operator.and_, 'list': operator.or_}


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
    return _pieces(x, ranks) == _pieces(y, ranks)
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


def _rank(ends: Sequence[Tree]) -> Mapping[Tree, float]:
  """Rank the endpoints; raises _NoSetError if there are too many or they cannot be ordered."""
  groups: list[list[Tree]] = []  # endpoints grouped by value
  for end in ends:
    if _is_infinite(end):
      continue
    if group := next((group for group in groups if quantity.same(group[0], end)), None):
      group.append(end)
    else:
      groups.append([end])
    if len(groups) > _MAX_ENDS:
      raise _NoSetError
  if len(groups) > 1:
    values = [value for group in groups if (value := quantity.real_value(group[0])) is not None]
    if len(set(values)) < len(groups):
      raise _NoSetError
    groups = [group for _, group in sorted(zip(values, groups), key=lambda pair: pair[0])]
  ranks: dict[Tree, float] = {end: rank for rank, group in enumerate(groups) for end in group}
  return ranks | {INFINITY: math.inf, MINUS_INFINITY: -math.inf}


def _pieces(reading: Reading, ranks: Mapping[Tree, float]) -> Pieces:
  """Return the pieces of a set; raises _NoSetError if the reading is not a set."""
  head, members = reading[0], _members(reading)
  if head == 'group':
    if len(members) != 2 or any(end[0] != 'quantity' for end in members):
      raise _NoSetError
    low, high = (ranks[end[1]] for end in members)
    if low > high or (low == high and (reading[1:3] != ('[', ']') or math.isinf(low))):
      raise _NoSetError
    first, last = 2 * low + (reading[1] == '('), 2 * high - (reading[2] == ')')
    return frozenset(piece for piece in _ALL if first <= piece <= last)
  if head in ('set', 'braces'):
    return frozenset(int(2 * _rank_of(member, ranks)) for member in members)
  if head in ('differs', 'minus'):
    *minuend, subtrahend = members
    if subtrahend[0] == 'quantity':
      subtrahend = ('set', (subtrahend,))  # '\setminus 9' is '\setminus \{9\}'
    return (_pieces(minuend[0], ranks) if minuend else _ALL) - _pieces(subtrahend, ranks)
  sets = [_pieces(member, ranks) for member in members]
  combine = _OPERATIONS[head]
  if head == 'list' and any(member[0] == 'differs' for member in members):
    combine = operator.and_  # all conditions must hold in 'x > 0, x != 9'
  elif head == 'list' and (
    not all(map(is_interval, members)) or sum(map(len, sets)) > len(frozenset().union(*sets))
  ):
    raise _NoSetError  # overlapping conditions may have been joined by 'and', now a comma
  return functools.reduce(combine, sets)


def _rank_of(member: Reading, ranks: Mapping[Tree, float]) -> float:
  if member[0] != 'quantity' or _is_infinite(member[1]):
    raise _NoSetError
  return ranks[member[1]]
