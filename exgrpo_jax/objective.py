"""The objective of ExGRPO (arXiv:2510.02245, section 3) on one screen. Pure.

A loss is a sum over response tokens of weight x term. The weights hold every
normaliser and belong to the optimiser's minibatch; the terms see one token at a
time. So any split of a minibatch gives the same gradient, up to rounding.

Departures from the authors' code, each on purpose:
  1. Entropy is taken over response tokens only; theirs scores padding.
  2. Fresh rows have ratio 1 in a step's first minibatch by construction, whatever
     the sampler's rounding.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.config import setting
from exgrpo_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class Config:
  clip: str = setting(('until_replay', 'always', 'never'), "when fresh rows' ratios are clipped")
  clip_epsilon: float = setting('(0, 1)', 'fresh ratios are clipped to 1 - epsilon … 1 + epsilon')
  shaping: bool = setting(None, 'replayed rows weigh f(w) = w / (w + beta) instead of w')
  beta: float = setting('(0, inf)', 'the constant of the shaping f(w) = w / (w + beta)')
  normalize_std: bool = setting(None, 'divide advantages by the standard deviation of their group')
  aggregation: str = setting(('constant', 'token_mean', 'sequence_mean'),
                             'how the sum over tokens is normalised')
  entropy_bonus: float = setting('[0, inf)', 'coefficient of the mean token entropy, in nats')
  kl_coefficient: float = setting('[0, inf)', 'coefficient of KL(policy, reference), k3 estimator')
  old_logprobs: str = setting(('sampler', 'recompute'),
                              'who gives the log-probabilities of the policy that wrote a row')


def group_advantages(reward_QK: jax.Array, normalize_std: bool = False) -> jax.Array:
  """Reward minus the mean over one question's K rollouts.

  Dr. GRPO (arXiv:2503.20783), no division by the standard deviation unless
  asked for (GRPO, arXiv:2402.03300: population standard deviation plus 1e-6).
  float32 [Q, K] -> [Q, K]; a group of equal rewards gives 0.
  """
  chex.assert_rank(reward_QK, 2)
  advantage_QK = reward_QK - reward_QK.mean(axis=1, keepdims=True)
  if normalize_std:
    advantage_QK /= reward_QK.std(axis=1, keepdims=True) + 1e-6
  return advantage_QK


def shaped(log_ratio: jax.Array, beta: float) -> jax.Array:
  """f(w) = w / (w + beta) of w = exp(log_ratio): policy shaping (LUFFY, arXiv:2504.14945).

  Written as a sigmoid, so that a ratio beyond float32 gives 1 and gradient 0
  instead of inf / inf. Its gradient by log w is beta w / (w + beta)^2: larger than
  w's own gradient, w, for w below sqrt(beta) - beta.
  """
  return jax.nn.sigmoid(log_ratio - jnp.log(beta))


def policy_terms(logp_BT, old_logp_BT, advantage_B1, is_replay_B1, clip, config: Config):
  """What each token adds to the objective, before its weight.

  Fresh: min(r A, clip(r) A) while `clip` (bool scalar), else r A. Replayed: A f(w),
  never clipped. This `where` is the one place where the two kinds of rows part.

  Returns (term_BT, is_clipped_BT): the second is true where clipping chose the term.
  """
  log_ratio_BT = logp_BT - old_logp_BT
  ratio_BT = jnp.exp(log_ratio_BT)
  plain_BT = ratio_BT * advantage_B1
  bounded_BT = jnp.clip(ratio_BT, 1 - config.clip_epsilon, 1 + config.clip_epsilon) * advantage_B1
  is_clipped_BT = clip & (bounded_BT < plain_BT) & ~is_replay_B1
  fresh_BT = jnp.where(is_clipped_BT, bounded_BT, plain_BT)
  weight_BT = shaped(log_ratio_BT, config.beta) if config.shaping else ratio_BT
  return jnp.where(is_replay_B1, weight_BT * advantage_B1, fresh_BT), is_clipped_BT


def token_weights(mask_BT: jax.Array, aggregation: str, max_response: int) -> jax.Array:
  """The share of each token of a minibatch in its policy term: [B, T] -> [B, T].

  constant: 1 / (B max_response), so neither length nor grouping carries bias
  (Dr. GRPO); token_mean: 1 / tokens (DAPO); sequence_mean: 1 / (B own length) (GRPO).
  """
  num_rows = mask_BT.shape[0]
  if aggregation == 'constant':
    return mask_BT / (num_rows * max_response)
  if aggregation == 'token_mean':
    return _mean_weights(mask_BT)
  length_B1 = mask_BT.sum(axis=1, keepdims=True)
  return mask_BT / (num_rows * jnp.maximum(length_B1, 1))


def loss(logp_BT, entropy_BT, batch: Batch, config: Config, *, max_response: int, clip, is_first,
         reference_logp_BT=None):
  """The loss of one minibatch, and the sums that its metrics are made of.

  Args:
    logp_BT: float32, nats, of batch.tokens_BT under the current policy at the
      sampling temperature; what lies outside the response mask is ignored.
    entropy_BT: float32, nats, of the distribution each token was drawn from.
    batch: the minibatch.
    config: which terms, and how much of each.
    max_response: the configured response limit in tokens.
    clip: bool scalar, whether fresh ratios are clipped now.
    is_first: bool scalar, whether this is the step's first minibatch.
    reference_logp_BT: needed where config.kl_coefficient > 0.

  Returns:
    (loss, sums): a float32 scalar; float32 scalars to add over minibatches, except
    those named *_max.
  """
  chex.assert_equal_shape([logp_BT, entropy_BT, batch.tokens_BT, batch.behaviour_logp_BT])
  mask_BT = batch.response_mask_BT
  replay_B1 = batch.is_replay_B[:, None]
  # Outside the mask both log-probabilities are 0, so that no exp overflows there
  # and no 0 * inf poisons a gradient.
  logp_BT = jnp.where(mask_BT > 0, logp_BT, 0.)
  old_logp_BT = jnp.where(is_first & ~replay_B1, jax.lax.stop_gradient(logp_BT),
                          batch.behaviour_logp_BT)
  term_BT, is_clipped_BT = policy_terms(
      logp_BT, old_logp_BT, batch.advantage_B[:, None], replay_B1, clip, config)
  total = -jnp.sum(token_weights(mask_BT, config.aggregation, max_response) * term_BT)
  total -= config.entropy_bonus * jnp.sum(_mean_weights(mask_BT) * entropy_BT)
  fresh_mask_BT = mask_BT * ~replay_B1
  sums = _metric_sums(logp_BT - old_logp_BT, entropy_BT, is_clipped_BT, mask_BT, fresh_mask_BT)
  if config.kl_coefficient > 0:
    # On fresh rows only: k3 is unbiased under the current policy's own samples.
    log_ratio_BT = jnp.where(mask_BT > 0, reference_logp_BT, 0.) - logp_BT
    kl_BT = jnp.exp(log_ratio_BT) - log_ratio_BT - 1
    total += config.kl_coefficient * jnp.sum(_mean_weights(fresh_mask_BT) * kl_BT)
    sums['kl'] = jnp.sum(fresh_mask_BT * kl_BT)
  return total, sums


def metrics(sums: dict[str, float]) -> dict[str, float]:
  """Means over a step's tokens from the sums of its minibatches (host scalars).

  Without replayed tokens the replay/ values are absent. The effective sample size
  is (sum w)^2 / (n sum w^2) over replayed tokens, in (0, 1]: 1 for equal weights.
  """
  tokens, fresh, replayed = sums['tokens'], max(sums['fresh_tokens'], 1), sums['replay_tokens']
  values = {'entropy': sums['entropy'] / max(tokens, 1), 'clip_share': sums['clipped'] / fresh}
  if 'kl' in sums:
    values['kl'] = sums['kl'] / fresh
  if replayed:
    values['replay/ratio_mean'] = sums['ratio'] / replayed
    values['replay/ratio_max'] = sums['ratio_max']
    values['replay/effective_sample_size'] = sums['ratio']**2 / (
        replayed * max(sums['ratio_squared'], 1e-30))
  return values


def _mean_weights(mask_BT):
  return mask_BT / jnp.maximum(mask_BT.sum(), 1)


def _metric_sums(log_ratio_BT, entropy_BT, is_clipped_BT, mask_BT, fresh_mask_BT):
  replay_mask_BT = mask_BT - fresh_mask_BT
  ratio_BT = jax.lax.stop_gradient(jnp.exp(log_ratio_BT)) * replay_mask_BT
  return {
      'tokens': mask_BT.sum(), 'fresh_tokens': fresh_mask_BT.sum(),
      'replay_tokens': replay_mask_BT.sum(), 'entropy': jnp.sum(entropy_BT * mask_BT),
      'clipped': jnp.sum(is_clipped_BT * fresh_mask_BT), 'ratio': ratio_BT.sum(),
      'ratio_squared': jnp.sum(ratio_BT**2), 'ratio_max': ratio_BT.max()}
