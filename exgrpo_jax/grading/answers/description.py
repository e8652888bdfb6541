"""Short descriptions of readings, for explaining a verdict to a user."""

import re
from fractions import Fraction

from exgrpo_jax.grading.answers import quantity
from exgrpo_jax.grading.answers.tree import INFINITY, MINUS_INFINITY, Reading, Tree, symbols

_MAX_BITS = 300  # larger rational numbers are not written out
_NAMES = {'differs': 'any value except one', 'chain': 'relation'}  # others are named by their head


def describe(reading: Reading) -> str:
  """Describe a reading in a few words, e.g. 'fraction 10/9' or 'interval [0, 1)'."""
  match reading:
    case 'quantity', tree, unit:
      return _describe_quantity(tree, unit)
    case 'text', text:
      return f'text: {text}'
    case 'letters', text, _:
      return f'word {text}'
    case 'dashed', items, difference:
      return f'{"date" if difference is None else "row"} {"-".join(map(str, items))}'
    case 'time', hour, minute, half:
      return f'time {hour}:{minute:02} {half}m'
    case 'numeral', digits, base:
      return f'numeral {digits} in base {base}'
    case 'matrix', rows:
      return f'{len(rows)} by {len(rows[0])} matrix'
    case _:
      return _describe_parts(reading)


def _describe_parts(reading: Reading) -> str:
  """Describe a reading that contains other readings."""
  match reading:
    case 'labelled', label, value, *_:
      return f'{_abbreviate(label)}: {describe(value)}'
    case 'assigned', assignments:
      return '; '.join(f'{_abbreviate(label)}: {describe(value)}' for label, value in assignments)
    case 'group', opening, closing, items:
      is_interval = opening + closing not in ('()', '[]')
      name = 'tuple or interval' if len(items) == 2 else 'tuple'
      return f'{"interval" if is_interval else name} {opening}{_describe_items(items)}{closing}'
    case ('list' | 'set' | 'braces' | 'union' | 'intersection' | 'ratio') as head, items:
      return f'{head} of {_describe_items(items)}'
  return _NAMES.get(str(reading[0]), str(reading[0]))


def _describe_items(items: tuple[Reading, ...]) -> str:
  return ', '.join(re.sub('^(integer|fraction) ', '', describe(item)) for item in items)


def _describe_quantity(tree: Tree, unit: str) -> str:
  suffix = f' {unit}' if unit else ''
  if tree[0] == 'percent':
    return f'{_describe_quantity(tree[1], "")} percent'
  if unknowns := symbols(tree):
    return f'expression in {", ".join(sorted(unknowns))}{suffix}'
  value = quantity.exact(tree)
  if isinstance(value, Fraction):
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
      return f'rational number with many digits{suffix}'
    return f'{"integer" if value.denominator == 1 else "fraction"} {value}{suffix}'
  number = quantity.real_value(tree)
  return f'{_abbreviate(tree) if number is None else f"number near {float(number):.12g}"}{suffix}'


def _abbreviate(tree: Tree) -> str:
  if tree[0] == 'symbol':
    return tree[1]
  if tree == INFINITY:
    return 'infinity'
  if tree == MINUS_INFINITY:
    return 'minus infinity'
  return ', '.join(sorted(symbols(tree))) or tree[0]
