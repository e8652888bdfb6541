"""The objective against numbers computed by hand, an independent formula, and enumeration."""

import dataclasses
import doctest
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.algorithm import advantages, losses, objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.errors import InputError
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
from tests.helpers.paths import REPOSITORY

LOGP, ENTROPY, BATCH, REFERENCE_LOGP = random_batch()


# ---- Examples in docstrings ----


EXAMPLES = sorted(
  '.'.join(path.relative_to(REPOSITORY).with_suffix('').parts)
  for path in (REPOSITORY / 'exgrpo_jax').rglob('*.py')
  if '>>> ' in path.read_text()
)


@pytest.mark.parametrize('module', EXAMPLES)
def test_the_examples_in_docstrings_are_right(module):
  outcome = doctest.testmod(importlib.import_module(module))
  assert outcome.attempted and not outcome.failed


# ---- Single tokens ----


def one_token(logp, old_logp, advantage, config, *, is_replay, clip=True, first=False):
  """Return [value, gradient with respect to logp, is_clipped] of one token's term."""
  one = np.ones((1, 1), np.float32)
  own = dict(old_logp_BT=old_logp * one, advantage_BT=advantage * one)
  inputs = objective.LossInputs(*[one] * 8)._replace(**own, is_replay_BT=(one > 0) & is_replay)
  (value, sums), (slope, _) = jax.value_and_grad(objective.token_loss, (0, 1), has_aux=True)(
    np.float32(logp) * one, 0 * one, inputs, config, clip=clip, is_first=first
  )
  return [-float(value), -float(slope[0, 0]), float(sums['clipped'])]


# Config values -> what a replayed token of past probability 1/2 and probability now 1/4, so of
# w = 1/2, adds for an advantage of 1, and its derivative by log pi.
LOG_QUARTER = -2 * np.log(2)
SHAPED = {
  'policy_shaping': (dict(beta=0.1), 0.5 / 0.6, 0.05 / 0.36),
  'unit_slope': (dict(beta=0.1), 12.1 * 0.5 / 0.6, 12.1 * 0.05 / 0.36),
  'none': ({}, 0.5, 0.5),
  'power': (
    dict(shaping_exponent=2.0),
    0.25,
    0.5,
  ),  # the derivative is the exponent times the value
  'log': (dict(shaping_weight=0.1), 0.1 * LOG_QUARTER, 0.1),
  'ratio_plus_log': (dict(shaping_weight=0.1), 0.5 + 0.1 * LOG_QUARTER, 0.6),
}


@pytest.mark.parametrize('shaping', SHAPED)
def test_a_replayed_token_has_the_hand_computed_term(shaping):
  values, value, slope = SHAPED[shaping]
  config = changed(shaping=shaping, **values)
  for advantage in (1.0, -3.0):
    term = one_token(LOG_QUARTER, LOG_QUARTER / 2, advantage, config, is_replay=True)
    np.testing.assert_allclose(term, [advantage * value, advantage * slope, 0], rtol=1e-5)


@pytest.mark.parametrize('shaping', losses.SHAPINGS)
def test_the_slope_of_a_replayed_token_at_ratio_1(shaping):
  config = changed(shaping=shaping, beta=0.3, shaping_exponent=0.25, shaping_weight=0.7)
  _, slope, _ = one_token(-1.0, -1.0, 1.0, config, is_replay=True)
  assert objective.replay_slope(config) == pytest.approx(slope, rel=1e-5)
  assert objective.replay_slope(PAPER) == pytest.approx(0.0826446)


@pytest.mark.parametrize('shaping', SHAPED)
def test_a_replayed_ratio_beyond_float32_is_finite_and_its_term_0_at_advantage_0(shaping):
  config = changed(shaping=shaping, shaping_exponent=1.0)
  assert np.isfinite(one_token(-1.0, -500.0, 1.0, config, is_replay=True)).all()
  assert one_token(-1.0, -500.0, 0.0, config, is_replay=True) == [0, 0, 0]


