"""A minibatch to try the objective on, and the loss of docs/algorithm.md in plain NumPy."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax import packing
from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.policy import model

LIMIT = 11  # the configured response limit
PAPER = objective.ObjectiveConfig(clip_schedule='always', entropy_bonus=0.0)
# Every option that changes a token's loss, in as few programs as possible.
VARIANTS = {
  'paper': {},
  'unshaped_token_mean': dict(shaping='none', aggregation='token_mean'),
  'unit_slope': dict(shaping='unit_slope', beta=0.3),
  'power': dict(shaping='power', shaping_exponent=0.25),
  'log': dict(shaping='log', shaping_weight=0.3),
  'ratio_plus_log_uncorrected': dict(shaping='ratio_plus_log', importance_correction=False),
  'sequence_mean_entropy_kl': dict(
    aggregation='sequence_mean', entropy_bonus=0.3, kl_coefficient=0.7
  ),
  'clip_higher_and_dual': dict(clip_epsilon_high=0.5, dual_clip=1.5),
  'cispo': dict(policy_loss='cispo'),
  'gspo': dict(importance_level='sequence', aggregation='sequence_mean'),
  'product': dict(importance_level='product'),
  'all': dict(
    importance_level='sequence',
    policy_loss='cispo',
    clip_epsilon_high=0.3,
    entropy_bonus=0.3,
    kl_coefficient=0.7,
    tis_limit=1.2,
    old_logprobs='recompute',
  ),
}
# Whether fresh ratios are clipped, and whether it is the step's first minibatch.
CLIP_AND_FIRST = list(itertools.product((True, False), repeat=2))


def large_passes():
  """A context: passes as large as the budget, in sequences of the longest row at any count."""
  return mock.patch.multiple(packing, _PASSES=1, _PAIRED=0, _GROUPED=0)


def changed(**values):
  """The paper's Config with these values."""
  return dataclasses.replace(PAPER, **values)


@functools.cache
def loss_and_gradient(config):
  """(logp, entropy, inputs, clip, is_first) -> ((loss, sums), gradients by logp and entropy)."""
  loss = functools.partial(objective.token_loss, config=config)
  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def random_batch(seed=0, length=9):
  """(logp_BT, entropy_BT, batch, reference_logp_BT): 8 rows, 2 replayed, 1 with an empty mask."""
  rng = np.random.default_rng(seed)
  spans = [(2, 9), (3, 5), (1, 9), (4, 8), (2, 3), (5, 9), (3, 3), (1, 7)]
  mask = np.zeros((len(spans), length), np.float32)
  for row, (start, stop) in enumerate(spans):
    mask[row, start:stop] = 1
  mask[0, 4] = 0  # a token that the policy did not sample, such as a tool's output
  logp = -rng.gamma(1.0, 1.0, mask.shape).astype(np.float32)
  behaviour_logp = (logp + rng.normal(0, 0.5, mask.shape)).astype(np.float32) * mask
  entropy = rng.gamma(1.0, 1.0, mask.shape).astype(np.float32)
  is_replay = np.array([0, 0, 1, 0, 1, 0, 0, 0], bool)
  term_weight = rng.uniform(0.5, 2, mask.shape).astype(np.float32)
  term_weight[is_replay] = term_weight[is_replay] > 1  # `objective.m2po_threshold`
  reference_logp = (logp + rng.normal(0, 0.3, mask.shape)).astype(np.float32)
  batch = Batch(
    tokens_BT=rng.integers(0, 13, mask.shape).astype(np.int32),
    response_mask_BT=mask,
    old_logp_BT=behaviour_logp,
    advantage_B=rng.normal(size=len(spans)).astype(np.float32),
    is_replay_B=is_replay,
    policy_step_B=np.zeros(len(spans), np.int32),
    term_weight_BT=term_weight,
  )
  return logp, entropy, batch, reference_logp


def with_carried(batch):
  """The batch with tokens of its fresh rows carried into the step: whole rows, starts and none."""
  count_B = np.array([9, 4, 0, 6, 0, 9, 9, 0])
  is_carried = (np.arange(batch.tokens_BT.shape[1]) < count_B[:, None]) & (
    batch.response_mask_BT > 0
  )
  return dataclasses.replace(batch, is_carried_BT=is_carried)


def inputs_of(batch, config, logp, reference_logp, first):
  """`objective.loss_inputs`, with what passes over whole rows add before an update."""
  inputs, row = objective.loss_inputs(batch, config, LIMIT), np.ones(logp.shape, int)
  return inputs._replace(
    reference_logp_BT=reference_logp if config.kl_coefficient else None,
    row_log_ratio_BT=np.asarray(objective.row_log_ratio(logp, inputs, row, config, first))
    if config.importance_level != 'token'
    else None,
  )


