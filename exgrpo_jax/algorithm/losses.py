"""Per-token terms of the objective: one small pure function per published method.

r is the importance ratio of a fresh token, w is the ratio of a replayed token, and A is the
advantage of the token's row. Arrays are broadcast, so they may have one value per token ([B, T]) or
per row ([B, 1]).
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.datatypes import Array

Flag = bool | jax.Array  # a bool scalar, traced or not

# In nats. exp(80) = 5.5e34 leaves room in float32 for every factor that a loss applies to it.
_LARGEST = 80.0


# ---- Replayed tokens: the term for an advantage of 1 ----


def importance_ratio(log_ratio: Array) -> jax.Array:
  """Return w = exp(log_ratio): plain importance sampling (no_reshape in the authors' code).

  The value and derivative are capped at 5.5e34 to stay finite in float32, so a capped ratio times
  an advantage of 0 is 0. Any other advantage gives a gradient so large that the update is skipped.
  """
  return jnp.exp(log_ratio - jax.lax.stop_gradient(jnp.maximum(log_ratio - _LARGEST, 0)))


def policy_shaping(log_ratio: Array, beta: float) -> jax.Array:
  """Return f(w) = w / (w + beta), w = exp(log_ratio): policy shaping (LUFFY, arXiv:2504.14945).

  Computed as a sigmoid, so that ratios too large for float32 give a value of 1 and a gradient of 0
  instead of inf / inf. The gradient with respect to log w is beta w / (w + beta)^2. For
  w < sqrt(beta) - beta, this gradient is larger than w, the gradient without shaping.

  >>> [round(float(policy_shaping(np.log(w), beta=0.1)), 2) for w in (0.1, 1, 10)]
  [0.5, 0.91, 0.99]
  """
  return jax.nn.sigmoid(log_ratio - jnp.log(beta))


def unit_slope(log_ratio: Array, beta: float) -> jax.Array:
  """Return `policy_shaping` times (1 + beta)^2 / beta.

  A replayed token at w = 1 then has the same gradient as a fresh token at r = 1. For beta = 0.1,
  the value is below 12.1, and the gradient with respect to log w is at most 12.1 / 4.

  >>> round(float(jax.grad(unit_slope)(0.0, 0.1)), 3)
  1.0
  """
  return policy_shaping(log_ratio, beta) * ((1 + beta) ** 2 / beta)


# ObjectiveConfig.shaping -> a function of logp, log_ratio and the ObjectiveConfig.
SHAPINGS: dict[str, Callable[[Array, Array, Any], Array]] = {
  'policy_shaping': lambda _, log_ratio, config: policy_shaping(log_ratio, config.beta),
  'unit_slope': lambda _, log_ratio, config: unit_slope(log_ratio, config.beta),
  'none': lambda _, log_ratio, __: importance_ratio(log_ratio),
  # w ** exponent (the authors' code: pow). Exponents below 1 move the result toward 1.
  'power': lambda _, log_ratio, config: importance_ratio(config.shaping_exponent * log_ratio),
  # Supervised learning without a ratio (the authors' code: logp).
  'log': lambda logp, _, config: config.shaping_weight * logp,
  # Importance sampling plus supervised learning (the authors' code: p_logp).
  'ratio_plus_log': lambda logp, log_ratio, config: (
    importance_ratio(log_ratio) + config.shaping_weight * logp
  ),
}


# ---- Fresh tokens: (term_BT, is_clipped_BT) ----


def ppo(
  logp_BT: Array, ratio_BT: Array, bounded_BT: Array, advantage_B1: Array, clip: Flag
) -> tuple[Array, Array]:
  """Return min(r A, clip(r) A) if `clip` is set, else r A: PPO's surrogate (arXiv:1707.06347).

  `bounded_BT` is clip(r). is_clipped_BT is True where the clipped ratio is used.

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
  """Bound PPO's term from below by limit x A where A is negative: dual clip (arXiv:1912.09729).

  Takes the pair (term_BT, is_clipped_BT) from `ppo` and returns it with the bound applied.

  >>> ppo_terms = np.array([[-9.0, -2.0]]), np.array([[False, False]])
  >>> term_BT, is_clipped_BT = dual_clip(*ppo_terms, np.array([[-1.0]]), clip=True, limit=3.0)
  >>> term_BT.tolist(), is_clipped_BT.tolist()
  ([[-3.0, -2.0]], [[True, False]])
  """
  floor_B1 = limit * advantage_B1
  is_floored_BT = clip & (advantage_B1 < 0) & (term_BT < floor_B1)
  return jnp.where(is_floored_BT, floor_B1, term_BT), is_clipped_BT | is_floored_BT


def cispo(
  logp_BT: Array, ratio_BT: Array, bounded_BT: Array, advantage_B1: Array, clip: Flag
) -> tuple[Array, Array]:
  """Return r A log pi, with r clipped if `clip` is set: CISPO (arXiv:2506.13585).

  No gradient flows through the ratio. `bounded_BT` is clip(r). is_clipped_BT is True where the
  clipped ratio is used.
  """
  is_clipped_BT = clip & (bounded_BT != ratio_BT)
  constant_BT = jax.lax.stop_gradient(jnp.where(is_clipped_BT, bounded_BT, ratio_BT))
  return constant_BT * advantage_B1 * logp_BT, is_clipped_BT


POLICY_LOSSES = {'ppo': ppo, 'cispo': cispo}  # by ObjectiveConfig.policy_loss


def tis_weight(trainer_logp: np.ndarray, sampler_logp: np.ndarray, limit: float) -> np.ndarray:
  """Return min(trainer probability / sampler probability, limit) for each token.

  Truncated importance sampling corrects for the mismatch between sampler and trainer on fresh
  tokens, in the step that sampled them. Yao et al. (2025) use a limit of 2
  (https://fengyao.notion.site/off-policy-rl). The arrays are float32, in nats, and have equal
  shapes; `limit` is positive.

  >>> trainer, sampler = np.log(np.float32([[0.6, 0.9], [0.3, 0.3]]))
  >>> tis_weight(trainer, sampler, limit=2.5).round(2).tolist()
  [2.0, 2.5]
  """
  chex.assert_equal_shape([trainer_logp, sampler_logp])
  return np.exp(np.minimum(trainer_logp - sampler_logp, np.float32(np.log(limit))))


def within_second_moment(
  log_ratio_N: np.ndarray, advantage_N: np.ndarray, limit: float
) -> np.ndarray:
  """Mark the tokens to keep under M2PO's bound on the ratios' second moment (arXiv:2510.01161).

  The bound applies to tokens whose ratio has moved in the direction of their advantage: A > 0 and
  r > 1, or A < 0 and r < 1. Among these tokens, those with the largest (log r)^2 are dropped until
  the mean of (log r)^2 over the rest is at most `limit`. All other tokens are kept.

  The arrays are float32 [N], with log-ratios in nats; `limit` is positive. Returns bool [N].

  >>> within_second_moment(np.float32([0.1, 0.3, -0.9]), np.ones(3), limit=0.04).tolist()
  [True, False, True]
  """
  chex.assert_rank([log_ratio_N, advantage_N], 1)
  chex.assert_equal_shape([log_ratio_N, advantage_N])
  place_M = np.flatnonzero(log_ratio_N * advantage_N > 0)
  square_M = np.square(log_ratio_N[place_M], dtype=np.float64)
  ascending_M = np.argsort(square_M, kind='stable')
  mean_M = np.cumsum(square_M[ascending_M]) / np.arange(1, len(place_M) + 1)  # nondecreasing
  stays_N = np.ones(len(log_ratio_N), bool)
  stays_N[place_M[ascending_M[mean_M > limit]]] = False
  return stays_N


# ---- Row sums and KL ----


def row_sums(x_BT: Array, segment_BT: Array) -> jax.Array:
  """Compute, for each token, the sum of x over the tokens of its row: [B, T] -> [B, T].

  `x_BT` is float32. `segment_BT` contains the number of each token's row, int32 in 0 … 2 T. A
  sequence may contain several rows. Numbers may exceed T because shared prompts are numbered too.

  >>> row_sums(jnp.array([[1.0, 2.0, 5.0]]), jnp.array([[0, 0, 1]])).tolist()
  [[3.0, 3.0, 5.0]]
  """
  chex.assert_rank([x_BT, segment_BT], 2)
  chex.assert_equal_shape([x_BT, segment_BT])

  def sums(x_T: Array, segment_T: Array) -> jax.Array:
    return jax.ops.segment_sum(x_T, segment_T, 2 * len(segment_T) + 1)[segment_T]

  return jax.vmap(sums)(x_BT, segment_BT)


def row_means(x_BT: Array, mask_BT: Array, segment_BT: Array) -> jax.Array:
  """Compute, for each token, the mean of x over the tokens of its row; see `row_sums`.

  The float32 mask is 1 for the tokens to average; `x_BT` must be 0 elsewhere. A row with an empty
  mask has mean 0.
  """
  return row_sums(x_BT, segment_BT) / jnp.maximum(row_sums(mask_BT, segment_BT), 1)


def k3(log_ratio_BT: Array) -> jax.Array:
  """Estimate KL(policy, reference) with Schulman's k3 from log(reference / policy), in nats.

  The estimate is never negative. It is unbiased if the policy sampled the tokens
  (http://joschu.net/blog/kl-approx.html).

  >>> [round(float(k3(np.log(ratio))), 2) for ratio in (0.5, 1, 2)]
  [0.19, 0.0, 0.31]
  """
  return jnp.exp(log_ratio_BT) - log_ratio_BT - 1
