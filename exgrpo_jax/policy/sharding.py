"""The device meshes, and the mapping from logical axes to mesh axes.

Training and decoding use different meshes over the same devices. Training splits rows and
parameters over all devices (FSDP): each device gathers a layer's weights to compute its own rows,
and no activations are summed across devices. Decoding reads all weights for every token, so it must
not gather them: they are replicated over the data axis and split by heads, hidden units and
vocabulary over the tensor axis. Both meshes have the same axis names, so one table of rules is
enough.

Only this file names mesh axes. All other code uses logical axes ('batch', 'embed', 'heads', ...).
A dimension is replicated if its mesh axes do not divide it evenly. For example, with two key/value
heads on a tensor axis of four, each device on that axis stores both heads. This costs memory but is
always correct.

Experts are split over their own axis, which also splits rows: a layer's experts see the rows of all
devices along this axis (`over_experts`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError, counted

_MESH_AXES = ('data', 'fsdp', 'expert', 'tensor')
WITHOUT_DEVICES: Any = AbstractMesh((1,) * len(_MESH_AXES), _MESH_AXES)  # a mesh to check shapes

# Rows are split over all axes except tensor. Parameters are split over fsdp by width, over expert
# by experts, and over tensor by heads, hidden units and vocabulary. No array uses an axis twice.
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


def _devices(use: str, default: int = 1) -> Any:
  """Declare a setting for the size of a mesh axis; `use` completes its description."""
  return setting(
    default, '[-1, inf)', f'number of devices to split {use}; -1 uses the remaining devices'
  )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """The mesh for training and scoring; the product of the sizes is the number of devices."""

  data: int = _devices('rows over, with replicated parameters')
  fsdp: int = _devices('rows and parameters over', -1)
  expert: int = _devices('rows and experts over')
  tensor: int = _devices('heads, hidden units and vocabulary over')

  def __post_init__(self) -> None:
    _check_sizes(self)


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """The mesh for sampling; the product of the sizes is the number of devices."""

  data: int = _devices('responses over, with replicated parameters', -1)
  expert: int = _devices('rows and experts over')
  tensor: int = _devices('heads, hidden units and vocabulary over')

  def __post_init__(self) -> None:
    _check_sizes(self)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The device meshes for training and decoding; they affect results only through rounding."""

  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)


class Meshes(NamedTuple):
  """Two meshes over the same devices in the same order, so programs can reshard between them."""

  training: Mesh
  decoding: Mesh


