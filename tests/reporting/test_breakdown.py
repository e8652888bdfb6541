"""When a run stops because training has broken down, and when it goes on."""

import dataclasses
import math

import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.configs import base
from exgrpo_jax.learner import optimizer
from exgrpo_jax.reporting import breakdown

CONFIG = config_lib.build(optimizer.Config, base.get_config().optimizer, 'config.optimizer')
CONFIG = dataclasses.replace(CONFIG, minibatches=2)
WELL = {'entropy': 0.5, 'loss': 0.1, 'gradient_norm': 0.01, 'skipped_updates': 0.0}


def reason(*changes):
  """After steps with these changes to WELL, the last of which is the newest."""
  return breakdown.reason(
    CONFIG, [WELL | change | {'step': step} for step, change in enumerate(changes, 1)]
  )


@pytest.mark.parametrize('entropy', [math.nan, math.inf])
def test_an_entropy_that_is_not_finite_stops_a_run_at_once(entropy):
  why = reason({}, {'entropy': entropy, 'gradient_norm': math.nan, 'skipped_updates': 1.0})
  assert why.startswith(f'entropy {entropy}, loss 0.1, gradient norm nan: the policy no longer')
  assert 'Probably config.optimizer.learning_rate=1e-06 is too large' in why


def test_where_no_update_was_made_the_weights_are_at_fault():
  why = reason({'entropy': math.nan, 'skipped_updates': 2.0})
  assert 'its weights, of config.model.path' in why and 'learning_rate' not in why


@pytest.mark.parametrize('norm', [math.nan, 100.0])
def test_a_gradient_that_is_not_finite_or_too_large_is_tolerated_singly(norm):
  skipped = {'loss': math.nan, 'gradient_norm': norm, 'skipped_updates': 2.0}
  assert not reason(*[{}] * 5, skipped)
  assert not reason(*[skipped, {}] * 10), 'half of them'


def test_a_run_most_of_whose_updates_are_skipped_stops():
  """11 of the 20 of ten steps."""
  half, all_of_it = {'skipped_updates': 1.0}, {'skipped_updates': 2.0, 'gradient_norm': 100.0}
  assert not reason(*[half] * 8, all_of_it), 'too few steps to say'
  why = reason(*[{}] * 5, *[half] * 9, all_of_it)
  assert why.startswith('11 of the 20 updates of the last 10 steps were skipped')
  assert 'config.optimizer.skip_norm=7.8 (of the last step: 100 on average)' in why
  assert not reason(*[all_of_it] * 9, *[{}] * 5), 'steps that are past'
