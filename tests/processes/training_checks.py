"""What must hold of rollout, learner and weights on eight devices; eight_devices.py runs it."""

import dataclasses

import jax
import numpy as np

from exgrpo_jax.huggingface import tensor_names, weights
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import lora, model, sharding
from exgrpo_jax.runtime import compilations, randomness
from exgrpo_jax.runtime.randomness import Purpose
from tests.helpers import passes
from tests.helpers.checks import Checks, case
from tests.helpers.decoding import decoding_by, generated, plain_kernel
from tests.helpers.meshes import make_mesh, make_meshes, one_device, shard_shape
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface import stored_checkpoints
from tests.learner import test_gradients
from tests.rollout import test_scheduler

CHECKS = Checks()


# ---- Rollout ----


@CHECKS.add
def sampled_tokens_are_those_of_one_device():
  """Parameters over eight devices; then rows over some and heads over the others."""
  expected = sample_on(sharding.Meshes(one_device(), one_device()))
  for decoding in ((4, 1, 2), (1, 1, 8)):
    with case(decoding):
      actual = sample_on(make_meshes((1, 8, 1), decoding))
      assert actual == expected, (actual, expected)
  for backend, decoding in (
    ('dense', (4, 1, 2)),
    ('dense', (2, 1, 4)),  # which does not divide two key/value heads
    ('ragged', (4, 1, 2)),
  ):
    with case((backend, decoding)), decoding_by(backend), plain_kernel():
      actual = sample_on(make_meshes((1, 8, 1), decoding))
      assert actual == expected, (actual, expected)


@CHECKS.add
def a_rollout_compiles_one_program_of_each_kind():
  """Also the second time that slots are filled, with what another program returned."""
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
  with jax.set_mesh(mesh), passes.large():
    params, spec = test_gradients.make_params(mesh), test_gradients.make_spec(mesh)
    return jax.device_get(
      gradients.minibatch_gradient(spec, params, test_gradients.BATCH, True, False)
    )


@CHECKS.add
def adapters_are_trained_and_merged_as_on_one_device():
  expected = adapters_on(sharding.Meshes(one_device(), one_device()))
  for training, decoding in (((1, 8, 1), (2, 1, 4)), ((2, 2, 2), (8, 1, 1))):
    with case((training, decoding)):
      test_gradients.assert_same(adapters_on(make_meshes(training, decoding)), expected)


def adapters_on(meshes):
  """LoRA's first adapters; of others the gradient, and the decode layout with them merged."""
  mesh = meshes.training
  with jax.set_mesh(mesh), passes.large():
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
  with jax.set_mesh(mesh), passes.large():
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
        for (path, index), tensor in tensor_names.of(config).items():
          shard = weights._get(params, path).addressable_shards[0].data
          shard_sizes[tensor] = shard[index].size
        assert len(reads) >= sum(len(tensor.shape) == 2 for tensor in shard_sizes)
        assert all(size == shard_sizes[tensor] for tensor, size in reads), reads
        first_params = first_params or params
        jax.tree.map(np.testing.assert_array_equal, params, first_params)
    gate = params['layers']['mlp']['gate_DF']
    assert shard_shape(gate)[2] == 48 // 8, gate.sharding