def test_a_bfloat16_shaping_is_summed_in_float32(monkeypatch):
  narrow = lambda _, log_ratio, __: log_ratio.astype('bfloat16')  # noqa: E731
  monkeypatch.setitem(losses.SHAPINGS, 'mine', narrow)
  assert one_token(-1.0, -2.0, 3.0, changed(shaping='mine'), is_replay=True) == [3.0, 3.0, 0.0]
  sums = objective.zero_sums(changed(shaping='mine'))
  assert {total.dtype for total in sums.values()} == {np.dtype('float32')}


def test_without_importance_correction_a_replayed_ratio_is_1_in_the_first_minibatch():
  def term(first, **values):
    config = changed(shaping='none', **values)
    return one_token(-3.0, -1.0, 2.0, config, is_replay=True, first=first)

  corrected = [2 * np.exp(-2), 2 * np.exp(-2), 0]
  assert term(True, importance_correction=False) == [2, 2, 0]
  np.testing.assert_allclose(term(False, importance_correction=False), corrected, rtol=1e-5)
  np.testing.assert_allclose(term(True), corrected, rtol=1e-5)


# Config values, ratio, advantage, clip, and the expected value, gradient and is clipped.
HIGHER, DUAL, CISPO = dict(clip_epsilon_high=0.28), dict(dual_clip=3.0), dict(policy_loss='cispo')
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


def test_a_fresh_token_has_the_hand_computed_term():
  for name, (values, ratio, advantage, clip, expected) in FRESH_TERMS.items():
    term = one_token(np.log(ratio), 0.0, advantage, changed(**values), is_replay=False, clip=clip)
    np.testing.assert_allclose(term, expected, rtol=1e-5, atol=1e-6, err_msg=name)


# ---- Minibatches ----


@pytest.mark.parametrize('batch', [BATCH, with_carried(BATCH)], ids=['fresh', 'carried'])
@pytest.mark.parametrize('name', VARIANTS)
def test_the_loss_and_its_gradient_match_the_formula(name, batch):
  """The gradient along a random direction, by finite differences in float64."""
  config, rng = changed(**VARIANTS[name]), np.random.default_rng(1)
  direction, towards = rng.normal(size=(2, *LOGP.shape))  # of logp and of the entropy
  for clip, first in CLIP_AND_FIRST:

    def value(step, clip=clip, first=first):
      at = LOGP + step * direction, ENTROPY + step * towards, batch, REFERENCE_LOGP, config
      return formula(*at, clip=clip, first=first, constant=LOGP)

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
  """Each of six parts has only its own tokens in the mask and the weights."""
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
def test_values_outside_the_mask_cannot_poison_the_gradient(name):
  config, outside = changed(**VARIANTS[name]), BATCH.response_mask_BT == 0
  # A row whose mask replay.difficulty has emptied keeps its log-probabilities.
  behaviour_logp = np.where(outside, -300.0, BATCH.old_logp_BT).astype(np.float32)
  batch = dataclasses.replace(BATCH, old_logp_BT=behaviour_logp)
  np.testing.assert_array_equal(
    objective.loss_inputs(batch, config, LIMIT).old_logp_BT, BATCH.old_logp_BT
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
  bounds = dict(clip_epsilon=0.5, clip_epsilon_high=0.6)
  config = changed(importance_level='sequence', aggregation='sequence_mean', **bounds)
  mask, fresh = BATCH.response_mask_BT, ~BATCH.is_replay_B

  def sequence_objective(logp):
    mean = (mask * (logp - BATCH.old_logp_BT)).sum(1) / jnp.maximum(mask.sum(1), 1)
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
    (dict(tis_limit=2.0), "tis_limit=2.0 .* Set config.objective.old_logprobs='recompute'"),
    (dict(dual_clip=3.0, policy_loss='cispo'), "dual_clip=3.0 needs .*policy_loss='ppo'"),
    (dict(dual_clip=1.0), r'dual_clip=1.0: .* must be in \(1, inf\]'),
    (dict(clip_epsilon_high=0.0), 'clip_epsilon_high=0.0: .* must be in'),
    (dict(policy_loss='gspo'), 'must be one of ppo, cispo'),
  ],
)
def test_a_config_of_impossible_values_is_refused(values, message):
  with pytest.raises(InputError, match=message):
    config_lib.build(objective.ObjectiveConfig, PAPER.__dict__ | values, 'config.objective')


# ---- Small functions against numbers computed by hand ----


