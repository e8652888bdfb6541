"""The ExGRPO objective (arXiv:2510.02245, section 3). Pure functions.

The loss is the sum of weight x term over response tokens. The weights include all normalizers and
are computed for a whole optimizer minibatch (`loss_inputs`). Each term depends on a single token
(`token_loss`). So splitting a minibatch changes its sums and gradient only through rounding.

Deliberate departures from the authors' code (numbered as in docs/authors.md):
  1. Entropy is computed over response tokens only; their code includes padding.
  2. In a step's first minibatch, fresh tokens that the current policy sampled have a ratio of
     exactly 1, regardless of the sampler's rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.algorithm import losses
from exgrpo_jax.algorithm.losses import Flag
from exgrpo_jax.algorithm.settings import ObjectiveConfig
from exgrpo_jax.datatypes import Array, Batch


class LossInputs(NamedTuple):
  """All inputs to a token's loss except the current policy; normalizers are included.

  Tokens may be rearranged and split into parts: the losses of the parts add up to the minibatch's
  loss. After packing, B counts sequences that contain several rows each.
  """

  mask_BT: Array  # float32, `Batch.response_mask_BT`
  weight_BT: Array  # float32, weight in the policy term; all weights are 0 outside the mask
  entropy_weight_BT: Array  # float32, weight in the mean entropy
  kl_weight_BT: Array  # float32, weight in the mean KL; 0 for replayed and carried tokens
  old_logp_BT: Array  # float32, nats, `Batch.old_logp_BT`; 0 outside the mask
  term_weight_BT: Array  # float32, `Batch.term_weight_BT`
  advantage_BT: Array  # float32, advantage of the token's row
  is_replay_BT: Array  # bool, True for tokens of replayed rows
  is_carried_BT: Array | None = None  # bool, `Batch.is_carried_BT`
  # Computed by forward passes over whole rows before the update; None if not needed.
  reference_logp_BT: Array | None = None  # float32, nats; set if kl_coefficient > 0
  row_log_ratio_BT: Array | None = None  # `row_log_ratio`; set unless importance_level is 'token'


# ---- Before the update, on whole minibatches ----


def clips_fresh_ratios(config: ObjectiveConfig, replay_started: bool) -> bool:
  """Return True if this step clips fresh ratios.

  >>> clips_fresh_ratios(ObjectiveConfig(clip_schedule='until_replay'), replay_started=True)
  False
  """
  return {'always': True, 'never': False, 'until_replay': not replay_started}[config.clip_schedule]


def loss_inputs(batch: Batch, config: ObjectiveConfig, max_response: int) -> LossInputs:
  """Compute a minibatch's loss inputs with all normalizers; NumPy in, NumPy out.

  `batch` is the whole optimizer minibatch, because its rows and lengths determine the normalizers.
  `max_response` is the configured response limit, in tokens. The inputs are aligned with
  batch.tokens_BT. Callers may rearrange tokens and drop tokens with mask 0.
  """
  mask_BT, shape = np.asarray(batch.response_mask_BT), np.shape(batch.response_mask_BT)
  chex.assert_shape([batch.tokens_BT, batch.old_logp_BT, batch.term_weight_BT], shape)
  chex.assert_shape([batch.advantage_B, batch.is_replay_B], shape[:1])
  is_replay_BT = np.broadcast_to(np.asarray(batch.is_replay_B)[:, None], shape)
  is_past_BT = is_replay_BT if batch.is_carried_BT is None else is_replay_BT | batch.is_carried_BT
  return LossInputs(
    mask_BT=mask_BT,
    weight_BT=token_weights(mask_BT, config.aggregation, max_response),
    entropy_weight_BT=mean_weights(mask_BT),
    # Only tokens sampled in this step, because k3 is biased for tokens from other policies.
    kl_weight_BT=mean_weights(mask_BT * ~is_past_BT),
    # Both log-probabilities of a ratio are 0 outside the mask, so exp cannot overflow there.
    old_logp_BT=np.where(mask_BT > 0, batch.old_logp_BT, np.float32(0)),
    term_weight_BT=batch.term_weight_BT,
    advantage_BT=np.broadcast_to(np.asarray(batch.advantage_B)[:, None], shape),
    is_replay_BT=is_replay_BT,
    is_carried_BT=batch.is_carried_BT,
  )


def token_weights(mask_BT: np.ndarray, aggregation: str, max_response: int) -> np.ndarray:
  """Compute each token's weight in the policy term: [B, T] -> [B, T].

  'constant' is 1 / (B max_response), so lengths and grouping cause no bias (Dr. GRPO). 'token_mean'
  is 1 / (number of tokens in the minibatch) (DAPO). 'sequence_mean' is 1 / (B x length of the row)
  (GRPO).

  >>> token_weights(np.float32([[1, 1], [1, 0]]), 'sequence_mean', max_response=2).tolist()
  [[0.25, 0.25], [0.5, 0.0]]
  """
  chex.assert_rank(mask_BT, 2)
  num_rows = mask_BT.shape[0]
  if aggregation == 'constant':
    return mask_BT / np.float32(num_rows * max_response)
  if aggregation == 'token_mean':
    return mean_weights(mask_BT)
  length_B1 = mask_BT.sum(axis=1, keepdims=True)
  return mask_BT / (num_rows * np.maximum(length_B1, 1))


def mean_weights(mask_BT: np.ndarray) -> np.ndarray:
  """Compute each token's weight in a mean over all tokens of a minibatch: [B, T] -> [B, T].

  >>> mean_weights(np.float32([[1, 1, 1], [1, 0, 0]])).tolist()
  [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]
  """
  return mask_BT / np.maximum(mask_BT.sum(), 1)


def row_log_ratio(
  logp_BT: Array, inputs: LossInputs, segment_BT: Array, config: ObjectiveConfig, is_first: Flag
) -> jax.Array:
  """Sum the log-ratios over each token's row, or average them if the level is 'sequence': [B, T].

  Returns `LossInputs.row_log_ratio_BT`. `logp_BT` must come from a forward pass over whole rows.
  Rows without tokens get 0. `segment_BT` assigns tokens to rows; see `losses.row_sums`.
  """
  chex.assert_equal_shape([logp_BT, inputs.mask_BT, segment_BT])
  old_logp_BT = fresh_old_logp(logp_BT, inputs, is_first)
  gap_BT = jnp.where(inputs.mask_BT > 0, logp_BT - old_logp_BT, 0.0)
  if config.importance_level == 'sequence':
    return losses.row_means(gap_BT, inputs.mask_BT, segment_BT)
  return losses.row_sums(gap_BT, segment_BT)


def fresh_old_logp(current_logp_BT: Array, inputs: LossInputs, is_first: Flag) -> Array:
  """Return each fresh token's log-probability under the policy that sampled it, in nats: [B, T].

  In a step's first minibatch, this is `current_logp_BT` except for carried tokens, because the
  current policy sampled all other fresh tokens.
  """
  is_current = is_first if inputs.is_carried_BT is None else is_first & ~inputs.is_carried_BT
  return jnp.where(is_current, current_logp_BT, inputs.old_logp_BT)


# ---- Token losses ----


def shaped_ratios(logp_BT: Array, log_ratio_BT: Array, config: ObjectiveConfig) -> Array:
  """Shape the importance ratios of replayed tokens: f(w), the factor on the advantage."""
  return losses.SHAPINGS[config.shaping](logp_BT, log_ratio_BT, config)


def replay_slope(config: ObjectiveConfig) -> float:
  """Return d term / d log-probability of a replayed token at w = 1 and A = 1.

  For a fresh token at r = 1, this slope is 1. With `policy_shaping`, it is beta / (1 + beta)^2,
  which is 0.083 for beta = 0.1.

  >>> round(replay_slope(ObjectiveConfig(shaping='policy_shaping', beta=0.1)), 3)
  0.083
  """
  return float(jax.grad(lambda logp: shaped_ratios(logp, logp, config))(0.0))


def policy_terms(
  logp_BT: Array, log_ratio_BT: Array, inputs: LossInputs, clip: Flag, config: ObjectiveConfig
) -> tuple[Array, Array]:
  """Compute each token's term, which `token_loss` then multiplies by `inputs.weight_BT`.

  Fresh and replayed rows have different terms. Fresh ratios are clipped to
  [1 - clip_epsilon, 1 + clip_epsilon_high]. If clip_epsilon_high is larger than clip_epsilon, this
  is clip-higher (DAPO, arXiv:2503.14476). Returns (term_BT, is_clipped_BT). is_clipped_BT is True
  where clipping determined a fresh token's term.
  """
  is_replay_BT, advantage_BT = inputs.is_replay_BT, inputs.advantage_BT
  # Keep replayed ratios too large for float32 out of the fresh rows' exp, because 0 * inf is NaN.
  exp = losses.importance_ratio if config.importance_level == 'product' else jnp.exp
  ratio_BT = exp(jnp.where(is_replay_BT, 0.0, log_ratio_BT))
  bounded_BT = jnp.clip(ratio_BT, 1 - config.clip_epsilon, 1 + config.clip_epsilon_high)
  surrogate = losses.POLICY_LOSSES[config.policy_loss]
  fresh_terms = surrogate(logp_BT, ratio_BT, bounded_BT, advantage_BT, clip)
  if config.dual_clip < float('inf'):
    fresh_terms = losses.dual_clip(*fresh_terms, advantage_BT, clip, config.dual_clip)
  fresh_term_BT, is_clipped_BT = fresh_terms
  shaped_BT = shaped_ratios(logp_BT, jnp.where(is_replay_BT, log_ratio_BT, 0.0), config)
  term_BT = jnp.where(is_replay_BT, shaped_BT * advantage_BT, fresh_term_BT)
  return inputs.term_weight_BT * term_BT, is_clipped_BT & ~is_replay_BT


def token_loss(
  logp_BT: Array,
  entropy_BT: Array,
  inputs: LossInputs,
  config: ObjectiveConfig,
  *,
  clip: Flag,
  is_first: Flag,
  measures_kl: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Compute what a slice of tokens contributes to its minibatch's loss and metric sums.

  With importance_level 'sequence' or 'product', a fresh token's ratio gets its value from the row
  and its gradient from the token's own log-probability. 'sequence' with aggregation 'sequence_mean'
  is exactly GSPO (arXiv:2507.18071): the gradient of a row with ratio s and length |o| is s A / |o|
  times the sum of the gradients of its tokens' log-probabilities. 'product' is importance sampling
  of whole responses. Without clipping, it is unbiased no matter which policy sampled the tokens.

  Args:
    logp_BT: the tokens' log-probabilities under the current policy at the sampling temperature,
      float32, in nats; ignored outside the response mask.
    entropy_BT: entropy of the current policy's next-token distribution, float32, in nats.
    inputs: any slice of the minibatch's loss inputs, aligned with these tokens.
    config: the loss terms and their coefficients.
    clip: True if fresh ratios are clipped in this step.
    is_first: True in the step's first minibatch.
    measures_kl: True to also return the sums of `_kl_sums`.

  Returns:
    (loss, sums), float32 scalars. Add up the losses of all slices, and combine the sums of slices
      and minibatches with `merge_sums`.
  """
  chex.assert_rank(logp_BT, 2)
  chex.assert_equal_shape([logp_BT, entropy_BT, inputs.mask_BT])
  is_token_BT, is_replay_BT = inputs.mask_BT > 0, inputs.is_replay_BT
  logp_BT = jnp.where(is_token_BT, logp_BT, 0.0)
  entropy_BT = jnp.where(is_token_BT, entropy_BT, 0.0)
  current_logp_BT = jax.lax.stop_gradient(logp_BT)
  if config.importance_level == 'token':
    fresh_log_ratio_BT = logp_BT - fresh_old_logp(current_logp_BT, inputs, is_first)
  else:  # the row's value with the gradient of the token's own log-probability
    fresh_log_ratio_BT = logp_BT - current_logp_BT + _require(inputs.row_log_ratio_BT)
  old_logp_BT = inputs.old_logp_BT
  # Without the correction, `stages.pick_replays` scored these rows with the step's initial policy.
  # As for fresh rows, the ratio is exactly 1 in the first minibatch, regardless of rounding.
  if not config.importance_correction:
    old_logp_BT = jnp.where(is_first, current_logp_BT, old_logp_BT)
  log_ratio_BT = jnp.where(is_replay_BT, logp_BT - old_logp_BT, fresh_log_ratio_BT)
  term_BT, is_clipped_BT = policy_terms(logp_BT, log_ratio_BT, inputs, clip, config)
  loss = -jnp.sum(inputs.weight_BT * term_BT)
  loss -= config.entropy_bonus * jnp.sum(inputs.entropy_weight_BT * entropy_BT)
  sums = _metric_sums(current_logp_BT, log_ratio_BT, entropy_BT, is_clipped_BT, inputs, config)
  if measures_kl:
    sums |= _kl_sums(current_logp_BT, inputs, is_first)
  if config.kl_coefficient > 0:
    gap_BT = _require(inputs.reference_logp_BT) - logp_BT
    kl_BT = losses.k3(jnp.where(inputs.kl_weight_BT > 0, gap_BT, 0.0))
    loss += config.kl_coefficient * jnp.sum(inputs.kl_weight_BT * kl_BT)
    sums['kl'] = kl_BT.sum()
  return loss, sums


