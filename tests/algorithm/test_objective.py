"""The objective against numbers computed by hand, an independent formula, and enumeration."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.algorithm import advantages, objective, terms
from exgrpo_jax.errors import InputError
from tests.helpers.enumeration import group_of, slopes, softmax
from tests.helpers.losses import (
  CLIP_AND_FIRST,
  LIMIT,
  PAPER,
  VARIANTS,
  changed,
  formula,
  inputs_of,
  loss_and_gradient,
  random_batch,
  with_carried,
)

LOGP, ENTROPY, BATCH, REFERENCE_LOGP = random_batch()


# ---- Single tokens ----


def one_token(logp, old_logp, advantage, config, *, is_replay, clip=True, first=False):
  """[value, gradient by logp, is clipped] of the term of one token."""
  one = np.ones((1, 1), np.float32)
  inputs = objective.LossInputs(
    mask_BT=one,
    weight_BT=one,
    entropy_weight_BT=one,
    kl_weight_BT=one,
    old_logp_BT=old_logp * one,
    term_weight_BT=one,
    advantage_BT=advantage * one,
    is_replay_BT=(one > 0) & is_replay,
  )
  (value, sums), (slope, _) = jax.value_and_grad(objective.token_loss, (0, 1), has_aux=True)(
    jnp.full((1, 1), logp, jnp.float32),
    jnp.zeros((1, 1)),
    inputs,
    config,
    clip=clip,
    is_first=first,
  )
  return [-float(value), -float(slope[0, 0]), float(sums['clipped'])]


# Config values -> what a replayed token of past probability 1/2 and probability now 1/4, so of
# w = 1/2, adds for an advantage of 1, and its derivative by log pi.
LOG_QUARTER = -2 * np.log(2)
SHAPED = {
  'fraction': (dict(beta=0.1), 0.5 / 0.6, 0.05 / 0.36),
  'normalised': (dict(beta=0.1), 12.1 * 0.5 / 0.6, 12.1 * 0.05 / 0.36),
  'none': ({}, 0.5, 0.5),
  'power': (dict(shaping_exponent=2.0), 0.25, 0.5),  # the derivative is the exponent times more
  'log': (dict(shaping_weight=0.1), 0.1 * LOG_QUARTER, 0.1),
  'ratio_plus_log': (dict(shaping_weight=0.1), 0.5 + 0.1 * LOG_QUARTER, 0.6),
}


@pytest.mark.parametrize('shaping', SHAPED)
def test_a_replayed_token_adds_the_hand_computed_term(shaping):
  values, value, slope = SHAPED[shaping]
  config = changed(shaping=shaping, **values)
  for advantage in (1.0, -3.0):
    term = one_token(LOG_QUARTER, LOG_QUARTER / 2, advantage, config, is_replay=True)
    np.testing.assert_allclose(term, [advantage * value, advantage * slope, 0], rtol=1e-5)


@pytest.mark.parametrize('shaping', terms.SHAPINGS)
def test_the_slope_of_a_replayed_token_at_ratio_1(shaping):
  config = changed(shaping=shaping, beta=0.3, shaping_exponent=0.25, shaping_weight=0.7)
  _, slope, _ = one_token(-1.0, -1.0, 1.0, config, is_replay=True)
  assert objective.replay_slope(config) == pytest.approx(slope, rel=1e-5)
  assert objective.replay_slope(PAPER) == pytest.approx(0.0826446)


@pytest.mark.parametrize('shaping', SHAPED)
def test_a_replayed_ratio_beyond_float32_is_finite_and_nothing_at_advantage_0(shaping):
  config = changed(shaping=shaping, shaping_exponent=1.0)
  assert np.isfinite(one_token(-1.0, -500.0, 1.0, config, is_replay=True)).all()
  assert one_token(-1.0, -500.0, 0.0, config, is_replay=True) == [0, 0, 0]


def test_without_importance_correction_a_replayed_ratio_is_1_in_the_first_minibatch():
  def term(first, **values):
    return one_token(
      -3.0, -1.0, 2.0, changed(shaping='none', **values), is_replay=True, first=first
    )

  corrected = [2 * np.exp(-2), 2 * np.exp(-2), 0]
  assert term(True, importance_correction=False) == [2, 2, 0]
  np.testing.assert_allclose(term(False, importance_correction=False), corrected, rtol=1e-5)
  np.testing.assert_allclose(term(True), corrected, rtol=1e-5)


# Config values, ratio, advantage, clip, and the expected value, gradient and is clipped.
HIGHER, DUAL, CISPO = dict(clip_epsilon_high=0.28), dict(dual_clip=3.0), dict(surrogate='cispo')
FRESH_TERMS = {
  'ppo stops at 1.2': ({}, 1.3, 2.0, True, [2.4, 0.0, 1.0]),
  'ppo without clipping': ({}, 1.3, 2.0, False, [2.6, 2.6, 0.0]),
  'clip-higher lets a ratio rise further': (HIGHER, 1.25, 2.0, True, [2.5, 2.5, 0.0]),
  'clip-higher stops too': (HIGHER, 1.3, 2.0, True, [2.56, 0.0, 1.0]),
  'clip-higher keeps the lower bound': (HIGHER, 0.7, -2.0, True, [-1.6, 0.0, 1.0]),
  'dual clip bounds the loss': (DUAL, 4.0, -2.0, True, [-6.0, 0.0, 1.0]),
  'dual clip not reached': (DUAL, 2.0, -2.0, True, [-4.0, -4.0, 0.0]),
  'dual clip only while clipping': (DUAL, 4.0, -2.0, False, [-8.0, -8.0, 0.0]),
  'dual clip leaves successes alone': (DUAL, 4.0, 2.0, True, [2.4, 0.0, 1.0]),
  # CISPO keeps a clipped token's gradient.
  'cispo': (CISPO, 4.0, 2.0, True, [2.4 * np.log(4), 2.4, 1.0]),
  'cispo, lower bound': (CISPO, 0.5, -2.0, True, [1.6 * np.log(2), -1.6, 1.0]),
  'cispo without clipping': (CISPO, 4.0, 2.0, False, [8 * np.log(4), 8.0, 0.0]),
}


def test_a_fresh_token_adds_the_hand_computed_term():
  for name, (values, ratio, advantage, clip, expected) in FRESH_TERMS.items():
    term = one_token(np.log(ratio), 0.0, advantage, changed(**values), is_replay=False, clip=clip)
    np.testing.assert_allclose(term, expected, rtol=1e-5, atol=1e-6, err_msg=name)


# ---- Minibatches ----


@pytest.mark.parametrize('batch', [BATCH, with_carried(BATCH)], ids=['fresh', 'carried'])
@pytest.mark.parametrize('name', VARIANTS)
def test_the_loss_and_its_gradient_are_those_of_the_formula(name, batch):
  """The gradient along a random direction, by finite differences in float64."""
  config, rng = changed(**VARIANTS[name]), np.random.default_rng(1)
  direction, towards = rng.normal(size=(2, *LOGP.shape))  # of logp and of the entropy
  for clip, first in CLIP_AND_FIRST:

    def value(step, clip=clip, first=first):
      return formula(
        LOGP + step * direction,
        ENTROPY + step * towards,
        batch,
        REFERENCE_LOGP,
        config,
        clip=clip,
        first=first,
        constant=LOGP,
      )

    inputs = inputs_of(batch, config, LOGP, REFERENCE_LOGP, first)
    (loss, _), (by_logp, by_entropy) = loss_and_gradient(config)(
      LOGP, ENTROPY, inputs, clip=clip, is_first=first
    )
    np.testing.assert_allclose(loss, value(0), rtol=2e-5)
    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    found = (by_logp * direction + by_entropy * towards).sum()
    assert abs(slope) > 1e-4
    np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize('name', VARIANTS)
def test_the_parts_of_a_minibatch_add_up_to_it(name):
  """The tokens in six parts, each of them alone in the mask and the weights."""
  config, batch = changed(**VARIANTS[name]), with_carried(BATCH)
  part_BT = np.random.default_rng(2).integers(0, 6, LOGP.shape)
  for clip, first in CLIP_AND_FIRST:
    inputs = inputs_of(batch, config, LOGP, REFERENCE_LOGP, first)
    weights = ('mask_BT', 'weight_BT', 'entropy_weight_BT', 'kl_weight_BT')
    parts = [
      inputs._replace(**{field: getattr(inputs, field) * (part_BT == part) for field in weights})
      for part in range(6)
    ]
    whole, *found = (
      loss_and_gradient(config)(LOGP, ENTROPY, x, clip=clip, is_first=first)
      for x in (inputs, *parts)
    )
    merged = objective.merge_sums([sums for (_, sums), _ in found])
    for key, value in whole[0][1].items():
      np.testing.assert_allclose(merged[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    np.testing.assert_allclose(sum(loss for (loss, _), _ in found), whole[0][0], atol=1e-6)
    for index in (0, 1):
      total = sum(gradients[index] for _, gradients in found)
      np.testing.assert_allclose(total, whole[1][index], atol=1e-7)


@pytest.mark.parametrize('name', VARIANTS)
def test_what_lies_outside_the_mask_cannot_poison_the_gradient(name):
  config, outside = changed(**VARIANTS[name]), BATCH.response_mask_BT == 0
  # A row whose mask replay.difficulty has emptied keeps its log-probabilities.
  behaviour_logp = np.where(outside, -300.0, BATCH.behaviour_logp_BT).astype(np.float32)
  batch = dataclasses.replace(BATCH, behaviour_logp_BT=behaviour_logp)
  np.testing.assert_array_equal(
    objective.loss_inputs(batch, config, LIMIT).old_logp_BT, BATCH.behaviour_logp_BT
  )
  logp, entropy, reference_logp = (
    np.where(outside, value, x).astype(np.float32)
    for x, value in ((LOGP, 300.0), (ENTROPY, np.nan), (REFERENCE_LOGP, np.nan))
  )
  for clip, first in CLIP_AND_FIRST:
    inputs = inputs_of(batch, config, logp, reference_logp, first)
    (value, _), gradients = loss_and_gradient(config)(
      logp, entropy, inputs, clip=clip, is_first=first
    )
    assert np.isfinite(value) and np.isfinite(gradients).all(), (clip, first)
    assert (np.asarray(gradients)[:, outside] == 0).all(), (clip, first)


def test_gspo_moves_a_row_by_its_mean_log_ratio():
  """By s A / |o| times the sum of its tokens' gradients: the derivative of GSPO's objective."""
  config = changed(
    ratio='sequence', aggregation='sequence_mean', clip_epsilon=0.5, clip_epsilon_high=0.6
  )
  mask, fresh = BATCH.response_mask_BT, ~BATCH.is_replay_B

  def sequence_objective(logp):
    mean = (mask * (logp - BATCH.behaviour_logp_BT)).sum(1) / jnp.maximum(mask.sum(1), 1)
    s, a = jnp.exp(mean), BATCH.advantage_B
    term = jnp.minimum(s * a, jnp.clip(s, 0.5, 1.6) * a) * (mask.sum(1) > 0)
    return -(term * fresh).sum() / len(a)

  batch = dataclasses.replace(BATCH, term_weight_BT=np.ones_like(mask))
  inputs = inputs_of(batch, config, LOGP, None, False)
  _, (gradient, _) = loss_and_gradient(config)(LOGP, ENTROPY, inputs, clip=True, is_first=False)
  expected = jax.jit(jax.grad(sequence_objective))(LOGP)
  assert np.abs(expected).max() > 0.001
  np.testing.assert_allclose(gradient[fresh], expected[fresh], atol=1e-7)


def test_loss_inputs_are_numpy_on_the_host():
  for x in jax.tree.leaves(objective.loss_inputs(BATCH, changed(aggregation='token_mean'), LIMIT)):
    assert isinstance(x, np.ndarray) and x.dtype in (np.float32, bool) and x.shape[0] == 8


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    (dict(tis_limit=2.0), "tis_limit=2.0 needs config.objective.old_logprobs='recompute'"),
    (dict(dual_clip=3.0, surrogate='cispo'), "dual_clip=3.0 needs .*surrogate='ppo'"),
    (dict(dual_clip=1.0), r'dual_clip=1.0 must lie in \(1, inf\]'),
    (dict(clip_epsilon_high=0.0), 'clip_epsilon_high=0.0 must lie in'),
    (dict(surrogate='gspo'), 'must be one of ppo, cispo'),
  ],
)
def test_a_config_of_impossible_values_is_refused(values, message):
  with pytest.raises(InputError, match=message):
    config_lib.build(objective.Config, PAPER.__dict__ | values, 'config.objective')


# ---- By enumeration: expectations are sums over every possible group, nothing is sampled ----


class TestTheorems:
  """Groups of K responses of one token out of four; an older policy wrote the replayed o*."""

  K = 3
  REWARD = np.array([1.0, 0.0, 0.5, 0.0])
  PI, PAST = softmax([0.3, -0.2, 0.5, 0.1]), softmax([-0.4, 0.6, 0.1, 0.2])
  SCORE = np.eye(4) - PI  # row o: gradient of log pi(o) by the logits
  GROUPS = np.array(list(itertools.product(range(4), repeat=K)))  # o* is the last
  ADVANTAGE = advantages.group_advantages(REWARD[GROUPS])

  def chance(self, source):
    """Probability of each group, where `source` wrote o* and the current policy the others."""
    return self.PI[self.GROUPS[:, :-1]].prod(axis=1) * source[self.GROUPS[:, -1]]

  def expected_gradient(self, is_replay):
    """Expected gradient of the loss without shaping, summed over all groups."""
    config, total = changed(shaping='none'), np.zeros(4)
    chance_G = self.chance(self.PAST if is_replay else self.PI)
    for tokens, advantage_B, chance in zip(self.GROUPS, self.ADVANTAGE, chance_G):
      last = np.arange(self.K) == self.K - 1
      past = np.where(last & is_replay, self.PAST[tokens], self.PI[tokens])
      batch = group_of(advantage_B, last & is_replay, np.log(past))
      total += chance * slopes(np.log(self.PI[tokens]), batch, config, 1) @ self.SCORE[tokens]
    return total

  def test_exact_weights_make_the_replayed_row_unbiased(self):
    on_policy = self.expected_gradient(is_replay=False)
    assert np.abs(on_policy).max() > 0.01  # so 0 would be noticed
    np.testing.assert_allclose(self.expected_gradient(is_replay=True), on_policy, atol=1e-6)
