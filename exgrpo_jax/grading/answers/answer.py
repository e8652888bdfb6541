"""What kind of thing an answer is: its expression tree, read as a mathematician would.

Readings are trees with the parser's heads and some of their own:

  ('quantity', tree, unit)   a number or expression; unit '' where none is given
  ('labelled', label, reading, lhs, rhs)   'x = 5', 'x ∈ [0, 1]', 'x < 5' solved for x
  ('assigned', ((label, reading)…))        'x = 5, y = 3'
  ('equation', lhs, rhs)   ('differs', reading)   ('chain', operators, sides)
  ('group', '[', ')', (readings…))   a tuple or an interval, which only context tells apart
  ('numeral', digits, base)   ('list' | 'set' | 'braces' | 'union' | 'ratio', (readings…))
  ('matrix', ((trees…)…))   ('words', text)
"""

import re
from fractions import Fraction

from exgrpo_jax.grading.answers import latex, quantity, units
from exgrpo_jax.grading.answers.cursor import UnreadableError, symbols
from exgrpo_jax.grading.answers.tokens import spelled, tokens

MAX_LENGTH = 2000  # characters; longer answers are compared as they stand

_INFINITY = ('infinity',)
_BELOW = ('negate', _INFINITY)
REALS = 'group', '(', ')', (('quantity', _BELOW, ''), ('quantity', _INFINITY, ''))
_REVERSED = {'>': '<', '>=': '<='}
_BASES = {
  'two': 2,
  'three': 3,
  'four': 4,
  'five': 5,
  'six': 6,
  'seven': 7,
  'eight': 8,
  'nine': 9,
  'ten': 10,
  'twelve': 12,
  'sixteen': 16,
}
_NUMERAL = re.compile(
  r'\(?([0-9][0-9A-Fa-f]*)\)? ?_ ?\{? ?\(?(?:\\text ?\{ ?)?([0-9]+|[a-z]+)'
  r'(?: ?\})?\)? ?\}?'
)
_WRAPPER = re.compile(r'\\(?:text|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}')
_ARTICLE = re.compile(r'(?i)(?:an?|the)\s+(?=[a-z]{3})')
_SHORT_WORDS = frozenset(('yes', 'no', 'odd', 'all', 'one', 'two', 'six', 'ten', 'sun', 'mon'))
_WORDS = re.compile(r"(?i)[a-z][a-z ,.'\-]{2,}")


def read(text: str):
  """The reading of an answer; what is not understood is ('words', text)."""
  money, text = r'\$' in text, spelled(text)
  if numeral := _numeral(text):
    return numeral
  found = tokens(text)
  if not found:
    return 'words', words(text)
  try:
    meant = reading(latex.parse(found))
  except (UnreadableError, RecursionError):
    return 'words', words(text)
  if money and meant[0] == 'quantity' and not meant[2]:
    return 'quantity', meant[1], 'dollar'
  return meant


def words(text: str) -> str:
  """Text without wrappers and white space; words without capitals.

  A space between two digits stays: '1 1/2' is not '11/2'.
  """
  text = wrapped_off(text).replace('$', '')
  text = _ARTICLE.sub('', text.strip(), count=1)
  if text.lower() in _SHORT_WORDS or (len(text) > 3 and _WORDS.fullmatch(text)):
    text = text.lower()
  text = re.sub(r'(?<![0-9])\s+|\s+(?![0-9])', '', text.strip())
  return text.removesuffix('.')


def wrapped_off(text: str) -> str:
  r"""'\text{C}' as 'C'."""
  return _WRAPPER.sub(r'\1', text)


def _numeral(text: str):
  match = _NUMERAL.fullmatch(wrapped_off(text))
  if not match:
    return None
  digits, base = match[1].upper(), match[2]
  base = int(base) if base.isdecimal() and len(base) < 3 else _BASES.get(base, 0)
  if not 2 <= base <= 36 or any(int(digit, 16) >= base for digit in digits):
    return None
  return 'numeral', digits.lstrip('0') or '0', base


