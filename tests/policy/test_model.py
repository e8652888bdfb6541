"""The decoder with and without a cache; test_weights.py compares it with transformers."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import matmul, mlp, model, shape, sharding
from exgrpo_jax.policy.mlp import Experts, Routing
from exgrpo_jax.policy.sharding import jit_for_training
from exgrpo_jax.runtime import machine
from tests.helpers import tiers
from tests.helpers.tiny import ROPE

CONFIG = model.ShapeConfig(
  vocab_size=97,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_size=8,
  mlp_width=48,
  rope=ROPE,
  norm_epsilon=0.01,
  attention_bias=True,
  query_key_norm=False,
  tied_embeddings=True,
  dtype='float32',
)


def randomise(params, scale=0.3):
  """Perturb all parameters, so that biases and norms matter and attention is not uniform."""
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return tree.unflatten(
    [leaf + scale * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
  )


forward = jax.jit(model.hidden_states, static_argnums=0)
prefill = jax.jit(model.prefill, static_argnums=(0, 4))
decode = jax.jit(model.decode, static_argnums=0)


@pytest.fixture(scope='module')
def initial(one_device):
  return model.init(CONFIG, jax.random.key(0), one_device)


@pytest.fixture(scope='module')
def params(initial):
  return randomise(initial)


@pytest.fixture(scope='module')
def tokens_BT():
  return jax.random.randint(jax.random.key(1), (3, 10), 0, CONFIG.vocab_size)


@pytest.fixture(scope='module')
def decode_params(params, one_device):
  return model.decode_layout(CONFIG, params, sharding.Meshes(one_device, one_device))


@pytest.fixture(scope='module')
def hidden_BTD(params, tokens_BT):
  return np.array(forward(CONFIG, params, tokens_BT))


def test_a_token_does_not_see_later_ones(params, tokens_BT, hidden_BTD):
  changed_BT = tokens_BT.at[:, 6].add(1) % CONFIG.vocab_size
  changed_BTD = np.array(forward(CONFIG, params, changed_BT))
  np.testing.assert_array_equal(changed_BTD[:, :6], hidden_BTD[:, :6])
  # All later positions see the change.
  assert (np.abs(changed_BTD[:, 6:] - hidden_BTD[:, 6:]).max(-1) > 1e-3).all()


# All features of model families, with distinct values; rows are longer than the window.
GEMMA_LIKE = dataclasses.replace(
  CONFIG,
  num_layers=4,
  layers='sfnw',
  window=3,
  local_rope=dataclasses.replace(ROPE, theta=50.0),
  activation='gelu',
  norms='both',
  norm_offset=True,
  query_key_norm=True,
  norm_all_heads=True,
  query_scale=5.0,
  attention_cap=2.0,
  output_bias=True,
  mlp_bias=True,
  scaled_embeddings=True,
)
VARIANTS = {
  'llama': CONFIG,
  'gemma': GEMMA_LIKE,
  'experts': dataclasses.replace(
    CONFIG, num_experts=8, experts_per_token=3, normalised_experts=True, tied_embeddings=False
  ),
  'olmo': dataclasses.replace(GEMMA_LIKE, layers='s', norms='after', norm_offset=False),
}


@pytest.fixture(params=[False, True], ids=['without_matrix_units', 'with_matrix_units'])
def has_units(request, monkeypatch):
  """Simulate a CPU with or without matrix units, which store decoding weights differently."""
  monkeypatch.setattr(machine, 'has_matrix_units', lambda: request.param)
  model.decode_conversion.cache_clear()
  yield request.param
  model.decode_conversion.cache_clear()


@pytest.mark.parametrize('tied', tiers.full_after_first([False, True]))
def test_decoding_computes_the_same_logits_as_training(one_device, tied, has_units):
  config = dataclasses.replace(CONFIG, tied_embeddings=tied)
  params = randomise(model.init(config, jax.random.key(0), one_device))
  hidden_BD = jax.random.normal(jax.random.key(1), (3, CONFIG.width))
  decode_params = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
  unembedding = model.decode_unembedding(config, decode_params)
  assert isinstance(unembedding, matmul.OutputMajor) == (not has_units)
  expected_BV = hidden_BD @ model.unembedding(config, params)
  np.testing.assert_allclose(matmul.logits(hidden_BD, unembedding), expected_BV, atol=1e-5)


@pytest.mark.usefixtures('has_units')
@pytest.mark.parametrize('name', tiers.full_after_first(VARIANTS))
def test_prefill_and_decode_equal_a_pass_over_the_whole_sequence(one_device, tokens_BT, name):
  """Prefill prompts of 4, 1 and 3 tokens, padded to 4, and decode the remaining tokens."""
  config = VARIANTS[name]
  params = randomise(model.init(config, jax.random.key(0), one_device))
  decode_params = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
  hidden_BTD = np.array(forward(config, params, tokens_BT))
  prompt_B = np.array([4, 1, 3])
  padded_BT = np.where(np.arange(4) < prompt_B[:, None], tokens_BT[:, :4], 96)
  prefilled_BTD, cache, _ = prefill(config, decode_params, padded_BT, prompt_B, 10)
  for row, length in enumerate(prompt_B):
    np.testing.assert_allclose(prefilled_BTD[row, :length], hidden_BTD[row, :length], atol=1e-5)
  for step in range(6):
    position_B = prompt_B + step
    token_B = np.array(tokens_BT)[np.arange(3), position_B]
    decoded_BD, cache, _ = decode(config, decode_params, token_B, position_B, cache)
    expected_BD = hidden_BTD[np.arange(3), position_B]
    np.testing.assert_allclose(decoded_BD, expected_BD, rtol=1e-5, atol=1e-5)


def test_a_cache_may_start_empty(decode_params, tokens_BT, hidden_BTD):
  cache = model.init_cache(CONFIG, num_rows=3, length=10)
  for step in range(2):
    decoded_BD, cache, _ = decode(
      CONFIG, decode_params, tokens_BT[:, step], np.full(3, step), cache
    )
  np.testing.assert_allclose(decoded_BD, hidden_BTD[:, 1], atol=1e-5)


def test_bfloat16_computes_in_bfloat16_over_float32_parameters(
  params, one_device, tokens_BT, hidden_BTD
):
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  decode_params = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
  bfloat16_BTD, cache, _ = prefill(
    config, decode_params, tokens_BT, np.full(3, tokens_BT.shape[1]), 10
  )
  assert bfloat16_BTD.dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype('uint16')}  # raw bits, on CPU
  assert model.unembedding(config, params).dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  # Compare means, because bfloat16 has three digits and errors add up over layers.
  error_BTD = np.abs(bfloat16_BTD.astype(np.float32) - hidden_BTD)
  assert error_BTD.mean() < 0.05 * np.abs(hidden_BTD).mean()


@pytest.mark.full
def test_initial_values_have_the_documented_scales(initial):
  layer = jax.tree.map(lambda stack: stack[1], initial['layers'])
  std = 1 / math.sqrt(initial['embedding_VD'].shape[1])  # width
  assert np.std(initial['embedding_VD']) == pytest.approx(std, rel=0.05)
  assert np.std(layer['mlp']['down_FD']) == pytest.approx(std / math.sqrt(2 * 2), rel=0.05)
  assert (layer['mlp_norm']['scale'] == 1).all()
  assert (layer['attention']['key_bias_GH'] == 0).all()
  assert not np.array_equal(layer['mlp']['gate_DF'], layer['mlp']['up_DF'])


def test_qwen_1_5b_has_the_published_number_of_parameters(one_device):
  """The model card says 1.54B; the exact number is 1,543,714,304. Nothing is allocated."""
  config = dataclasses.replace(
    CONFIG,
    vocab_size=151936,
    width=1536,
    num_layers=28,
    num_heads=12,
    head_size=128,
    mlp_width=8960,
  )
  shapes = model.shapes(config, one_device)
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 1_543_714_304
  assert {leaf.sharding.mesh for leaf in jax.tree.leaves(shapes)} == {one_device}


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'num_kv_heads': 3}, 'num_kv_heads=3: the number must divide config.model.num_heads=4'),
    ({'head_size': 7}, 'head_size=7: the size must be even'),
    ({'num_experts': 4}, 'experts_per_token=0: the number must be at least 1 and at most '),
    (
      {'num_experts': 4, 'experts_per_token': 1, 'mlp_bias': True},
      'mlp_bias=True: biases are not supported with config.model.num_experts=4, because',
    ),
    ({'experts_per_token': 1}, 'experts_per_token=1: .* at most config.model.num_experts=0, or'),
    ({'dtype': 'float16'}, "dtype='float16': .* must be one of float32, bfloat16"),
  ],
)
def test_an_impossible_shape_is_refused(change, message):
  with pytest.raises(InputError, match=f'config.model.{message}'):
    config_lib.build(model.ShapeConfig, dataclasses.asdict(CONFIG) | change, 'config.model')


def test_a_mesh_that_cannot_split_the_model_evenly_is_refused():
  changes = dict(num_heads=12, num_kv_heads=4, vocab_size=96, num_experts=6, experts_per_token=2)
  config = dataclasses.replace(CONFIG, **changes)
  whole = (1, 1, 1, 1)
  refused = {
    ((1, 5, 1, 1), whole): ('training.fsdp=5', 'width=32, because each'),
    ((1, 1, 1, 5), whole): ('training.tensor=5', 'num_heads=12, because each'),
    (whole, (1, 1, 1, 5)): ('decoding.tensor=5', 'num_heads=12, because each'),
    (whole, (1, 1, 1, 6)): ('decoding.tensor=6', 'num_kv_heads=4 or be a multiple'),
    (whole, (1, 1, 4, 1)): ('decoding.expert=4', 'num_experts=6, because each'),
  }

  def check(*sizes):
    axes = 'data', 'fsdp', 'expert', 'tensor'
    meshes = (jax.sharding.AbstractMesh(shape, axes) for shape in sizes)
    shape.check_meshes(config, sharding.Meshes(*meshes))

  for sizes, (place, rest) in refused.items():
    message = f'config.mesh.{place}: the number of devices must divide config.model.{rest}'
    with pytest.raises(InputError, match=re.escape(message)):
      check(*sizes)
  for sizes in ((5, 1, 1, 1), (1, 8, 3, 4), (1, 1, 1, 2), (1, 1, 1, 12)):  # 12 is a multiple of 4
    check(sizes, sizes)


# ---- Experts, against a weighted sum over all experts; and routes that override the router ----


EXPERTS = dataclasses.replace(CONFIG, width=6, mlp_width=5, num_experts=4, experts_per_token=2)
X_BTD = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)


@pytest.fixture
def experts(one_device):
  with jax.set_mesh(one_device):
    yield Experts(EXPERTS, nnx.Rngs(0))


def expected(experts, x_BTD, chosen_BTC, *, normalised):
  """Compute the weighted sum over all experts, most with weight 0; differentiable."""
  logits_BTE = x_BTD @ experts.router_DE[...]
  probability_BTE = jnp.exp(logits_BTE) / jnp.exp(logits_BTE).sum(-1, keepdims=True)
  weight_BTE = probability_BTE * jax.nn.one_hot(chosen_BTC, 4).sum(axis=-2)
  if normalised:
    weight_BTE /= weight_BTE.sum(-1, keepdims=True)
  gate, up, down = (k[...] for k in (experts.gate_EDF, experts.up_EDF, experts.down_EFD))
  gate_BTEF, up_BTEF = (jnp.einsum('btd,edf->btef', x_BTD, kernel) for kernel in (gate, up))
  hidden_BTEF = gate_BTEF / (1 + jnp.exp(-gate_BTEF)) * up_BTEF
  return jnp.einsum('btef,efd,bte->btd', hidden_BTEF, down, weight_BTE)


@pytest.mark.full
@pytest.mark.parametrize('normalised', tiers.full_after_first([True, False]))
@pytest.mark.parametrize('given', tiers.full_after_first([False, True]))
def test_experts_match_a_weighted_sum_and_its_gradient(experts, normalised, given):
  experts.config = dataclasses.replace(EXPERTS, normalised_experts=normalised)
  chosen_BTC = np.argsort(-(X_BTD @ experts.router_DE[...]), axis=-1)[..., :2]
  if given:  # includes experts that the router would not choose; no token gets expert 3
    chosen_BTC = np.array([[[0, 1], [1, 2], [2, 0]], [[1, 0], [0, 2], [2, 1]]], np.uint8)
  graph, state = nnx.split(experts)

  def total(state, x_BTD, apply):
    mixed_BTD = apply(nnx.merge(graph, state), x_BTD)
    return jnp.sum(mixed_BTD**3), mixed_BTD

  def gradients(apply):
    return jax.grad(total, (0, 1), has_aux=True)(state, jnp.array(X_BTD), apply)

  actual = gradients(lambda module, x: module(x, chosen_BTC if given else None)[0])
  wanted = gradients(lambda module, x: expected(module, x, chosen_BTC, normalised=normalised))
  # The tolerance is also relative, because entries are up to 20 and CPUs round differently.
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, wanted)
  assert np.abs(actual[0][0]['router_DE'][...]).max() > 1e-3


def test_tokens_without_a_recorded_choice_use_the_router(experts):
  _, own = experts(X_BTD)
  chosen_BTC = np.full((2, 3, 2), 255, np.uint8)
  chosen_BTC[1, 2] = 3, 0
  _, routing = experts(X_BTD, chosen_BTC)
  np.testing.assert_array_equal(routing.routes_BTC[1, 2], [3, 0])
  np.testing.assert_array_equal(routing.routes_BTC[0], own.routes_BTC[0])
  np.testing.assert_array_equal(routing.probability_BTE, own.probability_BTE)
  np.testing.assert_array_equal(
    own.routes_BTC, np.argsort(-np.asarray(own.probability_BTE), axis=-1)[..., :2]
  )


# ---- The load-balancing loss against loops over rows and experts ----


E, C = 5, 2
BALANCED = dataclasses.replace(CONFIG, num_experts=E, experts_per_token=C)
RNG = np.random.default_rng(0)
ROW_BT = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [3, 3, 3, 3, 3, 1, 1, 1]])
COUNTS_BT = RNG.random(ROW_BT.shape) < 0.7
WEIGHT_BT = (COUNTS_BT * RNG.uniform(0.1, 1, ROW_BT.shape)).astype(np.float32)
LOGITS_BTE = RNG.normal(size=(*ROW_BT.shape, E)).astype(np.float32)
CHOSEN_BTC = np.argsort(-LOGITS_BTE, axis=-1)[..., :C]


def of_layer(logits_BTE, weight_BT=WEIGHT_BT, row_BT=ROW_BT, chosen_BTC=CHOSEN_BTC):
  routing = Routing(chosen_BTC, jax.nn.softmax(logits_BTE))
  return mlp.balance_of_layer(BALANCED, routing, mlp.Counted(weight_BT, row_BT))


@pytest.mark.full
def test_the_balance_matches_loops_over_rows():
  probability_BTE = np.exp(LOGITS_BTE) / np.exp(LOGITS_BTE).sum(-1, keepdims=True)
  total, count_E = 0.0, np.zeros(E)
  for b in range(2):
    for row in range(1, 4):
      tokens = [t for t in range(8) if ROW_BT[b, t] == row and COUNTS_BT[b, t]]
      choices = [e for t in tokens for e in CHOSEN_BTC[b, t]]
      count_E += np.bincount(choices, minlength=E)
      for e in range(E):
        share = choices.count(e) / len(choices) if choices else 0
        total += sum(E * share * probability_BTE[b, t, e] * WEIGHT_BT[b, t] for t in tokens)
  found = of_layer(LOGITS_BTE)
  np.testing.assert_allclose(found.loss, total, rtol=1e-6)
  np.testing.assert_array_equal(found.count_E, count_E)


@pytest.mark.full
def test_even_routing_has_loss_1_and_a_gradient_step_lowers_the_loss():
  chosen_BTC = np.array([[[t % E, (t + 1) % E] for t in range(5)]])
  even = of_layer(np.zeros((1, 5, E)), np.full((1, 5), 0.2), np.ones((1, 5), int), chosen_BTC)
  np.testing.assert_allclose(even.loss, 1, rtol=1e-6)
  slope = jax.grad(lambda logits: of_layer(logits).loss)(LOGITS_BTE)
  assert of_layer(LOGITS_BTE - slope).loss < of_layer(LOGITS_BTE).loss


def test_weights_are_scattered_to_their_positions():
  position_BW, weight_BW = np.array([[0, 3], [2, 4]]), np.float32([[1, 2], [0, 3]])
  weight_BT, row_BT = mlp.counted_balance(position_BW, weight_BW, ROW_BT)
  assert weight_BT.tolist() == [[1, 0, 0, 2, *[0] * 4], [0, 0, 0, 0, 3, *[0] * 3]]
  assert row_BT is ROW_BT


# ---- Products with weights that are split over all chips of a TPU slice ----


def multiply(x_BTD, weight_DF):
  return sharding.constrain(x_BTD @ weight_DF, ('batch', None, None))


@pytest.mark.full
def test_weights_are_gathered_on_a_tpu_not_multiplied_shard_by_shard():
  """Plain jit would compile a loop of products over shards."""
  pytest.importorskip('libtpu')
  from exgrpo_jax.capacity import devices

  config = sharding.TrainingConfig(data=1, fsdp=-1, tensor=1)
  mesh = sharding.make_mesh(config, devices.slice_devices('v6e:4x4'))

  def split(shape, *axes):
    return jax.ShapeDtypeStruct(shape, 'bfloat16', sharding=sharding.named(mesh, axes, shape))

  arguments = split((16, 9216, 4096), 'batch', None, None), split((4096, 16384), 'embed', 'mlp')
  with jax.set_mesh(mesh):
    plain = jax.jit(multiply).lower(*arguments).compile().as_text()
    text = jit_for_training(static_argnums=())(multiply).lower(*arguments).compile().as_text()
  assert 'windowed_dot_general' in plain
  assert 'windowed_dot_general' not in text
  assert re.search('all-gather', text)
