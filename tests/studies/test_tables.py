"""The tables of a study, by hand: what they conclude, and from what they conclude nothing."""

import math

import pytest

from exgrpo_jax.reporting import bootstrap
from exgrpo_jax.studies import tables as study_tables
from exgrpo_jax.studies.runs import Evaluation, StudyRun

MEASURE = 'eval/sums/pass@1'


def run(arm, seed, *scores):
  """A finished run that was evaluated at step 0 and those after it."""
  evaluations = tuple(
    Evaluation(step, 0, 0, 0.0, None, {}, {MEASURE: score}) for step, score in enumerate(scores)
  )
  return StudyRun('sums', arm, seed, 'python', (), '', True, evaluations)


def tables(*runs):
  """The tables of a setting whose baseline is 'grpo', as rows of cells without their heads."""
  text = study_tables.setting('sums', runs, MEASURE, 'grpo', smallest_difference=0.05)
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
  assert study_tables.judgement(bootstrap.Estimate(0.1, low, high), 0.05) == said


def test_three_seeds_have_intervals_and_a_conclusion():
  """Of means from the lowest to the highest seed; pairs differ by .25, .5 and .75."""
  arms, differences, seeds = tables(
    *(run('exgrpo', seed, 0.0, 0.25 + 0.25 * seed) for seed in (0, 1, 2)),
    *(run('grpo', seed, 0.0, 0.0) for seed in (0, 1, 2)),
  )
  interval = ['0.5000', '0.2500 to 0.7500']
  assert arms[0] == ['exgrpo', '3', '1', *interval, *interval]
  assert arms[1] == ['grpo', '3', '1', '0.0000', '-', '0.0000', '-'], 'equal values have none'
  signed = ['+0.5000', '+0.2500 to +0.7500']
  assert differences == [['exgrpo', '3', *signed, *signed, 'larger']]
  assert seeds[0] == ['exgrpo', '0.2500', '0.5000', '0.7500']


def test_from_two_seeds_nothing_is_concluded():
  _, differences, _ = tables(
    *(run('exgrpo', seed, score) for seed, score in enumerate((0.5, 0.75))),
    *(run('grpo', seed, 0.25) for seed in range(2)),
  )
  assert [differences[0][column] for column in (3, 5, 6)] == ['-', '-', 'cannot be told']


def test_an_arm_whose_runs_were_last_evaluated_at_other_steps_says_at_which():
  """One ended early, its validation no longer improving."""
  arms, *_ = tables(
    run('exgrpo', 0, 0.0, 0.5), run('exgrpo', 1, 0.0, 0.5, 0.5), run('grpo', 0, 0.0)
  )
  assert [row[2] for row in arms] == ['1 to 2', '0']
