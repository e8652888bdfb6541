"""Pairs of ground truth and answer that are the same, or are not: equal.txt and different.txt.

A line is 'truth | answer', or 'one <> other' where either may be the truth; '# ' begins a section.
"""

import functools
import itertools
import pathlib

import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo_jax.grading.answers import answer, equality
from exgrpo_jax.grading.answers.extraction import final_answer
from exgrpo_jax.grading.answers.tokens import normalize_spelling
from tests.grading import cases
from tests.helpers import spellings
from tests.helpers.paths import REAL_DATA

BENCHMARKS = ('math_benchmarks', 'arc_c', 'gpqa')


def equal(given_answer, truth, kind='math'):
  return equality.equal(given_answer, truth, kind)


def sections(name):
  """(Whether they are equal, lines) of each section of a file, by its name and the section's."""
  text = pathlib.Path(__file__).with_name(f'{name}.txt').read_text(encoding='utf-8')
  for section in text.strip().split('\n\n'):
    title, *lines = section.splitlines()
    yield pytest.param(name == 'equal', lines, id=f'{name}: {title.removeprefix("# ")}')


@pytest.mark.parametrize(('expected', 'lines'), [*sections('equal'), *sections('different')])
def test_pairs_that_mean_the_same_are_equal_and_no_others(expected, lines):
  wrong = []
  for line in lines:
    is_symmetric = ' <> ' in line
    truth, text = line.split(' <> ' if is_symmetric else ' | ', 1)
    found = {equal(text, truth), equal(truth, text)} if is_symmetric else {equal(text, truth)}
    if found != {expected}:
      wrong.append(line)
  assert wrong == []


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


PIECES = r"""
0 1 2 3 4 5 6 7 8 9 x y n + - * / ^ ( ) { } [ ] , ; = < > . ! | % _ $ \frac \frac{1}{2} \sqrt
\sqrt{2} \pi \pm \infty \{ \} \sin \log \cup \le \ne \text{cm} \begin{pmatrix} & \\ \end{pmatrix}
\left( \right) \lfloor \rfloor \binom and or \vec \dot( e i f( 10^ 99999 ² ٣ _{5} \overline{3}"""
PIECES = st.sampled_from([*PIECES.split(), ' ', '\n', '\u200b'])


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
