"""The advantages of a step's responses. Pure."""

import chex

from exgrpo_jax.datatypes import Array


def group_advantages(
  reward_QK: Array, normalize_std: str = 'off', is_fresh_QK: Array | None = None
) -> Array:
  """Reward minus the mean over one question's K rollouts.

  Dr. GRPO (arXiv:2503.20783): no division by the standard deviation unless asked for (GRPO,
  arXiv:2402.03300). 'population' divides by the standard deviation over K plus 1e-6, 'sample' over
  K - 1 as torch.std and the authors' code do.

  With `is_fresh_QK`, fresh rows are measured against the mean of their group's fresh rows, so their
  advantages sum to 0; a replayed row still against the mean of all K. The standard deviation is
  always that of all K.

  float32 [Q, K] -> [Q, K]; a group of equal rewards gives 0. Each group has a fresh row.
  """
  chex.assert_rank(reward_QK, 2)
  baseline_QK = reward_QK.mean(axis=1, keepdims=True)
  if is_fresh_QK is not None:
    chex.assert_equal_shape([reward_QK, is_fresh_QK])
    total_Q1 = (reward_QK * is_fresh_QK).sum(axis=1, keepdims=True)
    count_Q1 = is_fresh_QK.sum(axis=1, keepdims=True, dtype=reward_QK.dtype)
    baseline_QK = is_fresh_QK * (total_Q1 / count_Q1) + ~is_fresh_QK * baseline_QK
  advantage_QK = reward_QK - baseline_QK
  if normalize_std != 'off':
    ddof = {'population': 0, 'sample': 1}[normalize_std]
    advantage_QK /= reward_QK.std(axis=1, ddof=ddof, keepdims=True) + 1e-6
  return advantage_QK
