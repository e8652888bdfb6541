"""Parse the text of an answer into a reading."""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers import latex, quantity
from exgrpo_jax.grading.answers.grammar import UnreadableError, joined_units
from exgrpo_jax.grading.answers.operators import with_forms
from exgrpo_jax.grading.answers.tokens import FUNCTIONS, SYMBOLS, normalize_spelling, tokenize
from exgrpo_jax.grading.answers.tree import (
  INFINITY,
  MINUS_INFINITY,
  REALS,
  Reading,
  Tree,
  heads,
  is_label,
  is_name,
  make_interval,
  make_labelled,
  plain,
  rewrite,
  size,
  subtract,
  symbols,
)
from exgrpo_jax.grading.answers.units import normalize_unit

MAX_LENGTH = 2000  # characters; longer answers are compared as plain text

_SMALL_BASES = 'two three four five six seven eight nine ten'
_BASES = {name: base for base, name in enumerate(_SMALL_BASES.split(), 2)}
_BASES |= {'twelve': 12, 'sixteen': 16}
_NUMERAL = re.compile(
  r'\(?([0-9][0-9A-Fa-f]*)\)? ?_ ?\{? ?\(?(?:\\text ?\{ ?)?([0-9]+|[a-z]+)'
  r'(?: ?\})?\)? ?\}?'
)
_CYCLES = re.compile(r'(?:\((?:[0-9]\s*){2,9}\)\s*){2,9}')
_QUOTES = (('"', '"'), ("'", "'"), ('``', "''"), ('`', '`'), ('“', '”'))
_TIME = re.compile(r'([0-9]{1,2})(?: ?: ?([0-5][0-9]))?\s*([ap])\.? ?m\.?', re.IGNORECASE)
_WRAPPER = re.compile(r'\\(?:text|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}')
_ARTICLE = re.compile(r'(?i)(?:an?|the)\s+(?=[a-z]{3})')
# Words of up to three letters that are compared case-insensitively.
_SHORT_WORDS = frozenset(('yes', 'no', 'odd', 'all', 'one', 'two', 'six', 'ten', 'sun', 'mon'))
_TWO_WORDS = re.compile(r'([A-Za-z]{2,}) ([A-Za-z]{2,})(?![A-Za-z(_^{])')
_MATHEMATICAL = FUNCTIONS | SYMBOLS | {'and', 'or'}
_WORDS = re.compile(r"(?i)[a-z][a-z ,.'\-]{2,}")


def read(text: str) -> Reading:
  """Read an answer; return ('text', …) if it cannot be parsed."""
  is_money = r'\$' in text or text.count('$') == 1  # '$50' has no second dollar sign
  text = normalize_spelling(_strip_quotes(text.strip()))
  if reading := _read_numeral(text) or _read_time(text):
    return reading
  words = _TWO_WORDS.match(text)
  is_prose = words and not {words[1], words[2]} & _MATHEMATICAL  # not a product of letters
  tokens = None if is_prose else tokenize(text)
  if not tokens:
    return 'text', normalize_text(text)
  try:
    reading = interpret(latex.parse(tokens))
  except (UnreadableError, RecursionError):
    return 'text', normalize_text(text)
  if is_money and reading[0] == 'quantity' and not reading[2]:
    return 'quantity', reading[1], 'dollar'
  if reading[0] == 'quantity' and (cycles := _read_cycles(text)):
    return 'dashed', cycles, reading  # as written or, failing that, as a product
  return reading


def _strip_quotes(text: str) -> str:
  for opening, closing in _QUOTES:
    if text.startswith(opening) and text.endswith(closing):
      content = text[len(opening) : -len(closing)]
      return content if content and opening[0] not in content else text
  return text


def _read_cycles(text: str) -> tuple[int, ...] | None:
  """Read a permutation of digits in cycle notation; return the images of 0 to 9, or None."""
  if not _CYCLES.fullmatch(text):
    return None
  images = list(range(10))
  for cycle in re.findall(r'\(([^()]+)\)', text):
    digits = [int(digit) for digit in cycle if digit.isdecimal()]
    if len(set(digits)) < len(digits):
      return None
    step = dict(zip(digits, [*digits[1:], digits[0]], strict=True))
    images = [step.get(image, image) for image in images]
  return tuple(images)


