"""Checks on eight devices in one process, mostly that they compute the same as one device.

Starting JAX takes longer than most of the checks, so test_eight_devices.py runs this module once
and has a test for each check. To run some checks alone, or in a debugger:

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.processes.eight_devices NAME...
"""

import dataclasses
import functools
import operator
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.algorithm import objective
from exgrpo_jax.huggingface import tensor_names, weights
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import attention, logprobs, lora, model, sharding
from exgrpo_jax.rollout import drafts
from exgrpo_jax.runtime import compilations, machine, randomness
from exgrpo_jax.runtime.randomness import Purpose
from tests.helpers import checks, losses
from tests.helpers.checks import Checks, case
from tests.helpers.decoding import decoding_by, generated, plain_kernel
from tests.helpers.losses import fused_example
from tests.helpers.meshes import initial_params, make_mesh, make_meshes, one_device, shard_shape
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface import stored_checkpoints
from tests.learner import test_gradients
from tests.policy import test_attention, test_logprobs, test_model
from tests.rollout import test_scheduler, test_slots

CHECKS = Checks()


def unsharded():
  return sharding.Meshes(one_device(), one_device())


def assert_trees_close(actual, expected, atol=2e-5, rtol=1e-7):
  compare = functools.partial(np.testing.assert_allclose, atol=atol, rtol=rtol)
  jax.tree.map(compare, actual, expected)


# ---- Sharding ----


@CHECKS.add
def arrays_and_activations_are_split_where_their_sizes_divide():
  mesh, rows, kernel = make_mesh(2, -1, 2), jnp.arange(24.0).reshape(8, 3), jnp.ones((4, 6))
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'expert': 1, 'tensor': 2}, mesh
  for x, placement, expected in (
    (rows, sharding.batch(mesh, 8), (2, 3)),
    (rows[:6], sharding.batch(mesh, 6), (6, 3)),  # four shards do not divide six rows
    (rows, sharding.replicated(mesh), (8, 3)),
    (kernel, sharding.named(mesh, ('embed', 'mlp'), (4, 6)), (2, 3)),
  ):
    actual = shard_shape(jax.device_put(x, placement))
    assert actual == expected, (placement, actual, expected)
  with jax.set_mesh(mesh):
    sharded = jax.jit(lambda x: sharding.constrain(x + 1, ('batch', None)))(rows)
  assert shard_shape(sharded) == (2, 3), shard_shape(sharded)
  assert (sharded == rows + 1).all()


@CHECKS.add
def training_and_decoding_have_the_same_devices_in_the_same_order():
  meshes = make_meshes((1, -1, 1), (-1, 1, 2))
  assert dict(meshes.training.shape) == {'data': 1, 'fsdp': 8, 'expert': 1, 'tensor': 1}, meshes
  assert dict(meshes.decoding.shape) == {'data': 4, 'fsdp': 1, 'expert': 1, 'tensor': 2}, meshes
  assert list(meshes.training.devices.flat) == list(meshes.decoding.devices.flat)


@CHECKS.add
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


@CHECKS.add
def attention_is_that_of_one_device():
  """A tensor axis of four has two key/value heads, then heads and rows that it does not divide."""
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
  """Return output and gradients, and the shapes of query and key in the backend on a device."""
  blockwise, shapes = attention._ATTEND['blockwise'], []

  def note_shapes(query, key, value, *segments):
    shapes.append((query.shape, key.shape))
    return blockwise(query, key, value, *segments)

  with mock.patch.dict(attention._ATTEND, blockwise=note_shapes), jax.set_mesh(mesh):
    return test_attention.actual('blockwise', *inputs), shapes


# ---- Model ----

ONE_LAYER = dataclasses.replace(test_model.CONFIG, num_layers=1)


@CHECKS.add
def parameters_and_hidden_states_are_those_of_one_device():
  """The same key gives the same parameters, and every pass gives the same hidden states."""
  expected = passes_on(unsharded())
  sharded = passes_on(make_meshes((2, 2, 2), (4, 1, 2)))
  kernel = sharded['params']['layers']['attention']['query_DNH']
  assert shard_shape(kernel) == (1, 16, 2, 8), kernel.sharding
  cache = sharded['cache'][0].value_BGSH
  assert shard_shape(cache) == (2, 1, 8, 8), cache.sharding
  jax.tree.map(np.testing.assert_array_equal, sharded.pop('params'), expected.pop('params'))
  assert_trees_close(sharded, expected)


