"""Terms that one token adds to the objective: one small function per published method. Pure.

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


# Nats. exp(80) = 5.5e34 stays within float32 after everything a loss multiplies it by.
_LARGEST = 80.0


# ---- Replayed tokens: the term for an advantage of 1 ----


def importance_ratio(log_ratio: Array) -> jax.Array:
  """Return w = exp(log_ratio): plain importance sampling (the authors' code: no_reshape).

  Value and derivative are capped at 5.5e34 so that float32 holds them. An advantage of 0 then gives
  0. Any other advantage gives a gradient so large that its update is skipped.
  """
  return jnp.exp(log_ratio - jax.lax.stop_gradient(jnp.maximum(log_ratio - _LARGEST, 0)))


def power(log_ratio: Array, exponent: float) -> jax.Array:
  """Return a power of w = exp(log_ratio). Exponents below 1 move it towards 1 (theirs: pow).

  >>> round(float(power(np.log(4), 0.5)), 3)
  2.0
  """
  return importance_ratio(exponent * log_ratio)


def log_probability(logp: Array, weight: float) -> Array:
  """Return weight x log pi: supervised learning without a ratio (theirs: logp)."""
  return weight * logp


def ratio_plus_log(logp: Array, log_ratio: Array, weight: float) -> Array:
  """Add weight x log pi to w: importance sampling plus supervised learning (theirs: p_logp)."""
  return importance_ratio(log_ratio) + log_probability(logp, weight)


def policy_shaping(log_ratio: Array, beta: float) -> jax.Array:
  """Return f(w) = w / (w + beta), w = exp(log_ratio): policy shaping (LUFFY, arXiv:2504.14945).

  It is written as a sigmoid, so that a ratio beyond float32 gives 1 and gradient 0 instead of inf /
  inf. The gradient by log w is beta w / (w + beta)^2. It is larger than w, the gradient of w
  itself, for w below sqrt(beta) - beta.

  >>> [round(float(policy_shaping(np.log(w), beta=0.1)), 2) for w in (0.1, 1, 10)]
  [0.5, 0.91, 0.99]
  """
  return jax.nn.sigmoid(log_ratio - jnp.log(beta))


def unit_slope(log_ratio: Array, beta: float) -> jax.Array:
  """Return `policy_shaping` times (1 + beta)^2 / beta.

  At w = 1 a replayed token then has the same gradient as a fresh one. For beta = 0.1 the value is
  below 12.1, and the gradient by log w is at most a quarter of 12.1.

  >>> round(float(jax.grad(unit_slope)(0.0, 0.1)), 3)
  1.0
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

# Their derivatives by logp at w = 1, on the host: the weights of `replay_advantage` 'balanced'.
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
  """Return min(r A, clip(r) A) while `clip`, else r A: PPO's surrogate (arXiv:1707.06347).

  `bounded_BT` is clip(r). Returns (term_BT, is_clipped_BT). The flag is True where clipping chose
  the term.

  >>> ratio_BT, advantage_B1 = np.array([[1.5, 0.5]]), np.array([[1.0]])
  >>> term_BT, is_clipped_BT = ppo(0, ratio_BT, ratio_BT.clip(0.75, 1.25), advantage_B1, clip=True)
  >>> term_BT.tolist(), is_clipped_BT.tolist()
  ([[1.25, 0.5]], [[True, False]])
  """
  del logp_BT  # the gradient flows through the ratio
  is_clipped_BT = clip & (bounded_BT * advantage_B1 < ratio_BT * advantage_B1)
  return jnp.where(is_clipped_BT, bounded_BT, ratio_BT) * advantage_B1, is_clipped_BT


def dual_clip(
  term_BT: Array, is_clipped_BT: Array, advantage_B1: Array, clip: Flag, limit: float
) -> tuple[Array, Array]:
  """Bound PPO's term below by limit x A where A is negative: dual clip (arXiv:1912.09729).

  Takes (term_BT, is_clipped_BT) from `ppo` and returns the same pair.

  >>> of_ppo = np.array([[-9.0, -2.0]]), np.array([[False, False]])
  >>> term_BT, is_clipped_BT = dual_clip(*of_ppo, np.array([[-1.0]]), clip=True, limit=3.0)
  >>> term_BT.tolist(), is_clipped_BT.tolist()
  ([[-3.0, -2.0]], [[True, False]])
  """
  floor_B1 = limit * advantage_B1
  is_floored_BT = clip & (advantage_B1 < 0) & (term_BT < floor_B1)
  return jnp.where(is_floored_BT, floor_B1, term_BT), is_clipped_BT | is_floored_BT


def cispo(
  logp_BT: Array, ratio_BT: Array, bounded_BT: Array, advantage_B1: Array, clip: Flag
) -> tuple[Array, Array]:
  """Return A log pi times the ratio as a constant, clipped if `clip`: CISPO (arXiv:2506.13585).

  `bounded_BT` is clip(r). Returns (term_BT, is_clipped_BT). The flag is True where the ratio was
  clipped.
  """
  is_clipped_BT = clip & (bounded_BT != ratio_BT)
  constant_BT = jax.lax.stop_gradient(jnp.where(is_clipped_BT, bounded_BT, ratio_BT))
  return constant_BT * advantage_B1 * logp_BT, is_clipped_BT


POLICY_LOSSES = {'ppo': ppo, 'cispo': cispo}  # by ObjectiveConfig.policy_loss


def is_outside(log_ratio_BT: Array, epsilon: float, epsilon_high: float) -> Array:
  """Return True where a ratio is below 1 - epsilon or above 1 + epsilon_high, clipped or not.

  >>> is_outside(np.log([0.7, 1.0, 1.3]), epsilon=0.2, epsilon_high=0.4).tolist()
  [True, False, False]
  """
  return (log_ratio_BT < np.log1p(-epsilon)) | (log_ratio_BT > np.log1p(epsilon_high))


def tis_weight(trainer_logp: np.ndarray, sampler_logp: np.ndarray, limit: float) -> np.ndarray:
  """Return min(trainer's probability / sampler's probability, limit) of each token.

  Truncated importance sampling corrects the sampler-trainer mismatch of a fresh token in the step
  that wrote it (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; they take limit 2).
  float32 arrays of one shape, nats; limit > 0.

  >>> trainer, sampler = np.log(np.float32([[0.6, 0.9], [0.3, 0.3]]))
  >>> tis_weight(trainer, sampler, limit=2.5).round(2).tolist()
  [2.0, 2.5]
  """
  chex.assert_equal_shape([trainer_logp, sampler_logp])
  return np.exp(np.minimum(trainer_logp - sampler_logp, np.float32(np.log(limit))))


def within_second_moment(
  log_ratio_N: np.ndarray, advantage_N: np.ndarray, limit: float
) -> np.ndarray:
  """Mark the tokens that M2PO's bound on the ratios' second moment keeps (arXiv:2510.01161).

  The bound concerns tokens whose ratio has moved to where their advantage pushes it: A > 0 and r >
  1, or A < 0 and r < 1. Among these, the tokens with the largest (log r)^2 are left out, as few as
  bring the mean of (log r)^2 over the others to at most `limit`. All other tokens stay.

  float32 arrays of one shape, log-ratios in nats; limit > 0. Returns bool.

  >>> within_second_moment(np.float32([0.1, 0.3, -0.9]), np.ones(3), limit=0.04).tolist()
  [True, False, True]
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
  """Sum x over the tokens of each token's row: [B, T] -> [B, T].

  >>> row_sums(jnp.array([[1.0, 2.0, 5.0]]), jnp.array([[0, 0, 1]])).tolist()
  [[3.0, 3.0, 5.0]]

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
  """Average x over the tokens of each token's row; see `row_sums`.

  The float32 mask is 1 where a token counts, and `x_BT` is 0 elsewhere. A row without such tokens
  has mean 0.
  """
  return row_sums(x_BT, segment_BT) / jnp.maximum(row_sums(mask_BT, segment_BT), 1)


def k3(log_ratio_BT: Array) -> jax.Array:
  """Estimate KL(policy, reference) by Schulman's k3, from log(reference / policy), in nats.

  At least 0. Unbiased under the policy's own samples (http://joschu.net/blog/kl-approx.html).

  >>> [round(float(k3(np.log(ratio))), 2) for ratio in (0.5, 1, 2)]
  [0.19, 0.0, 0.31]
  """
  return jnp.exp(log_ratio_BT) - log_ratio_BT - 1
