"""Whether two answers are the same, the first being a model's and the second the truth.

The truth decides how it is compared: a capital letter is a choice, a word is text.
Where in doubt they differ, for a model is rewarded for what passes here:

  a rounded decimal is not the fraction, nor is an irrational number, but for a truth
  of twelve digits and more that it rounds to;
  a numeral is its digits and its base: 204_5 is neither 204 nor 54;
  names and units count where both sides give one; 20% is 0.2 and 20;
  lists and sets have no order, tuples have; (0, 1) is a pair or an interval as the
  other side has it; '1, 2' is '(1, 2)' in that order.
"""

import itertools
import re
from fractions import Fraction

from exgrpo_jax.grading.answers import answer, quantity
from exgrpo_jax.grading.answers.tokens import spelled

_MAX_UNORDERED = 24  # items that are compared each with each
_CHOICE = re.compile(r'\(?([A-Ja-j])(?:\)|\.|:)*')
_CHOSEN = re.compile(
  r'(?is)(?:the\s)?(?:answer|option|choice)?\s*(?:is\s)?:?\s*'
  r'\(?([A-J])(?:[).:]+(?:\s+(.*))?)?'
)
_ANOTHER = re.compile(r'(?<![A-Za-z])(?:\(?[A-J][).:]|(?i:or|and|maybe|not)\b)')
_DIGITS = re.compile(r'-?[0-9]*\.[0-9]+')
_DECIMAL_COMMA = re.compile(r'-?[0-9]+,[0-9]+')
_WIDE_COMMA = re.compile(r'-?0,[0-9]{3,}')  # a list of 0 and 111 would not be written so
_LONG = 12  # digits from which a decimal stands for an irrational number


def equal(given: str, truth: str, kind: str) -> bool:
  """Whether two answers, as written, are the same; kind: 'math', 'choice' or 'text'."""
  given, truth = bare(given), bare(truth)
  if not truth or not given:
    return False
  if max(len(given), len(truth)) > answer.MAX_LENGTH:
    return given == truth
  given_words, true_words = answer.words(spelled(given)), answer.words(spelled(truth))
  if not true_words:  # nothing but dollars, periods and spaces
    return False
  choice = _CHOICE.fullmatch(true_words)
  if choice and (kind == 'choice' or (kind == 'math' and choice[1].isupper())):
    return _chosen(given) == choice[1].upper()
  if kind != 'math':
    return given_words.lower() == true_words.lower()
  if given_words == true_words:
    return True
  return _decimals(given, truth) or same(answer.read(given), answer.read(truth))


def bare(text: str) -> str:
  """An answer without a box, the dollars or the stars around it."""
  text = text.strip()
  if len(text) > 4 and text.startswith('**') and text.endswith('**'):
    text = text[2:-2].strip()
  if text.startswith('\\boxed{') and text.endswith('}'):
    text = text[len('\\boxed{') : -1].strip()
  if text.startswith('$') and text.endswith('$') and '$' not in text.strip('$'):
    text = text.strip('$').strip()
  return text


def _chosen(given: str) -> str | None:
  """The letter of the one choice named: 'C', 'c', '(C)', 'C.', 'C. 45 degrees'."""
  match = _CHOSEN.fullmatch(answer.wrapped_off(spelled(given)).strip('*{} '))
  if not match or (match[2] and (_ANOTHER.search(match[2]) or _CHOICE.fullmatch(match[2]))):
    return None
  return match[1].upper()


def _decimals(given: str, truth: str) -> bool:
  """Decimals that are no plain numbers: a comma for the point, or one of many digits."""
  given, truth = spelled(given), spelled(truth)
  for comma, other, known in ((given, truth, _DECIMAL_COMMA), (truth, given, _WIDE_COMMA)):
    if known.fullmatch(comma) and _DIGITS.fullmatch(other):
      return Fraction(comma.replace(',', '.')) == Fraction(other)
  digits = truth.replace('-', '').replace('.', '').lstrip('0')
  if not _DIGITS.fullmatch(truth) or len(digits) < _LONG:
    return False
  reading = answer.read(given)
  if reading[0] != 'quantity' or quantity.exact(reading[1]) is not None:
    return False
  half = Fraction(1, 2 * 10 ** len(truth.partition('.')[2]))
  return quantity.between(reading[1], Fraction(truth) - half, Fraction(truth) + half)


