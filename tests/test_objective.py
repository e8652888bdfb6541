"""The objective against numbers worked by hand, an independent formula, and enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import objective
from exgrpo_jax.types import Batch

PAPER = objective.Config(
    clip='always', clip_epsilon=.2, shaping=True, beta=.1, normalize_std=False,
    aggregation='constant', entropy_bonus=0., kl_coefficient=0., old_logprobs='sampler')


def changed(**values):
  return objective.Config(**{**PAPER.__dict__, **values})


@pytest.mark.parametrize(('reward', 'expected'), [
    pytest.param([[1., 1., 0., 0.]], [[.5, .5, -.5, -.5]], id='half_solved'),
    pytest.param([[1., 0., 0., 0.]], [[.75, -.25, -.25, -.25]], id='one_of_four'),
    pytest.param([[1., 1.]], [[0., 0.]], id='all_solved_teaches_nothing'),
    pytest.param([[3., 1.], [0., 0.]], [[1., -1.], [0., 0.]], id='groups_stand_alone')])
@pytest.mark.parametrize('wrap', [lambda f: f, jax.jit], ids=['plain', 'jit'])
def test_an_advantage_is_the_distance_to_the_groups_mean(reward, expected, wrap):
  found = wrap(objective.group_advantages)(jnp.array(reward))
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_normalised_advantages_have_unit_spread():
  found = objective.group_advantages(np.array([[1., 0., 0., 0.]]), normalize_std=True)
  expected = np.array([[.75, -.25, -.25, -.25]]) / np.sqrt(3 / 16)
  np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(('w', 'f', 'slope'), [
    # f(w) = w / (w + 0.1); df/dlog w = 0.1 w / (w + 0.1)^2
    (1., 1 / 1.1, .1 / 1.21),  # 0.083: a replayed token at w = 1 against a fresh one's 1
    (.1, .5, .01 / .04),
    (.9, .9, .09),
    (.01, .01 / .11, .001 / .0121)])
def test_shaping_and_its_gradient_are_the_hand_worked_ones(w, f, slope):
  value, gradient = jax.value_and_grad(lambda x: objective.shaped(x, .1))(jnp.log(w))
  np.testing.assert_allclose([value, gradient], [f, slope], rtol=1e-5)


def test_shaping_lifts_rare_tokens_and_damps_the_rest():
  turn = np.sqrt(.1) - .1  # 0.216
  for w, lifts in [(turn * .99, True), (turn * 1.01, False)]:
    slope = jax.grad(lambda x: objective.shaped(x, .1))(jnp.log(w))
    assert (slope > w) == lifts


def test_shaping_of_a_ratio_beyond_float32_stays_finite():
  value, slope = jax.value_and_grad(lambda x: objective.shaped(x, .1))(jnp.float32(200.))
  assert value == 1 and slope == 0


def random_batch(seed=0, rows=6, length=9):
  rng = np.random.default_rng(seed)
  mask = np.zeros((rows, length), np.float32)
  for row, (start, stop) in enumerate([(2, 9), (3, 5), (1, 9), (4, 8), (2, 3), (5, 9)]):
    mask[row, start:stop] = 1
  logp = -rng.gamma(1., 1., (rows, length)).astype(np.float32)
  past = (logp + rng.normal(0, .5, logp.shape)).astype(np.float32) * mask
  entropy = rng.gamma(1., 1., logp.shape).astype(np.float32)
  return logp, entropy, Batch(
      tokens_BT=np.zeros((rows, length), np.int32), response_mask_BT=mask, behaviour_logp_BT=past,
      advantage_B=rng.normal(size=rows).astype(np.float32),
      is_replay_B=np.array([0, 0, 1, 0, 1, 0], bool), policy_step_B=np.zeros(rows, np.int32))


def reference_loss(logp, entropy, batch, *, clip, first, aggregation, shaping, bonus, kl, ref):
  """DESIGN's formula row by row and token by token, in float64 and without JAX."""
  rows, limit = len(logp), 11
  tokens = [(b, t) for b, t in zip(*np.nonzero(batch.response_mask_BT))]
  lengths = batch.response_mask_BT.sum(axis=1)
  fresh = [(b, t) for b, t in tokens if not batch.is_replay_B[b]]
  total = 0.
  for b, t in tokens:
    advantage = float(batch.advantage_B[b])
    ratio = np.exp(float(logp[b, t]) - float(batch.behaviour_logp_BT[b, t]))
    if batch.is_replay_B[b]:
      term = advantage * (ratio / (ratio + .1) if shaping else ratio)
    else:
      ratio = 1. if first else ratio
      term = ratio * advantage
      if clip:
        term = min(term, min(max(ratio, .8), 1.2) * advantage)
    share = {'constant': 1 / (rows * limit), 'token_mean': 1 / len(tokens),
             'sequence_mean': 1 / (rows * lengths[b])}[aggregation]
    total -= share * term
  total -= bonus * np.mean([float(entropy[b, t]) for b, t in tokens])
  gap = [float(ref[b, t]) - float(logp[b, t]) for b, t in fresh]
  return total + kl * np.mean(np.exp(gap) - gap - 1)


