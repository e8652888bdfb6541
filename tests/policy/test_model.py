"""The decoder with and without a cache; test_weights.py compares it with transformers."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import matmul, model, shape, sharding
from exgrpo_jax.runtime import machine
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


# All that a family may have, each in a way of its own; the rows outgrow the window.
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
  """Either kind of CPU; they store the weights for decoding differently."""
  monkeypatch.setattr(machine, 'has_bfloat16_units', lambda: request.param)
  model.decode_conversion.cache_clear()
  yield request.param
  model.decode_conversion.cache_clear()


@pytest.mark.parametrize('tied', [False, True])
def test_decoding_has_the_logits_of_training(one_device, tied, has_units):
  config = dataclasses.replace(CONFIG, tied_embeddings=tied)
  params = randomise(model.init(config, jax.random.key(0), one_device))
  hidden_BD = jax.random.normal(jax.random.key(1), (3, CONFIG.width))
  decode_params = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
  unembedding = model.decode_unembedding(config, decode_params)
  assert isinstance(unembedding, matmul.OutputMajor) == (not has_units)
  expected_BV = hidden_BD @ model.unembedding(config, params)
  np.testing.assert_allclose(matmul.logits(hidden_BD, unembedding), expected_BV, atol=1e-5)


@pytest.mark.usefixtures('has_units')
@pytest.mark.parametrize('name', VARIANTS)
def test_prefill_and_decode_equal_a_pass_over_the_whole_sequence(one_device, tokens_BT, name):
  """Prompts of 4, 1 and 3 tokens, padded to 4 with what must not be seen; the rest decoded."""
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
    np.testing.assert_allclose(decoded_BD, hidden_BTD[np.arange(3), position_B], atol=1e-5)


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
  assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype('uint16')}  # its bits, on CPU
  assert model.unembedding(config, params).dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  # The mean over entries: bfloat16 has three digits, and errors add up over layers.
  error_BTD = np.abs(bfloat16_BTD.astype(np.float32) - hidden_BTD)
  assert error_BTD.mean() < 0.05 * np.abs(hidden_BTD).mean()


def test_initial_values_have_their_scales(initial):
  layer = jax.tree.map(lambda stack: stack[1], initial['layers'])
  std = 1 / math.sqrt(initial['embedding_VD'].shape[1])  # of the width
  assert np.std(initial['embedding_VD']) == pytest.approx(std, rel=0.05)
  assert np.std(layer['mlp']['down_FD']) == pytest.approx(std / math.sqrt(2 * 2), rel=0.05)
  assert (layer['mlp_norm']['scale'] == 1).all()
  assert (layer['attention']['key_bias_GH'] == 0).all()
  assert not np.array_equal(layer['mlp']['gate_DF'], layer['mlp']['up_DF'])


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
    ({'num_experts': 4}, 'config.model.experts_per_token=0 must be at least 1 and at most '),
    (
      {'num_experts': 4, 'experts_per_token': 1, 'mlp_bias': True},
      'config.model.mlp_bias=True must be False with config.model.num_experts=4: experts have',
    ),
    ({'experts_per_token': 1}, 'must be at least 1 and at most config.model.num_experts=0, or'),
    ({'dtype': 'float16'}, "config.model.dtype='float16' must be one of float32, bfloat16"),
  ],
)
def test_an_impossible_shape_is_refused(change, message):
  with pytest.raises(InputError, match=message):
    config_lib.build(model.Config, dataclasses.asdict(CONFIG) | change, 'config.model')


def test_a_mesh_that_cannot_split_the_model_evenly_is_refused():
  changes = dict(num_heads=12, num_kv_heads=4, vocab_size=96, num_experts=6, experts_per_token=2)
  config = dataclasses.replace(CONFIG, **changes)
  whole = (1, 1, 1, 1)
  refused = {
    ((1, 5, 1, 1), whole): 'training.fsdp=5 must divide config.model.width=32: each device',
    ((1, 1, 1, 5), whole): 'training.tensor=5 must divide config.model.num_heads=12: each device',
    (whole, (1, 1, 1, 5)): 'decoding.tensor=5 must divide config.model.num_heads=12: each device',
    (whole, (1, 1, 1, 6)): 'decoding.tensor=6 must divide config.model.num_kv_heads=4, or be a',
    (whole, (1, 1, 4, 1)): 'decoding.expert=4 must divide config.model.num_experts=6: each device',
  }

  def check(*sizes):
    axes = 'data', 'fsdp', 'expert', 'tensor'
    meshes = (jax.sharding.AbstractMesh(shape, axes) for shape in sizes)
    shape.check_meshes(config, sharding.Meshes(*meshes))

  for sizes, message in refused.items():
    with pytest.raises(InputError, match=re.escape(f'config.mesh.{message}')):
      check(*sizes)
  for sizes in ((5, 1, 1, 1), (1, 8, 3, 4), (1, 1, 1, 2), (1, 1, 1, 12)):  # 12 is a multiple of 4
    check(sizes, sizes)