def same(given, truth) -> bool:
  """Whether two readings are the same."""
  if given == truth:
    return given[0] != 'words' or bool(given[1])
  heads = given[0], truth[0]
  if 'labelled' in heads or 'assigned' in heads or 'equation' in heads:
    return _same_named(given, truth)
  if heads == ('quantity', 'quantity'):
    return _same_quantity(given, truth)
  if heads == ('numeral', 'numeral') or 'words' in heads:
    return False  # equal ones are equal above
  if heads == ('matrix', 'matrix'):
    return _same_matrix(given[1], truth[1])
  if heads == ('differs', 'differs'):
    return same(given[1], truth[1])
  if heads == ('chain', 'chain'):
    return _same_chain(given, truth)
  if heads == ('ratio', 'ratio'):
    return _in_order(given[1], truth[1])
  if heads == ('minus', 'minus'):
    return same(given[1], truth[1]) and same(given[2], truth[2])
  return _same_collection(given, truth)


def _same_quantity(given, truth) -> bool:
  (_, x, x_unit), (_, y, y_unit) = given, truth
  percent = 'percent' in (x[0], y[0])
  if (x_unit and y_unit and x_unit != y_unit) or (percent and (x_unit or y_unit)):
    return False
  # 20% is 0.2, and also 20, as questions ask 'what percentage'.
  if x[0] == 'percent' and y[0] == 'percent':
    return _same_number(x[1], y[1])
  if percent:
    bare_x, bare_y = (t[1] if t[0] == 'percent' else t for t in (x, y))
    return _same_number(x, y) or _same_number(bare_x, bare_y)
  return _same_number(x, y)


def _same_number(x, y) -> bool:
  if _infinite(x) or _infinite(y):
    return _infinite(x) == _infinite(y)
  return quantity.same(x, y)


def _infinite(tree) -> int:
  """1 or -1 for an infinity, 0 for all else."""
  if tree[0] == 'negate':
    return -_infinite(tree[1])
  return int(tree[0] == 'infinity')


def _same_named(given, truth) -> bool:
  """Values under names: a name that only one side gives is dropped."""
  if given[0] == 'labelled' and truth[0] == 'labelled':
    if _same_label(given[1], truth[1]):
      return same(given[2], truth[2])
    return _same_equation(given, truth)
  if 'equation' in (given[0], truth[0]):
    return _same_equation(given, truth)
  given, truth = _assigned(given), _assigned(truth)
  if given[0] == truth[0] == 'assigned':
    return len(given[1]) == len(truth[1]) and _pair_up(
      given[1], truth[1], lambda a, b: _same_label(a[0], b[0]) and same(a[1], b[1])
    )
  if given[0] == 'assigned':
    return _in_order_only(truth, given[1])
  if truth[0] == 'assigned':
    return _in_order_only(given, truth[1])
  given, truth = (x[2] if x[0] == 'labelled' else x for x in (given, truth))
  return same(given, truth)


def _assigned(reading):
  """'(p, q) = (3, 2)' as 'p = 3, q = 2'."""
  if (
    reading[0] == 'labelled'
    and reading[1][0] == 'group'
    and reading[2][0] == 'group'
    and (len(reading[1][3]) == len(reading[2][3]))
  ):
    return 'assigned', tuple(zip(reading[1][3], reading[2][3], strict=True))
  return reading


def _in_order_only(unnamed, named) -> bool:
  values = [value for _, value in named]
  if unnamed[0] in ('list', 'set') and [label for label, _ in named] == [
    ('symbol', f'{named[0][0][1][0]}_{index + 1}') for index in range(len(named))
  ]:
    return _unordered(unnamed[1], values)  # 'x_1 = 5, x_2 = 3' are two solutions
  return unnamed[0] in ('list', 'braces', 'group') and _in_order(unnamed[-1], values)


def _same_label(x, y) -> bool:
  return x == y or (
    x[0] == y[0] == 'call'
    and x[1] == y[1]
    and len(x[2]) == len(y[2])
    and all(map(quantity.same, x[2], y[2]))
  )


def _same_equation(given, truth) -> bool:
  """Whether two equations have the same solutions by a constant factor."""
  sides = [
    x[1:3] if x[0] == 'equation' else x[3:5] if x[0] == 'labelled' else None for x in (given, truth)
  ]
  if None in sides or None in sides[0] or None in sides[1]:
    return False
  x, y = (('add', (left, ('negate', right))) for left, right in sides)
  return quantity.proportional(x, y, positive=False)


def _same_chain(given, truth) -> bool:
  (_, x_operators, x_sides), (_, y_operators, y_sides) = _forward(given), _forward(truth)
  if x_operators != y_operators or None in x_sides or None in y_sides:
    return False
  if all(map(quantity.same, x_sides, y_sides)):
    return True
  if len(x_sides) != 2 or x_operators[0] not in ('<', '<='):
    return False
  x, y = (('add', (left, ('negate', right))) for left, right in (x_sides, y_sides))
  return quantity.proportional(x, y, positive=True)


