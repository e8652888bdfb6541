"""What one token adds to the objective: one small function per published method. Pure.

r is a fresh token's importance ratio, w a replayed token's, A the advantage of its row. Array
arguments broadcast: [B, T] by token, [B, 1] by row.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.datatypes import Array

Flag = bool | jax.Array  # a bool scalar, traced or not


# Nats. exp of it, 5.5e34, times what follows it in a loss stays within float32.
_LARGEST = 80.0


# ---- Replayed tokens: the term for an advantage of 1 ----


def importance_ratio(log_ratio: Array) -> jax.Array:
  """Plain importance sampling, w = exp(log_ratio) (the authors' code: no_reshape).

  Value and derivative are capped at 5.5e34, so that float32 holds them: an advantage of 0 then
  gives 0, and any other a gradient so large that its update is skipped.
  """
  return jnp.exp(log_ratio - jax.lax.stop_gradient(jnp.maximum(log_ratio - _LARGEST, 0)))


def power(log_ratio: Array, exponent: float) -> jax.Array:
  """A power of w = exp(log_ratio); exponents below 1 draw it towards 1 (theirs: pow)."""
  return importance_ratio(exponent * log_ratio)


def log_probability(logp: Array, weight: float) -> Array:
  """Supervised learning, without a ratio: weight x log pi (theirs: logp)."""
  return weight * logp


def ratio_plus_log(logp: Array, log_ratio: Array, weight: float) -> Array:
  """Importance sampling plus supervised learning: w + weight x log pi (theirs: p_logp)."""
  return importance_ratio(log_ratio) + log_probability(logp, weight)


def policy_shaping(log_ratio: Array, beta: float) -> jax.Array:
  """Policy shaping, f(w) = w / (w + beta) of w = exp(log_ratio) (LUFFY, arXiv:2504.14945).

  Written as a sigmoid, so that a ratio beyond float32 gives 1 and gradient 0
  instead of inf / inf. Its gradient by log w is beta w / (w + beta)^2: larger than
  w's own gradient, w, for w below sqrt(beta) - beta.
  """
  return jax.nn.sigmoid(log_ratio - jnp.log(beta))


def unit_slope(log_ratio: Array, beta: float) -> jax.Array:
  """`policy_shaping` times (1 + beta)^2 / beta.

  At w = 1 a replayed token has the same gradient as a fresh one.

  For beta = 0.1 its value is below 12.1, and its gradient by log w at most a quarter of that.
  """
  return policy_shaping(log_ratio, beta) * ((1 + beta) ** 2 / beta)


# By ObjectiveConfig.shaping: a function of logp, log_ratio and the ObjectiveConfig.
SHAPINGS: dict[str, Callable[[Array, Array, Any], Array]] = {
  'policy_shaping': lambda _, log_ratio, config: policy_shaping(log_ratio, config.beta),
  'unit_slope': lambda _, log_ratio, config: unit_slope(log_ratio, config.beta),
  'none': lambda _, log_ratio, __: importance_ratio(log_ratio),
  'power': lambda _, log_ratio, config: power(log_ratio, config.shaping_exponent),
  'log': lambda logp, _, config: log_probability(logp, config.shaping_weight),
  'ratio_plus_log': lambda logp, log_ratio, config: ratio_plus_log(
    logp, log_ratio, config.shaping_weight
  ),
}

# Their derivatives by logp at w = 1, on the host: what `replay_advantage` 'balanced' weighs by.
SLOPES: dict[str, Callable[[Any], float]] = {
  'policy_shaping': lambda config: config.beta / (1 + config.beta) ** 2,
  'unit_slope': lambda _: 1.0,
  'none': lambda _: 1.0,
  'power': lambda config: config.shaping_exponent,
  'log': lambda config: config.shaping_weight,
  'ratio_plus_log': lambda config: 1 + config.shaping_weight,
}


# ---- Fresh tokens: (term_BT, is_clipped_BT) ----


def ppo(
  logp_BT: Array, ratio_BT: Array, bounded_BT: Array, advantage_B1: Array, clip: Flag
) -> tuple[Array, Array]:
  """min(r A, clip(r) A) while `clip`, else r A: PPO's surrogate (arXiv:1707.06347).

  `bounded_BT` is clip(r). Returns (term_BT, is_clipped_BT), the latter true where clipping
  chose the term.
  """
  del logp_BT  # the gradient is that of the ratio
  is_clipped_BT = clip & (bounded_BT * advantage_B1 < ratio_BT * advantage_B1)
  return jnp.where(is_clipped_BT, bounded_BT, ratio_BT) * advantage_B1, is_clipped_BT


def dual_clip(
  term_BT: Array, is_clipped_BT: Array, advantage_B1: Array, clip: Flag, limit: float
) -> tuple[Array, Array]:
  """PPO's term, at least limit x A where A is negative: dual clip (arXiv:1912.09729).

  Takes and returns what `ppo` returns.
  """
  floor_B1 = limit * advantage_B1
  is_floored_BT = clip & (advantage_B1 < 0) & (term_BT < floor_B1)
  return jnp.where(is_floored_BT, floor_B1, term_BT), is_clipped_BT | is_floored_BT


def cispo(
  logp_BT: Array, ratio_BT: Array, bounded_BT: Array, advantage_B1: Array, clip: Flag
) -> tuple[Array, Array]:
  """A log pi times the ratio as a constant, clipped while `clip`: CISPO (arXiv:2506.13585).

  `bounded_BT` is clip(r). Returns (term_BT, is_clipped_BT), the latter true where the ratio was
  clipped.
  """
  is_clipped_BT = clip & (bounded_BT != ratio_BT)
  constant_BT = jax.lax.stop_gradient(jnp.where(is_clipped_BT, bounded_BT, ratio_BT))
  return constant_BT * advantage_B1 * logp_BT, is_clipped_BT


POLICY_LOSSES = {'ppo': ppo, 'cispo': cispo}  # by ObjectiveConfig.policy_loss


def is_outside(log_ratio_BT: Array, epsilon: float, epsilon_high: float) -> Array:
  """Where a ratio is below 1 - epsilon or above 1 + epsilon_high, whether clipped there or not."""
  return (log_ratio_BT < np.log1p(-epsilon)) | (log_ratio_BT > np.log1p(epsilon_high))


def tis_weight(trainer_logp: np.ndarray, sampler_logp: np.ndarray, limit: float) -> np.ndarray:
  """Truncated importance sampling: min(trainer's probability / sampler's, limit) of each token.

  Corrects for the sampler-trainer mismatch of a fresh token, in the step that wrote it
  (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; they take limit 2).
  float32 arrays of one shape, nats; limit > 0.
  """
  chex.assert_equal_shape([trainer_logp, sampler_logp])
  return np.exp(np.minimum(trainer_logp - sampler_logp, np.float32(np.log(limit))))


def within_second_moment(
  log_ratio_N: np.ndarray, advantage_N: np.ndarray, limit: float
) -> np.ndarray:
  """Which tokens a bound on the second moment of the ratios leaves in: M2PO (arXiv:2510.01161).

  It concerns tokens whose ratio has moved to where their advantage pushes it, A > 0 and r > 1 or
  A < 0 and r < 1. Of these the ones of the largest (log r)^2 are left out, as few as bring the mean
  of (log r)^2 over the others to at most `limit`. All others stay.

  float32 arrays of one shape, log-ratios in nats; limit > 0. Returns bool.
  """
  chex.assert_rank([log_ratio_N, advantage_N], 1)
  chex.assert_equal_shape([log_ratio_N, advantage_N])
  place_M = np.flatnonzero(log_ratio_N * advantage_N > 0)
  square_M = np.square(log_ratio_N[place_M], dtype=np.float64)
  ascending_M = np.argsort(square_M, kind='stable')
  mean_M = np.cumsum(square_M[ascending_M]) / np.arange(1, len(place_M) + 1)  # never falls
  stays_N = np.ones(len(log_ratio_N), bool)
  stays_N[place_M[ascending_M[mean_M > limit]]] = False
  return stays_N


# ---- Sums over a row, and KL ----


def row_sums(x_BT: Array, segment_BT: Array) -> jax.Array:
  """The sum of x over the tokens of each token's row: [B, T] -> [B, T].

  Args:
    x_BT: float32.
    segment_BT: int32 in 0 … T, equal for tokens of one row. A sequence may hold several rows.
  """
  chex.assert_rank([x_BT, segment_BT], 2)
  chex.assert_equal_shape([x_BT, segment_BT])

  def sums(x_T: Array, segment_T: Array) -> jax.Array:
    return jax.ops.segment_sum(x_T, segment_T, len(segment_T) + 1)[segment_T]

  return jax.vmap(sums)(x_BT, segment_BT)


def row_means(x_BT: Array, mask_BT: Array, segment_BT: Array) -> jax.Array:
  """The mean of x over the tokens of each token's row; see `row_sums`.

  `x_BT` is 0 outside the float32 mask, which is 1 where a token counts; a row in which none does
  has mean 0.
  """
  return row_sums(x_BT, segment_BT) / jnp.maximum(row_sums(mask_BT, segment_BT), 1)


def k3(log_ratio_BT: Array) -> jax.Array:
  """KL(policy, reference) by Schulman's k3, from log(reference / policy): at least 0, in nats.

  Unbiased under the policy's own samples (http://joschu.net/blog/kl-approx.html).
  """
  return jnp.exp(log_ratio_BT) - log_ratio_BT - 1
