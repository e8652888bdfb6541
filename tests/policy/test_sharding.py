"""Meshes on this machine's devices; for eight devices, see tests/processes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import sharding

SIZES = {'data': 2, 'fsdp': 2, 'expert': 2, 'tensor': 2}


@pytest.mark.parametrize(
  ('axes', 'shape', 'expected'),
  [
    (('embed', 'mlp'), (4, 4), (('fsdp',), ('tensor',))),
    (('vocab', 'embed'), (4, 4), (('tensor',), ('fsdp',))),
    (('embed', 'heads', None), (4, 4, 3), (('fsdp',), ('tensor',), None)),
    (('batch', None), (8, 3), (('data', 'fsdp', 'expert'), None)),
    (('experts', 'embed', 'mlp'), (4, 4, 4), (('expert',), ('fsdp',), ('tensor',))),
  ],
)
def test_logical_axes_map_to_mesh_axes(axes, shape, expected):
  assert sharding.spec(SIZES, axes, shape) == PartitionSpec(*expected)


def test_a_dimension_that_does_not_divide_evenly_is_replicated():
  assert sharding.spec(SIZES, ('embed', 'kv_heads'), (4, 3)) == PartitionSpec(('fsdp',), None)
  assert sharding.spec(SIZES, ('batch',), (6,)) == PartitionSpec(None)  # 6 rows, 8 devices


@pytest.mark.parametrize(
  ('training', 'decoding', 'message'),
  [
    (
      (-1, -1, 1),
      (1, 1),
      'training (data=-1, fsdp=-1, expert=1, tensor=1): at most one size may be -1',
    ),
    ((1, 1, 1), (-1, -1), 'decoding (data=-1, expert=1, tensor=-1): at most one size may be -1'),
    ((1, 1, 0), (1, 1), 'training.tensor=0: the number of devices must not be 0'),
    ((1, 1, 1), (0, 1), 'decoding.data=0: the number of devices must not be 0'),
  ],
)
def test_impossible_sizes_are_refused(training, decoding, message):
  values = {
    'training': dict(zip(('data', 'fsdp', 'tensor'), training), expert=1),
    'decoding': dict(zip(('data', 'tensor'), decoding), expert=1),
  }
  with pytest.raises(InputError, match=re.escape(f'config.mesh.{message}')):
    config_lib.build(sharding.MeshConfig, values, 'config.mesh')


def test_sizes_must_multiply_to_the_number_of_devices():
  num_devices = jax.device_count()
  with pytest.raises(InputError, match=rf'fsdp={num_devices + 1}.* does not fit {num_devices} '):
    sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=num_devices + 1, tensor=1))
  with pytest.raises(InputError, match='does not fit'):  # -1 cannot fix it
    sharding.make_mesh(sharding.TrainingConfig(data=num_devices + 1, fsdp=-1, tensor=1))


def test_an_axis_may_cover_part_of_a_side_of_the_slice(monkeypatch):
  """By default, JAX makes such a mesh only on v5e."""
  config = sharding.TrainingConfig(data=1, fsdp=-1, tensor=1)
  expected = sharding.make_mesh(config)

  def refuse(*_, **__):
    raise NotImplementedError

  monkeypatch.setattr(jax, 'make_mesh', refuse)
  assert sharding.make_mesh(config) == expected


def test_one_axis_takes_the_remaining_devices():
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))
  assert dict(mesh.shape) == {'data': 1, 'fsdp': jax.device_count(), 'expert': 1, 'tensor': 1}
  assert mesh.are_all_axes_auto


def test_without_a_mesh_in_context_the_error_says_what_is_missing():
  calls = {
    'sharding.constrain': lambda: sharding.constrain(jnp.ones((2, 3)), ('batch', None)),
    'sharding.num_shards': lambda: sharding.num_shards('batch', 2),
    'sharding.per_shard': lambda: sharding.per_shard(jnp.sin, [('batch', None)], ('batch', None)),
  }
  for name, call in calls.items():
    message = re.escape(f'{name} needs a mesh: call it inside `with jax.set_mesh(mesh)`.')
    with without_mesh(), pytest.raises(RuntimeError, match=message):
      call()


def test_without_a_mesh_in_context_the_platform_is_jaxs_default():
  with without_mesh():
    assert sharding.platform() == jax.default_backend()


def without_mesh():
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def test_nothing_is_split_on_one_device():
  assert sharding.num_shards('batch', 2) == 1
  assert sharding.per_shard(jnp.sin, [('batch', None)], ('batch', None)) is jnp.sin
  x = jnp.ones((2, 3))
  np.testing.assert_array_equal(sharding.constrain(x, ('batch', None)), x)


def test_an_equivalent_layout_is_restored_without_a_copy():
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))
  layout = NamedSharding(mesh, PartitionSpec('fsdp', 'tensor'))
  rows = 2 * jax.device_count()
  x = jax.device_put(jnp.arange(rows * 3.0).reshape(rows, 3), layout)
  without_tensor = jax.device_put(x, NamedSharding(mesh, PartitionSpec('fsdp')))
  restored = sharding.restore_layout(without_tensor, sharding.layout_of(x))
  assert without_tensor.sharding != restored.sharding == layout
  np.testing.assert_array_equal(restored, x)
  pointers = [
    [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    for array in (without_tensor, restored)
  ]
  assert pointers[0] == pointers[1]


def test_restoring_a_different_layout_keeps_the_values():
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))
  x = jax.device_put(jnp.arange(6.0).reshape(2, 3), jax.devices()[0])
  layout = sharding.replicated(mesh)
  restored = sharding.restore_layout(x, layout)
  assert restored.sharding == layout
  np.testing.assert_array_equal(restored, x)
