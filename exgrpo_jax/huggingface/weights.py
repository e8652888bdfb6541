"""Load sharded parameters from safetensors or a GGUF, and save them as safetensors.

Each device's slice is read from the file and cast separately. A host therefore never has a whole
tensor in memory unless one of its devices does, and each host reads only the slices of its own
devices.
"""

import functools
import json
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import traverse_util
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from exgrpo_jax.huggingface import gguf_file, safetensors_files, tensor_names
from exgrpo_jax.huggingface.tensor_names import Index, ParamPath, Tensor
from exgrpo_jax.policy import lora, model
from exgrpo_jax.runtime import hosts

SHARD_BYTES = 5 * 10**9  # maximum size of one file


# ---- Loading ----


def load(
  directory: epath.PathLike, config: model.ShapeConfig, mesh: Mesh, *, frozen: bool = False
) -> model.Params:
  """Load a checkpoint's parameters and place each device's slice on that device.

  `directory` is a local or remote (gs://) folder whose config.json matches `config`, or a local
  GGUF file. Remote files are copied to the machine's temporary folder, one at a time. The
  parameters are laid out over `mesh` as in `model.init`; with `frozen`, they have the dtypes of
  frozen parameters (see `model.shapes`) instead of float32.

  Raises InputError if a tensor is missing or unexpected, or has the wrong shape or an unsupported
  dtype, if a file is missing or truncated, or if the copies on the hosts differ.
  """
  folder = epath.Path(directory).expanduser()
  layout = tensor_names.tensors(config)
  keys = {tensor.name: key for key, tensor in layout.items()}
  tensors = {tensor.name: tensor for tensor in layout.values()}
  shapes = model.shapes(config, mesh, frozen=frozen)
  leaves: dict[ParamPath, jax.Array] = {}
  vectors = []
  for name, reader in _slices(folder, tensors, config.head_size):
    tensor, (path, index) = tensors[name], keys[name]
    if len(tensor.shape) == 1:
      vectors.append(reader[:].tobytes())
    like: Any = functools.reduce(operator.getitem, path, shapes)
    if not index:
      leaves[path] = _read(reader, tensor, like)
      continue
    if path not in leaves:
      leaves[path] = jnp.zeros(like.shape, like.dtype, device=like.sharding)
    leaves[path] = _set(leaves[path], _read(reader, tensor, _entry_struct(like, index)), index)
  # Compare only vectors. No host reads full matrices, and vectors also differ between checkpoints.
  hosts.check_same(str(folder), 'the weights', lambda: b''.join(vectors))
  return traverse_util.unflatten_dict(leaves)


def _slices(
  folder: epath.Path, tensors: Mapping[str, Tensor], head_size: int
) -> Iterator[tuple[str, Any]]:
  """Yield each tensor's name and slice, from one file at a time.

  In each file, the largest tensors come first. Reading a tensor briefly takes several times its
  size in memory, and smaller tensors can reuse that memory.
  """

  def size(item: tuple[str, Any]) -> int:
    return math.prod(tensors[item[0]].shape)

  if gguf_file.is_one(folder):
    slices = gguf_file.slices(os.fspath(folder), tensors, head_size)
    yield from sorted(slices.items(), key=size, reverse=True)
    return
  files = safetensors_files.locate(folder, tensors)
  for file in sorted(set(files.values())):
    file_tensors = {name: tensor for name, tensor in tensors.items() if files[name] == file}
    with safetensors_files.open_checked(folder / file, file_tensors) as slices:
      yield from sorted(slices.items(), key=size, reverse=True)