def reading(tree):
  """A tree as what it is meant to be."""
  head = tree[0]
  if tree == ('symbol', 'mathbb_R'):
    return REALS
  if head == 'relation':
    return _relation(tree[1], tree[2])
  if head == 'list':
    return _list([reading(item) for item in tree[1]])
  if head in ('set', 'braces', 'union', 'ratio'):
    items = [reading(item) for item in tree[1]]
    if head == 'set' and items and all(item[0] == 'labelled' for item in items):
      return _list(items)  # '{x = 1, y = 2}'
    return head, tuple(_flat(items))
  if head == 'group':
    return 'group', tree[1], tree[2], tuple(reading(item) for item in tree[3])
  if head == 'minus':
    return 'minus', reading(tree[1]), reading(tree[2])
  if (
    head == 'multiply' and len(tree[1]) == 2 and tree[1][1][0] == 'group' and _is_label(tree[1][0])
  ):
    return 'labelled', tree[1][0], reading(tree[1][1]), None, None  # 't(0, 4]'
  matrix = _matrix(tree)
  if matrix:
    return 'matrix', matrix
  if _signs(tree):
    return 'list', tuple(reading(_signed(tree, sign)) for sign in (1, -1))
  if head == 'unit':
    return 'quantity', tree[1], units.same_unit(tree[2])
  if head == 'degrees':
    return 'quantity', tree[1], 'degree'
  if head == 'negate' and tree[1][0] in ('unit', 'degrees'):
    inner = reading(tree[1])
    return 'quantity', ('negate', inner[1]), inner[2]
  return 'quantity', tree, ''


def _flat(items):
  for item in items:
    yield from item[1] if item[0] == 'list' else (item,)


def _list(items):
  """Items that share a label lose it to the list: 'x = 1 or x = 2', 'n = 1, 2, 3'."""
  labels = [item[1] if item[0] == 'labelled' else None for item in items]
  if labels[0] is None or any(item[0] == 'equation' for item in items):
    return 'list', tuple(_flat(items))
  if all(label in (None, labels[0]) for label in labels):
    values = (item[2] if item[0] == 'labelled' else item for item in items)
    return 'labelled', labels[0], ('list', tuple(_flat(values))), None, None
  if None not in labels:
    return 'assigned', tuple((item[1], item[2]) for item in items)
  return 'list', tuple(_flat(items))


# Relations.


def _relation(operators, sides):
  if 'in' in operators:
    if operators != ('in',) or sides[0] is None:
      return 'chain', operators, sides
    return 'labelled', sides[0], reading(sides[1]), None, None
  if set(operators) <= {'=', '~'}:
    return _equation(operators, sides)
  if operators == ('!=',):
    value = 'differs', reading(sides[1])
    if sides[0] is None:
      return value
    if not symbols(sides[0]) and symbols(sides[1]):
      return 'labelled', sides[1], ('differs', reading(sides[0])), None, None
    return 'labelled', sides[0], value, None, None
  return _inequality(operators, sides)


def _equation(operators, sides):
  if sides[0] is None:
    return reading(sides[-1])
  if '~' in operators:  # what follows is rounded, but for 'x ≈ 5'
    at = operators.index('~') + 1
    sides = sides[: max(at, 2)] if at > 1 or _is_label(sides[0]) else sides[:1]
  first, last = sides[0], sides[-1]
  if len(sides) == 1:
    return reading(first)
  if _is_label(first) and not (_is_run(first) and _is_run(last)):
    return 'labelled', first, reading(last), first, last
  if not any(symbols(side) for side in sides):  # '2 + 3 = 5' is 5, '5 = 6' is nothing
    holds = all(quantity.same(side, last) for side in sides)
    return reading(last) if holds else ('equation', first, last)
  if last[0] == 'symbol' and not symbols(first):
    return 'labelled', last, reading(first), last, first
  return 'equation', first, last


def _is_label(tree) -> bool:
  """Whether an equation's left side only names what its right side is."""
  head = tree[0]
  if head == 'symbol':
    return tree[1] not in ('e', 'i', 'pi')
  if head == 'call':
    return True
  if head == 'function':
    return tree[1] == 'abs' and _is_run(tree[2][0])  # a segment's length
  if head == 'divide':
    return all(map(_is_run, tree[1:])) or all(map(_is_differential, tree[1:]))
  if head == 'ratio':
    return all(map(_is_label, tree[1]))
  if head == 'group':
    return all(item[0] == 'symbol' for item in tree[3])
  return _is_run(tree)


