"""Comparison of answers: pairs that are equal (equal.txt) and pairs that are not (different.txt).

A line is 'truth | answer', or 'one <> other' where either may be the truth; '# ' begins a section.
"""

import functools
import itertools
import pathlib
import random
import re
from fractions import Fraction

import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo_jax.grading.answers import answer, equality, identity, latex, number, quantity
from exgrpo_jax.grading.answers.extraction import final_answer
from exgrpo_jax.grading.answers.grammar import UnreadableError
from exgrpo_jax.grading.answers.tokens import normalize_spelling, tokenize
from exgrpo_jax.grading.answers.units import conversion, normalize_unit
from tests.helpers import cases
from tests.helpers.paths import REAL_DATA

BENCHMARKS = ('math_benchmarks', 'arc_c', 'gpqa')


def equal(text, truth, kind='math'):
  return equality.equal(text, truth, kind)


def sections(name):
  """Yield (True if the pairs are equal, lines) for each section of a file."""
  text = pathlib.Path(__file__).with_name(f'{name}.txt').read_text(encoding='utf-8')
  for section in text.strip().split('\n\n'):
    title, *lines = section.splitlines()
    yield pytest.param(name == 'equal', lines, id=f'{name}: {title.removeprefix("# ")}')


@pytest.mark.parametrize(('expected', 'lines'), [*sections('equal'), *sections('different')])
def test_pairs_are_equal_or_different_as_listed(expected, lines):
  wrong = []
  for line in lines:
    is_symmetric = ' <> ' in line
    truth, text = line.split(' <> ' if is_symmetric else ' | ', 1)
    found = {equal(text, truth), equal(truth, text)} if is_symmetric else {equal(text, truth)}
    if found != {expected}:
      wrong.append(line)
    equal(text[:-1], truth)  # an answer that is cut off raises no error
  assert wrong == []


@pytest.mark.parametrize('text', ['50/', r'x+\dot', r'\vec'])
def test_an_operator_without_its_operand_is_text(text):
  assert equal(text, text) and not equal(text, '50') and not equal('50', text)


@pytest.mark.parametrize('text', ['', r'\$', '$', '.'])
def test_nothing_equals_an_empty_truth(text):
  assert not equal('5', text) and not equal(text, text)


@pytest.mark.parametrize('text', [r'\vec(a)', r'\hat(', r'1+\bar(2)'])
def test_an_accent_on_a_bracket_is_text(text):
  assert equal(text, text) and not equal(text, '5') and not equal('5', text)


def test_each_kind_is_compared_in_its_own_way():
  assert equal('d', 'D', 'choice')
  assert equal('(D) 45 degrees', 'D', 'choice')
  assert not equal('D or E', 'D', 'choice')
  assert equal('North  East', r'\text{north east}', 'text')
  assert not equal('2/4', '1/2', 'text')


def own_truths():
  return tuple(dict.fromkeys(final_answer(case['gold']) for case in cases.responses()))


@functools.cache
def benchmark_truths():
  distinct = {}
  for name in BENCHMARKS:
    path = REAL_DATA / f'{name}.parquet'
    if not path.exists():
      pytest.skip(f'{path} does not exist: benchmark data is kept outside of the repository')
    rows = parquet.read_table(path, columns=['reward_model'])['reward_model'].to_pylist()
    distinct |= dict.fromkeys(row['ground_truth'] for row in rows)
  return tuple(distinct)


@pytest.fixture(params=[own_truths, benchmark_truths], ids=['own', 'benchmarks'])
def truths(request):
  return request.param()


@pytest.mark.full
def test_every_truth_is_accepted_however_it_is_spelled(truths):
  spelled = [(truth, *spelling) for truth in truths for spelling in respellings(truth)]
  assert [case for case in spelled if not equal(case[-1], case[0])] == []


@pytest.mark.full
def test_no_truth_is_mistaken_for_another_value(truths):
  changed = [(truth, *change) for truth in truths for change in changes(truth)]
  assert [case for case in changed if equal(case[-1], case[0])] == []


def test_no_truth_is_equal_to_the_next(truths):
  assert [
    (a, b)
    for a, b in itertools.pairwise(truths)
    if equal(a, b) and strip_delimiters(a) != strip_delimiters(b)
  ] == []