def normalize_text(text: str) -> str:
  """Strip wrappers and white space from an answer, and lowercase its words.

  A space between two digits stays, because '1 1/2' is not '11/2'.
  """
  text = strip_wrappers(text).replace('$', ' ')
  text = _ARTICLE.sub('', text.strip(), count=1)
  if text.lower() in _SHORT_WORDS or (len(text) > 3 and _WORDS.fullmatch(text)):
    text = text.lower()
  text = re.sub(r'(?<![0-9])\s+|\s+(?![0-9])', '', text.strip())
  return text.removesuffix('.')


def strip_wrappers(text: str) -> str:
  r"""Replace '\text{C}' with 'C'."""
  return _WRAPPER.sub(r'\1', text)


def _read_numeral(text: str) -> Reading | None:
  match = _NUMERAL.fullmatch(strip_wrappers(text))
  if not match or any(text.count(a) != text.count(b) for a, b in ('()', '{}')):
    return None
  digits, subscript = match[1].upper(), match[2]
  is_short = subscript.isdecimal() and len(subscript) < 3
  base = int(subscript) if is_short else _BASES.get(subscript, 0)
  if not 2 <= base <= 36 or any(int(digit, 16) >= base for digit in digits):
    return None
  return 'numeral', digits.lstrip('0') or '0', base


def _read_time(text: str) -> Reading | None:
  """Read a 12-hour time such as '3 pm' or '3:00 pm'; return None for anything else."""
  match = _TIME.fullmatch(strip_wrappers(text))
  if not match or not 1 <= int(match[1]) <= 12:
    return None
  return 'time', int(match[1]), int(match[2] or 0), match[3].lower()


def interpret(tree: Tree) -> Reading:
  """Interpret a tree as a reading."""
  head = tree[0]
  if head == 'letters':
    return 'letters', tree[1], interpret(tree[2])
  if head == 'dashed':
    return 'dashed', tree[1], None if tree[2] is None else interpret(tree[2])
  if head == 'relation':
    return _interpret_relation(tree[1], tree[2])
  if head == 'list':
    if total := joined_units(tree[1], is_list=True):
      return interpret(total)  # '1 hour and 30 minutes'
    return _share_labels([interpret(item) for item in tree[1]])
  if head in ('set', 'braces', 'union', 'intersection', 'ratio'):
    readings = [interpret(item) for item in tree[1]]
    if head == 'set' and readings and all(reading[0] == 'labelled' for reading in readings):
      return _share_labels(readings)  # '{x = 1, y = 2}'
    return head, tuple(_flatten(readings))
  if head == 'group':
    return 'group', tree[1], tree[2], tuple(map(interpret, tree[3]))
  return _interpret_one(with_forms(plain(tree)))


def _interpret_one(tree: Tree) -> Reading:
  """Interpret a tree that is neither a relation nor a collection."""
  match tree:
    case 'minus', left, right:
      return 'minus', interpret(left), interpret(right)
    # One set minus another: '(0, 36) - \{9\}'.
    case 'add', (('group' | 'set' | 'union', *_) | ('symbol', 'mathbb_R'), ('negate', ('set', _))):
      left, (_, right) = tree[1]
      return 'minus', interpret(tuple(left)), interpret(right)
    case 'multiply', (label, ('group', *_)) if is_label(label):  # 't(0, 4]'
      return make_labelled(label, interpret(tree[1][1]))
    case 'power', ('group', _, _, items), exponent if exponent == TRANSPOSED:  # not an interval
      return 'group', '(', ')', tuple(map(interpret, items))
  if rows := rows_of(tree):
    return 'matrix', rows
  if 'plusminus' in heads(tree):
    return 'list', tuple(interpret(_choose_sign(tree, sign)) for sign in (1, -1))
  return _interpret_expression(tree)


def _interpret_expression(tree: Tree) -> Reading:
  match tree:
    case 'symbol', 'mathbb_R':
      return REALS
    case 'unit', value, unit:
      return 'quantity', value, normalize_unit(unit)
    case 'degrees', value:
      return 'quantity', value, 'degree'
    case 'negate', ('unit' | 'degrees', *_):
      _, value, unit = _interpret_expression(tuple(tree[1]))
      return 'quantity', ('negate', value), unit
  return 'quantity', tree, ''


def _flatten(items: Sequence[Reading]) -> Iterator[Reading]:
  for item in items:
    yield from item[1] if item[0] == 'list' else (item,)


