"""What must hold on eight devices: mostly that they compute what one device does.

test_eight_devices.py runs all checks in one process, since starting JAX takes longer than most of
them. To debug some of them:

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.processes.eight_devices NAME...
"""

import dataclasses
import functools
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.algorithm import objective
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import attention, logprobs, model, sharding
from exgrpo_jax.rollout import scheduler
from tests.helpers import checks
from tests.helpers.losses import fused_example
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface import stored_checkpoints
from tests.learner import test_gradients
from tests.policy import test_attention, test_logprobs, test_model
from tests.rollout import test_scheduler

CHECKS = []


def check(function):
  """Registers a check; they run in the order of this file."""
  CHECKS.append(function)
  return function


def make_mesh(*sizes):
  """A mesh of all eight devices; `sizes` are those of data, fsdp and tensor."""
  return sharding.make_mesh(sharding.Config(*sizes))


def one_device():
  return sharding.make_mesh(sharding.Config(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def shard_shape(x):
  """The shape of what the first device holds."""
  return x.addressable_shards[0].data.shape


# ---- Sharding ----


@check
def one_axis_of_the_mesh_takes_the_devices_that_the_others_leave():
  mesh = make_mesh(2, -1, 2)
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}, mesh


@check
def arrays_are_split_where_their_sizes_divide():
  mesh, rows, kernel = make_mesh(2, 2, 2), jnp.arange(24.0).reshape(8, 3), jnp.ones((4, 6))
  for x, placement, expected in (
    (rows, sharding.batch(mesh, 8), (2, 3)),
    (rows[:6], sharding.batch(mesh, 6), (6, 3)),  # four shards do not divide six rows
    (rows, sharding.replicated(mesh), (8, 3)),
    (kernel, sharding.named(mesh, ('embed', 'mlp'), (4, 6)), (2, 3)),
  ):
    actual = shard_shape(jax.device_put(x, placement))
    assert actual == expected, (placement, actual, expected)


@check
def constrain_lays_out_an_activation():
  rows = jnp.arange(24.0).reshape(8, 3)
  with jax.set_mesh(make_mesh(2, 2, 2)):
    sharded = jax.jit(lambda x: sharding.constrain(x + 1, ('batch', None)))(rows)
  assert shard_shape(sharded) == (2, 3), shard_shape(sharded)
  assert (sharded == rows + 1).all()


@check
def per_shard_applies_a_function_to_the_shards_of_each_device():
  seen = []

  def first_half(x, y, z):
    seen.append((x.shape, y.shape, z.shape))
    return x[:, : len(y) // 2]

  def halve(num_columns):
    x = jnp.arange(8.0 * 4).reshape(8, 4)
    in_axes = [('batch', 'heads'), ('heads',), ('heads',)]
    by_shard = sharding.per_shard(first_half, in_axes, ('batch', 'heads'))
    return by_shard(x, jnp.ones(num_columns), jnp.ones(2))

  with jax.set_mesh(make_mesh(2, 2, 2)):
    num_shards = [sharding.num_shards(*axis) for axis in (('batch', 8), ('batch', 6), ('heads', 6))]
    assert num_shards == [4, 1, 2], num_shards
    assert jax.jit(halve, static_argnums=0)(4)[0].tolist() == [0, 2]
    assert jax.jit(halve, static_argnums=0)(5)[0].tolist() == [0, 1]  # 2 does not divide 5
  assert seen == [((2, 2), (2,), (1,)), ((2, 4), (5,), (2,))], seen


# ---- Attention ----


@check
def attention_is_that_of_one_device():
  """Two key/value heads on a tensor axis of four, then heads and rows it does not divide."""
  for B, N, G, query_shard, key_shard in (
    (4, 8, 2, (2, 10, 2, 8), (2, 10, 1, 8)),
    (3, 6, 3, (3, 10, 6, 8), (3, 10, 3, 8)),
  ):
    inputs = test_attention.random_inputs(B, 10, N, G, 8)
    expected, unsharded_shapes = attend_on(one_device(), inputs)
    actual, shapes = attend_on(make_mesh(1, 2, 4), inputs)
    assert unsharded_shapes == [((B, 10, N, 8), (B, 10, G, 8))], unsharded_shapes
    assert shapes == [(query_shard, key_shard)], shapes
    assert shard_shape(actual[0]) == query_shard, shard_shape(actual[0])
    test_attention.assert_close(actual, expected, 1e-5)


def attend_on(mesh, inputs):
  """Output and gradients, and the shapes of query and key that a device's backend is given."""
  blockwise, shapes = attention._ATTEND['blockwise'], []

  def note_shapes(query, key, value):
    shapes.append((query.shape, key.shape))
    return blockwise(query, key, value)

  with mock.patch.dict(attention._ATTEND, blockwise=note_shapes), jax.set_mesh(mesh):
    return test_attention.actual('blockwise', *inputs), shapes


# ---- Model ----

ONE_LAYER = dataclasses.replace(test_model.CONFIG, num_layers=1)


@check
def parameters_and_hidden_states_are_those_of_one_device():
  """The same parameters for the same key, and the same hidden states in every pass."""
  sharded, expected = passes_on(make_mesh(2, 2, 2)), passes_on(one_device())
  kernel = sharded['params']['layers']['attention']['query_DNH']
  assert shard_shape(kernel) == (1, 16, 2, 8), kernel.sharding
  cache = sharded['cache'][0].value_BGSH
  assert shard_shape(cache) == (2, 1, 8, 8), cache.sharding
  jax.tree.map(np.testing.assert_array_equal, sharded.pop('params'), expected.pop('params'))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), sharded, expected)


