"""Meshes of processes that have several devices, and what of an array each device holds."""

import jax

from exgrpo_jax.policy import sharding


def make_mesh(data, fsdp, tensor):
  """A mesh of all devices."""
  return sharding.make_mesh(sharding.Config(data=data, fsdp=fsdp, tensor=tensor))


def one_device():
  """A mesh of the first device."""
  return sharding.make_mesh(sharding.Config(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def shard_shape(x):
  """The shape of what the first device holds."""
  return x.addressable_shards[0].data.shape
