"""Comparison of a model's answer with the ground truth, both given as text.

The truth decides how the two are compared: a capital letter is a choice, and a word is text. When
in doubt, the two count as different, because the model is rewarded for whatever passes here. A
rounded decimal does not equal the exact fraction or irrational number, with one exception: a truth
with twelve or more digits equals any irrational number that rounds to it. The function `same`
compares meanings.
"""

import itertools
import re
import string
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from exgrpo_jax.grading.answers import latex, quantity
from exgrpo_jax.grading.answers.answer import (
  MAX_LENGTH,
  interpret,
  normalize_text,
  read,
  strip_wrappers,
)
from exgrpo_jax.grading.answers.extraction import accepted_answers
from exgrpo_jax.grading.answers.grammar import UnreadableError, is_roman
from exgrpo_jax.grading.answers.sets import is_interval, same_set
from exgrpo_jax.grading.answers.tokens import normalize_spelling, tokenize
from exgrpo_jax.grading.answers.tree import (
  Reading,
  Tree,
  heads,
  nodes,
  rewrite,
  subtract,
  symbols,
)
from exgrpo_jax.grading.answers.units import conversion, measure

_CHOICE = re.compile(r'\(?([A-Ja-j])(?:\)|\.|:)*')
_CHOSEN = re.compile(
  r'(?is)(?:the\s)?(?:answer|option|choice)?\s*(?:is\s)?:?\s*'
  r'\(?([A-J])(?:[).:]+(?:\s+(.*))?|(?:,\s|\s\()(.*[a-z]{3}.*))?'
)
_OTHER_CHOICE = re.compile(
  r'(?<![A-Za-z])(?:\(?[A-J][).:]|(?i:or|and|maybe|not|is)\s+(?i:option\s+|choice\s+)?'
  r"\(?[A-Jb-j](?![\w'-]))|,\s*[A-J]\s*(?:,|$)|^(?i:or|and|maybe)\b"
)
_DOUBT = re.compile(r"(?<![\w'-])(?:[A-Jb-j]|(?i:or|but|maybe|not|wrong|incorrect))(?![\w'-])")
_DECIMAL = re.compile(r'-?[0-9]*\.[0-9]+')
_DECIMAL_COMMA = re.compile(r'-?[0-9]+,[0-9]+')
_LONG_DECIMAL_COMMA = re.compile(r'-?0,[0-9]{3,}')  # a list of 0 and 111 would have a space
_REMAINDER = re.compile(r'(?:[^,;]*(?:=|\\equiv))? *([0-9]+) \\pmod\{([0-9]+)\}')
_MANY_DIGITS = 12  # a decimal with this many digits equals an irrational number that rounds to it


def equal(answer: str, truth: str, kind: str) -> bool:
  """Return True if an answer is equivalent to the ground truth, both given as text.

  The truth may also be a worked solution or a sentence that contains the answer, or a JSON list of
  accepted answers. `kind` is 'math', 'choice' or 'text'.
  """
  return any(_equal(answer, text, kind) for text in accepted_answers(truth))


def _equal(answer: str, truth: str, kind: str) -> bool:
  answer, truth = strip_delimiters(answer), strip_delimiters(truth)
  if 'mod' in answer and 'mod' not in truth:
    answer = _strip_modulus(answer)
  if not truth or not answer:
    return False
  if max(len(answer), len(truth)) > MAX_LENGTH:
    return answer == truth
  answer_text = normalize_text(normalize_spelling(answer))
  true_text = normalize_text(normalize_spelling(truth))
  if not true_text:  # nothing but dollar signs, periods and spaces
    return False
  choice = _CHOICE.fullmatch(true_text)
  if choice and (kind == 'choice' or (kind == 'math' and choice[1].isupper())):
    return _chosen_letter(answer) == choice[1].upper()
  if kind != 'math':
    return answer_text.lower() == true_text.lower()
  if answer_text == true_text:
    return True
  return _same_decimal(answer, truth) or same(read(answer), read(truth))


def _strip_modulus(answer: str) -> str:
  """Return 42 for '42 (mod 100)', which is a remainder, but keep '42 (mod 7)'."""
  match = _REMAINDER.fullmatch(normalize_spelling(answer))
  return match[1] if match and int(match[1]) < int(match[2]) else answer


