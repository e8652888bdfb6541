"""Metrics of a step against means in NumPy."""

import numpy as np
import pytest

from exgrpo_jax.algorithm import objective
from tests.helpers.losses import changed, inputs_of, loss_and_gradient, random_batch, with_carried

# Wider above, so that the two bounds are told apart.
CONFIG = changed(clip_epsilon_high=0.5, kl_coefficient=1.0)
LOGP, ENTROPY, BATCH, REFERENCE_LOGP = random_batch()
MASK = BATCH.response_mask_BT > 0
REPLAYED, FRESH = (
  MASK & is_replay[:, None] for is_replay in (BATCH.is_replay_B, ~BATCH.is_replay_B)
)
RATIO = np.exp(LOGP - BATCH.behaviour_logp_BT)


def measure(batch, clip=True, first=False, config=CONFIG):
  """(metrics, sums) of a minibatch."""
  inputs = inputs_of(batch, config, LOGP, REFERENCE_LOGP, first)
  (_, sums), _ = loss_and_gradient(config)(LOGP, ENTROPY, inputs, clip=clip, is_first=first)
  return objective.loss_metrics({name: float(value) for name, value in sums.items()}), sums


def mean_k3(mask):
  gap = (REFERENCE_LOGP - LOGP)[mask]
  return (np.exp(gap) - gap - 1).mean()


def test_metrics_are_means_over_the_steps_tokens():
  metrics, sums = measure(BATCH)
  w, is_outside = RATIO[REPLAYED], (RATIO < 0.8) | (RATIO > 1.5)
  sign = np.sign(BATCH.advantage_B)[:, None]
  is_clipped = ((RATIO > 1.5) & (sign > 0)) | ((RATIO < 0.8) & (sign < 0))
  f = w / (w + 0.1)
  expected = {
    'entropy': ENTROPY[MASK].mean(),
    'clip_share': is_clipped[FRESH].mean(),
    'outside_clip_range': is_outside[FRESH].mean(),
    'kl': mean_k3(FRESH),
    'replay/ratio_mean': w.mean(),
    'replay/ratio_max': w.max(),
    'replay/shaped_mean': f.mean(),
    'replay/shaped_variance': f.var(),
    'replay/effective_sample_size': w.sum() ** 2 / (len(w) * (w**2).sum()),
  }
  assert metrics == pytest.approx(expected, rel=1e-4)
  assert 0 < metrics['clip_share'] < metrics['outside_clip_range'] < 1
  assert set(objective.zero_sums(CONFIG)) == set(sums)
  # Where nothing is clipped they are outside all the same; in the first minibatch none is.
  unclipped, _ = measure(BATCH, clip=False)
  assert (unclipped['clip_share'], unclipped['outside_clip_range']) == (
    0,
    metrics['outside_clip_range'],
  )
  assert measure(BATCH, first=True)[0]['outside_clip_range'] == 0


@pytest.mark.parametrize(
  ('ratio', 'first'), [('token', True), ('token', False), ('sequence', True), ('product', True)]
)
def test_metrics_of_carried_tokens_are_means_of_their_own_ratios(ratio, first):
  batch = with_carried(BATCH)
  carried = batch.is_carried_BT
  metrics, _ = measure(batch, first=first, config=changed(ratio=ratio, kl_coefficient=1.0))
  own = RATIO[carried]
  expected = {
    'carry/token_share': carried.sum() / FRESH.sum(),
    'carry/ratio_mean': own.mean(),
    'carry/ratio_max': own.max(),
    'kl': mean_k3(FRESH & ~carried),
  }
  if ratio == 'token':
    outside = (own < 0.8) | (own > 1.2)
    expected['carry/outside_clip_range'] = outside.mean()
    if first:  # no other token is outside
      expected['outside_clip_range'] = outside.sum() / FRESH.sum()
  assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
