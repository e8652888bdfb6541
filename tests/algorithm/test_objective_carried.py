"""The loss of tokens that earlier policies wrote, in responses that span steps."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.algorithm import advantages, objective
from exgrpo_jax.datatypes import Batch
from tests.helpers.losses import (
  changed,
  inputs_of,
  loss_and_gradient,
  random_batch,
  with_carried,
)


def test_a_product_beyond_float32_is_finite_and_nothing_at_advantage_0():
  logp, entropy, batch, _ = random_batch()
  config = changed(ratio='product')
  past = np.where(batch.response_mask_BT > 0, logp - 30, 0).astype(np.float32)
  for advantage in (0.0, 1.0):
    absurd = dataclasses.replace(
      with_carried(batch), behaviour_logp_BT=past, advantage_B=np.full(8, advantage, np.float32)
    )
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


# Values of the config, whether ratios are clipped, and the relative bias of the expected gradient
# where all first tokens are carried: the table of docs/algorithm.md.
BIASES = {
  'product': (dict(ratio='product'), False, 0.0),
  'sequence': (dict(ratio='sequence'), False, 0.130),
  'token': ({}, False, 0.229),
  'cispo, clipped': (dict(surrogate='cispo'), True, 0.236),
  'sequence, clipped': (dict(ratio='sequence'), True, 0.368),
  'token, clipped': ({}, True, 0.755),
  'product, clipped': (dict(ratio='product'), True, 0.912),
}
IGNORED = 0.256  # carried tokens taken for fresh ones


class TestResponsesOfSeveralPolicies:
  """Two tokens each, out of two: logits of the first, and of the second after each first one.

  An older policy wrote some of the first tokens. Expectations are sums over every possible group of
  K responses: nothing is sampled.
  """

  K = 3
  REWARD = np.array([[0.0, 0.0], [0.0, 1.0]])  # by first and second token
  PAST = logits(0.5, 0.5, 0.5)
  START = logits(0.7, 0.4, 0.6)  # of the step
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
    """The gradient by theta of each group's loss."""
    logp_BT = TestResponsesOfSeveralPolicies.logp_BT

    def loss(theta, tokens_BT, inputs, clip, is_first):
      logp, row_BT = logp_BT(theta, tokens_BT), jnp.ones(tokens_BT.shape, int)
      if config.ratio != 'token':
        now = jax.lax.stop_gradient(logp)
        log_ratio = objective.row_log_ratio(now, inputs, row_BT, config, is_first)
        inputs = inputs._replace(row_log_ratio_BT=log_ratio)
      return objective.token_loss(
        logp, jnp.zeros(logp.shape), inputs, config, clip=clip, is_first=is_first
      )[0]

    return jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0, None, None)))

  def expected(self, values, is_carried_BT, *, now=START, start=START, clip=False, known=True):
    """E[gradient] where PAST wrote the carried tokens, and the policy of the step's start all else.

    `now` is the policy whose gradient it is; `known` is whether the loss is told what is carried.
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
          behaviour_logp_BT=written_BT,
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
    blind = self.bias(self.expected(dict(ratio='product'), self.ALL, known=False))
    np.testing.assert_allclose(blind, found, rtol=1e-3)  # no ratio helps that is not told

  def test_own_ratios_are_exact_for_the_first_token_and_blind_to_the_prefix_of_the_next(self):
    """The second token's gradient has the weight of the prefix under the policy that wrote it."""
    exact, found = self.on_policy(), self.expected({}, self.ALL)
    np.testing.assert_allclose(found[:2], exact[:2], atol=1e-6)
    # After the first token 1: 0.5 under the past policy, where the present one has 0.7.
    np.testing.assert_allclose(found[4:], exact[4:] * 0.5 / 0.7, atol=1e-6)

  def test_in_later_minibatches_the_product_corrects_for_every_policy_that_wrote_a_part(self):
    for is_carried in (self.ALL, self.ONE, self.NONE):
      product, token = (
        self.bias(self.expected(values, is_carried, now=self.LATER), self.LATER)
        for values in (dict(ratio='product'), {})
      )
      assert product < 1e-5 and token > 0.1
