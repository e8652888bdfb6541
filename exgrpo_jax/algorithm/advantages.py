"""Advantages of a step's responses. Pure."""

import chex
import numpy as np

from exgrpo_jax.datatypes import Array


def group_advantages(
  reward_QK: Array,
  normalize_std: str = 'off',
  is_replay_QK: Array | None = None,
  baseline: str = 'group',
  replay_advantage: str = 'group',
  replay_slope: float = 1.0,
) -> Array:
  """Subtract a baseline from the rewards of each question's K rollouts.

  Dr. GRPO (arXiv:2503.20783): no division by the standard deviation unless asked for (GRPO,
  arXiv:2402.03300). 'population' divides by the standard deviation over K plus 1e-6, 'sample' over
  K - 1 as torch.std and the authors' code do. The standard deviation always covers all K rows.

  >>> group_advantages(np.float32([[1, 0, 0, 0], [1, 1, 1, 1]])).tolist()
  [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]]

  Args:
    reward_QK: float32, from -1e15 to 1e15. Each group has a fresh row.
    normalize_std: `objective.normalize_std`.
    is_replay_QK: bool, True for replayed rows; None if there are none.
    baseline: 'group' is the mean of all K. 'fresh' is the mean of the group's fresh rows for a
      fresh row, so their advantages sum to 0, and the mean of all K for a replayed row.
    replay_advantage: 'group' uses the baseline. 'zero' gives a replayed row advantage 0, and it
      only counts in the mean. 'balanced' uses a weighted mean for all rows, in which a replayed row
      weighs `replay_slope`, so that advantages times slopes at ratio 1 sum to 0.
    replay_slope: `objective.replay_slope`: a replayed token's gradient relative to a fresh one's.

  Returns:
    float32 [Q, K]; a group of equal rewards gives exactly 0. With the baseline 'fresh', equal
      rewards of the fresh rows also give exactly 0.
  """
  chex.assert_rank(reward_QK, 2)
  is_replay_QK = np.zeros(reward_QK.shape, bool) if is_replay_QK is None else is_replay_QK
  chex.assert_equal_shape([reward_QK, is_replay_QK])
  # The mean of K equal numbers is often not that number in float32, but the mean of zeros is 0.
  reward_QK = reward_QK - reward_QK.max(axis=1, keepdims=True, where=~is_replay_QK, initial=-np.inf)
  baseline_QK = reward_QK.mean(axis=1, keepdims=True)
  if replay_advantage == 'balanced':
    baseline_QK = _weighted_mean(reward_QK, ~is_replay_QK + np.float32(replay_slope) * is_replay_QK)
  elif baseline == 'fresh':
    fresh_Q1 = _weighted_mean(reward_QK, ~is_replay_QK)
    baseline_QK = ~is_replay_QK * fresh_Q1 + is_replay_QK * baseline_QK
  advantage_QK = reward_QK - baseline_QK
  if replay_advantage == 'zero':
    advantage_QK *= ~is_replay_QK
  if normalize_std != 'off':
    ddof = {'population': 0, 'sample': 1}[normalize_std]
    advantage_QK /= reward_QK.std(axis=1, ddof=ddof, keepdims=True) + 1e-6
  return advantage_QK


def _weighted_mean(reward_QK: Array, weight_QK: Array) -> Array:
  total_Q1 = (reward_QK * weight_QK).sum(axis=1, keepdims=True)
  return total_Q1 / weight_QK.sum(axis=1, keepdims=True, dtype=reward_QK.dtype)
