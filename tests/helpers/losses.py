"""A minibatch to try the objective on, and DESIGN's formula for it without JAX."""

import numpy as np

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch

LIMIT = 11  # the configured response limit
PAPER = objective.Config(
  clip='always',
  clip_epsilon=0.2,
  clip_epsilon_high=0.2,
  dual_clip=float('inf'),
  surrogate='ppo',
  ratio='token',
  tis_limit=0.0,
  shaping=True,
  beta=0.1,
  normalize_std=False,
  aggregation='constant',
  entropy_bonus=0.0,
  kl_coefficient=0.0,
  old_logprobs='sampler',
)
# Every option that changes a token's loss, in few programs.
VARIANTS = {
  'paper': {},
  'unshaped_token_mean': dict(shaping=False, aggregation='token_mean'),
  'sequence_mean_entropy_kl': dict(
    aggregation='sequence_mean', entropy_bonus=0.3, kl_coefficient=0.7
  ),
  'clip_higher_and_dual': dict(clip_epsilon_high=0.5, dual_clip=1.5),
  'cispo': dict(surrogate='cispo'),
  'gspo': dict(ratio='sequence', aggregation='sequence_mean'),
  'all': dict(
    ratio='sequence',
    surrogate='cispo',
    clip_epsilon_high=0.3,
    entropy_bonus=0.3,
    kl_coefficient=0.7,
    tis_limit=1.2,
    old_logprobs='recompute',
  ),
}


def changed(**values):
  return objective.Config(**{**PAPER.__dict__, **values})


def random_batch(seed=0, length=9):
  """(logp_BT, entropy_BT, batch, reference_logp_BT): 8 rows, 2 replayed, 1 of an empty mask."""
  rng = np.random.default_rng(seed)
  spans = [(2, 9), (3, 5), (1, 9), (4, 8), (2, 3), (5, 9), (3, 3), (1, 7)]
  mask = np.zeros((len(spans), length), np.float32)
  for row, (start, stop) in enumerate(spans):
    mask[row, start:stop] = 1
  mask[0, 4] = 0  # not the policy's own, as a tool's answer is not
  logp = -rng.gamma(1.0, 1.0, mask.shape).astype(np.float32)
  past = (logp + rng.normal(0, 0.5, mask.shape)).astype(np.float32) * mask
  entropy = rng.gamma(1.0, 1.0, mask.shape).astype(np.float32)
  is_replay = np.array([0, 0, 1, 0, 1, 0, 0, 0], bool)
  correction = np.where(is_replay[:, None], 1, rng.uniform(0.5, 2, mask.shape)).astype(np.float32)
  reference = (logp + rng.normal(0, 0.3, mask.shape)).astype(np.float32)
  return (
    logp,
    entropy,
    Batch(
      tokens_BT=rng.integers(0, 13, mask.shape).astype(np.int32),
      response_mask_BT=mask,
      behaviour_logp_BT=past,
      advantage_B=rng.normal(size=len(spans)).astype(np.float32),
      is_replay_B=is_replay,
      policy_step_B=np.zeros(len(spans), np.int32),
      tis_weight_BT=correction,
    ),
    reference,
  )


def tokens_of(batch, config, logp, reference):
  """`objective.loss_inputs` with what the passes before an update add."""
  found = objective.loss_inputs(batch, config, LIMIT)
  return found._replace(
    reference_logp_BT=reference if config.kl_coefficient else None,
    row_log_ratio_B1=np.asarray(objective.row_log_ratio(logp, found))
    if config.ratio == 'sequence'
    else None,
  )


def formula(logp, entropy, batch, reference, config, *, clip, first, constant):
  """The loss, row by row and token by token in float64.

  `constant` is what a stop_gradient would see for logp: the same values when the loss is
  wanted, those of before the step when it is differentiated numerically.
  """
  logp, constant, past = (
    np.asarray(x, np.float64) for x in (logp, constant, batch.behaviour_logp_BT)
  )
  places = list(zip(*np.nonzero(batch.response_mask_BT)))
  total, kl, num_fresh = 0.0, 0.0, 0
  for b, t in places:
    advantage = float(batch.advantage_B[b])
    own = [s for row, s in places if row == b]
    if batch.is_replay_B[b]:
      ratio = np.exp(logp[b, t] - past[b, t])
      term = advantage * (ratio / (ratio + config.beta) if config.shaping else ratio)
    else:
      num_fresh += 1
      old = constant if first else past
      frozen = constant[b, t] - old[b, t]
      if config.ratio == 'sequence':
        frozen = np.mean([constant[b, s] - old[b, s] for s in own])
      ratio = np.exp(frozen + logp[b, t] - constant[b, t])  # the token's own gradient
      low, high = 1 - config.clip_epsilon, 1 + config.clip_epsilon_high
      if config.surrogate == 'cispo':
        ratio = np.exp(frozen)
        term = (min(max(ratio, low), high) if clip else ratio) * advantage * logp[b, t]
      else:
        term = ratio * advantage
        if clip:
          term = min(term, min(max(ratio, low), high) * advantage)
          if advantage < 0:
            term = max(term, config.dual_clip * advantage)
      term *= float(batch.tis_weight_BT[b, t])
      gap = float(reference[b, t]) - logp[b, t]
      kl += np.exp(gap) - gap - 1
    total -= (
      term
      * {
        'constant': 1 / (len(logp) * LIMIT),
        'token_mean': 1 / len(places),
        'sequence_mean': 1 / (len(logp) * len(own)),
      }[config.aggregation]
    )
  total -= config.entropy_bonus * np.mean([float(entropy[b, t]) for b, t in places])
  return total + config.kl_coefficient * kl / num_fresh


def fused_example(name, temperature, width=13, vocabulary=13, identity=False):
  """(config, arguments, batch, reference_logp_BT) of a variant.

  arguments: hidden_BWD, unembedding_DV, target_BW and tokens of a window that begins at
  token 1. The behaviour policy is near the one that the hidden states give.
  """
  config, rng = changed(**VARIANTS[name]), np.random.default_rng(7)
  *_, batch, _ = random_batch()
  hidden = rng.normal(size=(8, 8, width)).astype(np.float32)
  unembedding = rng.normal(size=(width, vocabulary)).astype(np.float32)
  if identity:
    unembedding = np.eye(width, dtype=np.float32)
  logp = log_softmax(hidden @ unembedding / temperature)
  logp = np.take_along_axis(logp, batch.tokens_BT[:, 1:, None], -1)[..., 0]
  logp = np.pad(logp, ((0, 0), (1, 0)))
  past, reference = ((logp + rng.normal(0, 0.4, logp.shape)).astype(np.float32) for _ in range(2))
  batch = Batch(**{**batch.__dict__, 'behaviour_logp_BT': past * batch.response_mask_BT})
  tokens = tokens_of(batch, config, logp, reference)
  tokens = objective.LossInputs(*(x if x is None or x.shape[1] == 1 else x[:, 1:] for x in tokens))
  return config, (hidden, unembedding, batch.tokens_BT[:, 1:], tokens), batch, reference


def log_softmax(logits):
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