def make_meshes(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Meshes:  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
  """Make the meshes for training and decoding; see `make_mesh`."""
  decoding = make_mesh(config.decoding, devices)
  # Use the decoding mesh's device order, because its tensor axis needs neighboring devices. An
  # axis over all devices is equally fast with any order that follows the interconnect.
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
  """Make a mesh of the configured shape, on which GSPMD partitions programs (axis type Auto).

  Axes missing from `config` have size 1. By default, uses all devices of all hosts. To compile for
  a topology, pass its `devices`. Raises InputError if the sizes don't fit the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes, types = _sizes(config, len(devices)), (AxisType.Auto,) * len(_MESH_AXES)
  try:
    return jax.make_mesh(sizes, _MESH_AXES, axis_types=types, devices=devices)
  except NotImplementedError:  # an axis covers part of a slice's side, e.g. four of v6e's eight
    device_grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(device_grid, _MESH_AXES, axis_types=types)


def spec(
  axis_sizes: Mapping[str, int], logical_axes: Sequence[str | None], shape: Sequence[int]
) -> PartitionSpec:
  """Return the mesh axes that split each dimension of an array; `axis_sizes` is `mesh.shape`.

  Unknown names raise KeyError. Dimensions not divisible by their mesh axes are replicated.
  """
  return PartitionSpec(
    *(mesh_axes(axis_sizes, name, size) for name, size in zip(logical_axes, shape, strict=True))
  )


def named(mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
  """Return the sharding of an array of `shape` on `mesh`; see `spec`."""
  return NamedSharding(mesh, spec(mesh.shape, logical_axes, shape))


def split(mesh: Mesh, logical_axis: str) -> tuple[str, int]:
  """Return the mesh axes that split a logical axis, joined by '*', and the number of shards."""
  names = _RULES[logical_axis]
  return '*'.join(names), math.prod(mesh.shape[name] for name in names)


def batch(mesh: Mesh, num_rows: int) -> NamedSharding:
  """Return the sharding for arrays of any rank whose first axis has `num_rows` rows; see `spec`."""
  return named(mesh, ('batch',), (num_rows,))


def replicated(mesh: Mesh) -> NamedSharding:
  """Return the sharding for arrays that are replicated on every device."""
  return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, sharding: NamedSharding) -> Any:
  """Put NumPy arrays on the devices.

  All hosts must pass the same arrays; each host copies only its own shards.
  """

  # jax.device_put would first compare the arrays across hosts.
  def from_host(x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(from_host, tree)


def layout_of(tree: Any) -> Any:
  """Return each array's sharding; see `restore_layout`."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def restore_layout(tree: Any, layout: Any) -> Any:
  """Give the arrays in `tree` the shardings in `layout`, a tree of the same structure.

  The shardings of a program's results may lack mesh axes of size 1. If the next call received such
  results, JAX would compile another program that is not in the compilation cache.
  """

  def restore(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
      return jax.device_put(leaf, sharding)
    # Reuse the shards. With several hosts, jax.device_put would run a copying program for each
    # array, and XLA:CPU hangs if such programs fill its queue behind a collective.
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

  return jax.tree.map(restore, tree, layout)


def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
  """Pin an activation's layout inside jit, on the active mesh."""
  mesh = mesh_in_context('sharding.constrain')
  return jax.lax.with_sharding_constraint(x, spec(mesh.shape, logical_axes, x.shape))


def gathered(x: jax.Array, logical_axes: Sequence[str | None], meshes: Meshes) -> jax.Array:
  """Move a parameter from the training layout to the decoding layout, inside jit.

  The move is split into steps with one collective each, because XLA cannot plan the whole move at
  once and warns about it.
  """
  training, decoding = meshes
  target = spec(decoding.shape, logical_axes, x.shape)
  is_width = [_RULES.get(name or '') == ('fsdp',) for name in logical_axes]
  if training.shape['fsdp'] == training.size and any(
    wide and size % training.size == 0 for wide, size in zip(is_width, x.shape, strict=True)
  ):
    # First, each device gets a part of the width. Then an all-to-all runs along each axis that
    # splits another dimension, and an all-gather along the other axes. No device ever stores the
    # whole array.
    steps, width_axes, axes_by_dim = [], ['data', 'expert', 'tensor'], [list[str]() for _ in target]
    steps.append((decoding, [tuple(width_axes) if wide else None for wide in is_width]))
    for axis in ('tensor', 'expert'):
      dims = [dim for dim, axes in enumerate(target) if axis in (axes or ())]
      if axis == 'expert' and not dims:
        continue
      width_axes.remove(axis)
      for dim in dims:
        axes_by_dim[dim].append(axis)
      split_axes = (width_axes if wide else axes for wide, axes in zip(is_width, axes_by_dim))
      steps.append((decoding, [tuple(axes) or None for axes in split_axes]))
  else:
    layout = spec(training.shape, logical_axes, x.shape)
    steps = [(training, [None if wide else axes for wide, axes in zip(is_width, layout)])]
  for mesh, layout in (*steps, (decoding, target)):
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*layout)))
  return x


def platform() -> str:
  """Return the platform of the active mesh, or JAX's default: 'cpu', 'gpu' or 'tpu'."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def num_shards(logical_axis: str, size: int) -> int:
  """Return how many shards a logical axis of `size` is split into on the active mesh."""
  mesh = mesh_in_context('sharding.num_shards')
  axes = mesh_axes(mesh.shape, logical_axis, size) or ()
  return math.prod(mesh.shape[axis] for axis in axes)


def mesh_in_context(caller: str) -> AbstractMesh:
  """Return the active mesh (`jax.set_mesh`), or raise a RuntimeError that names `caller`."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    raise RuntimeError(f'{caller} needs a mesh: call it inside `with jax.set_mesh(mesh)`.')
  return mesh


def mesh_axes(
  axis_sizes: Mapping[str, int], logical_axis: str | None, size: int
) -> tuple[str, ...] | None:
  """Return the mesh axes that split a dimension of `size`; None if it is replicated."""
  if logical_axis is None:
    return None
  axes = _RULES[logical_axis]
  divides = size % math.prod(axis_sizes[axis] for axis in axes) == 0
  return axes if divides else None


def _sizes(config: TrainingConfig | DecodingConfig, num_devices: int) -> list[int]:
  """Return the sizes of _MESH_AXES; raise InputError unless their product is `num_devices`."""
  sizes = [getattr(config, axis, 1) for axis in _MESH_AXES]
  if -1 in sizes:
    sizes[sizes.index(-1)] = num_devices // math.prod(size for size in sizes if size != -1)
  if math.prod(sizes) != num_devices:
    raise InputError(
      f'{_describe(config)}: this mesh does not fit {counted(num_devices, "device")}. Choose sizes '
      'whose product is the number of devices.'
    )
  return sizes


def _check_sizes(config: TrainingConfig | DecodingConfig) -> None:
  """Raise InputError if a size is 0, or more than one is -1."""
  for name, size in dataclasses.asdict(config).items():
    if size == 0:
      raise InputError(
        f'{_place(config)}.{name}=0: the number of devices must not be 0. Set it to at least 1, or '
        'to -1 to use the remaining devices.'
      )
  if dataclasses.astuple(config).count(-1) > 1:
    raise InputError(
      f'{_describe(config)}: at most one size may be -1, because only one axis can use the '
      'remaining devices. Set the others to at least 1.'
    )


