"""What each device computes of its own shards, where GSPMD cannot partition a program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from exgrpo_jax.policy import sharding


def per_shard(
  function: Callable[..., jax.Array],
  in_axes: Sequence[Sequence[str | None]],
  out_axes: Sequence[str | None],
) -> Callable[..., jax.Array]:
  """`function`, applied by each device to its own shards, on the mesh of `jax.set_mesh`.

  For what GSPMD cannot partition, such as a Pallas kernel; `function` must not need data from
  other shards. On a mesh of one device it is `function` itself.

  Args:
    function: from arrays to one array.
    in_axes: the logical axes of each argument. An axis is split if the mesh divides it in
      every argument that has it.
    out_axes: the result's logical axes, each of which some argument has.

  Raises:
    RuntimeError: there is no mesh in context.
  """
  mesh = sharding.mesh_in_context('shards.per_shard')
  if mesh.size == 1:
    return function

  def call(*args: jax.Array) -> jax.Array:
    mesh_axes: dict[str | None, tuple[str, ...] | None] = {}
    for x, axes in zip(args, in_axes, strict=True):
      for name, size in zip(axes, x.shape, strict=True):
        dividing = sharding.mesh_axes(mesh.shape, name, size)
        mesh_axes[name] = mesh_axes.get(name, dividing) and dividing
    # check_vma is off: Pallas kernels do not declare over which axes their results vary.
    return jax.shard_map(
      function,
      in_specs=tuple(PartitionSpec(*map(mesh_axes.get, axes)) for axes in in_axes),
      out_specs=PartitionSpec(*map(mesh_axes.get, out_axes)),
      check_vma=False,
    )(*args)

  return call


def over_experts(
  function: Callable[[Any, Any, jax.Array | int], jax.Array], rows: Any, kernels: Any
) -> jax.Array:
  """The sum over devices of `function(rows, kernels, first)`, on the mesh of `jax.set_mesh`.

  Each device has the shards of the kernels of its experts, of which the first is number `first`
  among all, and the rows of all devices along the experts' axis. `function` gives its experts' and
  its hidden units' part of a sum, of the shape and dtype of the first of `rows`.

  Args:
    function: what a device computes; on a mesh of one device it is the whole.
    rows: arrays [B, ...].
    kernels: (gate, up, down) with the axes of mlp.Experts.

  Raises:
    RuntimeError: there is no mesh in context.
  """
  mesh = sharding.mesh_in_context('shards.over_experts')
  if mesh.size == 1:
    return function(rows, kernels, 0)
  of_rows = PartitionSpec(sharding.mesh_axes(mesh.shape, 'batch', len(rows[0])))
  # Whole in their width: what is split over it is gathered for the layer, as other kernels are.
  inputs, outputs = ('experts', None, 'mlp'), ('experts', 'mlp', None)
  of_kernels = tuple(
    sharding.spec(mesh.shape, axes, kernel.shape)
    for axes, kernel in zip((inputs, inputs, outputs), kernels, strict=True)
  )
  is_split = of_rows != PartitionSpec(None)
  experts, hidden_units = sharding.axes('experts'), sharding.axes('mlp')

  def call(rows: Any, kernels: Any) -> jax.Array:
    if is_split:
      rows = jax.tree.map(lambda x: jax.lax.all_gather(x, experts, tiled=True), rows)
    part = function(rows, kernels, jax.lax.axis_index(experts) * len(kernels[0]))
    if is_split:
      return jax.lax.psum(jax.lax.psum_scatter(part, experts, tiled=True), hidden_units)
    return jax.lax.psum(part, (*experts, *hidden_units))

  return jax.shard_map(call, in_specs=(of_rows, of_kernels), out_specs=of_rows, check_vma=False)(
    rows, kernels
  )