def passes_on(meshes, config=ONE_LAYER):
  """Return the parameters and the results of the model's passes."""
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, config.vocab_size, (8, 6)).astype(np.int32)
  params = model.init(config, jax.random.key(0), meshes.training)
  decode_params = model.decode_layout(config, params, meshes)
  forward = jax.jit(model.hidden_states, static_argnums=0)
  prefill = jax.jit(model.prefill, static_argnums=(0, 4))
  decode = jax.jit(model.decode, static_argnums=0)
  with jax.set_mesh(meshes.training):
    scanned_BTD = forward(config, params, tokens_BT)
  with jax.set_mesh(meshes.decoding):
    prefilled_BTD, cache, _ = prefill(config, decode_params, tokens_BT, np.full(8, 6), 8)
    decoded_BD, cache, _ = decode(config, decode_params, tokens_BT[:, 0], jnp.full(8, 6), cache)
    empty = jax.jit(model.init_cache, static_argnums=(0, 1, 2))(config, 8, 8)
  assert shard_shape(empty[0].value_BGSH) == shard_shape(cache[0].value_BGSH), empty
  return dict(
    params=params, scanned=scanned_BTD, prefilled=prefilled_BTD, decoded=decoded_BD, cache=cache
  )


@CHECKS.add
def windows_norms_and_caps_are_those_of_one_device():
  """The model has several kinds of layers and most options. The gradient is compared too."""
  config = test_model.VARIANTS['gemma']
  sharded = passes_and_gradient(make_meshes((2, 2, 2), (4, 1, 2)), config)
  assert_trees_close(sharded, passes_and_gradient(unsharded(), config))


def passes_and_gradient(meshes, config):
  """Return the result of `passes_on` and a gradient with respect to the parameters."""
  passes = passes_on(meshes, config)
  tokens_BT = np.arange(48, dtype=np.int32).reshape(8, 6)

  def total(params):
    return (model.hidden_states(config, params, tokens_BT) ** 3).mean()

  with jax.set_mesh(meshes.training):
    return passes, jax.jit(jax.grad(total))(passes['params'])


@CHECKS.add
def experts_on_an_axis_of_their_own_are_those_of_one_device():
  """Rows are split over the expert axis or not, and one training mesh splits no experts."""
  config = dataclasses.replace(test_model.VARIANTS['experts'], num_layers=1)
  expected = passes_and_gradient(unsharded(), config)
  for training, decoding in (
    ((1, 2, 2, 2), (2, 1, 2, 2)),
    ((2, 1, 1, 4), (1, 1, 1, 8)),
    ((1, 8, 1, 1), (2, 1, 1, 4)),
  ):
    with case((training, decoding)):
      passes, gradient = passes_and_gradient(make_meshes(training, decoding), config)
      gate_EDF = passes['params']['layers']['mlp']['gate_EDF']
      assert shard_shape(gate_EDF)[1] == 8 // training[3], gate_EDF.sharding
      assert_trees_close((passes, gradient), expected)
  mesh, rows_BTD = make_meshes((1, 2, 1, 4), (8, 1, 1)).training, jnp.ones((3, 2, 4))
  with jax.set_mesh(mesh):  # three rows, which eight devices do not divide
    kernels = (jnp.ones((8, 4, 2)), jnp.ones((8, 4, 2)), jnp.ones((8, 2, 4)))
    total = sharding.over_experts(
      lambda rows, kernels, first: rows[0] * (len(kernels[0]) * (first + 1)), (rows_BTD,), kernels
    )
  np.testing.assert_array_equal(total, rows_BTD * 2 * (1 + 3 + 5 + 7))


@CHECKS.add
@mock.patch.object(machine, 'has_matrix_units', functools.partial(bool, True))
def for_decoding_weights_are_cast_and_replicated_over_the_data_axes():
  model.decode_conversion.cache_clear()
  meshes = make_meshes((1, 8, 1), (4, 1, 2))
  params = initial_params(ONE_LAYER, meshes.training)
  for dtype in ('float32', 'bfloat16'):
    config = dataclasses.replace(ONE_LAYER, dtype=dtype)
    decode_params = model.decode_layout(config, params, meshes)
    layer = decode_params['layers'][0]
    kernel = layer['attention']['query_DNH']
    assert shard_shape(kernel) == (32, 2, 8) and kernel.dtype == dtype, kernel.sharding
    assert layer['mlp_norm']['scale'].dtype == 'float32'
    stacked = dict(decode_params, layers=jax.tree.map(lambda x: x[None], layer))
    jax.tree.map(
      lambda cast, x: np.testing.assert_array_equal(cast, x.astype(cast.dtype)), stacked, params
    )


@CHECKS.add
def weights_converted_in_place_are_those_of_the_decode_layout():
  model.decode_conversion.cache_clear()
  for training, decoding in (((1, 8, 1), (4, 1, 2)), ((2, 2, 2), (2, 1, 4))):
    meshes = make_meshes(training, decoding)
    for dtype in ('float32', 'bfloat16'):
      config = dataclasses.replace(ONE_LAYER, dtype=dtype)
      params = initial_params(config, meshes.training)
      expected = model.decode_layout(config, params, meshes)
      found = model.into_decode_layout(config, params, meshes)
      assert sharding.layout_of(found) == sharding.layout_of(expected)
      jax.tree.map(np.testing.assert_array_equal, found, expected)