def test_a_tis_weight_is_the_ratio_of_trainer_to_sampler_truncated_at_the_limit():
  trainer = np.log(np.array([0.5, 0.2, 0.9, 1.0], np.float32))
  sampler = np.append(np.log([0.25, 0.4, 0.1]), -200.0).astype(np.float32)  # exp(200) overflows
  weight = losses.tis_weight(trainer, sampler, 3.0)
  assert weight.dtype == np.float32
  np.testing.assert_allclose(weight, [2.0, 0.5, 3.0, 3.0], rtol=1e-5)


def test_m2po_drops_as_few_tokens_as_possible():
  """Four of seven ratios moved in the direction of their advantage: by .1, .3, .2 and .5."""
  log_ratio = np.float32([0.1, -0.3, 0.2, 0.5, -9.0, 9.0, 9.0])
  advantage = np.float32([1.0, -0.5, 1.0, 0.5, 1.0, -1.0, 0.0])
  # Squares .01 .04 .09 .25: means of the smallest are .01, .025, .0467 and .0975.
  for limit, left_out in ((0.1, []), (0.0974, [3]), (0.04, [1, 3]), (0.02, [1, 2, 3])):
    stays = losses.within_second_moment(log_ratio, advantage, limit)
    assert np.flatnonzero(~stays).tolist() == left_out, limit
  assert losses.within_second_moment(np.float32([9.0]), np.float32([1.0]), 0.04).tolist() == [False]
  assert losses.within_second_moment(np.float32([0.5]), np.float32([1.0]), 0.25).tolist() == [True]


def test_rows_in_one_sequence_have_separate_sums_and_means():
  x_BT = np.float32([[1, 2, 0, 5, 0], [0, 0, 0, 0, 3]])
  mask_BT = np.float32([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]])
  segment_BT = np.array([[1, 1, 1, 2, 0], [9, 9, 10, 10, 10]])  # the largest number is 2 T
  assert losses.row_sums(x_BT, segment_BT).tolist() == [[3, 3, 3, 5, 0], [0, 0, 3, 3, 3]]
  means = [[1.5, 1.5, 1.5, 5, 0], [0, 0, 3, 3, 3]]
  assert losses.row_means(x_BT, mask_BT, segment_BT).tolist() == means


# ---- Metrics of a step against means in NumPy ----


# Wider above, to tell the two bounds apart.
CONFIG = changed(clip_epsilon_high=0.5, kl_coefficient=1.0)
MASK = BATCH.response_mask_BT > 0
REPLAYED, FRESH = (
  MASK & is_replay[:, None] for is_replay in (BATCH.is_replay_B, ~BATCH.is_replay_B)
)
RATIO = np.exp(LOGP - BATCH.old_logp_BT)


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
    'policy/clip_fraction': is_clipped[FRESH].mean(),
    'policy/outside_clip_range': is_outside[FRESH].mean(),
    'kl': mean_k3(FRESH),
    'replay/ratio_mean': w.mean(),
    'replay/ratio_max': w.max(),
    'replay/shaped_mean': f.mean(),
    'replay/shaped_variance': f.var(),
    'replay/effective_sample_size': w.sum() ** 2 / (len(w) * (w**2).sum()),
  }
  assert metrics == pytest.approx(expected, rel=1e-4)
  assert 0 < metrics['policy/clip_fraction'] < metrics['policy/outside_clip_range'] < 1
  assert set(objective.zero_sums(CONFIG)) == set(sums)
  # Ratios may be outside the range without clipping, but not in the first minibatch.
  unclipped, _ = measure(BATCH, clip=False)
  outside = 'policy/outside_clip_range'
  assert (unclipped['policy/clip_fraction'], unclipped[outside]) == (0, metrics[outside])
  assert measure(BATCH, first=True)[0][outside] == 0
  nothing = dataclasses.replace(BATCH, response_mask_BT=0 * BATCH.response_mask_BT)
  assert set(measure(nothing)[0]) == {'policy/clip_fraction', outside, 'kl'}