def zero_sums(config: ObjectiveConfig, measures_kl: bool = False) -> dict[str, jax.Array]:
  """Return the sums of `token_loss` for an empty slice: all 0, including the *_max entries."""
  zero = jnp.zeros((1, 1))
  masks = dict.fromkeys(('is_replay_BT', 'is_carried_BT'), zero > 0)
  inputs = LossInputs(**dict.fromkeys(LossInputs._fields, zero) | masks)
  flags = {'clip': False, 'is_first': True, 'measures_kl': measures_kl}
  return token_loss(zero, zero, inputs, config, **flags)[1]


def _require(values: Array | None) -> Array:
  assert values is not None, 'requires a forward pass over whole rows before the update'
  return values


def _metric_sums(
  logp_BT: Array,
  log_ratio_BT: Array,
  entropy_BT: Array,
  is_clipped_BT: Array,
  inputs: LossInputs,
  config: ObjectiveConfig,
) -> dict[str, jax.Array]:
  replay_mask_BT = inputs.mask_BT * inputs.is_replay_BT
  fresh_mask_BT = inputs.mask_BT - replay_mask_BT
  log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT)
  ratio_BT = jnp.where(replay_mask_BT > 0, jnp.exp(log_ratio_BT), 0.0)
  shaped_BT = shaped_ratios(logp_BT, jnp.where(replay_mask_BT > 0, log_ratio_BT, 0.0), config)
  # A shaping function may return bfloat16, whose sums would be too coarse.
  shaped_BT = jnp.where(replay_mask_BT > 0, shaped_BT, jnp.float32(0))
  # Outside the clip range, whether or not ratios are clipped.
  low, high = np.log1p(-config.clip_epsilon), np.log1p(config.clip_epsilon_high)
  is_outside_BT = (log_ratio_BT < low) | (log_ratio_BT > high)
  # Tokens sampled in earlier steps, with per-token ratios at any `importance_level`.
  carried_BT, carried_ratio_BT = jnp.zeros((2, *logp_BT.shape))
  if inputs.is_carried_BT is not None:
    carried_BT = fresh_mask_BT * inputs.is_carried_BT
    carried_ratio_BT = jnp.where(carried_BT > 0, jnp.exp(logp_BT - inputs.old_logp_BT), 0.0)
  return {
    'tokens': inputs.mask_BT.sum(),
    'fresh_tokens': fresh_mask_BT.sum(),
    'replay_tokens': replay_mask_BT.sum(),
    'entropy': jnp.sum(entropy_BT),
    'clipped': jnp.sum(is_clipped_BT * fresh_mask_BT),
    'outside': jnp.sum(is_outside_BT * fresh_mask_BT),
    'ratio': ratio_BT.sum(),
    'ratio_squared': jnp.sum(ratio_BT**2),
    'ratio_max': ratio_BT.max(),
    'shaped': shaped_BT.sum(),
    'shaped_squared': jnp.sum(shaped_BT**2),
    'carried_tokens': carried_BT.sum(),
    'carried_ratio': carried_ratio_BT.sum(),
    'carried_ratio_max': carried_ratio_BT.max(),
    'carried_outside': jnp.sum(is_outside_BT * carried_BT),
  }