def strip_delimiters(text: str) -> str:
  """Remove the box, dollar signs or asterisks around an answer."""
  text = text.strip()
  if len(text) > 4 and text.startswith('**') and text.endswith('**'):
    text = text[2:-2].strip()
  if text.startswith('\\boxed{') and text.endswith('}'):
    text = text[len('\\boxed{') : -1].strip()
  if text.startswith('$') and text.endswith('$') and '$' not in text.strip('$'):
    text = text.strip('$').strip()
  return text.rstrip('\\ ')


def _chosen_letter(answer: str) -> str | None:
  """Return C for 'C', 'c', '(C)', 'C.' or 'C. 45 degrees'; None if no single letter is chosen."""
  match = _CHOSEN.fullmatch(strip_wrappers(normalize_spelling(answer)).strip('*{} '))
  if not match:
    return None
  letter, description, remark = match.groups()  # 'C. water' has a description, 'C, water' a remark
  if description and _CHOICE.fullmatch(description):
    return None
  if _OTHER_CHOICE.search(description or remark or '') or _DOUBT.search(remark or ''):
    return None
  return letter.upper()


def _same_decimal(answer: str, truth: str) -> bool:
  """Return True if only a decimal comma differs, or an irrational answer rounds to a long truth."""
  answer, truth = normalize_spelling(answer), normalize_spelling(truth)
  patterns = (answer, truth, _DECIMAL_COMMA), (truth, answer, _LONG_DECIMAL_COMMA)
  for with_comma, other, pattern in patterns:
    if pattern.fullmatch(with_comma) and _DECIMAL.fullmatch(other):
      return Fraction(with_comma.replace(',', '.')) == Fraction(other)
  digits = truth.replace('-', '').replace('.', '').lstrip('0')
  if not _DECIMAL.fullmatch(truth) or len(digits) < _MANY_DIGITS:
    return False
  reading = read(answer)
  if reading[0] != 'quantity' or quantity.exact(reading[1]) is not None:
    return False
  half = Fraction(1, 2 * 10 ** len(truth.partition('.')[2]))
  return quantity.is_between(reading[1], Fraction(truth) - half, Fraction(truth) + half)


# ---- Comparison of two readings ----

# A numeral matches only the same digits in the same base: 204_5 is neither 204 nor 54.
# Labels and units matter only if both sides have one. 20% equals both 0.2 and 20.
# Order matters in tuples, but not in lists and sets. (0, 1) is read as a pair or an interval,
# whichever matches the other side. '1, 2' equals '(1, 2)' but not '(2, 1)'.

_SET_OPERATIONS = frozenset({'union', 'intersection', 'minus', 'differs'})
_CHOOSE = 'C'
# Labels are coordinates if their sorted letters appear side by side here.
_ALPHABET = string.ascii_lowercase + ' ' + string.ascii_uppercase + ' xz'
_LETTER_UNIT = re.compile(r'([a-z])(?:\^(-?[0-9]))?')
_MAX_PAIRWISE = 24  # items to match in any order; larger collections are compared in order


def same(answer: Reading, truth: Reading) -> bool:
  """Return True if two readings mean the same thing."""
  if answer == truth:
    return answer[0] != 'text' or bool(answer[1])
  if 'letters' in (answer[0], truth[0]) or 'dashed' in (answer[0], truth[0]):
    return _same_as_written(answer, truth)
  kinds = answer[0], truth[0]
  if 'labelled' in kinds or 'assigned' in kinds or 'equation' in kinds:
    return _same_labelled(answer, truth)
  if kinds == ('numeral', 'numeral') or 'text' in kinds:
    return False  # equal texts were handled above
  if 'time' in kinds:
    return _same_time(answer, truth)
  if set(kinds) == {'ratio', 'quantity'}:
    return _same_ratio(*((answer, truth) if kinds[0] == 'ratio' else (truth, answer)))
  if kinds[0] == kinds[1] and kinds[0] in _COMPARISONS:
    return _COMPARISONS[kinds[0]](answer, truth)
  return _same_collection(answer, truth)


# Runs of letters, numbers with dashes, times.