def passes_on(mesh):
  """The parameters, and what each pass of the model gives."""
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, ONE_LAYER.vocab_size, (8, 6)).astype(np.int32)
  params = model.init(ONE_LAYER, jax.random.key(0), mesh)
  decode_params = model.decode_layout(ONE_LAYER, params, mesh)
  forward = jax.jit(model.hidden_states, static_argnums=0)
  prefill = jax.jit(model.prefill, static_argnums=(0, 3))
  decode = jax.jit(model.decode, static_argnums=0)
  with jax.set_mesh(mesh):
    scanned_BTD = forward(ONE_LAYER, params, tokens_BT)
    prefilled_BTD, cache = prefill(ONE_LAYER, decode_params, tokens_BT, 8)
    decoded_BD, cache = decode(ONE_LAYER, decode_params, tokens_BT[:, 0], jnp.full(8, 6), cache)
  return dict(
    params=params, scanned=scanned_BTD, prefilled=prefilled_BTD, decoded=decoded_BD, cache=cache
  )


@check
def an_empty_cache_is_split_by_rows_and_heads():
  with jax.set_mesh(make_mesh(2, 2, 2)):
    cache = jax.jit(model.init_cache, static_argnums=(0, 1, 2))(ONE_LAYER, 8, 8)
  assert shard_shape(cache[0].value_BGSH) == (2, 1, 8, 8), cache[0].value_BGSH.sharding


@check
def for_decoding_weights_are_cast_and_replicated_over_the_data_axes():
  mesh = make_mesh(2, 2, 2)
  params = model.init(ONE_LAYER, jax.random.key(0), mesh)
  for dtype in ('float32', 'bfloat16'):
    decode_params = model.decode_layout(dataclasses.replace(ONE_LAYER, dtype=dtype), params, mesh)
    layer = decode_params['layers'][0]
    kernel = layer['attention']['query_DNH']
    assert shard_shape(kernel) == (32, 2, 8) and kernel.dtype == dtype, kernel.sharding
    assert layer['mlp_norm']['scale'].dtype == 'float32'
    stacked = dict(decode_params, layers=jax.tree.map(lambda x: x[None], layer))
    jax.tree.map(
      lambda cast, x: np.testing.assert_array_equal(cast, x.astype(cast.dtype)), stacked, params
    )


# ---- The fused loss ----

COLLECTIVE = re.compile(
  r'= (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?[(]'
)
LOSS_MESHES = ((1, 8, 1), (1, 1, 8), (2, 2, 2))


@check
def the_fused_loss_and_its_gradients_are_those_of_one_device():
  _, expected = fused_loss_on(one_device())
  for sizes in LOSS_MESHES:
    _, actual = fused_loss_on(make_mesh(*sizes))
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=2e-6, rtol=1e-5), actual, expected
    )


@check
def where_only_rows_are_split_the_fused_loss_sums_their_shards_once_after_the_loop():
  program, _ = fused_loss_on(make_mesh(1, 8, 1))
  inside, outside = collectives(program)
  assert not inside, inside
  assert any('f32[8,16]' in shapes for shapes in outside), outside  # the sum over rows
  # Rows never leave their device, and neither do windows of them.
  assert not any('f32[8,8,8]' in shapes or 'f32[8,9,8]' in shapes for shapes in outside), outside


@check
def on_no_mesh_the_loop_of_the_fused_loss_moves_the_gradient_of_the_unembedding():
  for sizes in LOSS_MESHES:
    inside, _ = collectives(fused_loss_on(make_mesh(*sizes))[0])
    # D is 8; V is 16, or a device's share of it.
    assert not any(re.search(r'f32[[](1,)?8,(16|8|2)[]]', shapes) for shapes in inside), inside


