"""Log-probabilities, entropies and the fused loss against NumPy and plain autodiff."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import loss_sums, objective
from exgrpo_jax.policy import logprobs
from tests.helpers.losses import VARIANTS, formula, fused_example, log_softmax

B, T, D, V = 3, 11, 5, 17
RNG = np.random.default_rng(0)
HIDDEN_BTD = RNG.normal(size=(B, T, D)).astype(np.float32)
UNEMBEDDING_DV = RNG.normal(size=(D, V)).astype(np.float32)
TOKENS_BT = RNG.integers(0, V, (B, T)).astype(np.int32)


def token_logprobs(
  hidden_BTD=HIDDEN_BTD,
  unembedding_DV=UNEMBEDDING_DV,
  temperature=1.0,
  chunk=10**6,
  tokens_BT=TOKENS_BT,
):
  return _token_logprobs(hidden_BTD, unembedding_DV, tokens_BT, temperature, chunk)


@functools.partial(jax.jit, static_argnums=4)
def _token_logprobs(hidden_BTD, unembedding_DV, tokens_BT, temperature, chunk):
  return logprobs.token_logprobs(
    hidden_BTD, unembedding_DV, tokens_BT, temperature=temperature, chunk=chunk
  )


def numpy_logprobs(temperature=1.0):
  """(logp_BT, entropy_BT) token by token, in float64."""
  logp_BT, entropy_BT = np.zeros((B, T)), np.zeros((B, T))
  for b in range(B):
    for t in range(1, T):
      logits_V = HIDDEN_BTD[b, t - 1].astype(np.float64) @ UNEMBEDDING_DV / temperature
      p_V = np.exp(logits_V) / np.exp(logits_V).sum()
      logp_BT[b, t] = np.log(p_V[TOKENS_BT[b, t]])
      entropy_BT[b, t] = -(p_V * np.log(p_V)).sum()
  return logp_BT, entropy_BT


@pytest.mark.parametrize('temperature', [1.0, 0.6, 2.0])
def test_values_are_those_of_a_log_softmax(temperature):
  # With 3 rows, 10**6 and 33 give one chunk, 9 chunks of 3 positions, 4 and 1 chunks of 1.
  for chunk in (10**6, 33, 9, 4, 1):
    actual = token_logprobs(temperature=temperature, chunk=chunk)
    for name, actual_BT, expected_BT in zip(
      ('logp', 'entropy'), actual, numpy_logprobs(temperature)
    ):
      np.testing.assert_allclose(
        actual_BT, expected_BT, atol=2e-6, err_msg=f'{name} in chunks of {chunk}'
      )


def test_nothing_predicts_the_first_token_and_it_is_0():
  logp_BT, entropy_BT = token_logprobs()
  assert (logp_BT[:, 0] == 0).all() and (entropy_BT[:, 0] == 0).all()
  assert (logp_BT[:, 1:] < 0).all() and (entropy_BT[:, 1:] > 0).all()


def test_a_hidden_state_affects_only_the_next_token():
  before = token_logprobs()
  after = token_logprobs(hidden_BTD=np.where(np.arange(T)[:, None] == 4, -HIDDEN_BTD, HIDDEN_BTD))
  for before_BT, after_BT in zip(before, after):
    assert np.unique(np.nonzero(np.asarray(before_BT != after_BT))[1]).tolist() == [5]


def test_chunks_do_not_change_the_gradient():
  weight_BT = RNG.normal(size=(2, B, T)).astype(np.float32)

  def total(hidden_BTD, unembedding_DV, chunk):
    return sum(
      (w * x).sum()
      for w, x in zip(weight_BT, token_logprobs(hidden_BTD, unembedding_DV, 0.7, chunk))
    )

  def gradient(chunk):
    return jax.jit(jax.grad(functools.partial(total, chunk=chunk), argnums=(0, 1)))(
      HIDDEN_BTD, UNEMBEDDING_DV
    )

  whole = gradient(10**6)
  for chunk in (9, 12, 1):
    for actual, expected in zip(gradient(chunk), whole):
      assert np.abs(expected).max() > 0.1
      np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=f'chunks of {chunk}')


def test_large_logits_stay_finite():
  logp_BT, entropy_BT = token_logprobs(hidden_BTD=HIDDEN_BTD * 1e4)
  assert np.isfinite(logp_BT).all() and np.isfinite(entropy_BT).all()


def test_bfloat16_hidden_states_give_float32_values():
  from_bfloat16 = token_logprobs(
    hidden_BTD=jnp.asarray(HIDDEN_BTD, jnp.bfloat16),
    unembedding_DV=jnp.asarray(UNEMBEDDING_DV, jnp.bfloat16),
  )
  for actual_BT, expected_BT in zip(from_bfloat16, numpy_logprobs()):
    assert actual_BT.dtype == jnp.float32
    np.testing.assert_allclose(actual_BT, expected_BT, atol=0.1)


def test_no_more_logits_exist_at_once_than_the_chunk_allows():
  jaxpr = str(jax.make_jaxpr(functools.partial(token_logprobs, chunk=6))())
  assert f'f32[{B},2,{V}]' in jaxpr and f'f32[{B},{T - 1},{V}]' not in jaxpr


def test_predictor_states_are_those_at_the_positions_and_so_are_their_gradients():
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
CLIP_AND_FIRST = list(itertools.product((True, False), (True, False)))


@functools.cache
def fused_gradient(config, chunk):
  """(hidden, unembedding, target, tokens, clip, first) -> ((loss, sums), both gradients)."""

  def total(hidden, unembedding, target, tokens, clip, first):
    return logprobs.fused_loss(
      hidden,
      unembedding,
      target,
      tokens,
      functools.partial(objective.token_loss, config=config, clip=clip, is_first=first),
      temperature=TEMPERATURE,
      chunk=chunk,
    )

  return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def plain_logprobs(hidden, unembedding, target, temperature):
  """(log-probability, entropy) of the targets, from all logits at once."""
  logits = jnp.einsum('bwd,dv->bwv', hidden, unembedding, preferred_element_type=jnp.float32)
  logp = jax.nn.log_softmax(logits / temperature)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
  return jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0], entropy


@functools.cache
def plain_gradient(config):
  """The same by autodiff of all logits."""

  def total(hidden, unembedding, target, tokens, clip, first):
    return objective.token_loss(
      *plain_logprobs(hidden, unembedding, target, TEMPERATURE),
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


@pytest.mark.parametrize(
  ('name', 'chunk'),
  [
    # With 8 rows of 8 positions, 24 gives chunks of 3 positions, 40 of 4, 8 and 1 of 1.
    *((name, 24) for name in VARIANTS),
    *itertools.product(('all',), (40, 8, 10**6)),
    ('paper', 1),
  ],
)
def test_the_fused_loss_equals_autodiff_of_all_logits(name, chunk):
  config, arguments, *_ = fused_example(name, TEMPERATURE)
  for clip, first in CLIP_AND_FIRST:
    assert_same(
      fused_gradient(config, chunk)(*arguments, clip, first),
      plain_gradient(config)(*arguments, clip, first),
    )


@pytest.mark.parametrize('name', VARIANTS)
def test_the_gradient_equals_that_of_the_formula_in_float64(name):
  """By finite differences of the logits, which are the hidden states: D = V, the unembedding 1."""
  config, (hidden, _, target, _), batch, reference = fused_example(name, TEMPERATURE, identity=True)
  rng = np.random.default_rng(1)

  def logp_and_entropy(logits):
    logp = log_softmax(logits / TEMPERATURE)
    of_target = np.take_along_axis(logp, target[..., None], -1)[..., 0]
    # Back to the batch's positions, which start one before the window's.
    return [np.pad(x, ((0, 0), (1, 0))) for x in (of_target, -(np.exp(logp) * logp).sum(-1))]

  base = hidden.astype(np.float64)
  constant, _ = logp_and_entropy(base)
  for clip, first in CLIP_AND_FIRST:
    _, arguments, *_ = fused_example(name, TEMPERATURE, identity=True, first=first)
    (loss, _), (gradient, _) = fused_gradient(config, 24)(*arguments, clip, first)

    def value(logits, clip=clip, first=first):
      return formula(
        *logp_and_entropy(logits),
        batch,
        reference,
        config,
        clip=clip,
        first=first,
        constant=constant,
      )

    np.testing.assert_allclose(loss, value(base), atol=1e-6)
    for _ in range(3):
      direction = rng.normal(size=hidden.shape)
      slope = (value(base + 1e-5 * direction) - value(base - 1e-5 * direction)) / 2e-5
      assert abs(slope) > 1e-4
      np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-3, atol=1e-5)


def test_microbatches_and_windows_give_the_gradient_of_the_whole():
  config, (hidden, unembedding, target, tokens), *_ = fused_example('all', TEMPERATURE)
  order = np.array([7, 0, 3, 6, 5, 4, 2, 1])

  def microbatches(x, positions):
    """[2, B / 2, W / 2, …]: two microbatches of half a window."""
    x = x[order, positions]
    return x.reshape(2, 4, *x.shape[1:])

  @jax.jit
  def total(hidden, unembedding, clip, first):
    def add_microbatch(carry, microbatch):
      hidden, target, tokens = microbatch
      (loss, sums), gradients = jax.value_and_grad(
        lambda hidden, unembedding: logprobs.fused_loss(
          hidden,
          unembedding,
          target,
          tokens,
          functools.partial(objective.token_loss, config=config, clip=clip, is_first=first),
          temperature=TEMPERATURE,
          chunk=9,
        ),
        (0, 1),
        has_aux=True,
      )(hidden, unembedding)
      return carry + gradients[1], (loss, sums, gradients[0])

    (d_left, left), (d_right, right) = (
      jax.lax.scan(
        add_microbatch,
        jnp.zeros_like(unembedding),
        jax.tree.map(functools.partial(microbatches, positions=half), (hidden, target, tokens)),
      )
      for half in (slice(0, 4), slice(4, 8))
    )
    d_unembedding = d_left + d_right
    losses, sums, d_hidden = jax.tree.map(lambda *x: jnp.concatenate(x), left, right)
    d_hidden = jnp.concatenate(jnp.split(d_hidden.reshape(16, 4, -1), 2), axis=1)
    slices = [jax.tree.map(lambda x, index=index: x[index], sums) for index in range(4)]
    merged = loss_sums.merge_sums(slices)
    return (losses.sum(), merged), (d_hidden[np.argsort(order)], d_unembedding)

  for clip, first in CLIP_AND_FIRST:
    assert_same(
      total(hidden, unembedding, clip, first),
      fused_gradient(config, 10**6)(hidden, unembedding, target, tokens, clip, first),
    )


def weighted_loss(logp_BS, entropy_BS, weight_BS):
  """A simple token loss, linear in both."""
  loss = -jnp.sum(weight_BS * (logp_BS + 0.1 * entropy_BS))
  return loss, {'logp': logp_BS.sum()}


def fused_weighted(hidden, unembedding, target, weight, chunk=6):
  return logprobs.fused_loss(
    hidden, unembedding, target, weight, weighted_loss, temperature=1.0, chunk=chunk
  )


WEIGHT_BT = RNG.normal(size=(B, T)).astype(np.float32)
OPERANDS = (TOKENS_BT, WEIGHT_BT)


def test_the_gradient_scales_with_the_cotangent_and_has_the_arguments_dtypes():
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


def test_the_loss_takes_one_product_with_the_vocabulary_and_its_gradient_two_more():
  arguments = (HIDDEN_BTD, UNEMBEDDING_DV, *OPERANDS)
  loss = str(jax.make_jaxpr(fused_weighted)(*arguments))
  gradient = str(jax.make_jaxpr(jax.grad(lambda *x: fused_weighted(*x)[0], (0, 1)))(*arguments))
  assert (loss.count('dot_general['), gradient.count('dot_general[')) == (1, 3)
  for jaxpr in (loss, gradient):
    assert f'f32[{B},2,{V}]' in jaxpr and f'f32[{B},{T},{V}]' not in jaxpr


def compile_gradient(function, *shapes):
  return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True)).lower(*shapes).compile()


def shapes(rows, window, width, vocabulary, dtype):
  return [
    jax.ShapeDtypeStruct(*x)
    for x in (
      ((rows, window, width), dtype),
      ((width, vocabulary), dtype),
      ((rows, window), jnp.int32),
      ((rows, window), jnp.float32),
    )
  ]


def plain_weighted(hidden, unembedding, target, weight):
  return weighted_loss(*plain_logprobs(hidden, unembedding, target, 1.0), weight)


def test_the_fused_loss_needs_a_tenth_of_the_memory():
  """At a real model's width and vocabulary, compiled and not run."""
  real_size = shapes(8, 2048, 1536, 151936, jnp.bfloat16)
  fused, plain = (
    compile_gradient(f, *real_size).memory_analysis().temp_size_in_bytes
    for f in (functools.partial(fused_weighted, chunk=1024), plain_weighted)
  )
  assert fused < plain / 10, (fused / 2**30, plain / 2**30)  # 3.3 and 47.2 GiB


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason='its XLA counts other FLOPs')
def test_the_fused_loss_saves_a_quarter_of_the_products_of_rematerialisation():
  one_chunk = shapes(4, 64, 256, 1024, jnp.float32)  # the analysis counts a loop's body once
  fused, recomputed = (
    compile_gradient(f, *one_chunk).cost_analysis()['flops']
    for f in (functools.partial(fused_weighted, chunk=256), jax.checkpoint(plain_weighted))
  )
  assert recomputed > 3.9 * 2 * 256 * 256 * 1024  # four products, none shared
  assert fused < 0.78 * recomputed, fused / recomputed