def test_the_effective_sample_size_survives_a_ratio_whose_square_overflows():
  old_logp_BT = np.where(np.cumsum(REPLAYED).reshape(LOGP.shape) == 1, LOGP - 50, LOGP)
  metrics, sums = measure(dataclasses.replace(BATCH, old_logp_BT=np.float32(old_logp_BT)))
  assert np.isinf(sums['ratio_squared'])
  assert metrics['replay/effective_sample_size'] == pytest.approx(1 / REPLAYED.sum())


@pytest.mark.parametrize(
  ('ratio', 'first'), [('token', True), ('token', False), ('sequence', True), ('product', True)]
)
def test_metrics_of_carried_tokens_are_means_of_their_own_ratios(ratio, first):
  batch = with_carried(BATCH)
  carried = batch.is_carried_BT
  metrics, _ = measure(
    batch, first=first, config=changed(importance_level=ratio, kl_coefficient=1.0)
  )
  own = RATIO[carried]
  expected = {
    'staleness/token_share': carried.sum() / FRESH.sum(),
    'staleness/ratio_mean': own.mean(),
    'staleness/ratio_max': own.max(),
    'kl': mean_k3(FRESH & ~carried),
  }
  if ratio == 'token':
    outside = (own < 0.8) | (own > 1.2)
    expected['staleness/outside_clip_range'] = outside.mean()
    if first:  # no other token is outside
      expected['policy/outside_clip_range'] = outside.sum() / FRESH.sum()
  assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_movement_is_averaged_over_new_tokens_and_balance_over_updates():
  counts = dict(tokens=9.0, fresh_tokens=6.0, carried_tokens=2.0, updates=2.0)
  totals = dict(approx_kl=3.0, new_ratio=5.0, new_ratio_max=1.5, balance=7.0)
  sums = dict.fromkeys(objective.zero_sums(PAPER), 0.0) | counts | totals
  metrics, movement = objective.loss_metrics(sums), ('approx_kl', 'ratio_mean', 'ratio_max')
  assert [metrics[f'policy/{name}'] for name in movement] == [3 / 4, 5 / 4, 1.5]
  assert metrics['experts/balance'] == 7 / 2


# ---- The loss of tokens that earlier policies wrote, in responses that span steps ----


def test_a_product_beyond_float32_is_finite_and_its_term_0_at_advantage_0():
  logp, entropy, batch, _ = random_batch()
  config = changed(importance_level='product')
  past = np.where(batch.response_mask_BT > 0, logp - 30, 0).astype(np.float32)
  for advantage in (0.0, 1.0):
    values = dict(old_logp_BT=past, advantage_B=np.full(8, advantage, np.float32))
    absurd = dataclasses.replace(with_carried(batch), **values)
    inputs = inputs_of(absurd, config, logp, None, True)
    (value, _), (slope, _) = loss_and_gradient(config)(
      logp, entropy, inputs, clip=False, is_first=True
    )
    assert np.isfinite(value) and np.isfinite(slope).all()
    assert (value == 0 and not np.any(slope)) == (advantage == 0)


# ---- By enumeration ----


def logits(*probabilities):
  """Logits of two tokens, for each probability of the second one."""
  return np.log([[1 - p, p] for p in probabilities]).ravel()


# Config values, True if ratios are clipped, and the relative bias of the expected gradient if all
# first tokens are carried: the table in docs/algorithm.md.
BIASES = {
  'product': (dict(importance_level='product'), False, 0.0),
  'sequence': (dict(importance_level='sequence'), False, 0.130),
  'token': ({}, False, 0.229),
  'cispo, clipped': (dict(policy_loss='cispo'), True, 0.236),
  'sequence, clipped': (dict(importance_level='sequence'), True, 0.368),
  'token, clipped': ({}, True, 0.755),
  'product, clipped': (dict(importance_level='product'), True, 0.912),
}
IGNORED = 0.256  # carried tokens treated as fresh


