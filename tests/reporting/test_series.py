"""Which of a metric's values and steps count, and how a line is smoothed."""

import math

import pytest

from exgrpo_jax.reporting import series


@pytest.mark.parametrize(
  'name', ['eval/gsm8k/truncated', 'grading/crashed', 'loss', 'groups/solved_by_none']
)
def test_the_best_of_what_should_fall_is_the_lowest(name):
  assert series.best(name, [0.5, 0.25, math.nan, -math.inf]) == 0.25


@pytest.mark.parametrize('name', ['reward', 'eval/gsm8k/pass@1', 'eval/a/truncated/pass@1'])
def test_the_best_of_anything_else_is_the_highest(name):
  assert series.best(name, [0.5, 0.75, math.nan, math.inf]) == 0.75
  assert math.isnan(series.best(name, [math.nan]))


@pytest.mark.parametrize(
  ('evaluated', 'expected'),
  [
    ([[0, 12, 24, 36], [0, 12, 24]], 24),
    ([[0, 20, 40], [0, 10, 20, 30]], 20),
    ([[0, 20, 40]], 40),
    ([[0, 20], [0, 15]], None),
    ([[0, 20], []], None),
    ([], None),
  ],
)
def test_runs_are_compared_at_the_last_step_after_0_that_all_have(evaluated, expected):
  assert series.last_common_step(evaluated) == expected


def test_seeds_have_a_series_where_all_of_them_have_a_finite_value():
  runs = [
    [{'step': 0, 'reward': 0.0}, {'step': 1, 'reward': 1.0}, {'step': 2, 'reward': 5.0}],
    [{'step': 0, 'reward': 2.0}, {'step': 1, 'reward': 1.0}, {'step': 2, 'reward': math.nan}],
  ]
  found = series.over_seeds(runs, 'reward')
  assert (found.steps.tolist(), found.mean.tolist()) == ([0, 1], [1, 1])
  assert found.std.tolist() == [pytest.approx(2**0.5), 0]
  assert series.over_seeds(runs, 'loss') is None


def test_a_value_is_smoothed_with_a_fortieth_of_all_to_either_side():
  # Of 80 points two: the mean of 0 1 0 1 0 is .4, at the end of 0 1 0 it is 1/3.
  values = [0.0, 1.0] * 40
  assert series.smoothed(values)[[10, 11, 0]] == pytest.approx([0.4, 0.6, 1 / 3])
  assert series.smoothed(values[:3], points=80) == pytest.approx([1 / 3] * 3)
