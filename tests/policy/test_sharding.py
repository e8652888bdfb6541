"""Meshes on the devices there are, and on eight that XLA makes of the host."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import sharding
from tests.helpers.devices import on_eight_devices

SIZES = {'data': 2, 'fsdp': 2, 'tensor': 2}


@pytest.mark.parametrize(
  'axes, shape, expected',
  [
    (('embed', 'mlp'), (4, 4), (('fsdp',), ('tensor',))),
    (('vocab', 'embed'), (4, 4), (('tensor',), ('fsdp',))),
    (('embed', 'heads', None), (4, 4, 3), (('fsdp',), ('tensor',), None)),
    (('batch', None), (8, 3), (('data', 'fsdp'), None)),
  ],
)
def test_logical_axes_become_mesh_axes(axes, shape, expected):
  assert sharding.spec(SIZES, axes, shape) == PartitionSpec(*expected)


def test_a_dimension_that_does_not_divide_is_replicated():
  assert sharding.spec(SIZES, ('embed', 'kv_heads'), (4, 3)) == PartitionSpec(('fsdp',), None)
  assert sharding.spec(SIZES, ('batch',), (6,)) == PartitionSpec(None)  # 6 rows, 4 devices


def test_an_unknown_logical_axis_is_a_bug():
  with pytest.raises(KeyError):
    sharding.spec(SIZES, ('embde',), (4,))


def test_a_logical_axis_is_needed_for_every_dimension():
  with pytest.raises(ValueError):
    sharding.spec(SIZES, ('embed',), (4, 4))


def test_at_most_one_axis_takes_the_rest():
  with pytest.raises(InputError, match='data=-1, fsdp=-1, tensor=1 must hold at most one -1'):
    sharding.Config(data=-1, fsdp=-1, tensor=1)


def test_no_axis_is_empty():
  with pytest.raises(InputError, match='config.mesh.tensor=0 must be at least 1'):
    config_lib.build(sharding.Config, {'data': 1, 'fsdp': 1, 'tensor': 0}, 'config.mesh')


def test_sizes_must_multiply_to_the_number_of_devices():
  num_devices = jax.device_count()
  with pytest.raises(InputError, match=rf'fsdp={num_devices + 1}.* does not fit {num_devices} '):
    sharding.make_mesh(sharding.Config(data=1, fsdp=num_devices + 1, tensor=1))
  with pytest.raises(InputError, match='does not fit'):  # -1 cannot make up for it
    sharding.make_mesh(sharding.Config(data=num_devices + 1, fsdp=-1, tensor=1))


def test_one_axis_takes_the_rest():
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  assert dict(mesh.shape) == {'data': 1, 'fsdp': jax.device_count(), 'tensor': 1}
  assert mesh.are_all_axes_auto


def test_without_a_mesh_nothing_is_split():
  x = jnp.ones((2, 3))
  # Other tests may have set one for good, as a command does.
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    assert sharding.constrain(x, ('batch', None)) is x
    assert sharding.num_shards('batch', 2) == 1
    assert sharding.per_shard(jnp.sin, [('batch', None)], ('batch', None)) is jnp.sin


def test_eight_devices():
  on_eight_devices("""
import jax, jax.numpy as jnp
from exgrpo_jax.policy import sharding

mesh = sharding.make_mesh(sharding.Config(data=2, fsdp=-1, tensor=2))
assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}, mesh

def pieces(x):
  return x.addressable_shards[0].data.shape

rows = jnp.arange(24.).reshape(8, 3)
assert pieces(jax.device_put(rows, sharding.batch(mesh, 8))) == (2, 3)
assert pieces(jax.device_put(rows[:6], sharding.batch(mesh, 6))) == (6, 3)  # 4 does not divide 6
assert pieces(jax.device_put(rows, sharding.replicated(mesh))) == (8, 3)
kernel = jnp.ones((4, 6))
assert pieces(jax.device_put(kernel, sharding.named(mesh, ('embed', 'mlp'), (4, 6)))) == (2, 3)

with jax.set_mesh(mesh):
  spread = jax.jit(lambda x: sharding.constrain(x + 1, ('batch', None)))(rows)
assert pieces(spread) == (2, 3), pieces(spread)
assert (spread == rows + 1).all()

def halves(x, y, z):  # of what the device has
  seen.append((x.shape, y.shape, z.shape))
  return x[:, :len(y) // 2]

def by_halves(num_columns):
  return sharding.per_shard(
      halves, [('batch', 'heads'), ('heads',), ('heads',)], ('batch', 'heads'))(
          jnp.arange(8. * 4).reshape(8, 4), jnp.ones(num_columns), jnp.ones(2))

seen = []
with jax.set_mesh(mesh):
  assert [sharding.num_shards(*axis) for axis in (('batch', 8), ('batch', 6), ('heads', 6))] == [
      4, 1, 2]
  assert jax.jit(by_halves, static_argnums=0)(4)[0].tolist() == [0, 2]
  assert jax.jit(by_halves, static_argnums=0)(5)[0].tolist() == [0, 1]  # 2 does not divide 5
assert seen == [((2, 2), (2,), (1,)), ((2, 4), (5,), (2,))], seen
""")
