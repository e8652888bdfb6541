"""Readings: what a mathematician would mean by an answer.

Readings are tuples as trees are, with some of the parser's heads and some of their own:

  ('quantity', tree, unit)   a number or expression; unit '' where none is given
  ('labelled', label, reading, lhs, rhs)   'x = 5', 'x ∈ [0, 1]', 'x < 5' solved for x
  ('assigned', ((label, reading)…))        'x = 5, y = 3'
  ('equation', lhs, rhs)   ('differs', reading)   ('chain', operators, sides)
  ('group', '[', ')', (readings…))   a tuple or an interval, which only context tells apart
  ('numeral', digits, base)   ('list' | 'set' | 'braces' | 'ratio', (readings…))
  ('union' | 'intersection', (readings…))
  ('minus', reading, reading)   ('matrix', ((trees…)…))   ('text', text)

A label is a tree. lhs and rhs are the trees of an equation's sides, None where it was none.
"""

from typing import Any

from exgrpo_jax.grading.answers.tree import Tree

Reading = tuple[Any, ...]

INFINITY: Tree = ('infinity',)
MINUS_INFINITY: Tree = ('negate', INFINITY)
REALS: Reading = ('group', '(', ')', (('quantity', MINUS_INFINITY, ''), ('quantity', INFINITY, '')))


def make_interval(low: Tree, low_operator: str, high_operator: str, high: Tree) -> Reading:
  """The interval of low < x < high; an operator is '<' or '<='."""
  return (
    'group',
    '[' if low_operator == '<=' and low != MINUS_INFINITY else '(',
    ']' if high_operator == '<=' and high != INFINITY else ')',
    (('quantity', low, ''), ('quantity', high, '')),
  )


def make_labelled(
  label: Tree, value: Reading, lhs: Tree | None = None, rhs: Tree | None = None
) -> Reading:
  """A value under a name; lhs and rhs are the sides where an equation gave it."""
  return 'labelled', label, value, lhs, rhs
