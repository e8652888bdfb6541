r"""Expression trees and readings, and shared operations on them.

A tree is a tuple of its head and its children. The parser produces these heads:

  ('number', Fraction)         ('symbol', name)          ('infinity',)
  ('add', (terms…))            ('multiply', (factors…))  ('negate', x)
  ('divide', x, y)             ('power', x, y)           ('plusminus', sign, x, y)
  ('function', name, (x…))     ('call', name, (x…))      ('factorial', x)
  ('percent', x)               ('degrees', x)            ('unit', x, name)
  ('group', '(', ')', (x…))    ('set', (x…))             ('braces', (x…))
  ('list', (x…))               ('rows', ((x…)…))         ('relation', (operators…), (sides…))
  ('union', (x…))              ('intersection', (x…))    ('minus', x, y)
  ('ratio', (x…))              ('compose', (f, g))       ('dot' | 'cross', x, y)
  ('letters', 'XIV', x)        ('dashed', (numbers…), x)

'set' is \{1, 2\}, 'braces' is {1, 2}, 'minus' is a difference of sets, and 'call' calls an unknown
function. A missing side of a relation is None, as in '< 5', and so is x in '\pm y'. For 'letters'
and 'dashed', x is the alternative tree: the product of the letters, or the difference in '10-8'.
For a date, which has no alternative, x is None.

A reading is the meaning of an answer. It is also a tuple, with one of these heads:

  ('quantity', tree, unit)   a number or expression; the unit is '' if none is given
  ('labelled', label, reading, lhs, rhs)   'x = 5', 'x ∈ [0, 1]', 'x < 5' solved for x
  ('assigned', ((label, reading)…))        'x = 5, y = 3'
  ('equation', lhs, rhs)   ('differs', reading)   ('chain', operators, sides)
  ('group', '[', ')', (readings…))   a tuple or an interval, depending on context
  ('letters', text, reading)   ('dashed', numbers, reading)   ('time', hour, minute, 'a' | 'p')
  ('numeral', digits, base)   ('list' | 'set' | 'braces' | 'ratio', (readings…))
  ('union' | 'intersection', (readings…))
  ('minus', reading, reading)   ('matrix', ((trees…)…))   ('text', text)

A label is a tree. lhs and rhs are the sides of an equation as trees, or None if there is no
equation.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]
Reading = tuple[Any, ...]

INFINITY: Tree = ('infinity',)
MINUS_ONE: Tree = ('negate', ('number', Fraction(1)))
MINUS_INFINITY: Tree = ('negate', INFINITY)
REALS: Reading = ('group', '(', ')', (('quantity', MINUS_INFINITY, ''), ('quantity', INFINITY, '')))

_MAX_DEPTH = 120
_CONSTANTS = ('pi', 'e', 'i')


def is_too_deep(tree: Tree) -> bool:
  """Return True if recursion over the tree could exhaust the stack."""
  level = [tree]
  for _ in range(_MAX_DEPTH):
    level = [child for node in level for child in node if isinstance(child, tuple)]
    if not level:
      return False
  return True


def make_sum(terms: Sequence[Tree]) -> Tree:
  """Return the sum of one or more terms."""
  return terms[0] if len(terms) == 1 else ('add', tuple(terms))


def make_product(factors: Sequence[Tree]) -> Tree:
  """Return the product of one or more factors."""
  return factors[0] if len(factors) == 1 else ('multiply', tuple(factors))


def subtract(left: Tree, right: Tree) -> Tree:
  """Return the tree for left - right."""
  return 'add', (left, ('negate', right))


def symbols(tree: Any) -> frozenset[str]:
  """Return the names of the unknowns in a tree or tuple of trees; a call counts as 'f()'."""
  unknowns = (node for node in nodes(tree) if node[0] in ('symbol', 'call'))
  names = frozenset(name if head == 'symbol' else f'{name}()' for head, name, *_ in unknowns)
  return names.difference(_CONSTANTS)


def heads(tree: Any) -> frozenset[str]:
  """Return all heads and function names in a tree."""
  names = (node[:2] if node[0] == 'function' else node[:1] for node in nodes(tree))
  return frozenset(itertools.chain.from_iterable(names))


def nodes(tree: Any) -> Iterator[Tree]:
  """Yield a tree and all its subtrees."""
  stack = [tree]
  while stack:
    node = stack.pop()
    if isinstance(node, tuple) and node:
      if isinstance(node[0], str):
        yield node
      stack += node[::-1]


def rewrite(tree: Any, replace: Callable[[Tree], Tree | None]) -> Any:
  """Replace a tree with `replace(tree)`; if that is None, rewrite its parts recursively."""
  if not isinstance(tree, tuple) or not tree:
    return tree
  replacement = replace(tree)
  return tuple(rewrite(child, replace) for child in tree) if replacement is None else replacement


def plain(tree: Tree) -> Tree:
  """Replace runs of letters with products, and dashed numbers with differences."""
  return rewrite(tree, lambda node: node[2] if node[0] in ('letters', 'dashed') else None)


def size(tree: Tree) -> int:
  """Count the tuples in a tree."""
  return 1 + sum(size(child) for child in tree if isinstance(child, tuple))


def is_label(tree: Tree) -> bool:
  """Return True if a tree just names the other side of an equation: x in 'x = 5', or dy/dx."""
  match tree:
    case 'symbol', name:
      return name not in _CONSTANTS
    case ('call', *_) | ('multiply', (('compose', *_), *_)):  # '(f \circ g)(x)'
      return True
    case 'function', name, arguments:
      return name == 'abs' and is_name(arguments[0])  # a segment's length
    case 'divide', *parts:
      are_differentials = all(x[0] == 'multiply' and x[1][0] == ('symbol', 'd') for x in parts)
      return are_differentials or all(map(is_name, parts))
    case 'ratio', parts:
      return all(map(is_label, parts))
    case 'group', _, _, items:
      return all(item[0] == 'symbol' for item in items)
  return is_name(tree)


def is_name(tree: Tree) -> bool:
  """Return True if a tree is a word or a run of capital letters, which may name a segment."""
  if tree[0] == 'symbol':
    return len(tree[1]) > 3 and tree[1].isalpha()
  return tree[0] == 'multiply' and all(f[0] == 'symbol' and f[1][0].isupper() for f in tree[1])


def make_interval(low: Tree, low_operator: str, high_operator: str, high: Tree) -> Reading:
  """Return the interval low < x < high; each operator is '<' or '<='."""
  return (
    'group',
    '[' if low_operator == '<=' and low != MINUS_INFINITY else '(',
    ']' if high_operator == '<=' and high != INFINITY else ')',
    (('quantity', low, ''), ('quantity', high, '')),
  )


def make_labelled(
  label: Tree, value: Reading, lhs: Tree | None = None, rhs: Tree | None = None
) -> Reading:
  """Attach a label to a value; lhs and rhs are the sides of the original equation, if any."""
  return 'labelled', label, value, lhs, rhs