def _is_run(tree) -> bool:
  """Capital letters in a row, as name a segment, or a word."""
  if tree[0] == 'symbol':
    return len(tree[1]) > 3 and tree[1].isalpha()
  return tree[0] == 'multiply' and all(f[0] == 'symbol' and f[1][0].isupper() for f in tree[1])


def _is_differential(tree) -> bool:
  return tree[0] == 'multiply' and tree[1][0] == ('symbol', 'd')


def _inequality(operators, sides):
  if (
    len({operator[0] for operator in operators}) > 1
    or '!=' in operators
    or ('=' in operators or '~' in operators)
  ):
    return 'chain', operators, sides
  if operators[0] in _REVERSED:
    operators = tuple(_REVERSED[operator] for operator in reversed(operators))
    sides = sides[::-1]
  if len(sides) == 2 and None in sides:
    low, high = (_BELOW, sides[1]) if sides[0] is None else (sides[0], _INFINITY)
    return _interval(low, operators[0], operators[0], high)
  return _solved(operators, sides) or ('chain', operators, sides)


def _interval(low, below, above, high):
  return (
    'group',
    '[' if below == '<=' and low != _BELOW else '(',
    ']' if above == '<=' and high != _INFINITY else ')',
    (('quantity', low, ''), ('quantity', high, '')),
  )


def _solved(operators, sides):
  """An inequality as the interval its letter lies in, or None."""
  if len(sides) == 2:
    for index, low, high in ((1, sides[0], _INFINITY), (0, _BELOW, sides[1])):
      if _is_label(sides[index]) and not symbols(sides[1 - index]):
        interval = _interval(low, operators[0], operators[0], high)
        return 'labelled', sides[index], interval, None, None
    return _solved_linear(operators[0], ('add', (sides[0], ('negate', sides[1]))))
  if len(sides) != 3 or None in sides or symbols(sides[0]) or symbols(sides[2]):
    return None
  low, middle, high = sides
  if middle[:2] == ('function', 'abs') and middle[2][0][0] == 'symbol':
    negative = _interval(('negate', high), operators[1], operators[0], ('negate', low))
    positive = _interval(low, *operators, high)
    return 'labelled', middle[2][0], ('union', (negative, positive)), None, None
  if _is_label(middle):
    return 'labelled', middle, _interval(low, *operators, high), None, None
  letters = symbols(middle)
  line = quantity.linear(middle, *letters) if len(letters) == 1 else None
  if not line or not line[0]:
    return None
  scale, shift = (('number', value) for value in line)
  low, high = (('divide', ('add', (end, ('negate', shift))), scale) for end in (low, high))
  below, above = operators
  if line[0] < 0:
    low, high, below, above = high, low, above, below
  return 'labelled', ('symbol', *letters), _interval(low, below, above, high), None, None


def _solved_linear(operator, difference):
  """a·x + b < 0."""
  letters = symbols(difference)
  line = quantity.linear(difference, *letters) if len(letters) == 1 else None
  if not line or not line[0]:
    return None
  end = ('number', -line[1] / line[0])
  ends = (_BELOW, end) if line[0] > 0 else (end, _INFINITY)
  interval = _interval(ends[0], operator, operator, ends[1])
  return 'labelled', ('symbol', *letters), interval, None, None


# Both signs at once, and matrices.


def _signs(tree) -> bool:
  return (
    isinstance(tree, tuple)
    and bool(tree)
    and (tree[0] == 'plusminus' or any(_signs(child) for child in tree))
  )


def _signed(tree, sign: int):
  """The tree with one of its two signs wherever both stood."""
  if not isinstance(tree, tuple) or not tree:
    return tree
  if tree[0] != 'plusminus':
    return tuple(_signed(child, sign) for child in tree)
  left, right = _signed(tree[2], sign), _signed(tree[3], sign)
  right = right if tree[1] == sign else ('negate', right)
  return right if left is None else ('add', (left, right))