def _same_as_written(answer: Reading, truth: Reading) -> bool:
  """Compare two words or two dashed numbers as written, and anything else by value."""
  if answer[0] == truth[0]:
    return answer[1] == truth[1]
  if {answer[0], truth[0]} & {'labelled', 'assigned'}:
    return _same_labelled(answer, truth)
  literal, other = (answer, truth) if answer[0] in ('letters', 'dashed') else (truth, answer)
  if literal[2] is None or other[0] in ('letters', 'dashed'):
    return False
  if literal[0] == 'letters' and len(set(literal[1])) < len(literal[1]):
    return False  # 'ABA' is not a square of A
  if literal[0] == 'dashed' and (quantity.exact(literal[2][1]) or 0) < 0:
    return False  # '10-20' is a range
  return same(literal[2], truth) if literal is answer else same(answer, literal[2])


def _same_time(answer: Reading, truth: Reading) -> bool:
  """Compare times of day: '12:15 pm' is '12:15', and '3 pm' is 3, but 'am' is not 'pm'."""
  time, other = (answer, truth) if answer[0] == 'time' else (truth, answer)
  if other[0] == 'ratio':
    parts = [quantity.exact(item[1]) for item in other[1] if item[0] == 'quantity' and not item[2]]
    hours = time[1], time[1] % 12 + 12 * (time[3] == 'p')  # on a 12-hour and a 24-hour clock
    return any(parts == [hour, time[2]] for hour in hours)
  is_number = other[0] == 'quantity' and not other[2]
  return is_number and time[2] == 0 and quantity.exact(other[1]) == time[1]


# Quantities.


def _same_quantity(answer: Reading, truth: Reading) -> bool:
  (_, x, x_unit), (_, y, y_unit) = _in_one_unit(answer, truth)
  x, y = _read_coefficients(x, y)
  if x_unit and y_unit and x_unit != y_unit:
    return False
  p, q = _percentage(x), _percentage(y)
  # '25% of the class' is 25%, but 25% is neither 25 apples nor 25 cm.
  if (p or q) and any(unit and (not z or measure(unit)) for z, unit in ((p, x_unit), (q, y_unit))):
    return False
  if (is_same := quantity.same(x, y)) or bool(p) == bool(q):
    return is_same
  # 20% is 0.2, and also 20, because questions ask 'what percentage'. But 0.2% is not 0.2.
  value = quantity.real_value(y if p else x)
  return (value is None or abs(value) >= 1) and quantity.same(p or x, q or y)


def _percentage(tree: Tree) -> Tree | None:
  """Return p for 'p%' and -p for '-p%', else None."""
  if tree[0] == 'negate' and tree[1][0] == 'percent':
    return 'negate', tree[1][1]
  return tree[1] if tree[0] == 'percent' else None


def _in_one_unit(answer: Reading, truth: Reading) -> tuple[Reading, Reading]:
  """Return both quantities, with one converted to the other's unit if possible: 500 cm to 5 m.

  '6 m' is 6 times m if the other side uses m as a variable. A number with pi counts as an angle in
  radians if the other side is in degrees.
  """
  (_, x, x_unit), (_, y, y_unit) = answer, truth
  if (not x_unit and y_unit) or (x_unit, y_unit) == ('radian', 'degree'):
    truth, answer = _in_one_unit(truth, answer)
    return answer, truth
  if x_unit and not y_unit:
    is_angle = x_unit == 'degree' and any(node == ('symbol', 'pi') for node in nodes(y))
    return _unit_as_letter(answer, truth) or (_radians(x) if is_angle else answer), truth
  if (x_unit, y_unit) == ('degree', 'radian'):
    return _radians(x), ('quantity', y, '')
  if 'degree' in (x_unit, y_unit) and x_unit[:6] == y_unit[:6]:  # '20 °C' for '20°'
    return answer, (*truth[:2], x_unit)
  if x_unit != y_unit and (factor := conversion(x_unit, y_unit)):
    return ('quantity', ('multiply', (x, ('number', factor))), y_unit), truth
  return answer, truth


def _unit_as_letter(reading: Reading, other: Reading) -> Reading | None:
  match = _LETTER_UNIT.fullmatch(reading[2])
  names = symbols(other[1])
  letter = match and next((c for c in (match[1], match[1].upper()) if c in names), None)
  if not match or not letter:
    return None
  factor: Tree = ('symbol', letter)
  if match[2]:
    factor = ('power', factor, ('number', Fraction(match[2])))
  return 'quantity', ('multiply', (reading[1], factor)), ''


