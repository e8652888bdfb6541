"""Where arrays live: the mesh, and what its axes mean for ours.

The only file that names mesh axes. Everything else speaks of logical axes
('batch', 'embed', 'heads', ...), and a logical axis that the mesh cannot divide
evenly is replicated: two key/value heads on a tensor axis of four live on each
of its devices, which costs memory and is always right.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError

_MESH_AXES = ('data', 'fsdp', 'tensor')

# Rows spread over both data axes; parameters over fsdp by width and over tensor
# by heads, hidden units and vocabulary, so that no parameter needs an axis twice.
_RULES = {
  'batch': ('data', 'fsdp'),
  'outer_batch': ('data',),  # of rows whose width is split over fsdp
  'embed': ('fsdp',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'head': ('fsdp',),  # of biases and scales, which have no width
  'mlp': ('tensor',),
  'vocab': ('tensor',),
}
# While decoding, weights stay whole over the data axes: gathering them for every token would cost
# more than computing it.
_DECODE_RULES = _RULES | {'embed': (), 'head': ()}


@dataclasses.dataclass(frozen=True)
class Config:
  """The mesh's shape; the product is the number of devices."""

  data: int = setting(
    '[-1, inf)', 'devices that split the rows and keep whole parameters; -1 takes the rest'
  )
  fsdp: int = setting(
    '[-1, inf)', 'devices that split the rows and the parameters; -1 takes the rest'
  )
  tensor: int = setting(
    '[-1, inf)', 'devices that split heads, hidden units and vocabulary; -1 takes the rest'
  )

  def __post_init__(self):
    for name, size in dataclasses.asdict(self).items():
      if size == 0:
        raise InputError(
          f'config.mesh.{name}=0 must be at least 1, or -1 to take the rest: '
          'it is a number of devices.'
        )
    if list(dataclasses.astuple(self)).count(-1) > 1:
      raise InputError(
        f'config.mesh {_described(self)} must hold at most one -1: '
        'only one axis can take the devices that the others leave.'
      )


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh over every device of every host; GSPMD places the operations (axis type Auto).

  `devices` in their place, such as those of a slice to compile for.

  Raises InputError where the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes, num_devices = list(dataclasses.astuple(config)), len(devices)
  if -1 in sizes:
    sizes[sizes.index(-1)] = num_devices // math.prod(size for size in sizes if size != -1)
  if math.prod(sizes) != num_devices:
    raise InputError(
      f'config.mesh {_described(config)} does not fit {num_devices} '
      f'device{"s" * (num_devices > 1)}: the sizes must multiply to exactly that.'
    )
  return jax.make_mesh(
    sizes, _MESH_AXES, axis_types=(AxisType.Auto,) * len(_MESH_AXES), devices=devices
  )


def spec(
  axis_sizes: Mapping[str, int],
  logical_axes: Sequence[str | None],
  shape: Sequence[int],
  decoding: bool = False,
) -> PartitionSpec:
  """The mesh axes of each dimension.

  Args:
    axis_sizes: `mesh.shape`.
    logical_axes: one name, or None, per dimension; an unknown name is a KeyError.
    shape: of the array; a dimension that its mesh axes do not divide is replicated.
    decoding: the layout of weights while decoding, not in training.
  """
  rules = _DECODE_RULES if decoding else _RULES
  return PartitionSpec(
    *(
      _mesh_axes(rules, axis_sizes, name, size)
      for name, size in zip(logical_axes, shape, strict=True)
    )
  )


def named(
  mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int], decoding: bool = False
) -> NamedSharding:
  """The sharding of an array of `shape`; see `spec`."""
  return NamedSharding(mesh, spec(mesh.shape, logical_axes, shape, decoding))


def split(mesh: Mesh, logical_axis: str) -> tuple[str, int]:
  """The names of the mesh axes that split a logical axis, and into how many parts."""
  axes = _RULES[logical_axis]
  return '*'.join(axes), math.prod(mesh.shape[axis] for axis in axes)


def batch(mesh: Mesh, num_rows: int) -> NamedSharding:
  """For arrays of any rank whose first axis is rows; see `spec`."""
  return named(mesh, ('batch',), (num_rows,))


def replicated(mesh: Mesh) -> NamedSharding:
  """For arrays that every device holds in full."""
  return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, sharding: NamedSharding) -> Any:
  """NumPy arrays on the devices; every host gives the same ones, and puts its own parts."""
  # jax.device_put would send them around to see that they are the same.
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree
  )


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
  """Pins an activation's layout inside jit, on the mesh of `jax.set_mesh`.

  Without a mesh in context it returns x: the values are the same either way.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, spec(mesh.shape, logical_axes, x.shape))


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': of the mesh of `jax.set_mesh`, or without one JAX's default."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def num_shards(logical_axis: str, size: int) -> int:
  """Into how many parts the mesh of `jax.set_mesh` splits an axis of `size`; 1 without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1
  axes = _mesh_axes(_RULES, mesh.shape, logical_axis, size) or ()
  return math.prod(mesh.shape[axis] for axis in axes)


def per_shard(
  function: Callable, in_axes: Sequence[Sequence[str | None]], out_axes: Sequence[str | None]
) -> Callable:
  """`function` on each device's own part of its arguments, on the mesh of `jax.set_mesh`.

  For what GSPMD cannot split by itself, such as a kernel; `function` must need nothing
  of the other parts. Without a mesh, or on one of a single device, it is `function`.

  Args:
    function: of arrays, to one array.
    in_axes: each argument's logical axes. An axis is split where the mesh divides it in
      every argument that has it.
    out_axes: the result's logical axes, among those of the arguments.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function

  def call(*args):
    split = {}
    for x, axes in zip(args, in_axes, strict=True):
      for name, size in zip(axes, x.shape, strict=True):
        split[name] = split.get(name, True) and _mesh_axes(_RULES, mesh.shape, name, size)
    # No check of what varies over which axes: kernels do not say that of their results.
    return jax.shard_map(
      function,
      in_specs=tuple(PartitionSpec(*map(split.get, axes)) for axes in in_axes),
      out_specs=PartitionSpec(*map(split.get, out_axes)),
      check_vma=False,
    )(*args)

  return call


def _mesh_axes(rules, axis_sizes, logical_axis, size):
  if logical_axis is None:
    return None
  axes = rules[logical_axis]
  divides = size % math.prod(axis_sizes[axis] for axis in axes) == 0
  return axes if axes and divides else None


def _described(config):
  return ', '.join(f'{name}={size}' for name, size in dataclasses.asdict(config).items())