@pytest.mark.parametrize('values', [
    dict(zip(('clip', 'first', 'aggregation', 'shaping', 'bonus', 'kl'), combination))
    for combination in itertools.product(
        (True, False), (True, False), ('constant', 'token_mean', 'sequence_mean'), (True, False),
        (0., .3), (0., .7))], ids=str)
def test_the_loss_is_the_formula(values):
  logp, entropy, batch = random_batch()
  ref = (logp + np.random.default_rng(5).normal(0, .3, logp.shape)).astype(np.float32)
  config = changed(aggregation=values['aggregation'], shaping=values['shaping'],
                   entropy_bonus=values['bonus'], kl_coefficient=values['kl'])
  found, _ = objective.loss(logp, entropy, batch, config, max_response=11, clip=values['clip'],
                            is_first=values['first'], reference_logp_BT=ref)
  np.testing.assert_allclose(found, reference_loss(logp, entropy, batch, ref=ref, **values),
                             rtol=2e-5)


def test_fresh_rows_of_the_first_minibatch_follow_the_plain_policy_gradient():
  logp, entropy, batch = random_batch()
  gradient = jax.grad(lambda x: objective.loss(
      x, entropy, batch, PAPER, max_response=11, clip=True, is_first=True)[0])(jnp.array(logp))
  expected = -batch.response_mask_BT * batch.advantage_B[:, None] / (6 * 11)
  fresh = ~batch.is_replay_B
  np.testing.assert_allclose(gradient[fresh], expected[fresh], atol=1e-7)


def test_what_lies_outside_the_mask_cannot_poison_the_gradient():
  logp, entropy, batch = random_batch()
  wild = np.where(batch.response_mask_BT > 0, logp, 300.).astype(np.float32)
  for first in (True, False):
    gradient = jax.grad(lambda x, first=first: objective.loss(
        x, entropy, batch, changed(kl_coefficient=1.), max_response=11, clip=False,
        is_first=first, reference_logp_BT=-wild)[0])(jnp.array(wild))
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[batch.response_mask_BT == 0] == 0).all()


def test_metrics_are_means_over_the_steps_tokens():
  logp, entropy, batch = random_batch()
  _, sums = objective.loss(logp, entropy, batch, PAPER, max_response=11, clip=True, is_first=False)
  found = objective.metrics({name: float(value) for name, value in sums.items()})
  mask = batch.response_mask_BT > 0
  replayed = mask & batch.is_replay_B[:, None]
  fresh = mask & ~batch.is_replay_B[:, None]
  w = np.exp(logp - batch.behaviour_logp_BT)
  sign = np.sign(batch.advantage_B)[:, None]
  np.testing.assert_allclose(found['entropy'], entropy[mask].mean(), rtol=1e-5)
  np.testing.assert_allclose(found['replay/ratio_mean'], w[replayed].mean(), rtol=1e-5)
  np.testing.assert_allclose(found['replay/ratio_max'], w[replayed].max(), rtol=1e-5)
  np.testing.assert_allclose(found['replay/effective_sample_size'],
                             w[replayed].sum()**2 / (replayed.sum() * (w[replayed]**2).sum()),
                             rtol=1e-5)
  outside = ((w > 1.2) & (sign > 0)) | ((w < .8) & (sign < 0))
  np.testing.assert_allclose(found['clip_share'], outside[fresh].mean(), rtol=1e-5)