def _kl_sums(logp_BT: Array, inputs: LossInputs, is_first: Flag) -> dict[str, jax.Array]:
  """Sum ratios and k3 over tokens sampled in this step, to measure how far the policy has moved.

  The ratios are per token, whatever the `importance_level`.
  """
  log_ratio_BT = logp_BT - fresh_old_logp(logp_BT, inputs, is_first)
  is_new_BT = inputs.kl_weight_BT > 0
  # The old policy sampled the tokens, so k3 is unbiased. Unlike exp(x) - 1, expm1 is exact near 0.
  excess_BT = jnp.where(is_new_BT, jnp.expm1(log_ratio_BT), 0.0)
  return {
    'new_ratio': jnp.sum(is_new_BT * (1 + excess_BT)),
    'new_ratio_max': jnp.max(is_new_BT * (1 + excess_BT)),
    'approx_kl': jnp.sum(excess_BT - jnp.where(is_new_BT, log_ratio_BT, 0.0)),
  }


# ---- Sums over minibatches ----


# A single program, because a few dozen small ones would fill XLA:CPU's queue and block the host.
@jax.jit
def merge_sums(slices: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
  """Combine the sums of several slices: take the maximum of *_max entries and add up the others."""

  def merge(name: str) -> jax.Array:
    values = jnp.stack([sums[name] for sums in slices])
    return values.max(axis=0) if name.endswith('_max') else values.sum(axis=0)

  return {name: merge(name) for name in slices[0]}


def merge_epochs(by_epoch: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Combine the sums of a step's epochs on the host, by the same rules as `merge_sums`."""
  return {
    name: (np.max if name.endswith('_max') else np.sum)([sums[name] for sums in by_epoch], axis=0)
    for name in by_epoch[0]
  }


def approx_kl(sums: Mapping[str, Any]) -> Any:
  """Estimate KL(old policy, policy), in nats per token, from sums that include `_kl_sums`."""
  num_new = sums['fresh_tokens'] - sums['carried_tokens']
  return sums['approx_kl'] / (num_new + (num_new == 0))


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
  """Compute a step's loss metrics from the sums over its minibatches (host scalars).

  Omits the entropy if all rows are masked, the replay/ metrics if no token was replayed, and
  the staleness/ metrics if no token was carried over. The effective sample size is
  (sum w)^2 / (n sum w^2) over replayed tokens. It lies in (0, 1] and is 1 if all weights are equal.
  """
  num_tokens, num_fresh = sums['tokens'], max(sums['fresh_tokens'], 1)
  num_replayed, num_carried = sums['replay_tokens'], sums['carried_tokens']
  metrics = {
    'policy/clip_fraction': sums['clipped'] / num_fresh,
    'policy/outside_clip_range': sums['outside'] / num_fresh,
  }
  if num_tokens:
    metrics['entropy'] = sums['entropy'] / num_tokens
  if 'approx_kl' in sums:
    metrics['policy/ratio_mean'] = sums['new_ratio'] / max(sums['fresh_tokens'] - num_carried, 1)
    metrics['policy/ratio_max'] = sums['new_ratio_max']
    metrics['policy/approx_kl'] = approx_kl(sums)
  if 'kl' in sums:
    metrics['kl'] = sums['kl'] / max(num_fresh - num_carried, 1)
  if 'balance' in sums:
    metrics['experts/balance'] = sums['balance'] / sums['updates']
  if num_replayed:
    metrics['replay/ratio_mean'] = sums['ratio'] / num_replayed
    metrics['replay/ratio_max'] = sums['ratio_max']
    shaped_mean = metrics['replay/shaped_mean'] = sums['shaped'] / num_replayed
    # Rounding could make the variance negative.
    metrics['replay/shaped_variance'] = max(
      sums['shaped_squared'] / num_replayed - shaped_mean**2, 0.0
    )
    # The float32 squares of ratios above 1.8e19 are infinite; sum w^2 is at most max w * sum w.
    ratio_squared = max(min(sums['ratio_squared'], sums['ratio_max'] * sums['ratio']), 1e-30)
    metrics['replay/effective_sample_size'] = sums['ratio'] ** 2 / (num_replayed * ratio_squared)
  if num_carried:
    metrics['staleness/token_share'] = num_carried / num_fresh
    metrics['staleness/ratio_mean'] = sums['carried_ratio'] / num_carried
    metrics['staleness/ratio_max'] = sums['carried_ratio_max']
    metrics['staleness/outside_clip_range'] = sums['carried_outside'] / num_carried
  return metrics


def expert_metrics(choices_LE: np.ndarray) -> dict[str, float]:
  """Measure the experts' load balance from how often each expert was chosen in a step.

  'experts/load_max' is the load of a layer's busiest expert divided by the layer's mean load,
  averaged over layers. 'experts/unused' is the fraction of experts that were never chosen.

  >>> expert_metrics(np.array([[6, 2, 0, 0]]))
  {'experts/load_max': 3.0, 'experts/unused': 0.5}
  """
  even_L1 = np.maximum(choices_LE.mean(axis=1, keepdims=True), 1e-9)
  return {
    'experts/load_max': float(np.mean(np.max(choices_LE / even_L1, axis=1))),
    'experts/unused': float(np.mean(choices_LE == 0)),
  }
