import functools
import itertools

import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo_jax.grading.answers import answer, equality
from exgrpo_jax.grading.answers.extraction import final_answer
from exgrpo_jax.grading.answers.spelling import normalize_spelling
from tests.grading import cases
from tests.helpers import pairs, spellings
from tests.helpers.paths import REAL_DATA

BENCHMARKS = ('math_benchmarks', 'arc_c', 'gpqa')


def equal(given_answer, truth, kind='math'):
  return equality.equal(given_answer, truth, kind)


# Name: (answer, truth).
EQUAL = {
  'integer': ('-5', '-5'),
  'leading_zeros_of_aime': ('73', '073'),
  'decimal_of_amc': ('142', '142.0'),
  'no_leading_zero': ('.4', '0.4'),
  'thousands': ('7,425,000', '7425000'),
  'thousands_latex': (r'14{,}916', '14916'),
  'thousands_thin': (r'32,\! 349', '32349'),
  'thousands_space': ('1 000', '1000'),
  'fraction': (r'\frac{10}{9}', '10/9'),
  'dfrac': (r'-\dfrac{1}{2}', '-0.5'),
  'negative_numerator': (r'\frac{-1}{2}', '-1/2'),
  'short_fraction': (r'\frac13', '1/3'),
  'unreduced': ('2/4', r'\frac{1}{2}'),
  'parentheses': (r'\left( \frac{1}{3} \right)', '1/3'),
  'money': (r'\$1,000.50', '1000.5'),
  'dollar_delimiters': ('$5$', '5'),
  'trailing_period': ('5.', '5'),
  'scientific': ('3e6', '3000000'),
  'power_of_ten': (r'4.5 \times 10^{33}', '4.5e33'),
  'percent': (r'20\%', '0.2'),
  'percent_asked_for': ('20%', '20'),
  'percent_left_out': ('28', r'28\%'),
  'percent_in_words': ('28 percent', r'28\%'),
  'unit': (r'15\text{ cm}^2', '15'),
  'degrees': ('336', r'336^\circ'),
  'unicode_minus': ('−3', '-3'),
  'spaces': ('p-q', 'p - q'),
  'text': (r'\text{Evelyn}', 'Evelyn'),
  'left_right': (r'\left( 3, \frac{\pi}{2} \right)', r'(3,\dfrac{\pi}{2})'),
  'short_root': (r'11\sqrt2', r'11\sqrt{2}'),
  'choice_case': ('c', 'C'),
  'choice_parentheses': (r'\text{(C)}.', 'C'),
}
DIFFERENT = {
  # float64 cannot tell these two apart.
  'exact': (str(2**53 + 1), str(2**53)),
  'rounded': ('0.333333333333333333', '1/3'),
  'sign': ('-5', '5'),
  'list_is_no_thousands': ('32, 349', '32349'),
  'wrong_thousands': ('1,0000', '10000'),
  'mixed_number_is_no_long_fraction': ('1 1/2', '11/2'),
  'percent_the_other_way': ('0.2', '20'),
  'two_percentages': ('20%', '2000%'),
  'variable': ('5x', '5'),
  'euler': (r'2\mathrm{e}', '2'),
  'base': ('204', '204_5'),
  'factor': ('4', r'4\sqrt{2}'),
  'two_answers': ('5', '5 or 6'),
  'other_choice': ('d', 'C'),
  'variables_keep_their_case': ('n', 'N'),
  'division_by_zero': ('1/0', '2/0'),
  'empty_truth': ('5', ''),
  'both_empty': (r'\$', '$'),
}


def test_equal():
  refused = [name for name, (text, truth) in EQUAL.items() if not equal(text, truth)]
  assert refused == []


def test_different():
  accepted = [name for name, (text, truth) in DIFFERENT.items() if equal(text, truth)]
  assert accepted == []


def test_pairs_that_mean_the_same_are_equal():
  refused = [
    f'{text} for {truth}'
    for truth, text in pairs.split_pairs(pairs.EQUAL)
    if not equal(text, truth)
  ]
  assert refused == []


def test_pairs_that_differ_are_not_equal():
  accepted = [
    f'{text} for {truth}'
    for truth, text in pairs.split_pairs(pairs.DIFFERENT)
    if equal(text, truth)
  ]
  assert accepted == []


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
  return tuple(dict.fromkeys(final_answer(case['gold']) for case in cases.read()))


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


def test_every_truth_is_accepted_however_it_is_spelled(truths):
  refused = [
    (truth, change, text)
    for truth in truths
    for change, text in spellings.respellings(truth)
    if not equal(text, truth)
  ]
  assert refused == []


def test_no_truth_is_mistaken_for_another_value(truths):
  accepted = [
    (truth, change, text)
    for truth in truths
    for change, text in spellings.changes(truth)
    if equal(text, truth)
  ]
  assert accepted == []


def test_no_truth_is_equal_to_the_next(truths):
  assert [
    (a, b)
    for a, b in itertools.pairwise(truths)
    if equal(a, b) and spellings.strip_delimiters(a) != spellings.strip_delimiters(b)
  ] == []


PIECES = st.sampled_from(
  [
    *'0123456789xyn+-*/^(){}[],;=<>.!|%_$ \n',
    r'\frac',
    r'\frac{1}{2}',
    r'\sqrt',
    r'\sqrt{2}',
    r'\pi',
    r'\pm',
    r'\infty',
    r'\{',
    r'\}',
    r'\sin',
    r'\log',
    r'\cup',
    r'\le',
    r'\ne',
    r'\text{ cm}',
    r'\begin{pmatrix}',
    '&',
    r'\\',
    r'\end{pmatrix}',
    r'\left(',
    r'\right)',
    r'\lfloor',
    r'\rfloor',
    r'\binom',
    'and',
    'or',
    r'\vec',
    r'\dot(',
    'e',
    'i',
    'f(',
    '10^',
    '99999',
    '²',
    '٣',
    '\u200b',
    '_{5}',
    r'\overline{3}',
  ]
)


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


@given(EXPRESSIONS, EXPRESSIONS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_equality_of_expressions_is_symmetric(x, y):
  assert equal(x, y) == equal(y, x)


@given(EXPRESSIONS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_one_more_is_another_value(x):
  assert not equal(f'({x})+1', x)
