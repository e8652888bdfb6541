"""Where arrays live: the device meshes, and how logical axes map to mesh axes.

There are two meshes of the same devices. Training splits rows and parameters over all devices
(FSDP): each device gathers a layer's weights to compute its own rows, and no activations are summed
across devices. Decoding reads all weights for every token, so it must not gather them: they are
replicated over the data axis and split by heads, hidden units and vocabulary over the tensor axis.
Both meshes have the same axes, so one table of rules serves both.

The only file that names mesh axes. All other code uses logical axes ('batch', 'embed', 'heads',
...). A dimension that its mesh axes do not divide evenly is replicated: with two key/value heads on
a tensor axis of four, each device of that axis holds both, which costs memory but is always
correct.

Experts are split over an axis of their own, which splits rows too: a layer's experts see the rows
of all devices along it (`shards.over_experts`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError, counted

_MESH_AXES = ('data', 'fsdp', 'expert', 'tensor')

# Rows are split over all axes but tensor. Parameters are split over fsdp by width, over expert by
# experts, and over tensor by heads, hidden units and vocabulary: none uses a mesh axis twice.
_RULES: dict[str, tuple[str, ...]] = {
  'batch': ('data', 'fsdp', 'expert'),
  'outer_batch': ('data', 'expert'),  # rows of activations whose width is split over fsdp
  'embed': ('fsdp',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'head': ('fsdp',),  # entries of one head in biases and norm scales, which have no width
  'mlp': ('tensor',),
  'experts': ('expert',),
  'vocab': ('tensor',),
}


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """The mesh of training and scoring; the product of the sizes is the number of devices."""

  data: int = setting(
    1, '[-1, inf)', 'devices that split the rows and replicate the parameters; -1 takes the rest'
  )
  fsdp: int = setting(
    -1, '[-1, inf)', 'devices that split the rows and the parameters; -1 takes the rest'
  )
  expert: int = setting(
    1, '[-1, inf)', 'devices that split the rows and the experts; -1 takes the rest'
  )
  tensor: int = setting(
    1, '[-1, inf)', 'devices that split heads, hidden units and vocabulary; -1 takes the rest'
  )

  def __post_init__(self) -> None:
    _check_sizes(self)


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """The mesh of sampling; the product of the sizes is the number of devices."""

  data: int = setting(
    -1,
    '[-1, inf)',
    'devices that split the responses and replicate the parameters; -1 takes the rest',
  )
  expert: int = setting(
    1, '[-1, inf)', 'devices that split the rows and the experts; -1 takes the rest'
  )
  tensor: int = setting(
    1, '[-1, inf)', 'devices that split heads, hidden units and vocabulary; -1 takes the rest'
  )

  def __post_init__(self) -> None:
    _check_sizes(self)


@dataclasses.dataclass(frozen=True)
class Config:
  """How the devices are arranged for training and for decoding; changes nothing but rounding."""

  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)


class Meshes(NamedTuple):
  """The same devices in the same order, so that a program may convert from one to the other."""

  training: Mesh
  decoding: Mesh


def make_meshes(config: Config, devices: Sequence[jax.Device] | None = None) -> Meshes:  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
  """The meshes of training and of decoding; see `make_mesh`."""
  decoding = make_mesh(config.decoding, devices)
  # In the order of the decoding mesh, whose tensor axis needs neighbouring devices; an axis over
  # all devices does as well with any order that follows the interconnect.
  in_order = list(decoding.devices.flat)
  sizes = _sizes(config.training, len(in_order))
  return Meshes(
    training=Mesh(decoding.devices.reshape(sizes), _MESH_AXES, axis_types=decoding.axis_types),
    decoding=decoding,
  )


def make_mesh(
  config: TrainingConfig | DecodingConfig,
  devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
) -> Mesh:
  """A mesh of the configured shape, on which GSPMD partitions programs (axis type Auto).

  Args:
    config: the mesh's shape; axes that it does not name have one device.
    devices: by default every device of every host; else e.g. those of a topology to compile for.

  Raises:
    InputError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes, types = _sizes(config, len(devices)), (AxisType.Auto,) * len(_MESH_AXES)
  try:
    return jax.make_mesh(sizes, _MESH_AXES, axis_types=types, devices=devices)
  except NotImplementedError:  # an axis would be a part of a side of the slice: four of v6e's eight
    split = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(split, _MESH_AXES, axis_types=types)


def spec(
  axis_sizes: Mapping[str, int], logical_axes: Sequence[str | None], shape: Sequence[int]
) -> PartitionSpec:
  """The mesh axes that split each dimension.

  Args:
    axis_sizes: `mesh.shape`.
    logical_axes: one name, or None, per dimension; an unknown name is a KeyError.
    shape: the array's; a dimension that its mesh axes do not divide is replicated.
  """
  return PartitionSpec(
    *(mesh_axes(axis_sizes, name, size) for name, size in zip(logical_axes, shape, strict=True))
  )