class TestTheoremsByEnumeration:
  """One-token responses from a softmax over V tokens; o* comes from an older policy.

  Sums over every outcome of a group of K, nothing is sampled.
  """

  K = 3
  REWARD = np.array([1., 0., .5, 0.])
  THETA = np.array([.3, -.2, .5, .1])
  PAST = np.array([-.4, .6, .1, .2])

  def setup_method(self):
    self.pi, self.past = (np.exp(x) / np.exp(x).sum() for x in (self.THETA, self.PAST))
    self.score = np.eye(4) - self.pi  # row o: gradient of log pi(o) by theta

  def advantage(self, fresh, last):
    reward = self.REWARD[[[*fresh, last]]].astype(np.float64)
    return np.asarray(objective.group_advantages(reward))[0, -1]

  def expectation(self, source, weigh):
    """E[weigh(o*) A(group) grad log pi(o*)] with the K - 1 others fresh and o* from `source`."""
    total = np.zeros(4)
    for fresh in itertools.product(range(4), repeat=self.K - 1):
      for last in range(4):
        chance = np.prod(self.pi[list(fresh)]) * source[last]
        total += chance * weigh(last) * self.advantage(fresh, last) * self.score[last]
    return total

  def test_exact_weights_make_the_replayed_row_unbiased(self):
    on_policy = self.expectation(self.pi, lambda _: 1.)
    replayed = self.expectation(self.past, lambda o: self.pi[o] / self.past[o])
    assert np.abs(on_policy).max() > .01  # it says something
    np.testing.assert_allclose(replayed, on_policy, atol=1e-12)
    assert np.abs(self.expectation(self.past, lambda _: 1.) - on_policy).max() > .01

  def test_the_loss_itself_is_unbiased_without_shaping(self):
    """The same through objective.loss and autodiff, for the whole mixed group."""
    config = changed(shaping=False)

    def gradient(fresh, last, is_replay):
      tokens = np.array([*fresh, last])
      advantage = np.asarray(objective.group_advantages(self.REWARD[None, tokens]))[0]
      past = np.log(np.where(np.arange(self.K) == self.K - 1, self.past[tokens], self.pi[tokens]))
      batch = Batch(tokens[:, None], np.ones((self.K, 1), np.float32),
                    past[:, None].astype(np.float32), advantage.astype(np.float32),
                    np.arange(self.K) == (self.K - 1 if is_replay else -1), tokens)
      return jax.grad(lambda theta: objective.loss(
          jax.nn.log_softmax(theta)[tokens][:, None], jnp.zeros((self.K, 1)), batch, config,
          max_response=1, clip=False, is_first=True)[0])(jnp.array(self.THETA, jnp.float32))

    sums = {True: 0., False: 0.}
    for fresh in itertools.product(range(4), repeat=self.K - 1):
      for last in range(4):
        for is_replay, source in ((True, self.past), (False, self.pi)):
          chance = np.prod(self.pi[list(fresh)]) * source[last]
          sums[is_replay] += chance * np.asarray(gradient(fresh, last, is_replay))
    np.testing.assert_allclose(sums[True], sums[False], atol=1e-6)
    assert np.abs(sums[False]).max() > .01

  def test_variance_of_the_weighted_term_is_bounded_by_the_largest_weight(self):
    w = self.pi / self.past
    left = middle = plain = 0.
    for fresh in itertools.product(range(4), repeat=self.K - 1):
      for last in range(4):
        chance = np.prod(self.pi[list(fresh)])
        square = self.advantage(fresh, last)**2 * (self.score[last]**2).sum()
        left += chance * self.past[last] * w[last]**2 * square
        middle += chance * self.pi[last] * w[last] * square
        plain += chance * self.pi[last] * square
    np.testing.assert_allclose(left, middle, rtol=1e-12)
    assert left <= w.max() * plain