def formula(
  logp, entropy, batch, reference_logp, config, *, clip, first, constant, max_response=LIMIT
):
  """The loss, row by row and token by token in float64.

  `constant` is what a stop_gradient sees of logp: logp itself for the value of the loss, and logp
  before the perturbation when the loss is differentiated numerically.
  """
  logp, constant, behaviour_logp = (
    np.asarray(x, np.float64) for x in (logp, constant, batch.old_logp_BT)
  )
  positions = list(zip(*np.nonzero(batch.response_mask_BT)))
  carried = np.zeros(logp.shape, bool) if batch.is_carried_BT is None else batch.is_carried_BT
  gap = constant - np.where(first & ~carried, constant, behaviour_logp)  # of fresh rows
  total, kl, num_own = 0.0, 0.0, 0
  for b, t in positions:
    advantage = float(batch.advantage_B[b])
    response = [s for row, s in positions if row == b]
    if batch.is_replay_B[b]:
      past = constant if first and not config.importance_correction else behaviour_logp
      ratio = np.exp(logp[b, t] - past[b, t])
      shaped = {
        'policy_shaping': ratio / (ratio + config.beta),
        'unit_slope': ratio / (ratio + config.beta) * (1 + config.beta) ** 2 / config.beta,
        'none': ratio,
        'power': ratio**config.shaping_exponent,
        'log': config.shaping_weight * logp[b, t],
        'ratio_plus_log': ratio + config.shaping_weight * logp[b, t],
      }
      term = advantage * shaped[config.shaping]
    else:
      frozen = {
        'token': gap[b, t],
        'sequence': np.mean([gap[b, s] for s in response]),
        'product': sum(gap[b, s] for s in response),
      }[config.importance_level]
      # The value is the row's, the gradient the token's.
      ratio = np.exp(frozen + logp[b, t] - constant[b, t])
      low, high = 1 - config.clip_epsilon, 1 + config.clip_epsilon_high
      if config.policy_loss == 'cispo':
        ratio = np.exp(frozen)
        term = (min(max(ratio, low), high) if clip else ratio) * advantage * logp[b, t]
      else:
        term = ratio * advantage
        if clip:
          term = min(term, min(max(ratio, low), high) * advantage)
          if advantage < 0:
            term = max(term, config.dual_clip * advantage)
      if not carried[b, t]:
        from_reference = float(reference_logp[b, t]) - logp[b, t]
        kl += np.exp(from_reference) - from_reference - 1
        num_own += 1
    term *= float(batch.term_weight_BT[b, t])
    divisors = {
      'constant': len(logp) * max_response,
      'token_mean': len(positions),
      'sequence_mean': len(logp) * len(response),
    }
    total -= term / divisors[config.aggregation]
  total -= config.entropy_bonus * np.mean([float(entropy[b, t]) for b, t in positions])
  return total + config.kl_coefficient * kl / num_own


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@functools.partial(jax.value_and_grad, argnums=3)
def on_all_logits(config, settings, policy_of, trained, batch, constants):
  """(loss, gradient) of docs/algorithm.md at the first minibatch, from all logits at once.

  Fresh tokens have r = 1, replayed ones f(w).

  Args:
    config: a model.ShapeConfig.
    settings: (beta, weight of the entropy, that of the KL, tokens of the longest response).
    policy_of: a function of the first of `constants` and `trained`: the policy's parameters.
    trained: what the gradient is taken by.
    batch: the minibatch; its mask says which tokens are the policy's own.
    constants: the frozen base or None, and the reference's log-probabilities [B, T] or None.
  """
  (beta, bonus, of_kl, max_response), (base, reference_BT) = settings, constants
  params, mask_BT = policy_of(base, trained), batch.response_mask_BT[:, 1:]
  hidden_BTD = model.hidden_states(config, params, batch.tokens_BT)
  logp_BTV = jax.nn.log_softmax(hidden_BTD[:, :-1] @ model.unembedding(config, params))
  logp_BT = jnp.take_along_axis(logp_BTV, batch.tokens_BT[:, 1:, None], axis=-1)[..., 0]
  entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
  is_replay_B1 = batch.is_replay_B[:, None]
  w_BT = jnp.exp(logp_BT - batch.old_logp_BT[:, 1:])
  fresh_BT = jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
  term_BT = jnp.where(is_replay_B1, w_BT / (w_BT + beta), fresh_BT) * batch.advantage_B[:, None]
  loss = -(mask_BT * term_BT).sum() / (len(mask_BT) * max_response)
  loss -= bonus * (mask_BT * entropy_BT).sum() / mask_BT.sum()
  if of_kl:
    gap_BT = reference_BT[:, 1:] - logp_BT
    fresh_BT = mask_BT * ~is_replay_B1
    loss += of_kl * (fresh_BT * (jnp.exp(gap_BT) - gap_BT - 1)).sum() / fresh_BT.sum()
  return loss


def norm(tree):
  """The norm of a tree of arrays, in float64."""
  return float(np.sqrt(sum((np.float64(x) ** 2).sum() for x in jax.tree.leaves(tree))))


def fused_example(name, temperature, width=13, vocabulary=13):
  """(config, arguments) of a variant, for `logprobs.fused_loss`.

  The arguments are hidden_BWD, unembedding_DV, target_BW and LossInputs of a window W that begins
  at token 1. The behaviour policy is near the one given by the hidden states.
  """
  config, rng = changed(**VARIANTS[name]), np.random.default_rng(7)
  *_, batch, _ = random_batch()
  hidden = rng.normal(size=(8, 8, width)).astype(np.float32)
  unembedding = rng.normal(size=(width, vocabulary)).astype(np.float32)
  logits = hidden @ unembedding / temperature
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  logp = np.take_along_axis(logp, batch.tokens_BT[:, 1:, None], -1)[..., 0]
  logp = np.pad(logp, ((0, 0), (1, 0)))
  behaviour_logp, reference_logp = (
    (logp + rng.normal(0, 0.4, logp.shape)).astype(np.float32) for _ in range(2)
  )
  batch = dataclasses.replace(batch, old_logp_BT=behaviour_logp * batch.response_mask_BT)
  inputs = jax.tree.map(lambda x: x[:, 1:], inputs_of(batch, config, logp, reference_logp, False))
  return config, (hidden, unembedding, batch.tokens_BT[:, 1:], inputs)
