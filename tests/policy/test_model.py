"""The decoder against NumPy, with and without a cache."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model, sharding
from tests.helpers.tiny import ROPE

CONFIG = model.Config(
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
  """Perturbs every parameter, so that biases and norms matter and attention is not uniform."""
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return tree.unflatten(
    [leaf + scale * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
  )


forward = jax.jit(model.hidden_states, static_argnums=0)
prefill = jax.jit(model.prefill, static_argnums=(0, 3))
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


def test_hidden_states_equal_a_plain_numpy_decoder(params, tokens_BT, hidden_BTD):
  for tokens_T, hidden_TD in zip(np.array(tokens_BT), hidden_BTD):
    np.testing.assert_allclose(hidden_TD, plain_decoder(params, tokens_T), atol=1e-4)


def plain_decoder(params, tokens_T):
  """float64, one row, head by head; rotations as products of complex numbers."""
  params = jax.tree.map(lambda x: np.array(x, np.float64), params)
  group, half = CONFIG.num_heads // CONFIG.num_kv_heads, CONFIG.head_size // 2

  def norm(x_TD, weights):
    rms = np.sqrt((x_TD**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon)
    return x_TD / rms * weights['scale']

  def rotate(x_TH):
    pair_TP = x_TH[:, :half] + 1j * x_TH[:, half:]
    frequency_P = CONFIG.rope.theta ** (-np.arange(half) / half)
    pair_TP = pair_TP * np.exp(1j * np.arange(len(x_TH))[:, None] * frequency_P)
    return np.concatenate([pair_TP.real, pair_TP.imag], axis=-1)

  def head(x_TD, weights, n):
    g = n // group
    query_TH = rotate(x_TD @ weights['query_DNH'][:, n] + weights['query_bias_NH'][n])
    key_TH = rotate(x_TD @ weights['key_DGH'][:, g] + weights['key_bias_GH'][g])
    value_TH = x_TD @ weights['value_DGH'][:, g] + weights['value_bias_GH'][g]
    weight_TT = np.exp(query_TH @ key_TH.T / np.sqrt(CONFIG.head_size)) * np.tri(len(x_TD))
    return weight_TT / weight_TT.sum(-1, keepdims=True) @ value_TH @ weights['out_NHD'][n]

  x_TD = params['embedding_VD'][tokens_T]
  for index in range(CONFIG.num_layers):
    layer = jax.tree.map(lambda stack, index=index: stack[index], params['layers'])
    normed_TD = norm(x_TD, layer['attention_norm'])
    x_TD = x_TD + sum(head(normed_TD, layer['attention'], n) for n in range(CONFIG.num_heads))
    normed_TD, mlp = norm(x_TD, layer['mlp_norm']), layer['mlp']
    gate_TF = normed_TD @ mlp['gate_DF']
    x_TD = x_TD + gate_TF / (1 + np.exp(-gate_TF)) * (normed_TD @ mlp['up_DF']) @ mlp['down_FD']
  return norm(x_TD, params['final_norm'])


def test_a_token_does_not_see_later_ones(params, tokens_BT, hidden_BTD):
  changed_BT = tokens_BT.at[:, 6].add(1) % CONFIG.vocab_size
  changed_BTD = np.array(forward(CONFIG, params, changed_BT))
  np.testing.assert_array_equal(changed_BTD[:, :6], hidden_BTD[:, :6])
  # All later positions see the change.
  assert (np.abs(changed_BTD[:, 6:] - hidden_BTD[:, 6:]).max(-1) > 1e-3).all()


def test_prefill_and_decode_equal_a_pass_over_the_whole_sequence(
  decode_params, tokens_BT, hidden_BTD
):
  """Prompts of 4, 1 and 3 tokens, padded to 4 with what must not be seen; the rest decoded."""
  prompt_B = np.array([4, 1, 3])
  padded_BT = np.where(np.arange(4) < prompt_B[:, None], tokens_BT[:, :4], 96)
  prefilled_BTD, cache = prefill(CONFIG, decode_params, padded_BT, 10)
  for row, length in enumerate(prompt_B):
    np.testing.assert_allclose(prefilled_BTD[row, :length], hidden_BTD[row, :length], atol=1e-5)
  for step in range(6):
    position_B = prompt_B + step
    token_B = np.array(tokens_BT)[np.arange(3), position_B]
    decoded_BD, cache = decode(CONFIG, decode_params, token_B, position_B, cache)
    np.testing.assert_allclose(decoded_BD, hidden_BTD[np.arange(3), position_B], atol=1e-5)


def test_a_cache_may_start_empty(decode_params, tokens_BT, hidden_BTD):
  cache = model.init_cache(CONFIG, num_rows=3, length=10)
  for step in range(2):
    decoded_BD, cache = decode(CONFIG, decode_params, tokens_BT[:, step], np.full(3, step), cache)
  np.testing.assert_allclose(decoded_BD, hidden_BTD[:, 1], atol=1e-5)


def test_bfloat16_computes_in_bfloat16_over_float32_parameters(
  params, one_device, tokens_BT, hidden_BTD
):
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  decode_params = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
  bfloat16_BTD, cache = prefill(config, decode_params, tokens_BT, 10)
  assert {x.dtype for x in jax.tree.leaves((bfloat16_BTD, cache))} == {jnp.dtype('bfloat16')}
  assert model.unembedding(config, params).dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  # The mean over entries: bfloat16 has three digits, and errors add up over layers.
  error_BTD = np.abs(bfloat16_BTD.astype(np.float32) - hidden_BTD)
  assert error_BTD.mean() < 0.05 * np.abs(hidden_BTD).mean()


def test_the_unembedding_is_the_embedding_only_if_tied(params):
  np.testing.assert_array_equal(model.unembedding(CONFIG, params), params['embedding_VD'].T)
  assert 'unembedding_DV' not in params
  untied = dataclasses.replace(CONFIG, tied_embeddings=False)
  unembedding_DV = jnp.ones((32, 97))
  np.testing.assert_array_equal(
    model.unembedding(untied, params | {'unembedding_DV': unembedding_DV}), unembedding_DV
  )


def test_initial_values_have_their_scales(initial):
  layer = jax.tree.map(lambda stack: stack[1], initial['layers'])
  std = 1 / math.sqrt(initial['embedding_VD'].shape[1])  # of the width
  assert np.std(initial['embedding_VD']) == pytest.approx(std, rel=0.05)
  assert np.std(layer['mlp']['down_FD']) == pytest.approx(std / math.sqrt(2 * 2), rel=0.05)
  assert (layer['mlp_norm']['scale'] == 1).all()
  assert (layer['attention']['key_bias_GH'] == 0).all()
  assert not np.array_equal(layer['mlp']['gate_DF'], layer['mlp']['up_DF'])


def test_layers_apply_in_order(params, one_device, tokens_BT, hidden_BTD):
  """Four layers, two of which add nothing, equal a model of the other two, scanned and unrolled."""
  layers = jax.tree.map(lambda stack: stack[np.array([0, 0, 0, 1])], params['layers'])
  for module, name in (('attention', 'out_NHD'), ('mlp', 'down_FD')):
    layers[module][name] = layers[module][name].at[np.array([0, 2])].set(0)
  config, params = dataclasses.replace(CONFIG, num_layers=4), params | {'layers': layers}
  np.testing.assert_allclose(forward(config, params, tokens_BT), hidden_BTD, atol=1e-5)
  decode_params = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
  unrolled_BTD, _ = prefill(config, decode_params, tokens_BT, 10)
  np.testing.assert_allclose(unrolled_BTD, hidden_BTD, atol=1e-5)


def test_qwen_1_5b_has_its_number_of_parameters(one_device):
  """1,543,714,304, as the model card says (1.54B); nothing is allocated."""
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
    ({'num_kv_heads': 3}, 'config.model.num_kv_heads=3 must divide config.model.num_heads=4'),
    ({'head_size': 7}, 'config.model.head_size=7 must be even'),
    ({'dtype': 'float16'}, "config.model.dtype='float16' must be one of float32, bfloat16"),
  ],
)
def test_an_impossible_shape_is_refused(change, message):
  with pytest.raises(InputError, match=message):
    config_lib.build(model.Config, dataclasses.asdict(CONFIG) | change, 'config.model')


def test_a_mesh_that_cannot_split_the_model_evenly_is_refused():
  config = dataclasses.replace(CONFIG, num_heads=12, num_kv_heads=4, vocab_size=96)
  whole = (1, 1, 1)
  refused = {
    ((1, 5, 1), whole): 'training.fsdp=5 must divide config.model.width=32: each device',
    ((1, 1, 5), whole): 'training.tensor=5 must divide config.model.num_heads=12: each device',
    (whole, (1, 1, 5)): 'decoding.tensor=5 must divide config.model.num_heads=12: each device',
    (whole, (1, 1, 6)): 'decoding.tensor=6 must divide config.model.num_kv_heads=4, or be a',
  }

  def check(*sizes):
    axes = 'data', 'fsdp', 'tensor'
    meshes = (jax.sharding.AbstractMesh(shape, axes) for shape in sizes)
    model.check_meshes(config, sharding.Meshes(*meshes))

  for sizes, message in refused.items():
    with pytest.raises(InputError, match=re.escape(f'config.mesh.{message}')):
      check(*sizes)
  for sizes in ((5, 1, 1), (1, 8, 4), (1, 1, 2), (1, 1, 12)):  # 12 is a multiple of 4
    check(sizes, sizes)