@functools.cache
def fused_loss_on(mesh):
  """The compiled gradient of the fused loss with all its options, and what it gives."""
  temperature = test_logprobs.TEMPERATURE
  config, arguments, *_ = fused_example('all', temperature, width=8, vocabulary=16)
  token_loss = functools.partial(objective.token_loss, config=config, clip=True, is_first=False)

  def total(states, unembedding, target, tokens):
    # States start one position before the window, as the model's do.
    hidden = logprobs.predictor_states(states, np.ones(8, int), 8)
    return logprobs.fused_loss(
      hidden, unembedding, target, tokens, token_loss, temperature=temperature, chunk=24
    )

  hidden, unembedding, *rest = arguments
  inputs = (
    jax.device_put(hidden, sharding.batch(mesh, 8)),
    jax.device_put(unembedding, sharding.named(mesh, ('embed', 'vocab'), (8, 16))),
    *jax.device_put(rest, sharding.batch(mesh, 8)),
  )
  with jax.set_mesh(mesh):
    gradient = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    program = gradient.lower(*inputs).compile()
    return program, program(*inputs)


def collectives(program):
  """The result shapes of a program's collectives: of those in the bodies of loops, and others."""
  text = program.as_text()
  bodies = set(re.findall(r'body=%?([^,]+)', text))
  assert bodies, text
  inside, outside, name = [], [], ''
  for line in text.splitlines():
    if line.endswith('{'):
      name = re.match(r'(?:ENTRY )?%?([^ ]*)', line)[1]
    if match := COLLECTIVE.search(line):
      (inside if name in bodies else outside).append(match[1])
  return inside, outside


# ---- Rollout ----


@check
def sampled_tokens_are_those_of_one_device():
  """Rows over four devices, heads over two."""
  assert sample_on(make_mesh(2, 2, 2)) == sample_on(one_device())


def sample_on(mesh):
  config = test_scheduler.CONFIG
  params = test_scheduler.make_params(config, mesh)
  responses = scheduler.generate(
    config,
    model.decode_layout(config, params, mesh),
    test_scheduler.PROMPTS,
    test_scheduler.ROWS,
    test_scheduler.SAMPLES,
    test_scheduler.KEY,
    test_scheduler.SPEC,
    mesh,
  )
  return [response.tokens.tolist() for response in responses]


# ---- Learner ----


@check
def gradients_are_those_of_one_device():
  expected = gradient_on(one_device())
  for sizes in ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)):
    test_gradients.assert_same(gradient_on(make_mesh(*sizes)), expected)


def gradient_on(mesh):
  with jax.set_mesh(mesh):
    params, spec = test_gradients.make_params(mesh), test_gradients.make_spec(mesh)
    return jax.device_get(
      gradients.minibatch_gradient(spec, params, test_gradients.BATCH, True, False)
    )


@check
def each_device_holds_an_eighth_of_every_parameter_and_moment():
  mesh = make_mesh(1, 8, 1)
  with jax.set_mesh(mesh):
    params, spec = test_gradients.make_params(mesh), test_gradients.make_spec(mesh)
    state = optimizer.init(test_gradients.OPTIMIZER, 10, params)
    for _ in range(2):
      for leaf in jax.tree.leaves(state):
        assert leaf.ndim == 0 or np.prod(shard_shape(leaf)) * 8 == leaf.size, leaf.shape
      state, sums = test_gradients.update(spec, state, test_gradients.BATCH, True, False)
      assert sums['skipped'] == 0


# ---- Weights ----


@check
def weights_are_the_same_in_every_layout_and_each_device_reads_only_its_slices():
  for name in (stored_checkpoints.SHARDED, stored_checkpoints.SINGLE):
    folder = CHECKPOINTS / name
    config, first_params = stored_checkpoints.read_config(folder), None
    for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)):
      with stored_checkpoints.recorded_reads() as reads:
        params = weights.load(folder, config, make_mesh(*sizes))
      shard_sizes = {}
      for (path, layer), tensor in architecture.tensors(config).items():
        shard = weights._get(params, path).addressable_shards[0].data
        shard_sizes[tensor] = shard.size if layer is None else shard[layer].size
      assert len(reads) >= sum(len(tensor.shape) == 2 for tensor in shard_sizes)
      assert all(size == shard_sizes[tensor] for tensor, size in reads), reads
      first_params = first_params or params
      jax.tree.map(np.testing.assert_array_equal, params, first_params)
    gate = params['layers']['mlp']['gate_DF']
    assert shard_shape(gate)[2] == 48 // 8, gate.sharding


if __name__ == '__main__':
  assert jax.device_count() == 8, f'{jax.devices()} are not eight devices'
  if len(sys.argv) > 1:
    for named in sys.argv[1:]:
      globals()[named]()
  else:
    checks.run(CHECKS)