def _radians(degrees: Tree) -> Reading:
  half_turns = ('divide', degrees, ('number', Fraction(180)))
  return 'quantity', ('multiply', (half_turns, ('symbol', 'pi'))), ''


# Binomial coefficients written as C(n, k) or C_n^k.


def _read_coefficients(answer: Tree, truth: Tree) -> tuple[Tree, Tree]:
  """Read C(n, k) on one side as a binomial coefficient if it can mean nothing else.

  C may also name a point or a constant. Therefore, C in the response is a coefficient only if the
  truth contains no C, and C in the truth is a coefficient only if the response contains a
  coefficient or a factorial instead.
  """
  if _choose_names(answer) and not _choose_names(truth):
    return rewrite(answer, _coefficient), truth
  if _choose_names(truth) and not _choose_names(answer) and heads(answer) & {'binom', 'factorial'}:
    return answer, rewrite(truth, _coefficient)
  return answer, truth


def _choose_names(tree: Tree) -> list[str]:
  """Return which of the names C, C_n and C() occur in a tree."""
  return [name for name in symbols(tree) if name.removesuffix('()').partition('_')[0] == _CHOOSE]


def _coefficient(node: Tree) -> Tree | None:
  """Return C(n, k) or C_n^k as a binomial coefficient, but not C(2, 3), which is a point."""
  if node[:2] == ('call', _CHOOSE) and len(node[2]) == 2:
    total, count = node[2]
  elif node[0] == 'power' and node[1][0] == 'symbol' and node[1][1].startswith(f'{_CHOOSE}_'):
    try:
      total = latex.parse(tokenize(node[1][1].removeprefix(f'{_CHOOSE}_')) or ())
    except (UnreadableError, RecursionError):
      return node
    count = node[2]
  else:
    return None
  if total[0] == count[0] == 'number' and not 0 <= count[1] <= total[1]:
    return node
  return 'function', 'binom', (total, count)


# Labels, equations and chains.


def _same_labelled(answer: Reading, truth: Reading) -> bool:
  """Return True if labels and values match; a label on only one side is ignored."""
  if truth[0] == 'labelled' and truth[2][0] == 'letters':
    _, text, product = truth[2]
    if len(text) < 3 or not is_roman(text):  # 'P = IV' is a product, but 'n = XIV' is not
      truth = (*truth[:2], product, *truth[3:])
  if answer[0] == 'labelled' and truth[0] == 'labelled':
    if _same_label(answer[1], truth[1]):
      return same(answer[2], truth[2])
    return _same_equation(answer, truth)
  if answer[0] == 'equation' and truth[0] == 'quantity':  # 'm + n = 33' for 33
    return _is_combination(answer[1]) and same(interpret(answer[2]), truth)
  if 'equation' in (answer[0], truth[0]):
    return _same_equation(answer, truth)
  answer, truth = _split_assignment(answer), _split_assignment(truth)
  if answer[0] == truth[0] == 'assigned':
    return len(answer[1]) == len(truth[1]) and _pair_up(
      answer[1], truth[1], lambda a, b: _same_label(a[0], b[0]) and same(a[1], b[1])
    )
  if answer[0] == 'assigned':
    return _same_without_labels(truth, answer[1])
  if truth[0] == 'assigned':
    return _same_without_labels(answer, truth[1])
  answer, truth = (x[2] if x[0] == 'labelled' else x for x in (answer, truth))
  return same(answer, truth)


def _is_combination(tree: Tree) -> bool:
  """Return True for a sum, product or quotient of different letters, like m+n in 'm+n = 33'."""
  parts = tree[1:] if tree[0] == 'divide' else tree[1] if tree[0] in ('add', 'multiply') else ()
  bases = [part[1] if part[0] in ('negate', 'power') else part for part in parts]
  are_letters = all(base[0] == 'symbol' or _is_combination(base) for base in bases)
  return are_letters and len(symbols(parts)) > 1