@CHECKS.add
def packed_rows_are_copied_to_slots_as_on_one_device():
  """Each device has four of sixteen slots, and heads are split too."""
  with jax.set_mesh(one_device()):
    expected = [test_slots.unpacked(size) for size in (8, 3)]
  with jax.set_mesh(make_mesh(4, 1, 2)):
    actual = [test_slots.unpacked(size) for size in (8, 3)]
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ---- The fused loss ----

COLLECTIVE = re.compile(
  r'= (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\('
)
LOSS_MESHES = ((1, 8, 1), (1, 1, 8), (2, 2, 2))


@CHECKS.add
def the_fused_loss_and_its_gradients_are_those_of_one_device():
  _, expected = fused_loss_on(one_device())
  for sizes in LOSS_MESHES:
    _, actual = fused_loss_on(make_mesh(*sizes))
    with case(sizes):
      assert_trees_close(actual, expected, atol=2e-6, rtol=1e-5)


@CHECKS.add
def each_device_has_the_logits_of_as_many_tokens_as_a_chunk_has():
  for sizes, logits in (((1, 8, 1), 'f32[1,3,16]'), ((1, 1, 8), 'f32[8,3,2]')):
    text = fused_loss_on(make_mesh(*sizes))[0].as_text()
    assert logits in text and not re.search(r'f32\[8,1,\d+\]', text), sizes


@CHECKS.add
def where_only_rows_are_split_the_fused_loss_sums_their_shards_once_after_the_loop():
  program, _ = fused_loss_on(make_mesh(1, 8, 1))
  inside, outside = collectives(program)
  assert not inside, inside
  assert any('f32[8,16]' in shapes for shapes in outside), outside  # the sum over rows
  # Rows and windows of rows never leave their device.
  assert not any('f32[8,8,8]' in shapes or 'f32[8,9,8]' in shapes for shapes in outside), outside


@CHECKS.add
def on_no_mesh_the_loop_of_the_fused_loss_moves_the_gradient_of_the_unembedding():
  for sizes in LOSS_MESHES:
    inside, _ = collectives(fused_loss_on(make_mesh(*sizes))[0])
    # D is 8. V is 16, or a device's share of 16.
    moved = [shapes for shapes in inside if re.search(r'f32\[(1,)?8,(16|8|2)\]', shapes)]
    assert not moved, (sizes, moved)


@functools.cache
def fused_loss_on(mesh):
  """Return the compiled gradient of the fused loss with all options, and its result."""
  temperature = test_logprobs.TEMPERATURE
  config, arguments, *_ = fused_example('all', temperature, width=8, vocabulary=16)
  chunk = 24 // sharding.split(mesh, 'batch')[1]  # three positions of each of the eight rows
  token_loss = functools.partial(objective.token_loss, config=config, clip=True, is_first=False)

  def total(states, unembedding, target, tokens):
    # States start one position before the window, as in the model.
    hidden = logprobs.predictor_states(states, np.tile(np.arange(8), (8, 1)))
    return logprobs.fused_loss(
      hidden, unembedding, target, tokens, token_loss, temperature=temperature, chunk=chunk
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
  """Return the result shapes of a program's collectives inside and outside of loops."""
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


@CHECKS.add
def sampled_tokens_are_those_of_one_device():
  """Parameters are split over eight devices, then rows over some and heads over the others."""
  expected = sample_on(unsharded())
  for decoding in ((4, 1, 2), (1, 1, 8)):
    with case(decoding):
      actual = sample_on(make_meshes((1, 8, 1), decoding))
      assert actual == expected, (actual, expected)
  # Four devices do not divide two key/value heads.
  for backend, decoding in (('dense', (4, 1, 2)), ('dense', (2, 1, 4)), ('ragged', (4, 1, 2))):
    with case((backend, decoding)), decoding_by(backend), plain_kernel():
      actual = sample_on(make_meshes((1, 8, 1), decoding))
      assert actual == expected, (actual, expected)


@CHECKS.add
def auto_drafts_by_the_rows_that_each_device_has():
  for slots, expected in ((8, 7), (16, 3), (7, 0)):  # eight devices do not divide seven rows
    assert drafts.width('auto', slots, make_mesh(8, 1, 1)) == expected, slots


@CHECKS.add
def a_rollout_compiles_one_program_of_each_kind():
  """This includes the second filling of slots, with another program's results."""
  for decoding in ((8, 1, 1), (4, 1, 2)):
    with case(decoding):
      meshes = make_meshes((1, 8, 1), decoding)
      jax.clear_caches()
      with compilations.counted() as compiled:
        sample_on(meshes, slots=2 * decoding[0], samples=6)
      kinds = ('empty', 'prefill', 'insert', 'decode')
      assert [compiled.names[kind] for kind in kinds] == [1, 1, 1, 1], compiled.names


def sample_on(meshes, slots=test_scheduler.SPEC.slots, samples=1):
  config = test_scheduler.CONFIG
  params = test_scheduler.make_params(config, meshes.training)
  with jax.set_mesh(meshes.training):  # as in a step
    key = randomness.key(0, Purpose.ROLLOUT, 1)
  responses = generated(
    config,
    model.decode_layout(config, params, meshes),
    test_scheduler.PROMPTS * samples,
    test_scheduler.ROWS * samples,
    test_scheduler.SAMPLES * samples,
    key,
    dataclasses.replace(test_scheduler.SPEC, slots=slots),
    meshes.decoding,
  )
  return [response.tokens.tolist() for response in responses]


# ---- Learner ----


@CHECKS.add
def gradients_are_those_of_one_device():
  expected = gradient_on(one_device())
  for sizes in ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)):
    with case(sizes):
      # Rounding alone is 1.3e-5 on one kind of CPU, for one number of 2,048.
      test_gradients.assert_same(gradient_on(make_mesh(*sizes)), expected, tolerance=2e-5)


