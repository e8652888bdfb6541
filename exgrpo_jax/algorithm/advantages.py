"""Group-relative advantages. Pure functions."""

from collections.abc import Callable, Sequence

import chex
import numpy as np

from exgrpo_jax.config import check_numbers
from exgrpo_jax.datatypes import Array

# From arXiv:2603.18444: a uniform prior, and the discount for a 1.7B model (0.75 for an 8B model).
PRIOR = 1.0, 1.0
DISCOUNT = 0.5

# config.objective.baseline -> a function from reward_QK and is_replay_QK to what is subtracted from
# reward_QK, [Q, K] or [Q, 1]; None for the rules below. The arguments are copies, with rewards in
# float64, where the mean of K equal float32 numbers is exact.
BASELINES: dict[str, Callable[[Array, Array], Array] | None] = {
  'group': None,
  'fresh': None,
  'history': None,  # see `history_advantages`
}


def group_advantages(
  reward_QK: Array,
  normalize_std: str = 'off',
  is_replay_QK: Array | None = None,
  baseline: str = 'group',
  replay_advantage: str = 'group',
  replay_slope: float = 1.0,
) -> Array:
  """Subtract a baseline from the rewards of each question's K rollouts.

  By default, the result is not divided by the standard deviation (Dr. GRPO, arXiv:2503.20783). With
  `normalize_std` (GRPO, arXiv:2402.03300), it is divided by the standard deviation of all K rewards
  plus 1e-6. 'population' averages over K; 'sample' averages over K - 1, like torch.std and the
  authors' code.

  >>> group_advantages(np.float32([[1, 0, 0, 0], [1, 1, 1, 1]])).tolist()
  [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]]

  Args:
    reward_QK: the rewards, float32, from -1e15 to 1e15. Each group needs at least one fresh row.
    normalize_std: 'off', 'population' or 'sample'.
    is_replay_QK: True for replayed rows; None if no row is replayed.
    baseline: a key of BASELINES except 'history'. 'group' subtracts the mean of all K rewards.
      'fresh' uses this mean for replayed rows and the mean of the group's fresh rewards for fresh
      rows, so that fresh advantages sum to 0.
    replay_advantage: 'group' uses `baseline`. 'zero' sets a replayed row's advantage to 0, so the
      row only contributes to the mean. 'balanced' subtracts a weighted mean from all rows. Replayed
      rows have weight `replay_slope`, so that advantages times slopes at ratio 1 sum to 0.
    replay_slope: `objective.replay_slope`: a replayed token's gradient relative to a fresh token's.

  Returns:
    Advantages, float32 [Q, K]; with the built-in baselines, exactly 0 if a group's rewards are all
      equal. With 'fresh', fresh rows also get exactly 0 if the group's fresh rewards are equal.
  """
  chex.assert_rank(reward_QK, 2)
  is_replay_QK = np.zeros(reward_QK.shape, bool) if is_replay_QK is None else is_replay_QK
  chex.assert_equal_shape([reward_QK, is_replay_QK])
  # In float32 the mean of K equal numbers is often slightly off, but the mean of zeros is exact.
  highest_Q1 = reward_QK.max(axis=1, keepdims=True, where=~is_replay_QK, initial=-np.inf)
  shifted_QK = reward_QK - highest_Q1
  baseline_QK = shifted_QK.mean(axis=1, keepdims=True)
  if replay_advantage == 'balanced':
    weight_QK = ~is_replay_QK + np.float32(replay_slope) * is_replay_QK
    baseline_QK = _weighted_mean(shifted_QK, weight_QK)
  elif baseline == 'fresh':
    fresh_Q1 = _weighted_mean(shifted_QK, ~is_replay_QK)
    baseline_QK = ~is_replay_QK * fresh_Q1 + is_replay_QK * baseline_QK
  advantage_QK = shifted_QK - baseline_QK
  if baseline_rule := BASELINES[baseline]:
    baseline_QK = baseline_rule(np.array(reward_QK, np.float64), np.array(is_replay_QK))
    check_numbers('objective.baseline', baseline, baseline_QK, reward_QK.shape, highest_Q1.shape)
    advantage_QK = np.array(reward_QK - np.asarray(baseline_QK), np.float32)
  if replay_advantage == 'zero':
    advantage_QK *= ~is_replay_QK
  if normalize_std != 'off':
    std_Q1 = shifted_QK.std(axis=1, ddof=int(normalize_std == 'sample'), keepdims=True) + 1e-6
    if baseline_rule:  # it may give equal rewards an advantage: do not divide that by 1e-6
      std_Q1 = np.where(std_Q1 > 1e-6, std_Q1, np.float32(1))
    advantage_QK /= std_Q1
  return advantage_QK


def discounted_counts(counts: tuple[float, float], rewards: Sequence[float]) -> tuple[float, float]:
  """Return a question's (successes, failures) after another visit, with earlier visits discounted.

  Discounted Beta-Bernoulli (arXiv:2603.18444, eq. 11). `counts` are from the question's previous
  visit; on the first visit, pass PRIOR. `rewards` are the rewards of this visit's fresh responses,
  from 0 to 1.

  >>> discounted_counts(PRIOR, [1, 0, 0, 0])
  (1.5, 3.5)
  """
  alpha, beta = counts
  successes = sum(rewards)
  return DISCOUNT * alpha + successes, DISCOUNT * beta + len(rewards) - successes


def history_advantages(reward_QK: Array, counts_Q2: Array, normalize_std: str = 'off') -> Array:
  """Subtract the mean of each question's discounted Beta-Bernoulli posterior from its rewards.

  arXiv:2603.18444, eq. 12. Even a group whose rewards are all equal gets nonzero advantages. Unless
  `normalize_std` is 'off', the result is also divided by the standard deviation (never 0) of a 0/1
  reward with this mean (eq. 13).

  >>> history_advantages(np.float32([[1, 1, 1, 1]]), np.float32([[6, 2]])).tolist()
  [[0.25, 0.25, 0.25, 0.25]]

  Args:
    reward_QK: the rewards, float32, 0 or 1.
    counts_Q2: each question's `discounted_counts` including this visit, float32.
    normalize_std: 'off', 'population' or 'sample'; the last two are equivalent here.
  """
  chex.assert_rank([reward_QK, counts_Q2], 2)
  total_Q1 = counts_Q2.sum(axis=1, keepdims=True)
  advantage_QK = reward_QK - counts_Q2[:, :1] / total_Q1
  if normalize_std != 'off':
    advantage_QK *= total_Q1 / counts_Q2.prod(axis=1, keepdims=True) ** 0.5
  return advantage_QK


def _weighted_mean(reward_QK: Array, weight_QK: Array) -> Array:
  total_Q1 = (reward_QK * weight_QK).sum(axis=1, keepdims=True)
  return total_Q1 / weight_QK.sum(axis=1, keepdims=True, dtype=reward_QK.dtype)
