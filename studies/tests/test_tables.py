"""The tables of a study and their verdicts, computed by hand."""

import math

import numpy as np
import pytest

from exgrpo_jax.reporting import comparison
from studies import tables as study_tables
from studies.tests.examples import run, study


def tables(*runs, settings=('sums',), **fields):
  """Return the tables of a setting with baseline 'grpo', as rows of cells without headers."""
  text = study_tables.setting('sums', runs, study(settings, **fields))
  found = []
  for block in text.split('\n\n'):
    if block.startswith('|'):
      lines = block.splitlines()[2:]
      found.append([[cell.strip() for cell in line.strip('|').split('|')] for line in lines])
  return found


@pytest.mark.parametrize(
  ('low', 'high', 'said'),
  [
    (0.05, 0.2, 'larger'),
    (0.04, 0.2, 'undecided'),
    (-0.04, 0.04, 'no difference that matters'),
    (-0.2, -0.05, 'smaller'),
    (-0.2, 0.2, 'undecided'),
    (math.nan, math.nan, 'cannot be told'),
  ],
)
def test_a_difference_is_judged_by_all_of_its_interval(low, high, said):
  assert study_tables.judgement(comparison.Estimate(0.1, low, high), 0.05) == said


def test_three_seeds_have_intervals_and_a_conclusion():
  """Intervals reach from the lowest to the highest seed; pairs differ by .25, .5 and .75."""
  arms, differences, seeds = tables(
    *(run('exgrpo', seed, 0.0, 0.25 + 0.25 * seed) for seed in (0, 1, 2)),
    *(run('grpo', seed, 0.0, 0.0) for seed in (0, 1, 2)),
  )
  interval = ['0.5000', '0.2500 to 0.7500']
  assert arms[0] == ['exgrpo', '3', '1', *interval, *interval]
  assert arms[1] == ['grpo', '3', '1', '0.0000', '-', '0.0000', '-'], 'equal values have none'
  signed = ['+0.5000', '+0.2500 to +0.7500']
  # .5 ± 4.303 (t with two degrees of freedom) times .25 / sqrt(3).
  assert differences == [['exgrpo', '3', *signed, *signed, '-0.1210 to +1.1210', 'undecided']]
  assert seeds[0] == ['exgrpo', '0.2500', '0.5000', '0.7500']


def test_arms_can_be_compared_with_a_second_baseline():
  _, from_grpo, from_exgrpo, _ = tables(
    *(run('exgrpo', seed, 0.25 * seed) for seed in (0, 1, 2)),
    *(run('grpo', seed, 0.0) for seed in (0, 1, 2)),
    second_baseline='exgrpo',
  )
  assert from_grpo[0][:3] == ['exgrpo', '3', '+0.2500']
  assert from_exgrpo[0][:3] == ['grpo', '3', '-0.2500']


def test_intervals_that_decide_are_wider_the_more_comparisons_there_are():
  runs = [
    *(run('exgrpo', seed, 0.5 + 0.01 * seed) for seed in (0, 1, 2)),
    *(run('grpo', seed, 0.25) for seed in (0, 1, 2)),
  ]
  said = [tables(*runs, settings=settings)[1][0][6:] for settings in ('a', 'abcde')]
  # t is 4.303, and 9.925 at the level 1 - .05 / 5, times .01 / sqrt(3).
  assert said == [['+0.2352 to +0.2848', 'larger'], ['+0.2027 to +0.3173', 'larger']]


def test_the_mean_over_tokens_is_the_area_under_the_curve():
  """Over 150 tokens, a run rises from 0 to .4 in 100 tokens, and then to .6 if it goes on."""
  found = tables(
    run('exgrpo', 0, 0.0, 0.4, 0.8), run('exgrpo', 1, 0.0, 0.4), run('grpo', 0, 0.1), tokens=150
  )
  *_, seeds, last_arms, _, last_seeds = found
  assert seeds == [['exgrpo', '0.3000', '0.2667'], ['grpo', '0.1000', '-']]
  assert last_seeds[0] == ['exgrpo', '0.8000', '0.4000'] and last_arms[0][3] == '0.6000'


def test_runs_that_take_off_are_counted_with_what_they_had_generated():
  *_, found = tables(
    run('exgrpo', 0, 0.0, 0.4, 0.8), run('exgrpo', 1, 0.1), run('grpo', 0, 0.1), takes_off=0.4
  )
  assert found == [['exgrpo', '1 of 2', '100', '16', '0.50'], ['grpo', '0 of 1', '-', '-', '0.00']]


def test_from_two_seeds_nothing_is_concluded():
  _, differences, _ = tables(
    *(run('exgrpo', seed, score) for seed, score in enumerate((0.5, 0.75))),
    *(run('grpo', seed, 0.25) for seed in range(2)),
  )
  assert [differences[0][column] for column in (3, 5, 6, 7)] == [
    '-',
    '-',
    '-',
    'cannot be told',
  ]


def test_an_arm_whose_runs_were_last_evaluated_at_other_steps_says_at_which():
  """One run stopped early because its validation score no longer improved."""
  arms, *_ = tables(
    run('exgrpo', 0, 0.0, 0.5), run('exgrpo', 1, 0.0, 0.5, 0.5), run('grpo', 0, 0.0)
  )
  assert [row[2] for row in arms] == ['1 to 2', '0']


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
  eight = np.array([9.0, 1, 2, 100, 3, 4, -50, 5])  # -50 and 1 are left out, as are 9 and 100
  assert study_tables.interquartile_mean(eight) == 3.5
  assert study_tables.interquartile_mean(np.array([1.0, 2, 6])) == 3  # none is left out
