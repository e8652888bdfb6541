"""The decoder against NumPy and transformers, with a cache, and on eight devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model, sharding
from tests.helpers.devices import on_eight_devices
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
QWEN_1_5B = model.Config(
  vocab_size=151936,
  width=1536,
  num_layers=28,
  num_heads=12,
  num_kv_heads=2,
  head_size=128,
  mlp_width=8960,
  rope=ROPE,
  norm_epsilon=1e-6,
  attention_bias=True,
  query_key_norm=False,
  tied_embeddings=True,
  dtype='bfloat16',
)


def randomised(params, scale=0.3):
  """Every parameter moved, so that biases and norms matter and attention is not flat."""
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return tree.unflatten(
    [leaf + scale * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
  )


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.Config(data=1, fsdp=1, tensor=-1))


@pytest.fixture(scope='module')
def initial(mesh):
  return model.init(CONFIG, jax.random.key(0), mesh)


@pytest.fixture(scope='module')
def params(initial):
  return randomised(initial)


@pytest.fixture(scope='module')
def tokens_BT():
  return jax.random.randint(jax.random.key(1), (3, 10), 0, CONFIG.vocab_size)


@pytest.fixture(scope='module')
def forward():
  return jax.jit(model.hidden_states, static_argnums=0)


@pytest.fixture(scope='module')
def prefill():
  return jax.jit(model.prefill, static_argnums=(0, 3))


@pytest.fixture(scope='module')
def decode():
  return jax.jit(model.decode, static_argnums=0)


@pytest.fixture(scope='module')
def decoding(params, mesh):
  return model.decode_layout(CONFIG, params, mesh)


@pytest.fixture(scope='module')
def hidden_BTD(forward, params, tokens_BT):
  return np.array(forward(CONFIG, params, tokens_BT))


def test_hidden_states_equal_a_plain_numpy_decoder(params, tokens_BT, hidden_BTD):
  for tokens_T, hidden_TD in zip(np.array(tokens_BT), hidden_BTD):
    np.testing.assert_allclose(hidden_TD, plain_decoder(params, tokens_T), atol=1e-4)


def plain_decoder(params, tokens_T):
  """float64, one row, head by head; rotary positions as products of complex numbers."""
  params = jax.tree.map(lambda x: np.array(x, np.float64), params)
  group, half = CONFIG.num_heads // CONFIG.num_kv_heads, CONFIG.head_size // 2

  def norm(x_TD, own):
    return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * own['scale']

  def turned(x_TH):
    pair_TP = x_TH[:, :half] + 1j * x_TH[:, half:]
    speed_P = CONFIG.rope.theta ** (-np.arange(half) / half)
    pair_TP = pair_TP * np.exp(1j * np.arange(len(x_TH))[:, None] * speed_P)
    return np.concatenate([pair_TP.real, pair_TP.imag], axis=-1)

  def head(x_TD, own, n):
    g = n // group
    query_TH = turned(x_TD @ own['query_DNH'][:, n] + own['query_bias_NH'][n])
    key_TH = turned(x_TD @ own['key_DGH'][:, g] + own['key_bias_GH'][g])
    value_TH = x_TD @ own['value_DGH'][:, g] + own['value_bias_GH'][g]
    weight_TT = np.exp(query_TH @ key_TH.T / np.sqrt(CONFIG.head_size)) * np.tri(len(x_TD))
    return weight_TT / weight_TT.sum(-1, keepdims=True) @ value_TH @ own['out_NHD'][n]

  x_TD = params['embedding_VD'][tokens_T]
  for index in range(CONFIG.num_layers):
    layer = jax.tree.map(lambda stack, index=index: stack[index], params['layers'])
    normed_TD = norm(x_TD, layer['attention_norm'])
    x_TD = x_TD + sum(head(normed_TD, layer['attention'], n) for n in range(CONFIG.num_heads))
    normed_TD, mlp = norm(x_TD, layer['mlp_norm']), layer['mlp']
    gate_TF = normed_TD @ mlp['gate_DF']
    x_TD = x_TD + gate_TF / (1 + np.exp(-gate_TF)) * (normed_TD @ mlp['up_DF']) @ mlp['down_FD']
  return norm(x_TD, params['final_norm'])


def test_a_token_does_not_see_later_ones(forward, params, tokens_BT, hidden_BTD):
  changed_BT = tokens_BT.at[:, 6].add(1) % CONFIG.vocab_size
  found_BTD = np.array(forward(CONFIG, params, changed_BT))
  np.testing.assert_array_equal(found_BTD[:, :6], hidden_BTD[:, :6])
  assert (np.abs(found_BTD[:, 6:] - hidden_BTD[:, 6:]).max(-1) > 1e-3).all()  # all later ones do


def test_padding_on_the_right_changes_nothing(forward, params, tokens_BT, hidden_BTD):
  padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, 6)))
  found_BTD = forward(CONFIG, params, padded_BT)[:, :10]
  np.testing.assert_allclose(found_BTD, hidden_BTD, atol=1e-5)


def test_prefill_and_decode_equal_the_whole_sequence(
  prefill, decode, decoding, tokens_BT, hidden_BTD
):
  """Prompts of 4, 1 and 3 tokens, padded to 4 with what must not be seen, then one by one."""
  prompt_B = np.array([4, 1, 3])
  padded_BT = np.where(np.arange(4) < prompt_B[:, None], tokens_BT[:, :4], 96)
  found_BTD, cache = prefill(CONFIG, decoding, padded_BT, 10)
  for row, length in enumerate(prompt_B):
    np.testing.assert_allclose(found_BTD[row, :length], hidden_BTD[row, :length], atol=1e-5)
  for time in range(6):
    position_B = prompt_B + time
    token_B = np.array(tokens_BT)[np.arange(3), position_B]
    found_BD, cache = decode(CONFIG, decoding, token_B, position_B, cache)
    np.testing.assert_allclose(found_BD, hidden_BTD[np.arange(3), position_B], atol=1e-5)


def test_a_cache_may_start_empty(decode, decoding, tokens_BT, hidden_BTD):
  cache = model.init_cache(CONFIG, num_rows=3, length=10)
  for time in range(2):
    found_BD, cache = decode(CONFIG, decoding, tokens_BT[:, time], np.full(3, time), cache)
  np.testing.assert_allclose(found_BD, hidden_BTD[:, 1], atol=1e-5)


def test_bfloat16_computes_in_bfloat16_over_float32_parameters(
  prefill, params, mesh, tokens_BT, hidden_BTD
):
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  found_BTD, cache = prefill(config, model.decode_layout(config, params, mesh), tokens_BT, 10)
  assert {x.dtype for x in jax.tree.leaves((found_BTD, cache))} == {jnp.dtype('bfloat16')}
  assert model.unembedding(config, params).dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  # An average over the entries: bfloat16 keeps three digits, and errors add up over layers.
  assert np.abs(found_BTD.astype(np.float32) - hidden_BTD).mean() < 0.05 * np.abs(hidden_BTD).mean()


def test_the_unembedding_is_the_embedding_only_if_tied(params):
  np.testing.assert_array_equal(model.unembedding(CONFIG, params), params['embedding_VD'].T)
  assert 'unembedding_DV' not in params
  untied = dataclasses.replace(CONFIG, tied_embeddings=False)
  own_DV = jnp.ones((32, 97))
  np.testing.assert_array_equal(
    model.unembedding(untied, params | {'unembedding_DV': own_DV}), own_DV
  )


def test_initial_values(initial):
  layer = jax.tree.map(lambda stack: stack[1], initial['layers'])
  std = 1 / math.sqrt(initial['embedding_VD'].shape[1])  # of the width
  assert np.std(initial['embedding_VD']) == pytest.approx(std, rel=0.05)
  assert np.std(layer['mlp']['down_FD']) == pytest.approx(std / math.sqrt(2 * 2), rel=0.05)
  assert (layer['mlp_norm']['scale'] == 1).all()
  assert (layer['attention']['key_bias_GH'] == 0).all()
  assert not np.array_equal(layer['mlp']['gate_DF'], layer['mlp']['up_DF'])


def test_layers_apply_in_order(forward, prefill, params, mesh, tokens_BT, hidden_BTD):
  """Two speaking layers of four equal a model of the two, scanned and one by one."""
  layers = jax.tree.map(lambda stack: stack[np.array([0, 0, 0, 1])], params['layers'])
  for kind, name in (('attention', 'out_NHD'), ('mlp', 'down_FD')):
    layers[kind][name] = layers[kind][name].at[np.array([0, 2])].set(0)
  config, own = dataclasses.replace(CONFIG, num_layers=4), params | {'layers': layers}
  np.testing.assert_allclose(forward(config, own, tokens_BT), hidden_BTD, atol=1e-5)
  found_BTD, _ = prefill(config, model.decode_layout(config, own, mesh), tokens_BT, 10)
  np.testing.assert_allclose(found_BTD, hidden_BTD, atol=1e-5)


def test_qwen_1_5b_has_its_number_of_parameters():
  """1,543,714,304, as the model's card says (1.54B); nothing is allocated."""
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  shapes = jax.eval_shape(lambda key: model.init(QWEN_1_5B, key, mesh), jax.random.key(0))
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == 1_543_714_304