class TestResponsesOfSeveralPolicies:
  """Responses of two tokens from a vocabulary of two, partly from an older policy.

  A policy is the logits of the first token, and of the second after each first one. An older policy
  may have sampled the first tokens. Expectations are sums over every possible group of K responses.
  """

  K = 3
  REWARD = np.array([[0.0, 0.0], [0.0, 1.0]])  # by first and second token
  PAST = logits(0.5, 0.5, 0.5)
  START = logits(0.7, 0.4, 0.6)  # the policy at the start of the step
  LATER = logits(0.8, 0.4, 0.7)  # after its first minibatch
  ALL = np.tile([True, False], (K, 1))  # first tokens
  ONE = ALL & (np.arange(K) == 0)[:, None]
  NONE = ALL & False

  @staticmethod
  def logp_BT(theta, tokens_BT):
    first_V = jax.nn.log_softmax(theta[:2])
    second_VV = jax.nn.log_softmax(theta[2:].reshape(2, 2))
    first_B, second_B = tokens_BT.T
    return jnp.stack([first_V[first_B], second_VV[first_B, second_B]], axis=1)

  @staticmethod
  @functools.cache
  def slopes(config):
    """Return the gradient of each group's loss with respect to theta."""
    logp_BT = TestResponsesOfSeveralPolicies.logp_BT

    def loss(theta, tokens_BT, inputs, clip, is_first):
      logp, row_BT = logp_BT(theta, tokens_BT), jnp.ones(tokens_BT.shape, int)
      if config.importance_level != 'token':
        now = jax.lax.stop_gradient(logp)
        log_ratio = objective.row_log_ratio(now, inputs, row_BT, config, is_first)
        inputs = inputs._replace(row_log_ratio_BT=log_ratio)
      return objective.token_loss(
        logp, jnp.zeros(logp.shape), inputs, config, clip=clip, is_first=is_first
      )[0]

    return jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0, None, None)))

  def expected(self, values, is_carried_BT, *, now=START, start=START, clip=False, known=True):
    """Return E[gradient] if PAST sampled the carried tokens, and `start` all other tokens.

    `now` is the policy to differentiate; `known` is True if the loss knows what is carried.
    """
    config, is_first = changed(**values), now is start
    responses = np.array(list(itertools.product(range(2), repeat=2)))
    tokens_GBT = responses[list(itertools.product(range(4), repeat=self.K))]
    past, present = (
      np.asarray(self.logp_BT(theta, tokens_GBT.reshape(-1, 2))).reshape(tokens_GBT.shape)
      for theta in (self.PAST, start)
    )
    written_GBT = np.where(is_carried_BT, past, present)
    reward_GB = self.REWARD[tokens_GBT[..., 0], tokens_GBT[..., 1]]
    advantage_GB = np.asarray(advantages.group_advantages(reward_GB), np.float32)
    ones = np.ones((self.K, 2), np.float32)
    inputs_G = [
      objective.loss_inputs(
        Batch(
          tokens_BT=tokens_BT,
          response_mask_BT=ones,
          old_logp_BT=written_BT,
          advantage_B=advantage_B,
          is_replay_B=np.zeros(self.K, bool),
          policy_step_B=np.zeros(self.K, np.int32),
          term_weight_BT=ones,
          is_carried_BT=is_carried_BT & known,
        ),
        config,
        max_response=2,
      )
      for tokens_BT, written_BT, advantage_B in zip(tokens_GBT, written_GBT, advantage_GB)
    ]
    probability_G = np.exp(written_GBT.sum(axis=(1, 2), dtype=np.float64))
    np.testing.assert_allclose(probability_G.sum(), 1, rtol=1e-6)
    inputs = jax.tree.map(lambda *x: np.stack(x), *inputs_G)
    slope_G = self.slopes(config)(jnp.float32(now), tokens_GBT, inputs, clip, is_first)
    return probability_G @ np.asarray(slope_G, np.float64)

  def on_policy(self, now=START):
    return self.expected({}, self.NONE, now=now, start=now)

  def bias(self, found, now=START):
    exact = self.on_policy(now)
    assert np.linalg.norm(exact) > 0.05  # so 0 would be noticed
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)

  def test_the_product_of_ratios_is_unbiased_and_every_other_option_is_not(self):
    for name, (values, clip, expected) in BIASES.items():
      found = self.bias(self.expected(values, self.ALL, clip=clip))
      assert abs(found - expected) < (5e-4 if expected else 1e-5), (name, found)

  def test_ignoring_that_tokens_are_carried_is_worse_than_their_own_ratios(self):
    found = self.bias(self.expected({}, self.ALL, known=False))
    np.testing.assert_allclose(found, IGNORED, atol=5e-4)
    assert BIASES['token'][2] < found
    blind = self.bias(self.expected(dict(importance_level='product'), self.ALL, known=False))
    np.testing.assert_allclose(
      blind, found, rtol=1e-3
    )  # no ratio helps if carried tokens are unknown

  def test_token_ratios_are_exact_for_the_first_token_but_ignore_prefixes(self):
    """The second token's gradient is weighted by the past policy's probability of the prefix."""
    exact, found = self.on_policy(), self.expected({}, self.ALL)
    np.testing.assert_allclose(found[:2], exact[:2], atol=1e-6)
    # The probability of first token 1 is 0.5 under the past policy and 0.7 under the present one.
    np.testing.assert_allclose(found[4:], exact[4:] * 0.5 / 0.7, atol=1e-6)

  def test_in_later_minibatches_the_product_corrects_for_every_policy_that_wrote_a_part(self):
    for is_carried in (self.ALL, self.ONE, self.NONE):
      product, token = (
        self.bias(self.expected(values, is_carried, now=self.LATER), self.LATER)
        for values in (dict(importance_level='product'), {})
      )
      assert product < 1e-5 and token > 0.1


