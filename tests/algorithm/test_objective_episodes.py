"""The environment's transitions cancel in the ratio: enumerated for one of two states."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import advantages, objective
from exgrpo_jax.datatypes import Batch
from tests.helpers.losses import changed

CONFIG = changed(ratio='product')
# An episode is a token of the policy, the state that the environment answers with, and another
# token of the policy, each 0 or 1.
EPISODES = np.array(list(itertools.product(range(2), repeat=3)))
STATE_1 = np.array([0.2, 0.9])  # its probability, by the first token
REWARD = np.array([[[0.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.5]]])  # by the whole episode
OWN = np.array([True, False, True])
# Logits of the first token, then of the second by (first token, state).
PAST = np.log([0.5, 0.5, *[0.5, 0.5] * 4])
NOW = np.log([0.3, 0.7, 0.6, 0.4, 0.2, 0.8, 0.7, 0.3, 0.4, 0.6])


def logp_B3(theta, episode_B3):
  """Log-probabilities of the policy; what it thinks of a state is wrong, and must not matter."""
  first_B, state_B, last_B = episode_B3.T
  first = jax.nn.log_softmax(theta[:2])[first_B]
  last = jax.nn.log_softmax(theta[2:].reshape(2, 2, 2))[first_B, state_B, last_B]
  return jnp.stack([first, first - 1.0 - state_B, last], axis=1)


@functools.partial(jax.jit, static_argnums=3)
@functools.partial(jax.grad)
def slope(theta, episode_B3, inputs, is_first):
  logp, row_B3 = logp_B3(theta, episode_B3), jnp.ones(episode_B3.shape, int)
  now = jax.lax.stop_gradient(logp)
  log_ratio = objective.row_log_ratio(now, inputs, row_B3, CONFIG, is_first)
  inputs = inputs._replace(row_log_ratio_BT=log_ratio)
  return objective.token_loss(logp, 0 * logp, inputs, CONFIG, clip=False, is_first=is_first)[0]


def expected_gradient(writer, mask):
  """Of a group of two: one whole episode by `writer`, with exact weights, and one by NOW."""
  groups = np.array(list(itertools.product(range(len(EPISODES)), repeat=2)))
  mask_23, is_past = np.float32([mask, mask]), np.array([[True] * 3, [False] * 3])
  total = np.zeros(len(NOW))
  for group in groups:
    episode_23 = EPISODES[group]
    past_23, now_23 = (np.asarray(logp_B3(theta, episode_23)) for theta in (writer, NOW))
    written_23 = np.where(is_past, past_23, now_23)
    first_2, state_2, last_2 = episode_23.T
    state_chance_2 = np.where(state_2, STATE_1[first_2], 1 - STATE_1[first_2])
    chance = np.exp(written_23[:, OWN].sum(dtype=np.float64)) * state_chance_2.prod()
    batch = Batch(
      tokens_BT=episode_23,
      response_mask_BT=mask_23,
      behaviour_logp_BT=np.float32(written_23 * mask_23),
      advantage_B=np.float32(
        advantages.group_advantages(REWARD[first_2, state_2, last_2][None])[0]
      ),
      is_replay_B=np.zeros(2, bool),
      policy_step_B=np.zeros(2, np.int32),
      term_weight_BT=np.ones((2, 3), np.float32),
      is_carried_BT=is_past & (mask_23 > 0),
    )
    inputs = objective.loss_inputs(batch, CONFIG, max_response=3)
    total += chance * np.asarray(slope(jnp.float32(NOW), episode_23, inputs, True))
  return total


def test_an_episode_of_a_past_policy_is_unbiased_without_the_environments_chances():
  on_policy = expected_gradient(NOW, OWN)
  assert np.linalg.norm(on_policy) > 0.01  # so 0 would be noticed
  np.testing.assert_allclose(expected_gradient(PAST, OWN), on_policy, atol=1e-6)


@pytest.mark.parametrize('mask', [[True, True, True], [True, False, False]])
def test_any_other_mask_is_biased(mask):
  """As if the policy had drawn the state, or had not drawn its last token."""
  on_policy = expected_gradient(NOW, OWN)
  bias = np.linalg.norm(expected_gradient(PAST, np.array(mask)) - on_policy)
  assert bias > 0.05 * np.linalg.norm(on_policy)
