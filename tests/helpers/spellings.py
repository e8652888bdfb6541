r"""Other spellings of a ground truth, and other answers that look like it.

For the tests of the verifier. Everything works on the text, without the verifier's own code.
"""

import itertools
import re
from fractions import Fraction

NUMBER = re.compile(r'-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)')
SCIENTIFIC = re.compile(r'(-?[0-9.]+)e(-?[0-9]+)')
FRACTION = re.compile(r'(-?)\\d?frac\{([0-9]+)\}\{([0-9]+)\}')
LETTER = re.compile(r'(?<![A-Za-z\\{])([a-zA-Z])(?![A-Za-z])')


def strip_delimiters(gold):
  """A ground truth without the dollars around it and the period after it."""
  gold = gold.strip().removesuffix('.')
  inside = gold[1:-1]
  return inside if gold[:1] == gold[-1:] == '$' and '$' not in inside else gold


def split_items(text):
  """The text between those commas that are in no bracket."""
  items, depth = [''], 0
  for char in text:
    depth += (char in '([{') - (char in ')]}')
    if char == ',' and depth == 0:
      items.append('')
    else:
      items[-1] += char
  return [item.strip() for item in items]


def is_list(text):
  return (
    len(split_items(text)) > 1
    and '\\!' not in text
    and 'where' not in text
    and (not re.fullmatch(r'[0-9]{1,3}(?:,[0-9]{3})+', text))
  )


def decimal(value):
  """A fraction's decimal expansion; None where it is infinite."""
  for places in range(1, 40):
    scaled = value * 10**places
    if scaled.denominator == 1:
      digits = str(abs(scaled.numerator)).rjust(places + 1, '0')
      return ('-' if value < 0 else '') + digits[:-places] + '.' + digits[-places:]
  return None


def respellings(gold):
  """Pairs (change, text) of spellings that every reader takes for the same answer."""
  text = strip_delimiters(gold)
  yield 'unchanged', gold
  yield 'without_delimiters', text
  if '$' not in text:
    yield 'dollars', f'${text}$'
    yield 'parentheses', rf'\({text}\)'
  yield 'spaces_around', f'  {text} '
  yield 'period', text + '.'
  changes = (
    ('dfrac', r'\\frac', r'\\dfrac'),
    ('tfrac', r'\\frac', r'\\tfrac'),
    ('no_left_right', r'\\(left|right)', ''),
    ('left', r'(?<!left)\(', r'\\left('),
    ('space_after_comma', r',(?![\\0-9]{3}| )', ', '),
    ('no_spaces', r'(?<![a-zA-Z0-9]) +', ''),
    ('circ', r'\^\{?\\circ\}?', '°'),
    ('degrees', r'\^\{?\\circ\}?(?=$|\$)', ' degrees'),
    ('text_degrees', r'\^\{?\\circ\}?(?=$|\$)', r'\\text{ degrees}'),
    ('no_degrees', r'\^\{?\\circ\}?', ''),
    ('pi', r'\\pi(?![a-z])', 'π'),
    ('cup', r'\\cup', '∪'),
    ('infinity', r'\\infty', '∞'),
    ('minus', '-(?![^{]*e)', '−'),
    ('no_text', r'\\text\{(?![^}]*degrees)([^{}]*)\}', r'\1'),
    ('cdot', r'\\cdot', r'\\times'),
    ('bmatrix', 'pmatrix', 'bmatrix'),
    ('subscript', r'_([0-9])(?![0-9])', r'_{\1}'),
    ('power', r'\^([0-9a-z])(?![0-9])', r'^{\1}'),
    ('plain_power', r'\^\{([0-9a-z])\}', r'^\1'),
    ('root', r'\\sqrt\{([0-9]+)\}', r'\\sqrt{(\1)}'),
    ('half', r'(?<![0-9 ])\\sqrt\{([0-9]+)\}', r'\1^{1/2}'),
    ('unicode_root', r'\\sqrt\{([0-9]+)\}', r'√{\1}'),
    ('thin', r'\\! ?', ''),
    ('mbox', r'\\mbox', r'\\text'),
    ('percent', r'\\?%', r'\\%'),
    ('money', r'\\\$', ''),
    ('slash', r'^(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}$', r'\1\2/\3'),
    ('infix', r'(?<![0-9 ])\\frac\{([0-9a-z]+)\}\{([0-9a-z]+)\}', r'{(\1)/(\2)}'),
  )
  for name, old, new in changes:
    changed = re.sub(old, new, text)
    if changed != text:
      yield name, changed
  yield from _number_spellings(text)
  yield from _structure_spellings(text)


def _number_spellings(text):
  if re.fullmatch('-?[0-9]+', text):
    yield 'point_zero', text + '.0'
    yield 'named', f'x = {text}'
    yield 'half_of_twice', rf'\frac{{{2 * int(text)}}}{{2}}'
    yield 'sum', f'{int(text) - 3}+3'
    if len(text.strip('-')) > 3:
      yield 'thousands', f'{int(text):,}'
      yield 'latex_thousands', f'{int(text):,}'.replace(',', '{,}')
      yield 'thin_thousands', f'{int(text):,}'.replace(',', r',\!')
  elif NUMBER.fullmatch(text):
    yield 'as_fraction', str(Fraction(text))
    yield 'more_zeros', text + ('00' if '.' in text else '.00')
  if match := SCIENTIFIC.fullmatch(text):
    yield 'times_ten', rf'{match[1]}\times10^{{{match[2]}}}'
    yield 'cdot_ten', rf'{match[1]} \cdot 10^{{{match[2]}}}'
    yield (
      'written_out',
      str(Fraction(text)) if Fraction(text).denominator == 1 else decimal(Fraction(text)),
    )
  if match := FRACTION.fullmatch(text):
    value = Fraction(int(match[1] + match[2]), int(match[3]))
    yield 'not_reduced', rf'\frac{{{value.numerator * 3}}}{{{value.denominator * 3}}}'
    yield 'solved', f'x = {text}'
    if exactly := decimal(value):
      yield 'decimal', exactly
    if value > 1:
      integer, rest = divmod(value, 1)
      if rest:
        yield 'mixed', rf'{integer}\frac{{{rest.numerator}}}{{{rest.denominator}}}'
        yield 'plain_mixed', f'{integer} {rest}'


