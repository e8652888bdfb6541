"""Short descriptions of readings, which explain a verdict to a person."""

from fractions import Fraction

from exgrpo_jax.grading.answers import quantity
from exgrpo_jax.grading.answers.tree import INFINITY, MINUS_INFINITY, Reading, Tree, symbols

_MAX_BITS = 300  # larger rational numbers are not written out
_NAMES = {
  'differs': 'any value except one',
  'chain': 'relation',
}  # other readings are named by their heads


def describe(reading: Reading) -> str:
  """Describe a reading in a few words, e.g. 'fraction 10/9' or 'interval [0, 1)'."""
  head: str = reading[0]
  if head == 'quantity':
    return _describe_quantity(reading[1], reading[2])
  if head == 'text':
    return f'text: {reading[1]}'
  if head in ('letters', 'dashed', 'time'):
    return _describe_as_written(reading)
  if head == 'numeral':
    return f'numeral {reading[1]} in base {reading[2]}'
  if head == 'labelled':
    return f'{_abbreviate(reading[1])}: {describe(reading[2])}'
  if head == 'assigned':
    return '; '.join(f'{_abbreviate(label)}: {describe(value)}' for label, value in reading[1])
  if head == 'group':
    return _describe_group(*reading[1:])
  if head in ('list', 'set', 'braces', 'union', 'intersection', 'ratio'):
    return f'{head} of {_describe_items(reading[1])}'
  if head == 'matrix':
    return f'matrix of {len(reading[1])} by {len(reading[1][0])}'
  return _NAMES.get(head, head)


def _describe_as_written(reading: Reading) -> str:
  if reading[0] == 'letters':
    return f'word {reading[1]}'
  if reading[0] == 'time':
    return f'time {reading[1]}:{reading[2]:02} {reading[3]}m'
  return f'{"date" if reading[2] is None else "row"} {"-".join(map(str, reading[1]))}'


def _describe_group(opening: str, closing: str, items: tuple[Reading, ...]) -> str:
  if opening + closing not in ('()', '[]'):
    name = 'interval'
  else:
    name = 'tuple or interval' if len(items) == 2 else 'tuple'
  return f'{name} {opening}{_describe_items(items)}{closing}'


def _describe_items(items: tuple[Reading, ...]) -> str:
  return ', '.join(
    describe(item).removeprefix('integer ').removeprefix('fraction ') for item in items
  )


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
  if number is not None:
    return f'number near {float(number):.12g}{suffix}'
  return f'{_abbreviate(tree)}{suffix}'


def _abbreviate(tree: Tree) -> str:
  if tree[0] == 'symbol':
    return tree[1]
  if tree == INFINITY:
    return 'infinity'
  if tree == MINUS_INFINITY:
    return 'minus infinity'
  return ', '.join(sorted(symbols(tree))) or tree[0]