PIECES = r"""
0 1 2 3 4 5 6 7 8 9 x y n + - * / ^ ( ) { } [ ] , ; = < > . ! | % _ $ \frac \frac{1}{2} \sqrt
\sqrt{2} \pi \pm \infty \{ \} \sin \log \cup \le \ne \text{cm} \begin{pmatrix} & \\ \end{pmatrix}
\left( \right) \lfloor \rfloor \binom and or \vec \dot( e i f( 10^ 99999 ² ٣ _{5} \overline{3}"""
PIECES = st.sampled_from([*PIECES.split(), ' ', '\n', '\u200b'])


@pytest.mark.full
@given(st.lists(PIECES, max_size=25).map(''.join))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_anything_equals_itself_and_nothing_raises(text):
  visible = equality.strip_delimiters(text)
  assert equal(text, text) == bool(visible and answer.normalize_text(normalize_spelling(visible)))


EXPRESSIONS = st.recursive(
  st.sampled_from(['1', '2', '0', '10', 'x', 'n', r'\pi', r'\sqrt{2}', '0.5', 'i', 'e']),
  lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from(['+', '-', r'\cdot ', '/']), inner).map(
      lambda t: f'({t[0]}){t[1]}({t[2]})'
    ),
    st.tuples(inner, inner).map(lambda t: rf'\frac{{{t[0]}}}{{{t[1]}}}'),
    inner.map(lambda t: rf'\sqrt{{{t}}}'),
    inner.map(lambda t: f'({t})^{{2}}'),
  ),
  max_leaves=6,
)


