"""The objective against hand-computed numbers, an independent formula, and enumeration."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.algorithm import advantages, loss_sums, objective, terms
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
  random_batch,
  with_carried,
)


def loss(logp, entropy, batch, config, *, clip, first, reference_logp=None):
  """(loss, sums) of a minibatch."""
  inputs = inputs_of(batch, config, logp, reference_logp, first)
  return jitted(config)(logp, entropy, inputs, clip=clip, is_first=first)


@functools.cache
def jitted(config):
  return jax.jit(functools.partial(objective.token_loss, config=config))


def test_an_advantage_is_the_distance_to_the_groups_mean():
  cases = {
    'half solved': ([[1.0, 1.0, 0.0, 0.0]], [[0.5, 0.5, -0.5, -0.5]]),
    'one of four': ([[1.0, 0.0, 0.0, 0.0]], [[0.75, -0.25, -0.25, -0.25]]),
    'all solved, so no gradient': ([[1.0, 1.0]], [[0.0, 0.0]]),
    'groups are independent': ([[3.0, 1.0], [0.0, 0.0]], [[1.0, -1.0], [0.0, 0.0]]),
  }
  for name, (reward, expected) in cases.items():
    for wrap in (lambda f: f, jax.jit):
      advantage = wrap(advantages.group_advantages)(jnp.array(reward))
      np.testing.assert_allclose(advantage, expected, atol=1e-6, err_msg=f'{name}, {wrap}')


def test_normalised_advantages_are_in_units_of_the_groups_standard_deviation():
  """The squared distances to the mean sum to 12 / 16: over 4 rollouts, or over 4 - 1."""
  reward = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
  for kind, variance in (('population', 3 / 16), ('sample', 4 / 16)):
    expected = np.array([[0.75, -0.25, -0.25, -0.25], [0] * 4]) / np.sqrt(variance)
    for wrap in (lambda f: f, functools.partial(jax.jit, static_argnums=1)):
      advantage = wrap(advantages.group_advantages)(reward, kind)
      np.testing.assert_allclose(advantage, expected, rtol=1e-4, err_msg=kind)


def test_with_the_fresh_baseline_the_replayed_row_stands_outside_the_fresh_rows_mean():
  """The last row of the first three groups is replayed; the last group has none."""
  reward = np.array([[1.0, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]], np.float32)
  is_fresh = np.array([[1, 1, 1, 0]] * 3 + [[1] * 4], bool)
  expected = np.array(
    [[2 / 3, -1 / 3, -1 / 3, 1 / 2], [0, 0, 0, 3 / 4], [0] * 4, [1 / 2, -1 / 2, -1 / 2, 1 / 2]]
  )
  # Squared distances to the whole group's mean: the divisor is what it is without replay.
  scales = {'off': [1, 1, 1, 1], 'population': np.sqrt([4 / 16, 3 / 16, 1, 4 / 16])}
  for kind, scale in scales.items():
    for wrap in (lambda f: f, functools.partial(jax.jit, static_argnums=1)):
      advantage = wrap(advantages.group_advantages)(reward, kind, is_fresh)
      assert advantage.dtype == np.float32
      np.testing.assert_allclose(
        advantage, expected / np.reshape(scale, (4, 1)), rtol=1e-4, atol=1e-6, err_msg=kind
      )
  fresh_sum = (np.asarray(advantages.group_advantages(reward)) * is_fresh).sum(axis=1)
  np.testing.assert_allclose(fresh_sum, [-1 / 2, -3 / 4, 0, 0])  # what the setting is for


def test_shaping_and_its_gradient_are_the_hand_computed_ones():
  """f(w) = w / (w + 0.1), and df/dlog w = 0.1 w / (w + 0.1)^2."""
  for w, f, slope in (
    (1.0, 1 / 1.1, 0.1 / 1.21),  # 0.083, where a fresh token at ratio 1 has 1
    (0.1, 0.5, 0.01 / 0.04),
    (0.9, 0.9, 0.09),
    (0.01, 0.01 / 0.11, 0.001 / 0.0121),
  ):
    value, gradient = jax.value_and_grad(lambda x: terms.fraction(x, 0.1))(jnp.log(w))
    np.testing.assert_allclose([value, gradient], [f, slope], rtol=1e-5, err_msg=f'w = {w}')


def test_shaping_lifts_rare_tokens_and_damps_the_rest():
  threshold = np.sqrt(0.1) - 0.1  # 0.216
  for w, lifts in [(threshold * 0.99, True), (threshold * 1.01, False)]:
    slope = jax.grad(lambda x: terms.fraction(x, 0.1))(jnp.log(w))
    assert (slope > w) == lifts


def test_shaping_of_a_ratio_beyond_float32_stays_finite():
  value, slope = jax.value_and_grad(lambda x: terms.fraction(x, 0.1))(jnp.float32(200.0))
  assert value == 1 and slope == 0


# Config values -> what a replayed token of past probability 1/2 and probability now 1/4, so of
# w = 1/2, adds for an advantage of 1, and its derivative by log pi.
LOG_QUARTER = -2 * np.log(2)
RESHAPED = {
  'fraction': (dict(beta=0.1), 0.5 / 0.6, 0.05 / 0.36),
  'none': ({}, 0.5, 0.5),
  'power': (dict(shaping_exponent=2.0), 0.25, 0.5),  # the derivative is the exponent times more
  'log': (dict(shaping_weight=0.1), 0.1 * LOG_QUARTER, 0.1),
  'ratio_plus_log': (dict(shaping_weight=0.1), 0.5 + 0.1 * LOG_QUARTER, 0.6),
}


def replayed_token(logp, past_logp, advantage, config, first=False):
  """[value, gradient by logp] of the term of one replayed token."""
  one = np.ones((1, 1), np.float32)
  inputs = objective.LossInputs(
    mask_BT=one,
    weight_BT=one,
    entropy_weight_BT=one,
    kl_weight_BT=0 * one,
    old_logp_BT=past_logp * one,
    tis_weight_BT=one,
    advantage_BT=advantage * one,
    is_replay_BT=one > 0,
  )
  value, slope = jax.value_and_grad(
    lambda logp: jitted(config)(
      logp[None, None], jnp.zeros((1, 1)), inputs, clip=True, is_first=first
    )[0]
  )(jnp.float32(logp))
  return [-float(value), -float(slope)]


@pytest.mark.parametrize('shaping', RESHAPED)
def test_a_replayed_token_adds_the_hand_computed_term(shaping):
  values, value, slope = RESHAPED[shaping]
  for advantage in (1.0, -3.0):
    term = replayed_token(
      LOG_QUARTER, LOG_QUARTER / 2, advantage, changed(shaping=shaping, **values)
    )
    expected = [advantage * value, advantage * slope]
    np.testing.assert_allclose(term, expected, rtol=1e-5, err_msg=f'A = {advantage}')


@pytest.mark.parametrize('shaping', RESHAPED)
def test_a_replayed_token_beyond_float32_is_finite_and_nothing_at_advantage_0(shaping):
  config = changed(shaping=shaping, shaping_exponent=1.0)
  assert np.isfinite(replayed_token(-1.0, -500.0, 1.0, config)).all()
  assert replayed_token(-1.0, -500.0, 0.0, config) == [0, 0]


def test_without_importance_correction_a_replayed_ratio_is_1_in_the_first_minibatch():
  config = changed(shaping='none', importance_correction=False)
  assert replayed_token(-3.0, -1.0, 2.0, config, first=True) == [2, 2]
  later = replayed_token(-3.0, -1.0, 2.0, config, first=False)
  np.testing.assert_allclose(later, [2 * np.exp(-2), 2 * np.exp(-2)], rtol=1e-5)
  corrected = replayed_token(-3.0, -1.0, 2.0, changed(shaping='none'), first=True)
  np.testing.assert_allclose(corrected, later, rtol=1e-6)


@pytest.mark.parametrize('name', VARIANTS)
def test_the_loss_is_the_formula(name):
  config = changed(**VARIANTS[name])
  logp, entropy, batch, reference_logp = random_batch()
  for clip, first in CLIP_AND_FIRST:
    value, _ = loss(
      logp, entropy, batch, config, clip=clip, first=first, reference_logp=reference_logp
    )
    expected = formula(
      logp, entropy, batch, reference_logp, config, clip=clip, first=first, constant=logp
    )
    np.testing.assert_allclose(value, expected, rtol=2e-5, err_msg=f'clip={clip}, first={first}')


def one_token(ratio, advantage, config, clip=True):
  """[value, gradient by logp, is clipped] of the term of one fresh token."""
  one = np.ones((1, 1), np.float32)
  inputs = objective.LossInputs(
    mask_BT=one,
    weight_BT=one,
    entropy_weight_BT=one,
    kl_weight_BT=one,
    old_logp_BT=0 * one,
    tis_weight_BT=one,
    advantage_BT=advantage * one,
    is_replay_BT=one == 0,
  )
  (value, sums), slope = jax.value_and_grad(
    lambda logp: jitted(config)(
      logp[None, None], jnp.zeros((1, 1)), inputs, clip=clip, is_first=False
    ),
    has_aux=True,
  )(jnp.log(jnp.float32(ratio)))
  return [-float(value), -float(slope), float(sums['clipped'])]


# Name -> config values, ratio, advantage, clip, and the expected value, gradient and is clipped.
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
  'no dual clip': ({}, 4.0, -2.0, True, [-8.0, -8.0, 0.0]),
  # CISPO keeps a clipped token's gradient.
  'cispo': (CISPO, 4.0, 2.0, True, [2.4 * np.log(4), 2.4, 1.0]),
  'cispo, lower bound': (CISPO, 0.5, -2.0, True, [1.6 * np.log(2), -1.6, 1.0]),
  'cispo without clipping': (CISPO, 4.0, 2.0, False, [8 * np.log(4), 8.0, 0.0]),
}


def test_a_fresh_token_adds_the_hand_computed_term():
  for name, (values, ratio, advantage, clip, expected) in FRESH_TERMS.items():
    term = one_token(ratio, advantage, changed(**values), clip)
    np.testing.assert_allclose(term, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_gspo_moves_a_row_by_its_mean_log_ratio():
  """By s A / |o| times the sum of its tokens' gradients: the derivative of GSPO's objective."""
  config = changed(
    ratio='sequence', aggregation='sequence_mean', clip_epsilon=0.5, clip_epsilon_high=0.6
  )
  logp, entropy, batch, _ = random_batch()
  fresh = ~batch.is_replay_B
  mask = batch.response_mask_BT

  def sequence_objective(logp):
    mean = (mask * (logp - batch.behaviour_logp_BT)).sum(1) / jnp.maximum(mask.sum(1), 1)
    s, a = jnp.exp(mean), batch.advantage_B
    term = jnp.minimum(s * a, jnp.clip(s, 0.5, 1.6) * a) * (mask.sum(1) > 0)
    return -(term * fresh).sum() / len(a)

  batch = dataclasses.replace(batch, tis_weight_BT=np.ones_like(mask))
  inputs = inputs_of(batch, config, logp, None, False)
  gradient = jax.grad(lambda x: jitted(config)(x, entropy, inputs, clip=True, is_first=False)[0])(
    jnp.array(logp)
  )
  expected = jax.jit(jax.grad(sequence_objective))(logp)
  assert np.abs(expected).max() > 0.001
  np.testing.assert_allclose(gradient[fresh], expected[fresh], atol=1e-7)


def test_a_row_without_tokens_has_log_ratio_0():
  logp, _, batch, _ = random_batch()
  inputs, row = objective.loss_inputs(batch, PAPER, LIMIT), np.ones(logp.shape, int)
  log_ratio_BT = objective.row_log_ratio(logp, inputs, row, changed(ratio='sequence'), False)
  gap = (logp - batch.behaviour_logp_BT)[1, 3:5]  # of row 1's response
  assert log_ratio_BT.shape == logp.shape and (log_ratio_BT[6] == 0).all()
  np.testing.assert_allclose(log_ratio_BT[1], gap.mean(), rtol=1e-5)


def test_rows_that_share_a_sequence_have_log_ratios_of_their_own():
  logp, _, batch, _ = random_batch()
  inputs = objective.loss_inputs(batch, PAPER, LIMIT)
  segment = np.where(np.arange(9) < 5, 1, 2) * np.ones(logp.shape, int)  # cuts every row in two
  gap, mask = logp - batch.behaviour_logp_BT, batch.response_mask_BT
  for ratio in ('sequence', 'product'):
    log_ratio_BT = objective.row_log_ratio(logp, inputs, segment, changed(ratio=ratio), False)
    for part in (slice(5), slice(5, None)):
      expected_B = (gap * mask)[:, part].sum(1)
      if ratio == 'sequence':
        expected_B /= np.maximum(mask[:, part].sum(1), 1)
      for found_B in log_ratio_BT[:, part].T:
        np.testing.assert_allclose(found_B, expected_B, rtol=1e-5, atol=1e-6)


def test_a_tis_weight_is_the_ratio_of_trainer_to_sampler_truncated_at_the_limit():
  trainer = np.log(np.array([0.5, 0.2, 0.9, 1.0], np.float32))
  sampler = np.append(np.log([0.25, 0.4, 0.1]), -200.0).astype(np.float32)  # exp(200) overflows
  weight = terms.tis_weight(trainer, sampler, 3.0)
  assert weight.dtype == np.float32
  np.testing.assert_allclose(weight, [2.0, 0.5, 3.0, 3.0], rtol=1e-5)


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    (dict(tis_limit=2.0), "tis_limit=2.0 needs config.objective.old_logprobs='recompute'"),
    (
      dict(dual_clip=3.0, surrogate='cispo'),
      "dual_clip=3.0 needs config.objective.surrogate='ppo'",
    ),
    (dict(dual_clip=1.0), r'dual_clip=1.0 must lie in \(1, inf\]'),
    (dict(clip_epsilon_high=0.0), 'clip_epsilon_high=0.0 must lie in'),
    (dict(tis_limit=-1.0), 'tis_limit=-1.0 must lie in'),
    (dict(surrogate='gspo'), 'must be one of ppo, cispo'),
    (dict(ratio='row'), 'must be one of token, sequence, product'),
  ],
)
def test_a_config_of_impossible_values_is_refused(values, message):
  with pytest.raises(InputError, match=message):
    config_lib.build(objective.Config, PAPER.__dict__ | values, 'config.objective')


@pytest.mark.parametrize('name', VARIANTS)
def test_any_split_of_a_minibatch_gives_the_same(name):
  """Split by rows, in another order, and by positions."""
  config = changed(**VARIANTS[name])
  logp, entropy, batch, reference_logp = random_batch()
  batch = with_carried(batch)
  step = jax.jit(
    jax.value_and_grad(
      lambda logp, entropy, inputs, clip, first: objective.token_loss(
        logp, entropy, inputs, config, clip=clip, is_first=first
      ),
      has_aux=True,
    )
  )
  for clip, first in CLIP_AND_FIRST:
    inputs = inputs_of(batch, config, logp, reference_logp, first)
    (value, sums), gradient = step(logp, entropy, inputs, clip, first)
    sum_of_values, gradients, slices = 0.0, np.zeros_like(logp), []
    # All slices have one shape, so they share a program.
    for rows in ([7, 0, 3, 6], [5, 4, 2, 1]):
      for positions in (slice(0, 3), slice(3, 6), slice(6, 9)):

        def cut(x, rows=rows, positions=positions):
          return x[rows] if x.shape[1] == 1 else x[rows, positions]

        (slice_value, slice_sums), slice_gradient = step(
          *jax.tree.map(cut, (logp, entropy, inputs)), clip, first
        )
        sum_of_values += slice_value
        gradients[rows, positions] = slice_gradient
        slices.append(slice_sums)
    np.testing.assert_allclose(sum_of_values, value, atol=1e-6)
    np.testing.assert_allclose(gradients, gradient, atol=1e-7)
    for key, merged in loss_sums.merge_sums(slices).items():
      np.testing.assert_allclose(merged, sums[key], rtol=1e-5, atol=1e-6, err_msg=key)


def test_loss_inputs_are_numpy_on_the_host():
  *_, batch, _ = random_batch()
  for x in jax.tree.leaves(objective.loss_inputs(batch, changed(aggregation='token_mean'), LIMIT)):
    assert isinstance(x, np.ndarray) and x.dtype in (np.float32, bool) and x.shape[0] == 8


def test_fresh_rows_of_the_first_minibatch_follow_the_plain_policy_gradient():
  logp, entropy, batch, _ = random_batch()
  batch = dataclasses.replace(batch, tis_weight_BT=np.ones_like(batch.tis_weight_BT))
  inputs = objective.loss_inputs(batch, PAPER, LIMIT)
  gradient = jax.grad(lambda x: jitted(PAPER)(x, entropy, inputs, clip=True, is_first=True)[0])(
    logp
  )
  expected = -batch.response_mask_BT * batch.advantage_B[:, None] / (8 * LIMIT)
  fresh = ~batch.is_replay_B
  np.testing.assert_allclose(gradient[fresh], expected[fresh], atol=1e-7)


@pytest.mark.parametrize(('pass_rate', 'quotient'), [(1 / 8, 0.0826), (1 / 2, 0.0118)])
def test_a_replayed_row_pulls_little_and_its_neighbours_downwards(pass_rate, quotient):
  """Responses of one token, right with p = sigmoid(theta): d log pi / d theta is 1 - p or -p.

  All numbers of right ones among 7 fresh rows are enumerated; the replayed row is right, w is 1.
  """
  *_, batch, _ = random_batch()
  pull, net = np.zeros(8), 0.0  # expected: of each row towards theta, of all rows' tokens together
  for solved in range(8):
    chance = math.comb(7, solved) * pass_rate**solved * (1 - pass_rate) ** (7 - solved)
    is_right = np.array([1] * solved + [0] * (7 - solved) + [1], np.float32)
    group = dataclasses.replace(
      batch,
      response_mask_BT=np.ones((8, 1), np.float32),
      behaviour_logp_BT=np.zeros((8, 1), np.float32),
      tis_weight_BT=np.ones((8, 1), np.float32),
      advantage_B=np.asarray(advantages.group_advantages(is_right[None]))[0],
      is_replay_B=np.arange(8) == 7,
    )
    slope_B = -8 * LIMIT * slopes(objective.loss_inputs(group, PAPER, LIMIT))[:, 0]
    pull += chance * slope_B * np.where(is_right, 1 - pass_rate, -pass_rate)
    net += chance * slope_B.sum()
  np.testing.assert_allclose(pull[7] / pull[:7].sum(), quotient, rtol=5e-3)
  np.testing.assert_allclose(net, -(1 - 0.1 / 1.1**2) * 7 / 8 * (1 - pass_rate), rtol=1e-4)


@jax.jit
def slopes(inputs):
  """The loss's gradient by logp where w is 1, in a step's first minibatch."""
  loss_of = functools.partial(objective.token_loss, clip=True, is_first=True, config=PAPER)
  return jax.grad(lambda logp: loss_of(logp, jnp.zeros_like(logp), inputs)[0])(inputs.old_logp_BT)


@pytest.mark.parametrize('name', VARIANTS)
def test_what_lies_outside_the_mask_cannot_poison_the_gradient(name):
  config = changed(**VARIANTS[name])
  logp, entropy, batch, reference_logp = random_batch()
  outside = batch.response_mask_BT == 0
  reference_logp = np.where(outside, np.nan, reference_logp)
  # A row whose mask replay.difficulty has emptied keeps its log-probabilities.
  behaviour_logp = np.where(outside, -300.0, batch.behaviour_logp_BT).astype(np.float32)
  masked = objective.loss_inputs(
    dataclasses.replace(batch, behaviour_logp_BT=behaviour_logp), config, LIMIT
  )
  np.testing.assert_array_equal(masked.old_logp_BT, batch.behaviour_logp_BT)
  logp = np.where(outside, 300.0, logp).astype(np.float32)
  entropy = np.where(outside, np.nan, entropy)
  step = jax.jit(
    jax.value_and_grad(
      lambda x, inputs, clip, first: objective.token_loss(
        x, entropy, inputs, config, clip=clip, is_first=first
      )[0]
    )
  )
  for clip, first in CLIP_AND_FIRST:
    inputs = inputs_of(batch, config, logp, reference_logp, first)
    value, gradient = step(logp, inputs, clip, first)
    assert np.isfinite(value) and np.isfinite(gradient).all(), (clip, first)
    assert (np.asarray(gradient)[outside] == 0).all(), (clip, first)


def test_a_replayed_token_that_the_past_policy_found_absurd_stays_finite():
  logp, entropy, batch, _ = random_batch()
  behaviour_logp = batch.behaviour_logp_BT.copy()
  behaviour_logp[2, 1:9] = -500.0  # the ratio overflows float32, its shaped weight is 1
  batch = dataclasses.replace(batch, behaviour_logp_BT=behaviour_logp)
  inputs = objective.loss_inputs(batch, PAPER, LIMIT)
  gradient = jax.grad(lambda x: jitted(PAPER)(x, entropy, inputs, clip=True, is_first=False)[0])(
    logp
  )
  assert np.isfinite(gradient).all() and (np.asarray(gradient)[2] == 0).all()


def test_metrics_are_means_over_the_steps_tokens():
  logp, entropy, batch, _ = random_batch()
  _, sums = loss(logp, entropy, batch, PAPER, clip=True, first=False)
  metrics = loss_sums.metrics({name: float(value) for name, value in sums.items()})
  mask = batch.response_mask_BT > 0
  replayed = mask & batch.is_replay_B[:, None]
  fresh = mask & ~batch.is_replay_B[:, None]
  w = np.exp(logp - batch.behaviour_logp_BT)
  sign = np.sign(batch.advantage_B)[:, None]
  np.testing.assert_allclose(metrics['entropy'], entropy[mask].mean(), rtol=1e-5)
  np.testing.assert_allclose(metrics['replay/ratio_mean'], w[replayed].mean(), rtol=1e-5)
  np.testing.assert_allclose(metrics['replay/ratio_max'], w[replayed].max(), rtol=1e-5)
  f = w[replayed] / (w[replayed] + 0.1)
  np.testing.assert_allclose(metrics['replay/shaped_mean'], f.mean(), rtol=1e-5)
  np.testing.assert_allclose(metrics['replay/shaped_variance'], f.var(), rtol=1e-4)
  np.testing.assert_allclose(
    metrics['replay/effective_sample_size'],
    w[replayed].sum() ** 2 / (replayed.sum() * (w[replayed] ** 2).sum()),
    rtol=1e-5,
  )
  outside = ((w > 1.2) & (sign > 0)) | ((w < 0.8) & (sign < 0))
  np.testing.assert_allclose(metrics['clip_share'], outside[fresh].mean(), rtol=1e-5)


@pytest.mark.parametrize('clip', [True, False])
def test_the_share_of_fresh_tokens_outside_the_clip_range_does_not_depend_on_clipping(clip):
  logp, entropy, batch, _ = random_batch()
  wide_above = dataclasses.replace(PAPER, clip_epsilon_high=0.5)
  _, sums = loss(logp, entropy, batch, wide_above, clip=clip, first=False)
  metrics = loss_sums.metrics({name: float(value) for name, value in sums.items()})
  fresh = (batch.response_mask_BT > 0) & ~batch.is_replay_B[:, None]
  ratio = np.exp(logp - batch.behaviour_logp_BT)[fresh]
  share = ((ratio < 0.8) | (ratio > 1.5)).mean()
  assert 0 < share < 1 and metrics['clip_share'] < share
  np.testing.assert_allclose(metrics['outside_clip_range'], share, rtol=1e-5)


def test_no_fresh_token_of_a_steps_first_minibatch_is_outside_the_clip_range():
  logp, entropy, batch, _ = random_batch()
  _, sums = loss(logp, entropy, batch, PAPER, clip=False, first=True)
  assert float(sums['outside']) == 0


class TestTheoremsByEnumeration:
  """One-token responses from a softmax over 4 tokens; o* was written by an older policy.

  Expectations are sums over every possible group of K responses: nothing is sampled.
  """

  K = 3
  REWARD = np.array([1.0, 0.0, 0.5, 0.0])
  THETA = np.array([0.3, -0.2, 0.5, 0.1])
  PAST = np.array([-0.4, 0.6, 0.1, 0.2])

  def setup_method(self):
    self.pi, self.past = (np.exp(x) / np.exp(x).sum() for x in (self.THETA, self.PAST))
    self.score = np.eye(4) - self.pi  # row o: gradient of log pi(o) by theta

  def advantage(self, fresh, last):
    reward = self.REWARD[[[*fresh, last]]].astype(np.float64)
    return np.asarray(advantages.group_advantages(reward))[0, -1]

  def expectation(self, source, weight):
    """E[weight(o*) A(group) grad log pi(o*)] with the K - 1 others fresh and o* from `source`."""
    total = np.zeros(4)
    for fresh in itertools.product(range(4), repeat=self.K - 1):
      for last in range(4):
        probability = np.prod(self.pi[list(fresh)]) * source[last]
        total += probability * weight(last) * self.advantage(fresh, last) * self.score[last]
    return total

  def test_exact_weights_make_the_replayed_row_unbiased(self):
    on_policy = self.expectation(self.pi, lambda _: 1.0)
    replayed = self.expectation(self.past, lambda o: self.pi[o] / self.past[o])
    assert np.abs(on_policy).max() > 0.01  # so 0 would be noticed
    np.testing.assert_allclose(replayed, on_policy, atol=1e-12)
    assert np.abs(self.expectation(self.past, lambda _: 1.0) - on_policy).max() > 0.01

  def test_the_loss_itself_is_unbiased_without_shaping(self):
    """The same through the loss and autodiff, for a mixed group."""
    config = changed(shaping='none')

    @jax.jit
    def slope(theta, outcome, inputs):
      return jax.grad(
        lambda theta: objective.token_loss(
          jax.nn.log_softmax(theta)[outcome][:, None],
          jnp.zeros((self.K, 1)),
          inputs,
          config,
          clip=False,
          is_first=True,
        )[0]
      )(theta)

    def gradient(fresh, last, is_replay):
      tokens = np.array([*fresh, last])
      advantage = np.asarray(advantages.group_advantages(self.REWARD[None, tokens]))[0]
      past = np.log(np.where(np.arange(self.K) == self.K - 1, self.past[tokens], self.pi[tokens]))
      batch = Batch(
        tokens_BT=tokens[:, None],
        response_mask_BT=np.ones((self.K, 1), np.float32),
        behaviour_logp_BT=past[:, None].astype(np.float32),
        advantage_B=advantage.astype(np.float32),
        is_replay_B=np.arange(self.K) == (self.K - 1 if is_replay else -1),
        policy_step_B=np.zeros(self.K, np.int32),
        tis_weight_BT=np.ones((self.K, 1), np.float32),
      )
      return slope(
        jnp.array(self.THETA, jnp.float32),
        tokens,
        objective.loss_inputs(batch, config, max_response=1),
      )

    sums = {True: 0.0, False: 0.0}
    for fresh in itertools.product(range(4), repeat=self.K - 1):
      for last in range(4):
        for is_replay, source in ((True, self.past), (False, self.pi)):
          probability = np.prod(self.pi[list(fresh)]) * source[last]
          sums[is_replay] += probability * np.asarray(gradient(fresh, last, is_replay))
    np.testing.assert_allclose(sums[True], sums[False], atol=1e-6)
    assert np.abs(sums[False]).max() > 0.01

  def test_variance_of_the_weighted_term_is_bounded_by_the_largest_weight(self):
    w = self.pi / self.past
    under_past = under_current = unweighted = 0.0
    for fresh in itertools.product(range(4), repeat=self.K - 1):
      for last in range(4):
        probability = np.prod(self.pi[list(fresh)])
        square = self.advantage(fresh, last) ** 2 * (self.score[last] ** 2).sum()
        under_past += probability * self.past[last] * w[last] ** 2 * square
        under_current += probability * self.pi[last] * w[last] * square
        unweighted += probability * self.pi[last] * square
    np.testing.assert_allclose(under_past, under_current, rtol=1e-12)
    assert under_past <= w.max() * unweighted