def _structure_spellings(text):
  if is_list(text):
    items = split_items(text.replace('$', ' '))
    yield 'reversed', ', '.join(reversed(items))
    yield 'rotated', ', '.join(items[1:] + items[:1])
    if '=' not in text:
      yield 'in_braces', r'\{' + ', '.join(items) + r'\}'
    yield 'and', ', '.join(items[:-1]) + r' \text{ and } ' + items[-1]
    yield 'or', ' or '.join(items)
    return
  if match := re.fullmatch(r'([A-Za-z]|[a-zA-Z]\([a-z]\)) ?= ?(.*)', text):
    yield 'value', match[2]
    yield 'value_first', f'{match[2]} = {match[1]}'
  if is_expression(text):
    yield 'in_parentheses', f'({text})'
    yield 'twice_halved', rf'\frac{{2({text})}}{{2}}'
    yield 'minus_minus', f'-(-({text}))'
    yield 'one_more_less', f'{text}+1-1'
    terms = re.fullmatch(r'([^-+(){}=,]+) ?\+ ?([^-+(){}=,]+)', text)
    if terms and 'pm' not in text:
      yield 'swapped_terms', f'{terms[2]} + {terms[1]}'


def is_expression(text):
  """Whether a text is a single number or formula, with which one can calculate."""
  return (
    bool(text)
    and not re.search(
      r'[=<>,:%_$]|\\(?:text|mbox|pm|begin|in|cup|neq|circ|geq)|^[A-J]$|[0-9]e|np', text
    )
    and not re.fullmatch(r'\\?\{?[A-Za-z(){}\\]{4,}', text)
  )


def changes(gold):
  """Pairs (change, text) of answers with another value."""
  text = strip_delimiters(gold)
  for match in re.finditer('[0-9]', text):
    digit = str((int(match[0]) + 1) % 10)
    yield f'digit_{match.start()}', text[: match.start()] + digit + text[match.end() :]
  if not re.fullmatch(r'0(?:\.0+|,.*)?', text):  # -0 is 0
    yield 'sign', text[1:] if text.startswith('-') else f'-{text}'
  yield 'one_more', f'{text}+1'
  yield 'nothing', ''
  for name, old, new in (
    ('root', r'\\sqrt(?:\[3\])?', ''),
    ('pi', r'\\pi(?![a-z])', ''),
    ('plus', r'\+', '-'),
    ('minus', r'(?<=[^({, ])\s?-', '+'),
    ('sine', r'\\sin', r'\\cos'),
    ('cosine', r'\\cos', r'\\sin'),
    ('open', r'\[', '('),
    ('close', r'\]', ')'),
    ('imaginary', r'i(?![a-zA-Z])', ''),
    ('union', r'\\cup', r'\\cap'),
    ('fraction', r'\\frac\{([^{}]*)\}\{([^{}]*)\}', r'\\frac{\2}{\1}'),
    ('pm', r'\\pm', '+'),
    ('mp', r'\\pm', '-'),
    ('floor', r'\\(l|r)floor', r'\\\1ceil'),
    ('ln', r'\\ln', r'\\exp'),
    ('ceil', r'\\(l|r)ceil', r'\\\1floor'),
    ('above', r'\\geqslant', '>'),
    ('below', r'\\geqslant', r'\\leq'),
    ('equal', r'\\n?eq(?:slant)?', '='),
    ('base', '_[0-9{}]+$', ''),
    ('factorial', '!', ''),
    ('infinity', r'-\\infty', r'\\infty'),
  ):
    changed = re.sub(old, new, text)
    if changed != text:
      yield name, changed
  if FRACTION.fullmatch(text) or (NUMBER.fullmatch(text) and float(text)):
    yield 'with_letter', f'{text}x'
    yield 'hedged', f'{text} or {text}1'
    yield 'tenfold', f'10({text})'
  if FRACTION.fullmatch(text):
    value = Fraction(*map(int, FRACTION.fullmatch(text).groups()[1:]))
    if not decimal(value):
      yield 'rounded', f'{"-" * text.startswith("-")}{float(value):.4f}'
  yield from _structure_changes(text)


def _structure_changes(text):
  for match in itertools.islice(LETTER.finditer(text), 12):
    letter = 'w' if match[1].islower() else 'W'
    if letter != match[1]:
      yield f'letter_{match.start()}', text[: match.start()] + letter + text[match.end() :]
  if is_list(text):
    items = split_items(text.replace('$', ' '))
    for index in range(len(items)):
      yield f'without_{index}', ','.join(items[:index] + items[index + 1 :])
    yield 'with_one_more', ','.join([*items, '977'])
  pair = re.fullmatch(r'(?:\\left)?([(\[])([^()]*?)(?:\\right)?([)\]])', text)
  if pair and len(split_items(pair[2])) > 1:
    items = split_items(pair[2])
    yield 'swapped', pair[1] + ','.join([items[1], items[0], *items[2:]]) + pair[3]
    yield 'shorter', pair[1] + ','.join(items[1:]) + pair[3]
    yield 'half_open', {'(': '[', '[': '('}[pair[1]] + pair[2] + pair[3]
    yield 'half_closed', pair[1] + pair[2] + {')': ']', ']': ')'}[pair[3]]
