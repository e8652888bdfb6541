"""A suite's results table."""

import csv
import io
import math

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import benchmark_table, comparison
from exgrpo_jax.reporting.benchmark_table import Benchmark, Score

BENCHMARKS = (
  Benchmark('A&B_1', data='x.jsonl', source='a', group='in', samples=4),
  Benchmark('C', data='x.jsonl', source='c', group='in', samples=1),
  Benchmark('D', data='x.jsonl', source='d', group='out', samples=1),
)


def row(name, content='0', settings=None, **scores):
  """A row in which each score has an interval from 0.1 below to 0.1 above it."""
  same, benchmarks = {'content': content, 'responses': 8}, {}
  for label, score in scores.items():
    benchmarks[label] = {'score': score, 'low': score - 0.1, 'high': score + 0.1, **same}
  settings = settings or {'evaluation.temperature': 0.6}
  return {'name': name, 'settings': settings, 'benchmarks': benchmarks}


ROWS = [row('Base | 100%', **{'A&B_1': 0.5, 'C': 0.25}, D=0.125), row('^~{}\\#$', C=0.3)]


def test_the_squared_errors_of_benchmarks_add_up_in_their_average():
  """3, 4 and 0 hundredths: 5, over 3 benchmarks."""
  average = benchmark_table.average(
    [Score(0.5, 0.47, 0.53), Score(0.2, 0.16, 0.24), Score(0.8, 0.8, 0.8)]
  )
  assert average == pytest.approx((0.5, 0.5 - 0.05 / 3, 0.5 + 0.05 / 3))
  assert benchmark_table.average([Score(0.5, 0.4, 0.7)]) == pytest.approx((0.5, 0.4, 0.7))


def test_symmetric_intervals_combine_like_independent_standard_errors():
  rng = np.random.default_rng(0)
  correct = [rng.random((40_000, 1)) < p for p in (0.3, 0.5, 0.6)]
  scores = [Score(*comparison.interval_95(c, np.arange(len(c)))) for c in correct]
  errors = [c.std(ddof=1) / math.sqrt(len(c)) for c in correct]
  expected = 1.96 * math.sqrt(sum(error**2 for error in errors)) / 3
  assert benchmark_table.average(scores).half_width == pytest.approx(expected, rel=1e-3)


@pytest.mark.full
def test_95_percent_of_intervals_contain_the_true_average():
  """Three benchmarks of 40 questions, one so hard that often no response is correct."""
  rng, truth = np.random.default_rng(1), (0.02, 0.4, 0.9)
  held = 0
  for _ in range(1000):
    scores = [Score(*comparison.interval_95(rng.random((40, 1)) < p, np.arange(40))) for p in truth]
    _, low, high = benchmark_table.average(scores)
    held += low <= np.mean(truth) <= high
  assert 0.93 < held / 1000 < 0.985


def test_markdown_has_each_groups_average_and_its_missing_benchmarks():
  head, _, first, second, *rest = benchmark_table.markdown(BENCHMARKS, ROWS).splitlines()
  assert head == '|  | A&B_1 | C | average in distribution | D | average out of distribution |'
  # Two intervals of ± 10: √2 · 10 / 2.
  cells = r'| Base \| 100% | 50.0 ± 10.0 | 25.0 ± 10.0 | 37.5 ± 7.1 | 12.5 ± 10.0 | 12.5 ± 10.0 |'
  assert first == cells
  assert second == '| ^~{}\\#$ | – | 30.0 ± 10.0 | 30.0 ± 10.0 (1 of 2) | – | – |'
  assert rest[1].endswith('avg@4: A&B_1; pass@1: C, D.')
  assert rest[2] == 'evaluation.temperature=0.6'
  assert rest[3:] == ['Not evaluated on A&B_1, D (no questions): ^~{}\\#$.']


def test_csv_has_every_interval():
  head, first, second = csv.reader(io.StringIO(benchmark_table.comma_separated(BENCHMARKS, ROWS)))
  table = [dict(zip(head, fields, strict=True)) for fields in (first, second)]
  ends = [table[0][name] for name in ('A&B_1', 'A&B_1 low', 'A&B_1 high')]
  assert ends == ['50.0000', '40.0000', '60.0000']
  assert table[0]['average in distribution'] == '37.5000'
  assert [line['average in distribution over'] for line in table] == ['2', '1']
  assert [line['average out of distribution over'] for line in table] == ['1', '0']
  assert table[1]['A&B_1'] == table[1]['D'] == table[1]['average out of distribution high'] == ''


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    (
      {'settings': {'evaluation.temperature': 1.0}},
      r"evaluation\.temperature=1\.0: the row in .*/Base\.json \('Base'\) was evaluated",
    ),
    ({'content': '1'}, r'D: the row in .* on different questions \(content is 0 there, but 1 here'),
  ],
)
def test_rows_that_are_not_comparable_are_refused(changed, message, tmp_path):
  with pytest.raises(InputError, match=message):
    benchmark_table.check_comparable(row('New', D=0.5, **changed), [row('Base', D=0.1)], tmp_path)


def test_benchmarks_in_only_one_row_are_not_compared(tmp_path):
  others = [row('Base', content='1', C=0.1)]
  benchmark_table.check_comparable(row('New', D=0.5), others, tmp_path)
