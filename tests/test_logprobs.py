"""Log-probabilities and entropies against NumPy, whole and in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import logprobs

B, T, D, V = 3, 11, 5, 17
RNG = np.random.default_rng(0)
HIDDEN_BTD = RNG.normal(size=(B, T, D)).astype(np.float32)
UNEMBEDDING_DV = RNG.normal(size=(D, V)).astype(np.float32)
TOKENS_BT = RNG.integers(0, V, (B, T)).astype(np.int32)


def of_tokens(hidden_BTD=HIDDEN_BTD, unembedding_DV=UNEMBEDDING_DV, temperature=1., chunk=10**6,
              tokens_BT=TOKENS_BT):
  return logprobs.of_tokens(jnp.asarray(hidden_BTD), jnp.asarray(unembedding_DV),
                            jnp.asarray(tokens_BT), temperature=temperature, chunk=chunk)


def plain(temperature=1.):
  """Token by token, in float64."""
  logp_BT, entropy_BT = np.zeros((B, T)), np.zeros((B, T))
  for b in range(B):
    for t in range(1, T):
      logits_V = HIDDEN_BTD[b, t - 1].astype(np.float64) @ UNEMBEDDING_DV / temperature
      p_V = np.exp(logits_V) / np.exp(logits_V).sum()
      logp_BT[b, t] = np.log(p_V[TOKENS_BT[b, t]])
      entropy_BT[b, t] = -(p_V * np.log(p_V)).sum()
  return logp_BT, entropy_BT


@pytest.mark.parametrize('temperature', [1., .6, 2.])
# 33 = 11 positions a chunk, so one; 9 = 3 positions; 4 = 1, as has less than a row each.
@pytest.mark.parametrize('chunk', [10**6, 33, 9, 4, 1])
def test_values_are_those_of_a_log_softmax(temperature, chunk):
  for found_BT, expected_BT in zip(of_tokens(temperature=temperature, chunk=chunk),
                                   plain(temperature)):
    np.testing.assert_allclose(found_BT, expected_BT, atol=2e-6)


def test_the_first_token_has_no_past_and_is_0():
  logp_BT, entropy_BT = of_tokens()
  assert (logp_BT[:, 0] == 0).all() and (entropy_BT[:, 0] == 0).all()
  assert (logp_BT[:, 1:] < 0).all() and (entropy_BT[:, 1:] > 0).all()


def test_a_hidden_state_speaks_of_the_next_token_alone():
  base = of_tokens()
  moved = of_tokens(hidden_BTD=np.where(np.arange(T)[:, None] == 4, -HIDDEN_BTD, HIDDEN_BTD))
  for old_BT, new_BT in zip(base, moved):
    assert np.unique(np.nonzero(np.asarray(old_BT != new_BT))[1]).tolist() == [5]


@pytest.mark.parametrize('chunk', [9, 12, 1])
@pytest.mark.parametrize('wrap', [lambda f: f, jax.jit], ids=['plain', 'jit'])
def test_chunks_do_not_change_the_gradient(chunk, wrap):
  weight_BT = RNG.normal(size=(2, B, T)).astype(np.float32)

  def total(hidden_BTD, unembedding_DV, chunk):
    return sum((w * x).sum() for w, x in zip(
        weight_BT, of_tokens(hidden_BTD, unembedding_DV, .7, chunk)))

  def gradient(chunk):
    return wrap(jax.grad(functools.partial(total, chunk=chunk), argnums=(0, 1)))(
        jnp.asarray(HIDDEN_BTD), jnp.asarray(UNEMBEDDING_DV))

  for found, expected in zip(gradient(chunk), gradient(10**6)):
    assert np.abs(expected).max() > .1
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_large_logits_stay_finite():
  logp_BT, entropy_BT = of_tokens(hidden_BTD=HIDDEN_BTD * 1e4)
  assert np.isfinite(logp_BT).all() and np.isfinite(entropy_BT).all()


def test_bfloat16_hidden_states_give_float32_values():
  low = of_tokens(hidden_BTD=jnp.asarray(HIDDEN_BTD, jnp.bfloat16),
                  unembedding_DV=jnp.asarray(UNEMBEDDING_DV, jnp.bfloat16))
  for found_BT, expected_BT in zip(low, plain()):
    assert found_BT.dtype == jnp.float32
    np.testing.assert_allclose(found_BT, expected_BT, atol=.1)


def test_no_more_logits_exist_at_once_than_the_chunk_allows():
  jaxpr = str(jax.make_jaxpr(functools.partial(of_tokens, chunk=6))())
  assert f'f32[{B},2,{V}]' in jaxpr and f'f32[{B},{T - 1},{V}]' not in jaxpr
