"""Log-probabilities, entropies and the fused loss against NumPy and plain autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import objective
from exgrpo_jax.policy import logprobs
from tests.helpers import tiers
from tests.helpers.losses import CLIP_AND_FIRST, fused_example

B, T, D, V = 3, 11, 5, 17
RNG = np.random.default_rng(0)
HIDDEN_BTD = RNG.normal(size=(B, T, D)).astype(np.float32)
UNEMBEDDING_DV = RNG.normal(size=(D, V)).astype(np.float32)
TOKENS_BT = RNG.integers(0, V, (B, T)).astype(np.int32)


@functools.partial(jax.jit, static_argnames='chunk')
def token_logprobs(
  hidden_BTD=HIDDEN_BTD, unembedding_DV=UNEMBEDDING_DV, temperature=1.0, chunk=10**6
):
  return logprobs.token_logprobs(
    hidden_BTD, unembedding_DV, TOKENS_BT, temperature=temperature, chunk=chunk
  )


def numpy_logprobs(temperature=1.0):
  """Compute (logp_BT, entropy_BT) token by token, in float64."""
  logp_BT, entropy_BT = np.zeros((B, T)), np.zeros((B, T))
  for b in range(B):
    for t in range(1, T):
      logits_V = HIDDEN_BTD[b, t - 1].astype(np.float64) @ UNEMBEDDING_DV / temperature
      p_V = np.exp(logits_V) / np.exp(logits_V).sum()
      logp_BT[b, t] = np.log(p_V[TOKENS_BT[b, t]])
      entropy_BT[b, t] = -(p_V * np.log(p_V)).sum()
  return logp_BT, entropy_BT


@pytest.mark.parametrize('chunk', [10**6, 9, 1])  # one chunk; 3 positions; 1 position
def test_values_match_log_softmax_and_are_0_at_the_first_token(chunk):
  for temperature in (1.0, 0.6, 2.0):
    found = token_logprobs(temperature=temperature, chunk=chunk)
    for found_BT, expected_BT in zip(found, numpy_logprobs(temperature)):
      np.testing.assert_allclose(found_BT, expected_BT, atol=2e-6)
      assert (found_BT[:, 0] == 0).all()


def test_large_logits_stay_finite():
  assert np.isfinite(token_logprobs(hidden_BTD=HIDDEN_BTD * 1e4)).all()


def test_bfloat16_hidden_states_give_float32_values():
  from_bfloat16 = token_logprobs(
    hidden_BTD=jnp.asarray(HIDDEN_BTD, jnp.bfloat16),
    unembedding_DV=jnp.asarray(UNEMBEDDING_DV, jnp.bfloat16),
  )
  for actual_BT, expected_BT in zip(from_bfloat16, numpy_logprobs()):
    assert actual_BT.dtype == jnp.float32
    np.testing.assert_allclose(actual_BT, expected_BT, atol=0.1)


def test_predictor_states_and_their_gradients_are_gathered_by_position():
  position_BW = np.array([[0, 1, 4], [3, 5, 6], [0, 2, T - 1]])
  states_BWD = logprobs.predictor_states(jnp.asarray(HIDDEN_BTD), position_BW)
  np.testing.assert_array_equal(
    states_BWD, np.take_along_axis(HIDDEN_BTD, position_BW[..., None], axis=1)
  )
  slope_BTD = jax.grad(lambda hidden: logprobs.predictor_states(hidden, position_BW).sum())(
    jnp.asarray(HIDDEN_BTD)
  )
  is_chosen_BT = (position_BW[..., None] == np.arange(T)).any(axis=1)
  np.testing.assert_array_equal(slope_BTD, np.broadcast_to(is_chosen_BT[..., None], (B, T, D)))


# ---- The fused loss ----

TEMPERATURE = 0.7


@functools.cache
def fused_gradient(config, chunk, cap=0.0):
  """Return (hidden, unembedding, target, inputs, clip, first) -> ((loss, sums), both gradients)."""

  def total(hidden, unembedding, target, tokens, clip, first):
    return logprobs.fused_loss(
      hidden,
      unembedding,
      target,
      tokens,
      functools.partial(objective.token_loss, config=config, clip=clip, is_first=first),
      temperature=TEMPERATURE,
      chunk=chunk,
      cap=cap,
    )

  return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def plain_logprobs(hidden, unembedding, target, temperature, cap=0.0):
  """Compute the (log-probability, entropy) of the targets from all logits at once."""
  logits = jnp.einsum('bwd,dv->bwv', hidden, unembedding, preferred_element_type=jnp.float32)
  if cap:
    logits = cap * jnp.tanh(logits / cap)
  logp = jax.nn.log_softmax(logits / temperature)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
  return jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0], entropy


@functools.cache
def plain_gradient(config, cap=0.0):
  """Return the counterpart of `fused_gradient` that differentiates all logits."""

  def total(hidden, unembedding, target, tokens, clip, first):
    return objective.token_loss(
      *plain_logprobs(hidden, unembedding, target, TEMPERATURE, cap),
      tokens,
      config,
      clip=clip,
      is_first=first,
    )

  return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def assert_same(actual, expected):
  (loss, sums), gradients = actual
  (expected_loss, expected_sums), expected_gradients = expected
  np.testing.assert_allclose(loss, expected_loss, atol=1e-6)
  for name, value in expected_sums.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
  for gradient, expected_gradient in zip(gradients, expected_gradients):
    largest = np.abs(expected_gradient).max()
    assert largest > 1e-4
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5 * largest)


# All features of a fused loss: entropy, terms from other passes, clipping and replays.
@pytest.mark.parametrize(
  ('name', 'chunk'),
  # With 8 rows of 8 positions, 24 gives chunks of 3 positions, 40 of 4, 8 of 1.
  tiers.full_after_first(
    [('all', 24), ('all', 40), ('all', 8), ('all', 10**6), ('paper', 24), ('product', 24)]
  ),
)
def test_the_fused_loss_equals_autodiff_of_all_logits(name, chunk):
  config, arguments = fused_example(name, TEMPERATURE)
  for clip, first in CLIP_AND_FIRST:
    assert_same(
      fused_gradient(config, chunk)(*arguments, clip, first),
      plain_gradient(config)(*arguments, clip, first),
    )


def test_gradients_include_the_logit_cap():
  config, arguments = fused_example('all', TEMPERATURE)
  hidden, unembedding, *_ = arguments
  cap = float(jnp.abs(jnp.einsum('bwd,dv->bwv', hidden, unembedding)).max()) / 2
  found = fused_gradient(config, 24, cap)(*arguments, True, True)
  assert_same(found, plain_gradient(config, cap)(*arguments, True, True))
  assert abs(found[0][0] - fused_gradient(config, 24)(*arguments, True, True)[0][0]) > 1e-3


def weighted_loss(logp_BS, entropy_BS, weight_BS):
  """A simple token loss, linear in log-probabilities and entropies."""
  loss = -jnp.sum(weight_BS * (logp_BS + 0.1 * entropy_BS))
  return loss, {'logp': logp_BS.sum()}


def fused_weighted(hidden, unembedding, target, weight, chunk=6):
  return logprobs.fused_loss(
    hidden, unembedding, target, weight, weighted_loss, temperature=1.0, chunk=chunk
  )


WEIGHT_BT = RNG.normal(size=(B, T)).astype(np.float32)
OPERANDS = (TOKENS_BT, WEIGHT_BT)


def test_the_gradient_scales_with_the_cotangent_and_keeps_the_dtypes():
  def total(scale, *arguments):
    loss, sums = fused_weighted(*arguments, *OPERANDS)
    return scale * loss + 0 * sums['logp']

  in_bfloat16 = [jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN_BTD, UNEMBEDDING_DV)]
  gradient = jax.jit(jax.grad(total, (1, 2)))
  unscaled, scaled = (gradient(scale, *in_bfloat16) for scale in (1.0, -3.0))
  exact = gradient(1.0, HIDDEN_BTD, UNEMBEDDING_DV)
  for x, scaled_x, exact_x in zip(unscaled, scaled, exact):
    assert x.dtype == jnp.bfloat16 and exact_x.dtype == jnp.float32
    np.testing.assert_allclose(-3 * x.astype(jnp.float32), scaled_x.astype(jnp.float32), rtol=0.01)
    np.testing.assert_allclose(x.astype(jnp.float32), exact_x, atol=0.03 * np.abs(exact_x).max())


def test_the_loss_needs_one_vocabulary_product_and_its_gradient_two_more():
  arguments = (HIDDEN_BTD, UNEMBEDDING_DV, *OPERANDS)
  loss = str(jax.make_jaxpr(fused_weighted)(*arguments))
  gradient = str(jax.make_jaxpr(jax.grad(lambda *x: fused_weighted(*x)[0], (0, 1)))(*arguments))
  assert (loss.count('dot_general['), gradient.count('dot_general[')) == (1, 3)
  for jaxpr in (loss, gradient):
    assert f'f32[{B},2,{V}]' in jaxpr and f'f32[{B},{T},{V}]' not in jaxpr


def plain_weighted(hidden, unembedding, target, weight):
  return weighted_loss(*plain_logprobs(hidden, unembedding, target, 1.0), weight)


def test_the_fused_loss_needs_a_tenth_of_the_memory():
  """The program has a real model's width and vocabulary. It is only compiled."""
  shapes = (8, 2048, 1536), (1536, 151936), (8, 2048), (8, 2048)
  dtypes = 'bfloat16', 'bfloat16', 'int32', 'float32'
  arguments = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
  fused, plain = (
    jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    .lower(*arguments)
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
    for total in (functools.partial(fused_weighted, chunk=1024), plain_weighted)
  )
  assert fused < plain / 10, (fused / 2**30, plain / 2**30)  # 3.3 and 47.2 GiB