def _share_labels(items: Sequence[Reading]) -> Reading:
  """Combine items into a list, labeled if they share a label: 'x = 1 or x = 2', 'n = 1, 2, 3'."""
  labels = [item[1] if item[0] == 'labelled' else None for item in items]
  if labels[0] is None or any(item[0] == 'equation' for item in items):
    return 'list', tuple(_flatten(items))
  if all(label in (None, labels[0]) for label in labels):
    values = [item[2] if item[0] == 'labelled' else item for item in items]
    return make_labelled(labels[0], ('list', tuple(_flatten(values))))
  if None not in labels:
    return 'assigned', tuple((item[1], item[2]) for item in items)
  return 'list', tuple(_flatten(items))


def _choose_sign(tree: Any, sign: int) -> Any:
  r"""Replace every '\pm' in a tree with the given sign, and every '\mp' with the opposite sign."""

  def choose(node: Tree) -> Tree | None:
    if node[0] != 'plusminus':
      return None
    left, right = _choose_sign(node[2], sign), _choose_sign(node[3], sign)
    right = right if node[1] == sign else ('negate', right)
    return right if left is None else ('add', (left, right))

  return rewrite(tree, choose)


# Relations.


def _interpret_relation(operators: Sequence[str], sides: Sequence[Any]) -> Reading:
  """Interpret a relation; the first side is None if it is missing, as in '< 5'."""
  last_side = sides[-1]
  sides = tuple(None if side is None else with_forms(plain(side)) for side in sides)
  reading = _interpret_sides(operators, sides)
  if reading[0] == 'labelled' and last_side[0] == 'letters' and operators == ('=',):
    return make_labelled(reading[1], interpret(last_side), reading[3], reading[4])
  return reading


def _interpret_sides(operators: Sequence[str], sides: Sequence[Any]) -> Reading:
  if 'in' in operators:
    if operators != ('in',) or sides[0] is None:
      return 'chain', operators, sides
    return make_labelled(sides[0], interpret(sides[1]))
  if set(operators) <= {'=', '~'}:
    return _interpret_equation(operators, sides)
  if operators != ('!=',):
    return _interpret_inequality(operators, sides)
  left, right = sides
  if left is None:
    return 'differs', interpret(right)
  if not symbols(left) and symbols(right):
    left, right = right, left
  return make_labelled(left, ('differs', interpret(right)))


def _interpret_equation(operators: Sequence[str], sides: Sequence[Any]) -> Reading:
  if sides[0] is None:
    return interpret(sides[-1])
  if '~' in operators:  # drop values after '≈', which are rounded, except in 'x ≈ 5'
    end = operators.index('~') + 1
    sides = sides[: max(end, 2)] if end > 1 or is_label(sides[0]) else sides[:1]
  first, last = sides[0], sides[-1]
  if len(sides) == 1:
    return interpret(first)
  if is_label(first) and not (is_name(first) and is_name(last)):
    return make_labelled(first, interpret(last), lhs=first, rhs=last)
  if not any(symbols(side) for side in sides):  # '2 + 3 = 5' is 5, but '5 = 6' is not a number
    is_true = all(quantity.same(side, last) for side in sides)
    return interpret(last) if is_true else ('equation', first, last)
  if last[0] == 'symbol' and not symbols(first):
    return make_labelled(last, interpret(first), lhs=last, rhs=first)
  return 'equation', first, last


# ---- Inequalities ----

_REVERSED = {'>': '<', '>=': '<=', '<': '>', '<=': '>='}


def _interpret_inequality(operators: Sequence[str], sides: Sequence[Tree | None]) -> Reading:
  """Solve an inequality for its unknown; return a 'chain' if it cannot be solved.

  A missing side, as in '< 5', is None.
  """
  if any(operator[0] == '>' for operator in operators):
    operators = tuple(_REVERSED.get(operator, operator) for operator in reversed(operators))
    sides = sides[::-1]
  is_ascending = all(operator[0] == '<' for operator in operators)
  reading = None
  if is_ascending and len(sides) == 2:
    reading = _solve_two_sided(operators[0], *sides)
  elif is_ascending and len(sides) == 3:
    reading = _solve_three_sided(operators[0], operators[1], *sides)
  return reading or ('chain', operators, sides)


def _solve_two_sided(operator: str, low: Tree | None, high: Tree | None) -> Reading | None:
  """Solve 'low < high' for its unknown."""
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
  """Solve '|inner| < bound' (if `is_inside`) or '|inner| > bound' for the unknown."""
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
  """Solve 'low < middle < high' for the unknown; low and high are numbers."""
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
  """Return (unknown, slope, intercept) if a tree is linear in its only unknown; else None."""
  unknowns = symbols(tree)
  if len(unknowns) != 1:
    return None
  (unknown,) = unknowns
  line = quantity.linear(tree, unknown)
  return (('symbol', unknown), *line) if line and line[0] else None