def _entry_struct(stack: jax.ShapeDtypeStruct, index: Index) -> jax.ShapeDtypeStruct:
  """Return the shape, dtype and sharding of a stack's entry at `index`."""
  sharding = stack.sharding
  assert isinstance(sharding, NamedSharding), sharding
  entry_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[len(index) :]))
  return jax.ShapeDtypeStruct(stack.shape[len(index) :], stack.dtype, sharding=entry_sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _set(stack: jax.Array, value: jax.Array, index: Index) -> jax.Array:
  start_indices = (*index, *(0,) * value.ndim)
  return jax.lax.dynamic_update_slice(stack, value[(None,) * len(index)], start_indices)


def _read(reader: Any, tensor: Tensor, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Read a parameter from a `Slice`, device by device, with the shape and sharding of `like`."""

  def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None
    if len(tensor.shape) == 1:  # small, and a shard along the head size is not contiguous
      return reader[:].reshape(like.shape)[index].astype(like.dtype)
    file_slices, shape = _file_slices(tensor, like.shape, index)
    block = reader[file_slices].T if tensor.num_inputs else reader[file_slices]
    return block.reshape(shape).astype(like.dtype, copy=False)

  assert like.sharding is not None
  return jax.make_array_from_callback(like.shape, like.sharding, read_shard)


def _file_slices(
  tensor: Tensor, shape: Sequence[int], index: Sequence[slice]
) -> tuple[tuple[slice, ...], tuple[int, ...]]:
  """Return (slices of the file's matrix that contain `param[index]`, shape of `param[index]`).

  `param` is our parameter, with shape `shape`. If the file merges several dimensions (heads and
  head size) into one, `index` may select part of the first, but must select all of the others.
  """
  ranges = [axis.indices(size)[:2] for axis, size in zip(index, shape)]
  dims = range(len(shape))
  if tensor.num_inputs:
    groups = (dims[tensor.num_inputs :], dims[: tensor.num_inputs])  # the file has [out, in]
  else:
    groups = [[dim] for dim in dims]

  def merge(group: Sequence[int]) -> slice:
    (start, stop), stride = ranges[group[0]], math.prod(shape[dim] for dim in group[1:])
    assert all(ranges[dim] == (0, shape[dim]) for dim in group[1:]), (tensor, index)
    return slice(start * stride, stop * stride)

  return tuple(merge(group) for group in groups), tuple(stop - start for start, stop in ranges)


# ---- Saving ----


def save(
  directory: epath.PathLike,
  config: model.ShapeConfig,
  params: model.Params,
  values: Mapping[str, Any],
  dtype: str,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Write config.json and safetensors files that transformers and vLLM can read.

  Every host must call this, because gathering a parameter is a collective operation. Only the
  first host writes. At most one file's tensors are in host memory at a time.

  Args:
    directory: a local or remote folder. Existing files with the same names are replaced.
    config: the decoder's shape.
    params: as returned by `model.init`. LoRA adapters are merged into their matrices.
    values: the content of config.json, whose dtype is replaced with `dtype`.
    dtype: the dtype of all tensors: 'float32', 'bfloat16' or 'float16'.
    shard_bytes: the maximum size of one file, unless a single tensor exceeds it.
  """
  folder = epath.Path(directory).expanduser()
  itemsize = np.dtype(dtype).itemsize
  shards = _split(tensor_names.tensors(config), itemsize, shard_bytes)
  names = safetensors_files.names(len(shards))
  if hosts.is_first():
    folder.mkdir(parents=True, exist_ok=True)
  for file, shard in zip(names, shards):
    arrays = {
      tensor.name: gathered(params, path, index, tensor, dtype)
      for (path, index), tensor in shard.items()
    }
    if hosts.is_first():
      safetensors_files.write(folder / file, arrays)
  if not hosts.is_first():
    return
  if len(shards) > 1:
    files = {tensor.name: file for file, shard in zip(names, shards) for tensor in shard.values()}
    size = sum(math.prod(tensor.shape) for shard in shards for tensor in shard.values())
    safetensors_files.write_index(folder, files, size * itemsize)
  # Write both names: transformers reads 'dtype' from version 5 on, and 'torch_dtype' before.
  (folder / 'config.json').write_text(
    json.dumps(dict(values) | {'torch_dtype': dtype, 'dtype': dtype}, indent=2)
  )


def _split(
  tensors: Mapping[tuple[ParamPath, Index], Tensor], itemsize: int, limit: int
) -> list[dict[tuple[ParamPath, Index], Tensor]]:
  """Split the tensors, in order, into files of at most `limit` bytes."""
  shards, size = [{}], 0
  for key, tensor in tensors.items():
    tensor_size = math.prod(tensor.shape) * itemsize
    if shards[-1] and size + tensor_size > limit:
      shards, size = [*shards, {}], 0
    shards[-1][key] = tensor
    size += tensor_size
  return shards


def gathered(
  params: model.Params, path: ParamPath, index: Index, tensor: Tensor, dtype: str
) -> np.ndarray:
  """Gather a whole tensor on this host, in the file's layout. This is a collective operation."""
  weight: Any = functools.reduce(operator.getitem, path, params)
  param = (_merged_entry(weight, index) if index else weight).astype(dtype)
  array = np.asarray(
    param if param.is_fully_addressable else multihost_utils.process_allgather(param, tiled=True)
  )
  if tensor.num_inputs:
    array = array.reshape(tensor.shape[::-1]).T
  # safetensors writes the underlying memory and ignores strides.
  return np.ascontiguousarray(array.reshape(tensor.shape))


@jax.jit
def _merged_entry(stack: lora.Weight, index: Index) -> jax.Array:
  return lora.merged(jax.tree.map(lambda leaf: leaf[index], stack))


# ---- LoRA adapters in peft's format ----

# https://huggingface.co/docs/peft/developer_guides/checkpoint


def save_adapters(
  directory: epath.PathLike,
  config: lora.LoraConfig,
  shape: model.ShapeConfig,
  adapters: model.Params,
  base: str,
  commit: str | None,
) -> None:
  """Write adapters in float32. Every host must call this; only the first host writes.

  `directory` may be remote. `base` is the base model's Hub name if there is a `commit`, or else
  its folder.
  """
  folder = epath.Path(directory).expanduser()
  arrays = {
    tensor.name: gathered(adapters, path, index, tensor, 'float32')
    for (path, index), tensor in adapter_tensors(config, shape).items()
  }
  if not hosts.is_first():
    return
  folder.mkdir(parents=True, exist_ok=True)
  safetensors_files.write(folder / 'adapter_model.safetensors', arrays)
  values = dict(
    peft_type='LORA', task_type='CAUSAL_LM', base_model_name_or_path=base, revision=commit,
    r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=list(config.targets),
    bias='none', fan_in_fan_out=False, inference_mode=True,
  )  # fmt: skip
  (folder / 'adapter_config.json').write_text(json.dumps(values, indent=2))


def adapter_tensors(
  config: lora.LoraConfig, shape: model.ShapeConfig
) -> dict[tuple[ParamPath, Index], Tensor]:
  """Return the A and B matrices of each target, keyed by (path in the adapters, index)."""
  layout = {}
  for (path, index), kernel in tensor_names.tensors(shape).items():
    module = kernel.name.removesuffix('.weight')
    if module.split('.')[-1] in config.targets:
      prefix, (num_outputs, num_inputs) = f'base_model.model.{module}', kernel.shape
      layout[(*path, 'a'), index] = Tensor(
        f'{prefix}.lora_A.weight', (config.rank, num_inputs), kernel.num_inputs
      )
      layout[(*path, 'b'), index] = Tensor(
        f'{prefix}.lora_B.weight', (num_outputs, config.rank), num_inputs=1
      )
  return layout