# ---- Advantages of groups against numbers computed by hand ----


# The last row of the first three groups is replayed; the last group has none.
MIXED = [[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]]
IS_REPLAY = [[0, 0, 0, 1]] * 3 + [[0, 0, 0, 0]]
AGAINST_FRESH = np.array(
  [[2 / 3, -1 / 3, -1 / 3, 1 / 2], [0, 0, 0, 3 / 4], [0] * 4, [1 / 2, -1 / 2, -1 / 2, 1 / 2]]
)
# The baseline if the replayed row has weight 1/2: the mean of 3.5 rows.
BALANCED = np.array(MIXED) - np.array([[1.5 / 3.5], [0.5 / 3.5], [1], [1 / 2]])
ZERO = [[1 / 2, -1 / 2, -1 / 2, 0], [-1 / 4] * 3 + [0], [0] * 4, [1 / 2, -1 / 2, -1 / 2, 1 / 2]]
FRESH_AND_ZERO = AGAINST_FRESH * (1 - np.array(IS_REPLAY))
# Mean squared distances to the whole group's mean: replay does not change the divisor.
DEVIATION = np.sqrt([[4 / 16], [3 / 16], [1], [4 / 16]])


@pytest.mark.parametrize(
  ('reward', 'expected', 'kind', 'of_replay'),
  [
    ([[1, 1, 0, 0]], [[0.5, 0.5, -0.5, -0.5]], 'off', ()),
    ([[1, 0, 0, 0]], [[0.75, -0.25, -0.25, -0.25]], 'off', ()),
    ([[1, 1]], [[0, 0]], 'off', ()),
    ([[3, 1], [0, 0]], [[1, -1], [0, 0]], 'off', ()),
    # The squared distances to the mean sum to 12 / 16: over 4 rollouts, or over 4 - 1.
    ([[1, 0, 0, 0]], np.array([[3, -1, -1, -1]]) / 4 / np.sqrt(3 / 16), 'population', ()),
    ([[1, 0, 0, 0]], np.array([[3, -1, -1, -1]]) / 4 / np.sqrt(4 / 16), 'sample', ()),
    ([[2, 2, 2, 2]], [[0] * 4], 'population', ()),
    (MIXED, AGAINST_FRESH, 'off', ('fresh',)),
    (MIXED, AGAINST_FRESH / DEVIATION, 'population', ('fresh',)),
    (MIXED, BALANCED, 'off', ('group', 'balanced', 0.5)),
    (MIXED, BALANCED / DEVIATION, 'population', ('group', 'balanced', 0.5)),
    (MIXED, ZERO, 'off', ('group', 'zero', 0.5)),
    (MIXED, FRESH_AND_ZERO, 'off', ('fresh', 'zero')),
  ],
  ids=[
    *('half_solved', 'one_of_four', 'all_solved_teaches_nothing', 'groups_are_independent'),
    *('population', 'sample', 'no_deviation', 'fresh_baseline', 'fresh_baseline_population'),
    *('balanced', 'balanced_population', 'zero', 'fresh_baseline_zero'),
  ],
)
def test_advantages_are_the_hand_computed_ones(reward, expected, kind, of_replay):
  reward = np.float32(reward)
  is_replay = np.array(IS_REPLAY, bool) if of_replay else None
  for wrap in (lambda f: f, functools.partial(jax.jit, static_argnums=(1, 3, 4, 5))):
    advantage = wrap(advantages.group_advantages)(reward, kind, is_replay, *of_replay)
    assert advantage.dtype == np.float32
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-6)


