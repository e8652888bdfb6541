"""Meshes of processes that have several devices, and what of an array each device holds."""

import functools

import jax

from exgrpo_jax.policy import model, sharding


def make_mesh(data, fsdp, tensor):
  """A mesh of all devices."""
  return sharding.make_mesh(sharding.TrainingConfig(data=data, fsdp=fsdp, tensor=tensor))


def make_meshes(training, decoding):
  """Meshes of all devices for training and decoding, of the sizes (data, fsdp, tensor, expert)."""
  (data, fsdp, tensor, *expert), (of_rows, one, split, *of_experts) = training, decoding
  assert one == 1, decoding
  return sharding.make_meshes(
    sharding.MeshConfig(
      training=sharding.TrainingConfig(data, fsdp, *expert or [1], tensor),
      decoding=sharding.DecodingConfig(of_rows, *of_experts or [1], split),
    )
  )


def one_device():
  """A mesh of the first device."""
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def shard_shape(x):
  """The shape of what the first device holds."""
  return x.addressable_shards[0].data.shape


def initial_params(config, mesh, change=lambda x: x):
  """The parameters of `model.init`, which are the same on every mesh, each of them changed."""
  return jax.device_put(jax.tree.map(change, _initial(config)), model.shardings(config, mesh))


@functools.cache
def _initial(config):
  """On the host: compiled once, for one device."""
  mesh = one_device()
  with jax.set_mesh(mesh):
    return jax.device_get(model.init(config, jax.random.key(0), mesh))