# ---- Matrices ----

Rows = tuple[tuple[Tree, ...], ...]

_MAX_FACTORS = 3  # matrices in a product; each additional matrix multiplies the size of the cells
_MAX_CELLS = 64
_MAX_ORDER = 4  # rows of a matrix that may be raised to a power
_MAX_EXPONENT = 8
_MAX_INVERSE = 8  # order**exponent of an inverse: exponents up to 1 for 4x4 and 3 for 2x2
_MAX_PATHS = 64  # products summed in one cell of a power
_MAX_NODES = 2000  # nodes in the cells of a power
TRANSPOSED: Tree = ('symbol', 'T')  # the exponent of a transpose


def rows_of(tree: Tree) -> Rows | None:
  """Return the rows of a matrix, or of a sum, product or power of matrices; None otherwise."""
  head = tree[0]
  if head == 'rows':
    return tree[1]
  if head == 'power' and (rows := rows_of(tree[1])):
    return tuple(zip(*rows, strict=True)) if tree[2] == TRANSPOSED else _power(rows, tree[2])
  if head in ('negate', 'divide') and (rows := rows_of(tree[1])):
    return tuple(tuple((head, cell, *tree[2:]) for cell in row) for row in rows)
  if head not in ('add', 'multiply'):
    return None
  operands = [rows_of(operand) for operand in tree[1]]
  matrices = [rows for rows in operands if rows]
  if not 1 <= len(matrices) <= _MAX_FACTORS:
    return None
  if sum(len(rows) * len(rows[0]) for rows in matrices) > _MAX_CELLS:
    return None
  if head == 'add':
    return _add(matrices) if len(matrices) == len(operands) else None
  scalars = [operand for operand, rows in zip(tree[1], operands, strict=True) if not rows]
  return _multiply(scalars, matrices)


def _add(matrices: Sequence[Rows]) -> Rows | None:
  total, *others = matrices
  for rows in others:
    if (len(rows), len(rows[0])) != (len(total), len(total[0])):
      return None
    total = tuple(
      tuple(('add', cells) for cells in zip(*pair, strict=True))
      for pair in zip(total, rows, strict=True)
    )
  return total


def _multiply(scalars: Sequence[Tree], matrices: Sequence[Rows]) -> Rows | None:
  product, *others = matrices
  for rows in others:
    if len(product[0]) != len(rows):
      return None
    columns = tuple(zip(*rows, strict=True))
    product = tuple(
      tuple(('add', tuple(('multiply', pair) for pair in zip(row, column))) for column in columns)
      for row in product
    )
  if not scalars:
    return product
  return tuple(tuple(('multiply', (*scalars, cell)) for cell in row) for row in product)


def _power(rows: Rows, exponent: Tree) -> Rows | None:
  negative = exponent[0] == 'negate'
  number = exponent[1] if negative else exponent
  order = len(rows)
  if number[0] != 'number' or order != len(rows[0]) or order > _MAX_ORDER:
    return None
  count = number[1]
  if count.denominator != 1 or not 1 <= count <= _MAX_EXPONENT:
    return None
  if order ** (count - 1) > _MAX_PATHS or (negative and order**count > _MAX_INVERSE):
    return None
  if max(size(cell) for row in rows for cell in row) * order**count > _MAX_NODES:
    return None
  return _multiply((), [_inverse(rows) if negative else rows] * int(count))


def _inverse(rows: Rows) -> Rows:
  """Divide a square matrix's adjugate by its determinant."""
  places = range(len(rows))
  determinant = _determinant(rows)
  return tuple(
    tuple(('divide', _signed(_determinant(_minor(rows, j, i)), i + j), determinant) for j in places)
    for i in places
  )


def _determinant(rows: Rows) -> Tree:
  if not rows:
    return 'number', Fraction(1)
  terms = (
    _signed(('multiply', (cell, _determinant(_minor(rows, 0, j)))), j)
    for j, cell in enumerate(rows[0])
  )
  return 'add', tuple(terms)


def _minor(rows: Rows, i: int, j: int) -> Rows:
  """Remove row i and column j."""
  return tuple(row[:j] + row[j + 1 :] for row in rows[:i] + rows[i + 1 :])


def _signed(tree: Tree, place: int) -> Tree:
  return ('negate', tree) if place % 2 else tree