def test_a_custom_baseline_gets_copies_in_which_equal_rewards_have_an_exact_mean(monkeypatch):
  def mean(reward_QK, is_replay_QK):
    baseline_Q1 = reward_QK.mean(axis=1, keepdims=True)
    reward_QK[:], is_replay_QK[:] = 9, False
    return baseline_Q1

  monkeypatch.setitem(advantages.BASELINES, 'mine', mean)
  reward_QK = np.float32([[0.1] * 7, [1, 1, 1, 1, 1, 1, 8]])  # in float32, .1 is not its own mean
  is_replay_QK = np.array([[False] * 6 + [True]] * 2)
  found = [
    advantages.group_advantages(reward_QK, kind, is_replay_QK, 'mine', 'zero')
    for kind in ('off', 'population')
  ]
  assert (found[0] == [[0] * 7, [-1] * 6 + [0]]).all() and found[0].dtype == np.float32
  np.testing.assert_allclose(found[1], found[0] / np.sqrt(6), rtol=1e-5)


def test_a_standard_deviation_is_exact_far_from_0():
  """In float32, the standard deviation of these rewards is 2% off unless they are shifted."""
  reward_QK = np.float32([[1e5 + 1 / 64, 1e5, 1e5]])
  found = advantages.group_advantages(reward_QK, 'population')
  np.testing.assert_allclose(found, [[2**0.5, -(0.5**0.5), -(0.5**0.5)]], rtol=1e-3)


@pytest.mark.parametrize('kind', ['off', 'population', 'sample'])
def test_history_uses_the_questions_posterior_instead_of_the_group(kind):
  counts = np.float32([[1.5, 3.5], [4.5, 0.5]])  # means of 0.3 and 0.9
  reward = np.float32([[1, 0, 0, 0], [1, 1, 1, 1]])
  expected = np.array([[0.7, -0.3, -0.3, -0.3], [0.1] * 4])
  if kind != 'off':
    expected /= np.sqrt([[0.3 * 0.7], [0.9 * 0.1]])
  advantage = advantages.history_advantages(reward, counts, kind)
  assert advantage.dtype == np.float32
  np.testing.assert_allclose(advantage, expected, rtol=1e-5)


@pytest.mark.parametrize('kind', ['off', 'population', 'sample'])
@pytest.mark.parametrize(
  'of_replay', [('group',), ('fresh',), ('group', 'zero'), ('fresh', 'zero'), ('group', 'balanced')]
)
@pytest.mark.parametrize('reward', [0.3, 1.3, -2.3, 9.9, 10.1, 1e-30, 1e15])
def test_equal_rewards_give_exactly_0(reward, of_replay, kind):
  for num_rollouts in range(2, 25):
    equal = np.full((2, num_rollouts), reward, np.float32)
    is_replay = np.arange(num_rollouts) == np.array([[0], [-1]])  # the first of a group, or none
    advantage = advantages.group_advantages(equal, kind, is_replay, *of_replay, replay_slope=0.0826)
    assert not advantage.any()


@pytest.mark.parametrize('of_replay', [0.1, 0.4])
@pytest.mark.parametrize('replayed', [0, 7])
@pytest.mark.parametrize('kind', ['off', 'sample'])
def test_equal_fresh_rewards_give_0_with_the_fresh_baseline(kind, replayed, of_replay):
  is_replay = np.arange(8)[None] == replayed
  reward = np.where(is_replay, of_replay, 0.2).astype(np.float32)
  advantage = advantages.group_advantages(reward, kind, is_replay, 'fresh')
  assert not advantage[~is_replay].any()
  assert (advantage[is_replay] > 0) == (of_replay > 0.2)