def _matrix(tree):
  """Rows of trees where the tree is a matrix, a sum, a product or a multiple of such."""
  head = tree[0]
  if head == 'rows':
    return tree[1]
  if head == 'negate' and (rows := _matrix(tree[1])):
    return tuple(tuple(('negate', cell) for cell in row) for row in rows)
  if head == 'divide' and (rows := _matrix(tree[1])):
    return tuple(tuple(('divide', cell, tree[2]) for cell in row) for row in rows)
  if head not in ('add', 'multiply'):
    return None
  total = None
  parts = [(_matrix(part), part) for part in tree[1]]
  matrices = [rows for rows, _ in parts if rows]
  # A product's cells grow by a factor with each matrix.
  if not 1 <= len(matrices) <= 3 or sum(len(rows) * len(rows[0]) for rows in matrices) > 64:
    return None
  if head == 'multiply':
    scalars = [part for rows, part in parts if not rows]
    for rows, _ in parts:
      total = rows if total is None else _times(total, rows) if rows else total
    return total and tuple(
      tuple(('multiply', (*scalars, cell)) if scalars else cell for cell in row) for row in total
    )
  for rows, _ in parts:
    if not rows or (total and (len(rows), len(rows[0])) != (len(total), len(total[0]))):
      return None
    total = (
      rows
      if total is None
      else tuple(
        tuple(('add', pair) for pair in zip(*both, strict=True))
        for both in zip(total, rows, strict=True)
      )
    )
  return total


def _times(left, right):
  if len(left[0]) != len(right):
    return None
  return tuple(
    tuple(
      ('add', tuple(('multiply', (row[k], right[k][j])) for k in range(len(right))))
      for j in range(len(right[0]))
    )
    for row in left
  )


def described(answer) -> str:
  """A reading in a few words, e.g. 'fraction 10/9' or 'interval [0, 1)'."""
  head = answer[0]
  if head == 'quantity':
    return _described_quantity(answer[1], answer[2])
  if head == 'words':
    return f'text: {answer[1]}'
  if head == 'numeral':
    return f'numeral {answer[1]} in base {answer[2]}'
  if head == 'labelled':
    return f'{_short(answer[1])}: {described(answer[2])}'
  if head == 'assigned':
    return '; '.join(f'{_short(label)}: {described(value)}' for label, value in answer[1])
  if head == 'group':
    inside = ', '.join(map(_brief, answer[3]))
    name = 'tuple or interval' if len(answer[3]) == 2 else 'tuple'
    mixed = answer[1] + answer[2] not in ('()', '[]')
    return f'{"interval" if mixed else name} {answer[1]}{inside}{answer[2]}'
  if head in ('list', 'set', 'braces', 'union', 'ratio'):
    return f'{head} of {", ".join(map(_brief, answer[1]))}'
  if head == 'matrix':
    return f'matrix of {len(answer[1])} by {len(answer[1][0])}'
  return {'differs': 'anything but a value', 'chain': 'relation'}.get(head, head)


def _brief(answer) -> str:
  return described(answer).removeprefix('integer ').removeprefix('fraction ')


def _described_quantity(tree, unit: str) -> str:
  suffix = f' {unit}' if unit else ''
  if tree[0] == 'percent':
    return f'{_described_quantity(tree[1], "")} percent'
  letters = symbols(tree)
  if letters:
    return f'expression in {", ".join(sorted(letters))}{suffix}'
  value = quantity.exact(tree)
  if isinstance(value, Fraction):
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 300:
      return f'rational number of many digits{suffix}'
    return f'{"integer" if value.denominator == 1 else "fraction"} {value}{suffix}'
  near = quantity.approximate(tree)
  return f'number near {near:.12g}{suffix}' if near is not None else f'{_short(tree)}{suffix}'


def _short(tree) -> str:
  if tree[0] == 'symbol':
    return tree[1]
  if tree == _INFINITY:
    return 'infinity'
  if tree == _BELOW:
    return 'minus infinity'
  return ', '.join(sorted(symbols(tree))) or tree[0]
