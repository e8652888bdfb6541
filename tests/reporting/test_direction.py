"""Which of a run's values is its best."""

import math

import pytest

from exgrpo_jax.reporting import direction


@pytest.mark.parametrize(
  'name',
  [
    'eval/gsm8k/truncated',
    'length/truncated',
    'grading/crashed',
    'skipped_updates',
    'loss',
    'groups/solved_by_none',
  ],
)
def test_the_best_of_what_should_fall_is_the_lowest(name):
  assert direction.best(name, [0.5, 0.25, math.nan, -math.inf]) == 0.25


@pytest.mark.parametrize('name', ['reward', 'eval/gsm8k/pass@1', 'eval/a/truncated/pass@1'])
def test_the_best_of_anything_else_is_the_highest(name):
  assert direction.best(name, [0.5, 0.75, math.nan, math.inf]) == 0.75


def test_without_a_finite_value_there_is_no_best():
  assert math.isnan(direction.best('reward', [math.nan]))
