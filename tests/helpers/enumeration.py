"""Exact expectations over all groups of one-token responses, through advantages and loss."""

import itertools

import numpy as np

from exgrpo_jax.algorithm import advantages, objective
from exgrpo_jax.datatypes import Batch
from tests.helpers.losses import LIMIT, loss_and_gradient


def softmax(logits):
  """Probabilities of the answers."""
  return np.exp(logits) / np.exp(logits).sum()


def entropy(logits):
  """Of the policy, in nats."""
  return float(-(softmax(logits) * np.log(softmax(logits))).sum())


def group_of(advantage_B, is_replay_B, behaviour_logp_B):
  """A batch of responses of one token."""
  one_B1 = np.ones((len(advantage_B), 1), np.float32)
  return Batch(
    tokens_BT=one_B1.astype(np.int32),
    response_mask_BT=one_B1,
    old_logp_BT=np.float32(behaviour_logp_B)[:, None],
    advantage_B=np.float32(advantage_B),
    is_replay_B=is_replay_B,
    policy_step_B=np.zeros(len(one_B1), np.int32),
    term_weight_BT=one_B1,
  )


def slopes(logp_B, batch, config, max_response, clip=True, is_first=True):
  """The loss's gradient [B] by log-probabilities of single tokens."""
  inputs, logp = objective.loss_inputs(batch, config, max_response), np.float32(logp_B)[:, None]
  _, (slope, _) = loss_and_gradient(config)(logp, 0 * logp, inputs, clip=clip, is_first=is_first)
  return np.asarray(slope)[:, 0]


def gradients(config, logits, group_size, stored=None, ratio=1.0, before=None, clip=True):
  """(chance_G, fresh_GA, stored_GA): what every possible group adds to the policy's logits.

  Answer 0 of A is right, the others are wrong. Terms are summed over a group, without the loss's
  divisor; the gradient is that of what is maximised.

  Args:
    config: the objective's.
    logits: of the policy, [A].
    group_size: K.
    stored: the answer of the stored row, the last of the group; None for K fresh rows.
    ratio: w of the stored row.
    before: logits of the policy that wrote the fresh rows, in a later minibatch; None where it is
      the same, in the first.
    clip: whether fresh ratios are clipped.
  """
  num_fresh = group_size - (stored is not None)
  drawn_GF = np.array(list(itertools.product(range(len(logits)), repeat=num_fresh)))
  wrote = softmax(logits if before is None else before)
  chance_G = wrote[drawn_GF].prod(axis=1)
  last = [] if stored is None else [np.full((len(drawn_GF), 1), stored)]
  answer_GK = np.concatenate([drawn_GF, *last], axis=1)
  is_replay_GK = np.zeros(answer_GK.shape, bool)
  is_replay_GK[:, num_fresh:] = True
  advantage_GK = advantages.group_advantages(
    np.float32(answer_GK == 0),
    config.normalize_std,
    is_replay_GK,
    config.baseline,
    config.replay_advantage,
    objective.replay_slope(config),
  )
  logp_GK = np.log(softmax(logits))[answer_GK]
  past_GK = np.where(is_replay_GK, logp_GK - np.log(ratio), np.log(wrote)[answer_GK])
  batch = group_of(advantage_GK.ravel(), is_replay_GK.ravel(), past_GK.ravel())
  slope_B = slopes(logp_GK.ravel(), batch, config, LIMIT, clip=clip, is_first=before is None)
  slope_GK = -slope_B.astype(float).reshape(answer_GK.shape) * answer_GK.size * LIMIT
  score_GKA = np.eye(len(logits))[answer_GK] - softmax(logits)  # d log pi by the logits
  by_row_GKA = slope_GK[..., None] * score_GKA
  return chance_G, by_row_GKA[:, :num_fresh].sum(axis=1), by_row_GKA[:, num_fresh:].sum(axis=1)
