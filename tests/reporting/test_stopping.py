"""When a run ends early: its score no longer improves, or training has broken down."""

import math

import pytest

from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting import alarms

CONFIG = optimizer.OptimizerConfig(minibatches=2)
WELL = {'entropy': 0.5, 'loss': 0.1, 'gradient_norm': 0.01, 'optimizer/skipped': 0.0}
FALLS = {0: 0.5, 10: 0.6, 20: 0.4, 30: 0.6, 40: 0.7, 50: 0.1}  # 0.6 again is no better


@pytest.mark.parametrize(
  ('num_steps', 'patience', 'step'),
  [(60, 0, 60), (60, 1, 20), (60, 2, 30), (60, 3, 60), (10, 2, 10)],
)
def test_a_run_ends_where_patience_evaluations_are_no_better_than_the_best(
  num_steps, patience, step
):
  assert alarms.last_step(FALLS, num_steps, patience) == step


def test_scores_are_those_of_the_validation_set():
  records = [{'step': 0.0, alarms.SCORE: 0.5}, {'step': 1.0}, {'step': 2, 'reward': 1.0}]
  assert alarms.scores_of(records) == {0: 0.5}


def breakdown(*changes):
  """After steps with these changes to WELL, the last of which is the newest."""
  steps = [WELL | change | {'step': step} for step, change in enumerate(changes, 1)]
  return alarms.breakdown(CONFIG, steps)


@pytest.mark.parametrize('entropy', [math.nan, math.inf])
def test_an_entropy_that_is_not_finite_stops_a_run_at_once(entropy):
  why = breakdown({}, {'entropy': entropy, 'gradient_norm': math.nan, 'optimizer/skipped': 1.0})
  assert f'entropy {entropy}' in why and 'config.optimizer.learning_rate=1e-06' in why


def test_where_no_update_was_made_the_weights_are_at_fault():
  why = breakdown({'entropy': math.nan, 'optimizer/skipped': 2.0})
  assert 'config.model.path' in why and 'learning_rate' not in why


@pytest.mark.parametrize('norm', [math.nan, 100.0])
def test_a_gradient_that_is_not_finite_or_too_large_is_tolerated_singly(norm):
  skipped = {'loss': math.nan, 'gradient_norm': norm, 'optimizer/skipped': 2.0}
  assert not breakdown(*[{}] * 5, skipped)
  assert not breakdown(*[skipped, {}] * 10), 'half of them'


def test_a_run_most_of_whose_updates_are_skipped_stops():
  """11 of the 20 of ten steps."""
  half, all_of_it = {'optimizer/skipped': 1.0}, {'optimizer/skipped': 2.0, 'gradient_norm': 100.0}
  assert not breakdown(*[half] * 8, all_of_it), 'too few steps to say'
  why = breakdown(*[{}] * 5, *[half] * 9, all_of_it)
  assert '11 of the 20 updates' in why and 'config.optimizer.skip_above_norm=7.8' in why
  assert not breakdown(*[all_of_it] * 9, *[{}] * 5), 'steps that are past'