def _split_assignment(reading: Reading) -> Reading:
  """Read '(p, q) = (3, 2)' as 'p = 3, q = 2'."""
  if reading[0] == 'labelled' and reading[1][0] == 'group' and reading[2][0] == 'group':
    labels, values = reading[1][3], reading[2][3]
    if len(labels) == len(values):
      return 'assigned', tuple(zip(labels, values, strict=True))
  return reading


def _same_without_labels(unlabelled: Reading, assignments: Sequence[tuple[Tree, Reading]]) -> bool:
  """Compare unlabeled values with labeled ones; sort coordinates ('y = 2, x = 1') by label."""
  names = sorted(label[1] for label, _ in assignments if label[0] == 'symbol')
  if len(names) == len(assignments) and ''.join(names) in _ALPHABET:
    assignments = sorted(assignments, key=lambda assignment: assignment[0][1])
  labels, values = zip(*assignments, strict=True)
  letter = str(labels[0][-1]).removesuffix('_1')
  are_numbered = all(label == ('symbol', f'{letter}_{n}') for n, label in enumerate(labels, 1))
  if are_numbered and unlabelled[:2] == ('labelled', ('symbol', letter)):  # 'x = 5 or x = 3'
    unlabelled = unlabelled[2]
  if unlabelled[0] in ('list', 'set') and are_numbered:  # 'x_1 = 5, x_2 = 3': two solutions
    return _same_in_any_order(unlabelled[1], values)
  return unlabelled[0] in ('list', 'braces', 'group') and _same_in_order(unlabelled[-1], values)


def _same_label(x: Tree, y: Tree) -> bool:
  are_calls = x[0] == y[0] == 'call' and x[1] == y[1] and len(x[2]) == len(y[2])
  return x == y or (are_calls and all(map(quantity.same, x[2], y[2])))


def _same_equation(answer: Reading, truth: Reading) -> bool:
  """Return True if one equation is a constant times the other, so both have the same solutions."""
  x, y = _zero_form(answer), _zero_form(truth)
  return x is not None and y is not None and quantity.proportional(x, y, positive=False)


def _zero_form(reading: Reading) -> Tree | None:
  """Return an equation's left side minus its right side; None if `reading` is not an equation."""
  sides = {'equation': reading[1:3], 'labelled': reading[3:5]}.get(reading[0], (None, None))
  return None if None in sides else subtract(*sides)


def _same_chain(answer: Reading, truth: Reading) -> bool:
  (_, x_operators, x_sides), (_, y_operators, y_sides) = answer, truth
  if x_operators != y_operators or None in x_sides or None in y_sides:
    return False
  if all(map(quantity.same, x_sides, y_sides)):
    return True
  if len(x_sides) != 2 or x_operators[0] not in ('<', '<='):
    return False
  return quantity.proportional(subtract(*x_sides), subtract(*y_sides), positive=True)


# Collections.


def _same_matrix(answer: Reading, truth: Reading) -> bool:
  x, y = answer[1], truth[1]
  have_one_shape = len(x) == len(y) and len(x[0]) == len(y[0])
  return have_one_shape and all(map(quantity.same, itertools.chain(*x), itertools.chain(*y)))


def _same_collection(answer: Reading, truth: Reading) -> bool:
  kinds = {answer[0], truth[0]}
  if kinds == {'quantity', 'group'}:
    return _same_point(*((answer, truth) if answer[0] == 'quantity' else (truth, answer)))
  if kinds == {'group'}:
    # [0, 1] is an interval, and (0, 1) may be one, but more than two items are always a vector.
    are_vectors = len(answer[3]) > 2 and all(x[1] + x[2] in '()[]' for x in (answer, truth))
    return (answer[1:3] == truth[1:3] or are_vectors) and _same_in_order(answer[3], truth[3])
  if kinds == {'group', 'matrix'}:
    group, matrix = (answer, truth) if answer[0] == 'group' else (truth, answer)
    rows = matrix[1] if len(matrix[1]) == 1 else tuple(zip(*matrix[1], strict=True))
    cells = [('quantity', cell, '') for cell in rows[0]]
    return group[1:3] == ('(', ')') and len(rows) == 1 and _same_in_order(group[3], cells)
  if 'group' in kinds and kinds & {'braces', 'list'}:  # '6, 31, -1' for '(6, 31, -1)'
    group = answer if answer[0] == 'group' else truth
    # Two items in square brackets are an interval.
    is_tuple = group[1:3] == ('(', ')') or len(group[3]) > 2
    return is_tuple and _same_in_order(answer[-1], truth[-1])
  if kinds == {'union', 'list'}:
    items = (answer if answer[0] == 'list' else truth)[1]
    if any(map(is_interval, items)) and _same_in_any_order(answer[1], truth[1]):
      return True
  if kinds & _SET_OPERATIONS:
    return same_set(answer, truth)
  if kinds <= {'list', 'set', 'braces'}:
    return _same_in_any_order(answer[1], truth[1])
  if kinds & {'list', 'set', 'braces'} and 'quantity' in kinds:
    number, items = (answer, truth[1]) if answer[0] == 'quantity' else (truth, _distinct(answer[1]))
    return len(items) == 1 and same(items[0], number)
  return False


