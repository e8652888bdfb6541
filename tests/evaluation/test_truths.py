"""What the ground truths of a data set are read as, and which of them are odd."""

import types

import pytest

from exgrpo_jax.configs import base
from exgrpo_jax.data import questions
from exgrpo_jax.evaluation import truths
from exgrpo_jax.experiment.experiment import parse_config
from tests.helpers.paths import REAL_DATA


class Truths(list):
  """A data set of these ground truths."""

  def read(self, rows):
    return [types.SimpleNamespace(row=row, answer=self[row][0], kind=self[row][1]) for row in rows]


def summary(*answers, kind='math'):
  return truths.summary(Truths((answer, kind) for answer in answers))


@pytest.mark.parametrize(
  ('truth', 'kind'),
  [
    ('42', 'integers'),
    ('She has 48/2 = 24 left, so that is it.\n#### 24', 'integers'),
    (r'The sum of all of them is \boxed{7}', 'integers'),
    (r'\frac{1}{2}', 'fractions'),
    (r'\sqrt{2}', 'other numbers'),
    ('50%', 'percentages'),
    ('x^2+1', 'expressions'),
    ('1, 2, 3', 'lists'),
    (r'\{1, 2\}', 'sets'),
    ('[0, 1)', 'tuples and intervals'),
    ('x = 3', 'equations and inequalities'),
    ('Yes', 'words or letters'),
    (r'\text{Evelyn}', 'words or letters'),
    ('blue and red', 'words or letters'),
    ('How many clips did she sell?', 'sentences'),
    ('  ', 'empty'),
    ('1+' * 1500 + '1', 'compared as text, because they are too long'),
  ],
)
def test_a_truth_has_the_kind_that_the_verifier_reads(truth, kind):
  assert truths.kind_of(truth) == kind


def test_the_kind_of_the_row_decides_how_a_truth_is_read():
  assert truths.kind_of('B', 'choice') == truths.kind_of('(C)', 'choice') == 'letters'
  assert truths.kind_of('42', 'choice') == 'other than a letter'
  assert truths.kind_of('It is a sentence of some length.', 'text') == 'text'


def test_kinds_that_are_rare_beside_a_common_one_are_odd():
  lines = summary(*['7'] * 299, '1/2')
  assert lines == [
    '300 of 300 read',
    '  integers     299 (99.7%), such as 7',
    '  fractions      1 (0.3%), such as 1/2',
    '  odd: row 299, one of few fractions: 1/2',
  ]
  assert 'odd' not in ''.join(summary(*['7'] * 200, *['x+1'] * 99, '1/2')), 'no kind has 90%'
  assert 'odd' not in ''.join(summary(*['7'] * 95, *['1/2'] * 5)), '5% are not rare'


def test_five_odd_truths_are_listed_and_long_ones_are_cut():
  found = summary(
    '1', 'nobody at all knows it yet', '1+' * 150 + '1', *['this is no answer at all'] * 4
  )
  assert [line.split(':')[1] for line in found if 'odd:' in line] == [
    ' row 1, a sentence',
    ' row 2, 301 characters',
    *(f' row {row}, a sentence' for row in (3, 4, 5)),
  ]
  assert f'{"1+" * 30}…' in '\n'.join(found) and found[-1] == '  and 1 more odd ones'


def test_of_many_rows_some_are_read_evenly():
  answers = [('1', 'math')] * 10_000
  read = list[int]()

  class Counted(Truths):
    def read(self, rows):
      read.extend(rows)
      return super().read(rows)

  assert truths.summary(Counted(answers))[0] == '2,000 of 10,000 read'
  assert (read[0], read[-1], len(set(read))) == (0, 9_999, 2_000)


@pytest.mark.skipif(not REAL_DATA.exists(), reason=f'{REAL_DATA} is absent')
def test_real_data_sets_are_what_they_are_known_for(tmp_path):
  config = base.get_config()
  config.data.cache_dir = str(tmp_path)

  def shown(name):
    spec = str(REAL_DATA / name)
    return truths.summary(questions.load(parse_config(config).data, spec))

  assert shown('gsm8k_test.jsonl')[:2] == [
    '1,319 of 1,319 read',
    '  integers  1,319 (100.0%), such as 18',
  ]
  kinds = ' '.join(shown('math_benchmarks.parquet'))
  assert all(kind in kinds for kind in ('fractions', 'expressions', 'matrices', 'words'))