def _place(config: TrainingConfig | DecodingConfig) -> str:
  return f'config.mesh.{"training" if isinstance(config, TrainingConfig) else "decoding"}'


def _describe(config: TrainingConfig | DecodingConfig) -> str:
  sizes = ', '.join(f'{name}={size}' for name, size in dataclasses.asdict(config).items())
  return f'{_place(config)} ({sizes})'


# ---- Programs on the training mesh ----


_OPTIONS: dict[str, dict[str, str]] = {  # by platform, because compilers reject unknown options
  # Keeps XLA from turning a product with weights that are split over all chips into a loop over
  # shards too thin for the matrix units. The value is in MiB; no product is this large.
  'tpu': {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
}

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


class TrainingJit(Generic[_Arguments, _Result]):
  """A jitted function with compiler options for the platform of the active mesh."""

  def __init__(self, function: Callable[_Arguments, _Result], **options: Any) -> None:
    functools.update_wrapper(self, function)
    self._on = functools.cache(
      lambda platform: jax.jit(function, compiler_options=_OPTIONS.get(platform), **options)
    )

  def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Call the function, compiled for the mesh's platform."""
    return self._on(platform())(*args, **kwargs)

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Lower the function for arguments of these shapes; see `jax.stages.Wrapped.lower`."""
    return self._on(platform()).lower(*args)


def jit_for_training(
  *, static_argnums: int | tuple[int, ...], donate_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[_Arguments, _Result]], TrainingJit[_Arguments, _Result]]:
  """Return a decorator that makes a `TrainingJit`; the arguments are as in `jax.jit`."""
  return lambda function: TrainingJit(
    function, static_argnums=static_argnums, donate_argnums=donate_argnums
  )


# ---- Functions on each shard ----


def per_shard(
  function: Callable[..., jax.Array],
  in_axes: Sequence[Sequence[str | None]],
  out_axes: Sequence[str | None],
) -> Callable[..., jax.Array]:
  """Wrap `function` so that each device of the active mesh applies it to its shards.

  Use this for functions that GSPMD cannot partition, such as Pallas kernels. `function` takes
  arrays, returns one array, and must not need data from other shards. On a mesh of one device,
  returns `function` itself.

  `in_axes` are the logical axes of each argument. An axis is split if the mesh divides it evenly in
  all arguments that have it. `out_axes` are the result's axes, which must all occur in `in_axes`.
  """
  mesh = mesh_in_context('sharding.per_shard')
  if mesh.size == 1:
    return function

  def call(*args: jax.Array) -> jax.Array:
    splits: dict[str | None, tuple[str, ...] | None] = {}
    for x, axes in zip(args, in_axes, strict=True):
      for name, size in zip(axes, x.shape, strict=True):
        dividing = mesh_axes(mesh.shape, name, size)
        splits[name] = splits.get(name, dividing) and dividing
    # check_vma is off because Pallas kernels do not declare which axes their results vary over.
    return jax.shard_map(
      function,
      in_specs=tuple(PartitionSpec(*map(splits.get, axes)) for axes in in_axes),
      out_specs=PartitionSpec(*map(splits.get, out_axes)),
      check_vma=False,
    )(*args)

  return call


def over_experts(
  function: Callable[[Any, Any, jax.Array | int], jax.Array], rows: Any, kernels: Any
) -> jax.Array:
  """Sum `function(rows, kernels, first)` over the devices of the active mesh.

  Each device receives the kernel shards of its own experts, and the rows of all devices along the
  expert axis.
  `first` is the global index of the device's first expert. `function` computes the device's part of
  the sum, with the shape and dtype of rows[0]. `rows` are arrays [B, ...], and `kernels` are (gate,
  up, down), with the same axes as in `mlp.Experts`.
  """
  mesh = mesh_in_context('sharding.over_experts')
  if mesh.size == 1:
    return function(rows, kernels, 0)
  row_spec = PartitionSpec(mesh_axes(mesh.shape, 'batch', len(rows[0])))
  # Kernels split by width are gathered for the layer, like all other weights.
  inputs, outputs = ('experts', None, 'mlp'), ('experts', 'mlp', None)
  kernel_specs = tuple(
    spec(mesh.shape, axes, kernel.shape)
    for axes, kernel in zip((inputs, inputs, outputs), kernels, strict=True)
  )
  is_split = row_spec != PartitionSpec(None)
  experts, hidden_units = _RULES['experts'], _RULES['mlp']

  def call(rows: Any, kernels: Any) -> jax.Array:
    if is_split:
      rows = jax.tree.map(lambda x: jax.lax.all_gather(x, experts, tiled=True), rows)
    part = function(rows, kernels, jax.lax.axis_index(experts) * len(kernels[0]))
    if is_split:
      return jax.lax.psum(jax.lax.psum_scatter(part, experts, tiled=True), hidden_units)
    return jax.lax.psum(part, (*experts, *hidden_units))

  return jax.shard_map(
    call, in_specs=(row_spec, kernel_specs), out_specs=row_spec, check_vma=False
  )(rows, kernels)
