"""Products with weights that are split over all chips of a TPU slice."""

import re

import jax
import pytest

from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.sharding import jit_for_training


def multiply(x_BTD, weight_DF):
  return sharding.constrain(x_BTD @ weight_DF, ('batch', None, None))


@pytest.mark.full
def test_weights_are_gathered_on_a_tpu_not_multiplied_shard_by_shard():
  """Plain jit compiles a loop of products over the shards here."""
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
