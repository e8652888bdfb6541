"""After which step a run ends early."""

import pytest

from exgrpo_jax.reporting import early_stop

FALLS = {0: 0.5, 10: 0.6, 20: 0.4, 30: 0.6, 40: 0.7, 50: 0.1}  # 0.6 again is no better


@pytest.mark.parametrize(
  ('patience', 'step'), [(0, 60), (1, 20), (2, 30), (3, 60)], ids=['never', 'one', 'two', 'three']
)
def test_a_run_ends_where_so_many_evaluations_are_no_better_than_the_best(patience, step):
  assert early_stop.last_step(FALLS, 60, patience) == step


def test_a_run_that_is_shorter_ends_where_it_is_asked_to():
  assert early_stop.last_step(FALLS, 10, 2) == 10


def test_scores_are_those_of_the_validation_set():
  records = [{'step': 0.0, early_stop.SCORE: 0.5}, {'step': 1.0}, {'step': 2, 'reward': 1.0}]
  assert early_stop.scores(records) == {0: 0.5}