def _forward(chain):
  """A chain of '>' turned round."""
  _, operators, sides = chain
  if not any(operator.startswith('>') for operator in operators):
    return chain
  turned = {'>': '<', '>=': '<=', '<': '>', '<=': '>='}
  return 'chain', tuple(turned.get(o, o) for o in reversed(operators)), sides[::-1]


def _same_matrix(x, y) -> bool:
  return (
    len(x) == len(y)
    and len(x[0]) == len(y[0])
    and all(map(quantity.same, itertools.chain(*x), itertools.chain(*y)))
  )


def _same_collection(given, truth) -> bool:
  heads = {given[0], truth[0]}
  if heads == {'group'}:
    return _same_brackets(given, truth) and _in_order(given[3], truth[3])
  if heads == {'group', 'matrix'}:
    group, matrix = (given, truth) if given[0] == 'group' else (truth, given)
    if group[1:3] != ('(', ')') or len(matrix[1][0]) > 1:
      return False
    return _in_order(group[3], [('quantity', row[0], '') for row in matrix[1]])
  if 'group' in heads and heads & {'braces', 'list'}:  # '6, 31, -1' for '(6, 31, -1)'
    group = given if given[0] == 'group' else truth
    # Two in square brackets are an interval.
    return (group[1:3] == ('(', ')') or len(group[3]) > 2) and _in_order(given[-1], truth[-1])
  if heads == {'union'}:
    return _unordered(given[1], truth[1])
  if heads == {'union', 'list'}:
    items = (given if given[0] == 'list' else truth)[1]
    intervals = any(_is_interval(item) for item in items)
    return intervals and _unordered(given[1], truth[1])
  if 'differs' in heads and heads & {'union', 'minus'}:
    return same(_without(given), _without(truth))
  if heads <= {'list', 'set', 'braces'}:
    return _unordered(given[1], truth[1])
  if heads & {'list', 'set', 'braces'} and 'quantity' in heads:
    items = (given if given[0] != 'quantity' else truth)[1]
    alone = given if given[0] == 'quantity' else truth
    return len(items) == 1 and same(items[0], alone)
  return False


def _same_brackets(x, y) -> bool:
  """(0, 1) may be an interval or a pair and [0, 1] an interval; longer ones are vectors."""
  return x[1:3] == y[1:3] or (len(x[3]) > 2 and x[1] + x[2] in '()[]' and y[1] + y[2] in '()[]')


def _is_interval(item) -> bool:
  return (
    item[0] == 'group'
    and len(item[3]) == 2
    and (
      '[' in item[1]
      or ']' in item[2]
      or any(end[0] == 'quantity' and _infinite(end[1]) for end in item[3])
    )
  )


def _without(reading):
  """All numbers but one, however written, as ('differs', the one)."""
  if (
    reading[0] == 'minus'
    and reading[1] == answer.REALS
    and (reading[2][0] == 'set' and len(reading[2][1]) == 1)
  ):
    return 'differs', reading[2][1][0]
  if reading[0] == 'union' and len(reading[1]) == 2:
    left, right = reading[1]
    if (
      left[0] == right[0] == 'group'
      and left[1:3] == right[1:3] == ('(', ')')
      and (len(left[3]) == len(right[3]) == 2)
    ):
      ends = left[3] + right[3]
      if (
        all(end[0] == 'quantity' for end in ends)
        and _infinite(ends[0][1]) == -1
        and _infinite(ends[3][1]) == 1
        and same(ends[1], ends[2])
      ):
        return 'differs', ends[1]
  return reading


def _in_order(x, y) -> bool:
  return len(x) == len(y) and all(map(same, x, y))


def _unordered(given, truth) -> bool:
  if len(given) > len(truth):  # a solution that is named twice is one
    given = tuple(dict.fromkeys(given))
  return len(given) == len(truth) and _pair_up(given, truth, same)


def _pair_up(x, y, alike) -> bool:
  """Whether each of x has its own equal among y."""
  rest, left = list(y), []
  for item in x:
    if item in rest:
      rest.remove(item)
    else:
      left.append(item)
  if len(left) > _MAX_UNORDERED:
    return all(map(alike, x, y))
  for item in left:
    at = next((i for i, other in enumerate(rest) if alike(item, other)), None)
    if at is None:
      return False
    del rest[at]
  return True