@pytest.mark.full
@given(EXPRESSIONS, EXPRESSIONS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_equality_of_expressions_is_symmetric(x, y):
  assert equal(x, y) == equal(y, x)


@pytest.mark.full
@given(EXPRESSIONS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_one_more_is_another_value(x):
  assert not equal(f'({x})+1', x)


# ---- Algebra decides or reports that it cannot; equal.txt has pairs that it decides ----


def tree(text):
  return latex.parse(tokenize(normalize_spelling(text)))


@pytest.mark.parametrize(
  'text',
  [
    '(x+y+z+1)^{5000}',
    '(x^2+y)^{99}(x+y^2)^{99}',
    r'\frac{1}{x+1}' + r'+\frac{1}{x+2y}' * 60,
    '+'.join(f'x_{{{n}}}^{{2022}}' for n in range(40)),
    r'\binom{a+b+c+x}{60}',
    '((x!)!)!',
    '10^{10^{10}}!',
  ],
)
def test_expressions_too_large_for_algebra_are_undecided(text):
  assert identity.same_expression(tree(text), tree('5x')) is None


def random_tree(generator, depth=3):
  if depth == 0 or generator.random() < 0.2:
    return generator.choice([('symbol', 'n'), ('number', Fraction(generator.randint(1, 3)))])
  x, y = (random_tree(generator, depth - 1) for _ in range(2))
  return generator.choice(
    [
      ('add', (x, y)),
      ('multiply', (x, y)),
      ('negate', x),
      ('divide', x, y),
      ('power', x, ('number', Fraction(generator.choice([2, -1])))),
      ('power', ('number', Fraction(2)), x),
      ('function', 'binom', (('add', (x, ('number', Fraction(2)))), ('number', Fraction(2)))),
      ('factorial', x),
    ]
  )


def value(of, n):
  try:
    return number.evaluate(of, {'n': Fraction(n)}, number.context_of(100))
  except number.ERRORS:
    return None


def test_algebra_and_values_agree():
  generator = random.Random(1)
  trees = [random_tree(generator) for _ in range(120)]
  pairs = [(x, random_tree(generator, 1)) for x in trees]
  pairs += [(('add', (x, y)), ('add', (y, x))) for x, y in pairs]
  decided = [
    (x, y, verdict) for x, y in pairs if (verdict := identity.same_expression(x, y)) is not None
  ]
  assert len(decided) > len(pairs) // 2
  assert {verdict for _, _, verdict in decided} == {True, False}
  for x, y, verdict in decided:
    values = [(a, b) for n in range(1, 30) if None not in (a := value(x, n), b := value(y, n))]
    if len(values) > 8:
      agree = all(abs(a - b) <= abs(a) * Fraction(1, 10**40) for a, b in values)
      assert agree == verdict, (x, y)


# ---- Quantities ----


@pytest.mark.parametrize(
  'text',
  r'9^9^9^9 10^{99999} 1/0 0^0 5!!!! \sqrt{2} \pi x \infty 9^{99999}/2'.split(),  # noqa: SIM905
)
def test_an_irrational_undefined_or_huge_number_has_no_exact_value(text):
  assert quantity.exact(tree(text)) is None


@pytest.mark.parametrize(
  'text', ['2 3', '', ')', '(1', r'\foo', '1 +', r'\frac{1}', '|', '^2', '5_']
)
def test_text_that_cannot_be_parsed_is_unreadable(text):
  with pytest.raises(UnreadableError):
    tree(text)


ROOT = '1.4142135623730950488016887242096980785696718753769480731766797379907324784621'


@pytest.mark.parametrize(
  ('x', 'y', 'expected'),
  [
    (r'\sqrt{2}', ROOT, False),  # the eightieth digit
    (r'10^{100}+\sqrt{2}', r'10^{100}+\sqrt{3}', False),
    (r'10^{100}+\sqrt{8}', r'10^{100}+2\sqrt{2}', True),
    ('|x|', 'x', False),  # x may be negative
    (r'\sqrt{x^2}', 'x', False),
    (r'\sqrt{r_0^2}', 'r_0', True),  # a radius is not
    (r'\lceil n/2 \rceil', r'\lfloor (n+1)/2 \rfloor', True),  # n is an integer
    (r'\lfloor x \rfloor', 'x', False),
  ],
)
def test_quantities_are_the_same_wherever_both_have_a_value(x, y, expected):
  assert quantity.same(tree(x), tree(y)) == expected


def test_proportional_means_up_to_a_constant_factor():
  line = tree('2x - y + 1')
  assert quantity.proportional(line, tree('y - 2x - 1'), positive=False)
  assert not quantity.proportional(line, tree('y - 2x - 1'), positive=True)
  assert not quantity.proportional(line, tree('x(2x - y + 1)'), positive=False)


def test_a_line_gives_its_slope_and_intercept():
  assert quantity.linear(tree('3 - x/2'), 'x') == (Fraction(-1, 2), 3)
  assert quantity.linear(tree('x^2'), 'x') is None


# ---- Sets of real numbers, compared with membership of sampled points ----

# Multiples of 1/2, from below the lowest endpoint to above the highest.
POINTS = [Fraction(halves, 2) for halves in range(-1, 10)]


def random_set(generator, depth=2):
  """Return a random set of numbers up to 4: its text, and its members among POINTS."""
  kind = generator.choice(['interval', 'finite', 'cup', 'cap', 'setminus'][: 5 if depth else 2])
  if kind == 'finite':
    members = generator.sample(range(5), generator.randint(1, 2))
    return r'\{' + ','.join(map(str, members)) + r'\}', {Fraction(member) for member in members}
  if kind == 'interval':
    low, high = sorted(generator.sample(range(5), 2))
    opening, closing = generator.choice('(['), generator.choice(')]')
    held = {x for x in POINTS if low < x < high}
    held |= {Fraction(low)} if opening == '[' else set()
    held |= {Fraction(high)} if closing == ']' else set()
    return f'{opening}{low},{high}{closing}', held
  (x, in_x), (y, in_y) = random_set(generator, depth - 1), random_set(generator, depth - 1)
  held = {'cup': in_x | in_y, 'cap': in_x & in_y, 'setminus': in_x - in_y}[kind]
  return rf'({x})\{kind}({y})', held


def test_sets_are_the_same_if_they_have_the_same_members():
  generator = random.Random(0)
  sets = [random_set(generator) for _ in range(60)]
  operations = [(text, held) for text, held in sets if '\\c' in text or 'setminus' in text]
  wrong = [
    (x, y)
    for (x, in_x), (y, in_y) in zip(operations, operations[1:] + operations[:1])
    if equality.equal(x, y, 'math') != (in_x == in_y)
  ]
  assert wrong == []


# ---- Units ----


@pytest.mark.parametrize(
  ('unit', 'other', 'factor'),
  [
    *(('m', 'cm', 100), ('cm^2', 'm^2', Fraction(1, 10_000)), ('h', 'min', 60)),
    *(('km/h', 'm/s', Fraction(5, 18)), ('mi/h', 'mph', 1), ('mi', 'ft', 5280), ('lb', 'oz', 16)),
    *(('l', 'cm^3', 1000), ('gallon', 'pint', 8), ('n', 'kg m/s^2', 1), ('m s^-1', 'm/s', 1)),
    *(('year', 'month', 12), ('dollar', 'cent', 100), ('year', 'day', None), ('m', 'g', None)),
    *(('m', 'm^2', None), ('apple', 'm', None), ('apple', 'apple', None)),
  ],
)
def test_units_of_one_kind_are_converted(unit, other, factor):
  assert conversion(unit, other) == factor


def test_a_unit_has_one_spelling():
  spelled = {
    'square centimeters': 'cm^2',
    'miles per hour': 'mi/h',
    'kg m/s^{2}': 'kg m/s^2',
    'units^2': '',
    'Green Apples': 'green apple',
  }
  assert {name: normalize_unit(name) for name in spelled} == spelled


# ---- Spellings ----
# For testing the verifier. These functions work on text and don't use the verifier's own code.

NUMBER = re.compile(r'-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)')
SCIENTIFIC = re.compile(r'(-?[0-9.]+)e(-?[0-9]+)')
FRACTION = re.compile(r'(-?)\\d?frac\{([0-9]+)\}\{([0-9]+)\}')
LETTER = re.compile(r'(?<![A-Za-z\\{])([a-zA-Z])(?![A-Za-z])')


def strip_delimiters(gold):
  """Strip a ground truth's enclosing dollar signs and final period."""
  gold = gold.strip().removesuffix('.')
  inside = gold[1:-1]
  return inside if gold[:1] == gold[-1:] == '$' and '$' not in inside else gold


def split_items(text):
  """Split a text at the commas outside brackets."""
  items, depth = [''], 0
  for char in text:
    depth += (char in '([{') - (char in ')]}')
    if char == ',' and depth == 0:
      items.append('')
    else:
      items[-1] += char
  return [item.strip() for item in items]


def is_list(text):
  is_number = '\\!' in text or re.fullmatch(r'[0-9]{1,3}(?:,[0-9]{3})+', text)
  return len(split_items(text)) > 1 and not is_number and 'where' not in text


def decimal(value):
  """Return a fraction's decimal expansion; None if it is infinite."""
  for places in range(1, 40):
    scaled = value * 10**places
    if scaled.denominator == 1:
      digits = str(abs(scaled.numerator)).rjust(places + 1, '0')
      return ('-' if value < 0 else '') + digits[:-places] + '.' + digits[-places:]
  return None


def respellings(gold):
  """Yield (change, text) for other spellings of the same answer."""
  text = strip_delimiters(gold)
  yield 'unchanged', gold
  yield 'without_delimiters', text
  if '$' not in text:
    yield 'dollars', f'${text}$'
    yield 'parentheses', rf'\({text}\)'
  yield 'spaces_around', f'  {text} '
  yield 'period', text + '.'
  yield 'space_after_comma', re.sub(r',(?![\\0-9]{3}| )', ', ', text)
  for name, old, *new in cases.lines('grading', 'respellings.txt'):
    changed = re.sub(old, ''.join(new), text)
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
    exact = Fraction(text)
    yield 'written_out', str(exact) if exact.denominator == 1 else decimal(exact)
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
  """Return True if a text is a single number or formula that can be used in a calculation."""
  other = r'[=<>,:%_$]|\\(?:text|mbox|pm|begin|in|cup|neq|circ|geq)|^[A-J]$|[0-9]e|np'
  is_word = re.fullmatch(r'\\?\{?[A-Za-z(){}\\]{4,}', text)
  return bool(text) and not re.search(other, text) and not is_word


def changes(gold):
  """Yield (change, text) for answers with a different value."""
  text = strip_delimiters(gold)
  for match in re.finditer('[0-9]', text):
    digit = str((int(match[0]) + 1) % 10)
    yield f'digit_{match.start()}', text[: match.start()] + digit + text[match.end() :]
  if not re.fullmatch(r'0(?:\.0+|,.*)?', text):  # -0 is 0
    yield 'sign', text[1:] if text.startswith('-') else f'-{text}'
  yield 'one_more', f'{text}+1'
  yield 'nothing', ''
  for name, old, *new in cases.lines('grading', 'changes.txt'):
    changed = re.sub(old, ''.join(new), text)
    if changed != text:
      yield name, changed
  if FRACTION.fullmatch(text) or (NUMBER.fullmatch(text) and float(text)):
    yield 'with_letter', f'{text}x'
    yield 'hedged', f'{text} or {text}+1'
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
