"""Draws follow the configured distribution and report its log-probability and entropy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from exgrpo_jax.rollout import token_sampling
from exgrpo_jax.runtime import randomness
from tests.helpers import tiers

LOGITS = np.array([2.0, 0.0, -1.0, -np.inf, 1.0, 0.5, -3.0, 1.0, -0.5])
_draw = jax.jit(token_sampling.sample_token, static_argnums=0)


@functools.cache
def _uniforms():
  """Return the uniforms for three tokens of many samples: float32 [12,000, 2]."""
  row_B = np.arange(12_000)
  key_B = randomness.row_keys(jax.random.key(5), row_B // 8, row_B % 8)
  return np.asarray(randomness.uniforms(key_B, row_B % 3))


def expected(config, logits_V):
  """Truncate token by token in NumPy: top-k, then top-p, then min-p."""
  p_V = scipy.special.softmax(logits_V / (config.temperature or 1.0))
  order = np.argsort(-p_V, kind='stable')
  kept = list(order[: config.top_k or None])
  total = sum(p_V[kept])
  below = 0.0
  for rank, token in enumerate(kept):
    if rank and below >= config.top_p * total:
      kept = kept[:rank]
      break
    below += p_V[token]
  kept = [token for token in kept if p_V[token] >= config.min_p * p_V[kept[0]]]
  truncated_V = np.zeros_like(p_V)
  truncated_V[kept] = p_V[kept]
  return truncated_V / truncated_V.sum()


@pytest.mark.parametrize(
  'config',
  tiers.full_after_first(
    [
      pytest.param(token_sampling.Distribution(temperature=0.8), id='temperature'),
      pytest.param(token_sampling.Distribution(), id='softmax'),
      pytest.param(token_sampling.Distribution(top_k=2), id='top_k'),
      pytest.param(token_sampling.Distribution(top_k=100), id='top_k_above_the_vocabulary'),
      pytest.param(token_sampling.Distribution(top_p=0.8), id='top_p'),
      pytest.param(token_sampling.Distribution(min_p=0.2), id='min_p'),
      pytest.param(
        token_sampling.Distribution(temperature=0.7, top_k=6, top_p=0.9, min_p=0.1), id='all'
      ),
    ]
  ),
)
@pytest.mark.parametrize('size', tiers.full_after_first([9, 700]))
def test_draws_follow_the_distribution(config, size):
  """Chi-square test on thousands of draws; 700 tokens are several blocks."""
  logits_V = LOGITS if size == 9 else np.random.default_rng(3).normal(size=size) * 2
  logits_V = logits_V - 1e-3 * np.arange(size)  # no ties
  count = 12_000 if size == 9 else 4_000
  logits_BV = np.tile(np.float32(logits_V), (count, 1))
  token_B, logp_B, entropy_B = map(np.asarray, _draw(config, logits_BV, _uniforms()[:count]))
  p_V = expected(config, logits_V)
  count_V = np.bincount(token_B, minlength=size)
  assert count_V[p_V == 0].sum() == 0
  # Rare tokens form one class, because the test needs an expected count of five per class.
  rare_V = (count * p_V < 5) & (p_V > 0)
  common_V = (p_V > 0) & ~rare_V
  classes = [np.append(x[common_V], x[rare_V].sum()) for x in (count_V, count * p_V)]
  classes = [x[: len(x) if rare_V.any() else -1] for x in classes]
  assert scipy.stats.chisquare(*classes).pvalue > 1e-3
  np.testing.assert_allclose(logp_B, np.log(p_V[token_B]), atol=2e-5)
  np.testing.assert_allclose(entropy_B, scipy.stats.entropy(p_V), atol=2e-5)


@pytest.mark.parametrize('size', [9, 700])
def test_greedy_is_argmax_with_log_probability_and_entropy_at_temperature_1(size):
  logits_BV = np.random.default_rng(0).normal(size=(50, size)).astype(np.float32)
  token_B, logp_B, entropy_B = _draw(
    token_sampling.Distribution(temperature=0.0), logits_BV, np.full((50, 2), 0.99, np.float32)
  )
  p_BV = scipy.special.softmax(logits_BV, axis=-1)
  np.testing.assert_array_equal(token_B, logits_BV.argmax(-1))
  np.testing.assert_allclose(logp_B, np.log(p_BV.max(-1)), atol=1e-5)
  np.testing.assert_allclose(entropy_B, scipy.stats.entropy(p_BV, axis=-1), atol=1e-5)


# Probabilities of 5 tokens -> settings and the tokens kept. Tokens 2 and 3 are equally probable.
P_V = [0.1, 0.4, 0.2, 0.2, 0.1]
KEPT = [
  (dict(top_k=1), [1]),
  (dict(top_k=2), [1, 2, 3]),
  (dict(top_p=0.3), [1]),
  (dict(top_p=0.55), [1, 2, 3]),
  (dict(top_p=0.85), [0, 1, 2, 3, 4]),
  (dict(min_p=0.4), [1, 2, 3]),
  (dict(min_p=0.6), [1]),
  (dict(top_k=3, top_p=0.45), [1]),  # 0.4 is half of what top_k keeps
]


def test_truncation_keeps_the_most_probable_tokens_and_all_ties():
  logits_V = np.log(np.float32([P_V]))
  for values, kept in KEPT:
    found_V = token_sampling.truncate(token_sampling.Distribution(**values), logits_V)[0]
    assert np.flatnonzero(np.isfinite(found_V)).tolist() == kept, values


@pytest.mark.full
def test_the_most_probable_token_is_always_kept():
  logits_BV = jnp.array([[0.0, 5.0, 1.0]])
  for config in (
    token_sampling.Distribution(top_p=1e-9),
    token_sampling.Distribution(min_p=1.0),
    token_sampling.Distribution(top_k=1),
  ):
    token_B, logp_B, entropy_B = _draw(config, logits_BV, jnp.array([[0.999, 0.999]]))
    assert (int(token_B[0]), float(logp_B[0]), float(entropy_B[0])) == (1, 0.0, 0.0)


def test_the_draw_inverts_the_cumulative_sum():
  """A boundary belongs to the next token. A token of weight 0 is never drawn, not even at 1."""
  expected = {0.0: 1, 0.24: 1, 0.25: 3, 0.49: 3, 0.5: 4, 0.9999999: 4, 1.0: 4}
  weight_BN = jnp.array([[0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0]] * len(expected))
  found_B = token_sampling.inverse_cdf(weight_BN, jnp.array([*expected]))
  assert found_B.tolist() == [*expected.values()]


@pytest.mark.full
def test_rounding_never_draws_an_impossible_token():
  """A parallel float32 cumulative sum may grow at a weight of 0. Draw exactly there."""
  rng = np.random.default_rng(0)
  weight_BN = np.float32(rng.exponential(size=(500, 5000)) * (rng.random((500, 5000)) < 0.5))
  cumulative_BN = np.array(jnp.cumsum(weight_BN, axis=-1))
  grows_BN = (np.diff(cumulative_BN) > 0) & (weight_BN[:, 1:] == 0)
  before_B = np.take_along_axis(cumulative_BN, grows_BN.argmax(-1)[:, None], -1)[:, 0]
  token_B = token_sampling.inverse_cdf(weight_BN, before_B / cumulative_BN[:, -1])
  assert (weight_BN[np.arange(500), token_B] > 0).all()