def test_every_parameter_has_a_sharding(params, mesh):
  places = model.shardings(CONFIG, mesh)
  assert jax.tree.structure(places) == jax.tree.structure(params)
  assert {place.mesh for place in jax.tree.leaves(places)} == {mesh}


@pytest.mark.parametrize(
  'change, message',
  [
    ({'num_kv_heads': 3}, 'config.model.num_kv_heads=3 must divide config.model.num_heads=4'),
    ({'head_size': 7}, 'config.model.head_size=7 must be even'),
    ({'dtype': 'float16'}, "config.model.dtype='float16' must be one of float32, bfloat16"),
  ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
  with pytest.raises(InputError, match=message):
    config_lib.build(model.Config, dataclasses.asdict(CONFIG) | change, 'config.model')


def test_eight_devices_compute_what_one_does():
  """Same parameters for the same key, and the same hidden states, forward and decode."""
  script = f"""
import dataclasses
import jax, jax.numpy as jnp, numpy as np
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.rotary import Config  # as the repr of `rope` has it
config = model.{dataclasses.replace(CONFIG, num_layers=1)!r}
mesh = sharding.make_mesh(sharding.Config(data=2, fsdp=2, tensor=2))
alone = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), mesh.axis_names, axis_types=mesh.axis_types)
tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (8, 6)).astype(np.int32)

def run(mesh):
  params = model.init(config, jax.random.key(0), mesh)
  decoding = model.decode_layout(config, params, mesh)
  with jax.set_mesh(mesh):
    whole_BTD = jax.jit(model.hidden_states, static_argnums=0)(config, params, tokens_BT)
    hidden_BTD, cache = jax.jit(model.prefill, static_argnums=(0, 3))(
        config, decoding, tokens_BT, 8)
    position_B = jnp.full(8, 6)
    hidden_BD, cache = jax.jit(model.decode, static_argnums=0)(
        config, decoding, tokens_BT[:, 0], position_B, cache)
  return params, whole_BTD, hidden_BTD, hidden_BD, cache

with jax.set_mesh(mesh):
  cache = jax.jit(model.init_cache, static_argnums=(0, 1, 2))(config, 8, 8)
assert cache[0].value_BGSH.addressable_shards[0].data.shape == (2, 1, 8, 8)
spread, whole = run(mesh), run(alone)
kernel = spread[0]['layers']['attention']['query_DNH']
assert kernel.addressable_shards[0].data.shape == (1, 16, 2, 8), kernel.sharding
# While decoding, weights are whole over the data axes and in the compute dtype.
half = dataclasses.replace(config, dtype='bfloat16')
decoding = model.decode_layout(half, spread[0], mesh)
for layer, kind in ((decoding['layers'][0], 'bfloat16'), (model.decode_layout(
    config, spread[0], mesh)['layers'][0], 'float32')):
  kernel = layer['attention']['query_DNH']
  assert kernel.addressable_shards[0].data.shape == (32, 2, 8) and kernel.dtype == kind
  assert layer['mlp_norm']['scale'].dtype == 'float32'
stacked = jax.tree.map(lambda own: own[None], decoding['layers'][0])
jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)),
             dict(decoding, layers=stacked), spread[0])
assert spread[4][0].value_BGSH.addressable_shards[0].data.shape == (2, 1, 8, 8)
jax.tree.map(np.testing.assert_array_equal, spread[0], whole[0])
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), spread[1:], whole[1:])
"""
  on_eight_devices(script)