def gradient_on(mesh):
  with jax.set_mesh(mesh), losses.large_passes():
    params, spec = test_gradients.make_params(mesh), test_gradients.make_spec(mesh)
    return jax.device_get(
      gradients.minibatch_gradient(spec, params, test_gradients.BATCH, True, False)
    )


@CHECKS.add
def adapters_are_trained_and_merged_as_on_one_device():
  expected = adapters_on(unsharded())
  for training, decoding in (((1, 8, 1), (2, 1, 4)), ((2, 2, 2), (8, 1, 1))):
    with case((training, decoding)):
      test_gradients.assert_same(adapters_on(make_meshes(training, decoding)), expected)


def adapters_on(meshes):
  """Return new LoRA adapters, then the gradient and merged decode layout of other adapters."""
  mesh = meshes.training
  with jax.set_mesh(mesh), losses.large_passes():
    base, adapters = test_gradients.make_params(mesh), test_gradients.make_adapters(mesh)
    spec = test_gradients.make_spec(mesh, lora_config=test_gradients.LORA)
    gradient, _ = gradients.minibatch_gradient(
      spec, adapters, test_gradients.BATCH, True, False, base
    )
    policy = lora.joined(spec.lora, base, adapters)
    first = lora.init(gradients.trained_shapes(spec), jax.random.key(0))
    return jax.device_get((first, gradient, model.decode_layout(spec.model, policy, meshes)))


@CHECKS.add
def each_device_holds_an_eighth_of_every_parameter_and_moment():
  mesh = make_mesh(1, 8, 1)
  with jax.set_mesh(mesh), losses.large_passes():
    params, spec = test_gradients.make_params(mesh), test_gradients.make_spec(mesh)
    state = optimizer.init(test_gradients.OPTIMIZER, 10, params)
    for _ in range(2):
      for leaf in jax.tree.leaves(state):
        assert leaf.ndim == 0 or np.prod(shard_shape(leaf)) * 8 == leaf.size, leaf.shape
      state, sums = test_gradients.update(spec, state, test_gradients.BATCH, True, False)
      assert sums['skipped'] == 0


# ---- Weights ----


@CHECKS.add
def weights_are_the_same_in_every_layout_and_each_device_reads_only_its_slices():
  for name in (stored_checkpoints.SHARDED, stored_checkpoints.SINGLE):
    folder = CHECKPOINTS / name
    config, first_params = stored_checkpoints.read_config(folder), None
    for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)):
      with case((name, sizes)):
        with stored_checkpoints.recorded_reads() as reads:
          params = weights.load(folder, config, make_mesh(*sizes))
        shard_sizes = {}
        for (path, index), tensor in tensor_names.tensors(config).items():
          shard = functools.reduce(operator.getitem, path, params).addressable_shards[0].data
          shard_sizes[tensor] = shard[index].size
        assert len(reads) >= sum(len(tensor.shape) == 2 for tensor in shard_sizes)
        assert all(size == shard_sizes[tensor] for tensor, size in reads), reads
        first_params = first_params or params
        jax.tree.map(np.testing.assert_array_equal, params, first_params)
    gate = params['layers']['mlp']['gate_DF']
    assert shard_shape(gate)[2] == 48 // 8, gate.sharding


# ---- All of them ----


BY_NAME = {check.__name__: check for check in CHECKS}


def main(names):
  assert jax.device_count() == 8, f'{jax.devices()} are not eight devices'
  if not names:
    checks.run(CHECKS)
  for name in names:
    BY_NAME[name]()


if __name__ == '__main__':
  main(sys.argv[1:])