def named(mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
  """The sharding of an array of `shape` on `mesh`; see `spec`."""
  return NamedSharding(mesh, spec(mesh.shape, logical_axes, shape))


def axes(logical_axis: str) -> tuple[str, ...]:
  """The mesh axes that split a logical axis."""
  return _RULES[logical_axis]


def split(mesh: Mesh, logical_axis: str) -> tuple[str, int]:
  """The mesh axes that split a logical axis, joined by '*', and into how many shards."""
  names = axes(logical_axis)
  return '*'.join(names), math.prod(mesh.shape[name] for name in names)


def batch(mesh: Mesh, num_rows: int) -> NamedSharding:
  """The sharding of arrays of any rank whose first axis is rows; see `spec`."""
  return named(mesh, ('batch',), (num_rows,))


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of arrays that every device holds in full."""
  return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, sharding: NamedSharding) -> Any:
  """Puts NumPy arrays on the devices. Every host passes the same arrays and copies its shards."""

  # jax.device_put would first compare the arrays between hosts.
  def from_host(x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(from_host, tree)


def layout_of(tree: Any) -> Any:
  """The sharding of each array; see `restore_layout`."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def bytes_per_device(tree: Any) -> int:
  """Return the bytes of one device's shards of a tree of arrays or shapes; 0 for None."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def restore_layout(tree: Any, layout: Any) -> Any:
  """The arrays of `tree` with the shardings of `layout`, of the same structure.

  The shardings of what a program returns may lack mesh axes of size one. Given these, the next call
  would compile a program of its own, which the compilation cache does not have.
  """

  def restore(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
      return jax.device_put(leaf, sharding)
    # The same shards under another name. With several hosts, jax.device_put would run a program
    # that copies for each array; XLA:CPU hangs where these fill its queue behind a collective.
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

  return jax.tree.map(restore, tree, layout)


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
  """Pins an activation's layout inside jit, on the mesh of `jax.set_mesh`.

  Raises:
    RuntimeError: there is no mesh in context.
  """
  mesh = mesh_in_context('sharding.constrain')
  return jax.lax.with_sharding_constraint(x, spec(mesh.shape, logical_axes, x.shape))


def gathered(x: jax.Array, logical_axes: Sequence[str | None], meshes: Meshes) -> jax.Array:
  """Moves a parameter, inside jit, from the training layout to the decoding layout.

  In steps of one collective each; XLA gives up on the whole, with a warning.
  """
  training, decoding = meshes
  target = spec(decoding.shape, logical_axes, x.shape)
  is_width = [_RULES.get(name or '') == ('fsdp',) for name in logical_axes]
  if training.shape['fsdp'] == training.size and any(
    wide and size % training.size == 0 for wide, size in zip(is_width, x.shape, strict=True)
  ):
    # Each device has a part of the width. An all-to-all along each axis that splits another
    # dimension then, and an all-gather along the others: no device ever holds the whole.
    steps, width, moved = [], ['data', 'expert', 'tensor'], [list[str]() for _ in target]
    steps.append((decoding, [tuple(width) if wide else None for wide in is_width]))
    for axis in ('tensor', 'expert'):
      dims = [dim for dim, axes in enumerate(target) if axis in (axes or ())]
      if axis == 'expert' and not dims:
        continue
      width.remove(axis)
      for dim in dims:
        moved[dim].append(axis)
      steps.append(
        (decoding, [tuple(width) if wide else (*to,) or None for wide, to in zip(is_width, moved)])
      )
  else:
    layout = spec(training.shape, logical_axes, x.shape)
    steps = [(training, [None if wide else axes for wide, axes in zip(is_width, layout)])]
  for mesh, layout in (*steps, (decoding, target)):
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*layout)))
  return x


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': the platform of the mesh of `jax.set_mesh`, or else JAX's default."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def num_shards(logical_axis: str, size: int) -> int:
  """How many shards the mesh of `jax.set_mesh` splits a logical axis of `size` into.

  Raises:
    RuntimeError: there is no mesh in context.
  """
  mesh = mesh_in_context('sharding.num_shards')
  axes = mesh_axes(mesh.shape, logical_axis, size) or ()
  return math.prod(mesh.shape[axis] for axis in axes)


def mesh_in_context(caller: str) -> AbstractMesh:
  """The mesh of `jax.set_mesh`, which `caller` needs.

  Raises:
    RuntimeError: there is none.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    raise RuntimeError(f'{caller} needs a mesh: call inside `with jax.set_mesh(mesh)`.')
  return mesh


def mesh_axes(
  axis_sizes: Mapping[str, int], logical_axis: str | None, size: int
) -> tuple[str, ...] | None:
  """The mesh axes that split a dimension of `size`; None where it is replicated."""
  if logical_axis is None:
    return None
  axes = _RULES[logical_axis]
  divides = size % math.prod(axis_sizes[axis] for axis in axes) == 0
  return axes if divides else None


def _sizes(config: TrainingConfig | DecodingConfig, num_devices: int) -> list[int]:
  """The sizes of _MESH_AXES; InputError if they do not fit the number of devices."""
  sizes = [getattr(config, axis, 1) for axis in _MESH_AXES]
  if -1 in sizes:
    sizes[sizes.index(-1)] = num_devices // math.prod(size for size in sizes if size != -1)
  if math.prod(sizes) != num_devices:
    raise InputError(
      f'{_describe(config)} does not fit {counted(num_devices, "device")}: the '
      'product of the sizes must equal their number.'
    )
  return sizes


def _check_sizes(config: TrainingConfig | DecodingConfig) -> None:
  """Raises InputError for a size of 0, or more than one of -1."""
  for name, size in dataclasses.asdict(config).items():
    if size == 0:
      raise InputError(
        f'{_place(config)}.{name}=0 must be at least 1, or -1 to take the remaining devices: '
        'it is a number of devices.'
      )
  if dataclasses.astuple(config).count(-1) > 1:
    raise InputError(
      f'{_describe(config)} must hold at most one -1: '
      'only one axis can take the devices that the others leave.'
    )


def _place(config: TrainingConfig | DecodingConfig) -> str:
  return f'config.mesh.{"training" if isinstance(config, TrainingConfig) else "decoding"}'


def _describe(config: TrainingConfig | DecodingConfig) -> str:
  sizes = ', '.join(f'{name}={size}' for name, size in dataclasses.asdict(config).items())
  return f'{_place(config)} {sizes}'
