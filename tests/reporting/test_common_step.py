"""The step at which runs of different lengths can be compared."""

import pytest

from exgrpo_jax.reporting.common_step import last_common_step


@pytest.mark.parametrize(
  ('evaluated', 'expected'),
  [
    ([[0, 12, 24, 36, 48, 60], [0, 12, 24]], 24),
    ([[0, 20, 40], [0, 10, 20, 30]], 20),
    ([[0, 20, 40]], 40),
  ],
)
def test_runs_are_compared_at_the_last_step_at_which_all_were_evaluated(evaluated, expected):
  assert last_common_step(evaluated) == expected


@pytest.mark.parametrize('evaluated', [[[0, 20], [0, 15]], [[0, 20], []], []])
def test_before_training_there_is_nothing_to_compare(evaluated):
  assert last_common_step(evaluated) is None