def _same_point(call: Reading, group: Reading) -> bool:
  """Return True if a call such as P(2, 3) is a point whose coordinates match the group."""
  if call[1][0] != 'call' or not call[1][1].isupper():
    return False
  coordinates = [('quantity', argument, '') for argument in call[1][2]]
  return group[1:3] == ('(', ')') and _same_in_order(coordinates, group[3])


def _same_ratio(ratio: Reading, number: Reading) -> bool:
  """Return True if a ratio equals a fraction or decimal: 3:4 is 3/4 and 0.75, but 3:1 is not 3."""
  if len(ratio[1]) != 2 or any(item[0] != 'quantity' or item[2] for item in ratio[1]):
    return False
  (_, top, _), (_, bottom, _) = ratio[1]
  value = quantity.exact(number[1])
  if (quantity.exact(bottom) or 0) >= 10:  # it may be a time of day
    return number[1] == ('divide', top, bottom)
  is_fraction = number[1][0] == 'divide' or (value is not None and value.denominator > 1)
  return is_fraction and not number[2] and quantity.same(('divide', top, bottom), number[1])


def _same_union(answer: Reading, truth: Reading) -> bool:
  return _same_in_any_order(answer[1], truth[1]) or same_set(answer, truth)


def _same_in_order(x: Sequence[Reading], y: Sequence[Reading]) -> bool:
  return len(x) == len(y) and all(map(same, x, y))


def _same_in_any_order(answer: Sequence[Reading], truth: Sequence[Reading]) -> bool:
  if len(answer) > len(truth):
    answer = _distinct(answer)
  return len(answer) == len(truth) and _pair_up(answer, truth, same)


def _distinct(items: Sequence[Reading]) -> Sequence[Reading]:
  """Drop repeated items, because each solution counts once: '1/2, 0.5' is '1/2'."""
  unique_items: list[Reading] = []
  for item in dict.fromkeys(items):
    candidates = unique_items[:_MAX_PAIRWISE] if item[0] == 'quantity' else []
    if not any(x[::2] == item[::2] and quantity.same(item[1], x[1]) for x in candidates):
      unique_items.append(item)
  return unique_items


def _pair_up(x: Sequence[Any], y: Sequence[Any], are_same: Callable[[Any, Any], bool]) -> bool:
  """Return True if each item of x matches a different item of y; x and y have the same length."""
  unmatched_y, unmatched_x = list(y), []
  for item in x:  # pair identical items first, which is fast
    if item in unmatched_y:
      unmatched_y.remove(item)
    else:
      unmatched_x.append(item)
  if len(unmatched_x) > _MAX_PAIRWISE:
    return all(map(are_same, x, y))
  for item in unmatched_x:
    index = next((i for i, candidate in enumerate(unmatched_y) if are_same(item, candidate)), None)
    if index is None:
      return False
    del unmatched_y[index]
  return True


# Comparisons of two readings with the same head.
_COMPARISONS: dict[str, Callable[[Reading, Reading], bool]] = {
  'quantity': _same_quantity,
  'matrix': _same_matrix,
  'chain': _same_chain,
  'differs': lambda answer, truth: same(answer[1], truth[1]),
  'ratio': lambda answer, truth: _same_in_order(answer[1], truth[1]),
  'minus': lambda answer, truth: _same_in_order(answer[1:], truth[1:]) or same_set(answer, truth),
  'union': _same_union,
  'intersection': _same_union,
}
