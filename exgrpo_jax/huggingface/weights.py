"""Hugging Face safetensors to sharded parameters and back.

Loading reads each device's slice from the file on its own and casts it on the way:
never a whole tensor in host memory unless a device holds it whole, and on several
hosts nothing that the host's devices do not hold. `python -m exgrpo_jax.weights`
exports a run: see export.py.
"""

import contextlib
import functools
import json
import math
import os
import runpy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.huggingface.architecture import Path, Tensor
from exgrpo_jax.policy import model
from exgrpo_jax.runtime import hosts

SHARD_BYTES = 5 * 10**9  # of one file, at most
_SINGLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}
_DERIVED = 'rotary_emb.inv_freq'  # old checkpoints keep it; it follows from config.json


# ---- Loading ----


def load(
  directory: epath.PathLike, config: model.Config, mesh: Mesh, dtype=jnp.float32
) -> model.Params:
  """The parameters of a checkpoint, each device's slice where it lives.

  Args:
    directory: local or remote (gs://), whose config.json gives `config`; of a remote one a
      file at a time is kept in the machine's temporary folder.
    config: the decoder's shape.
    mesh: whose devices hold the parameters, laid out as by `model.init`.
    dtype: of the parameters.

  Raises:
    InputError: a tensor is missing, unexpected, of another shape or not of a floating
      type, a file is truncated, the index names one that is not there, or hosts have
      different copies.
  """
  folder = epath.Path(directory).expanduser()
  wanted = {tensor.name: (place, tensor) for place, tensor in architecture.tensors(config).items()}
  files = _files(folder, wanted)
  shapes, params, vectors = model.shapes(config, mesh), {}, []
  for file in sorted(set(files.values())):
    names = [name for name in wanted if files[name] == file]
    with _local(folder / file) as local, _opened(local, folder / file) as reader:
      _check(reader, folder / file, names, {name: wanted[name][1] for name in names})
      for name in names:
        (path, layer), tensor = wanted[name]
        if len(tensor.shape) == 1:
          vectors.append(reader.get_slice(name)[:].tobytes())
        like = _at(shapes, path)
        if layer is None:
          _put(params, path, _read(reader.get_slice(name), tensor, like, dtype))
          continue
        stack = _at(params, path, None)
        if stack is None:
          stack = jnp.zeros(like.shape, dtype, device=like.sharding)
        own = _read(reader.get_slice(name), tensor, _without_layers(like), dtype)
        _put(params, path, _with_layer(stack, own, layer))
  # Matrices are read in parts; two checkpoints differ in their scales too.
  hosts.check_same(str(folder), 'the weights', lambda: b''.join(vectors))
  return params


def _without_layers(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """Of one layer in a stack of them."""
  place = NamedSharding(like.sharding.mesh, PartitionSpec(*like.sharding.spec[1:]))
  return jax.ShapeDtypeStruct(like.shape[1:], like.dtype, sharding=place)


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(stack, own, layer):
  return jax.lax.dynamic_update_index_in_dim(stack, own, layer, 0)


def _files(folder: epath.Path, wanted: Mapping[str, Any]) -> dict[str, str]:
  """Which file holds each wanted tensor; all that an index or a single file lists is checked."""
  index = folder / _INDEX
  if index.is_file():
    files = _weight_map(index)
    for file in sorted(set(files.values())):
      if not (folder / file).is_file():
        tensor = next(name for name, own in files.items() if own == file)
        raise InputError(
          f'{index}: names {file}, for {tensor} and others, and there is no such '
          'file; fetch the checkpoint again.'
        )
    place = index
  elif (folder / _SINGLE).is_file():
    place = folder / _SINGLE
    with _local(place) as local, _opened(local, place) as reader:
      files = dict.fromkeys(reader.keys(), _SINGLE)
  else:
    raise InputError(
      f'{folder}: holds neither {_SINGLE} nor {_INDEX}; weights must be '
      'safetensors, for other formats can run code.'
    )
  missing = [name for name in wanted if name not in files]
  unexpected = [name for name in files if name not in wanted and not name.endswith(_DERIVED)]
  if missing:
    shape = list(wanted[missing[0]][1].shape)
    raise InputError(
      f'{place}: tensor {missing[0]} is missing; config.json asks for it with shape '
      f'{shape}{_others(missing)}.'
    )
  if unexpected:
    raise InputError(
      f'{place}: tensor {unexpected[0]} is unexpected; the model of config.json has '
      f'none of that name{_others(unexpected)}.'
    )
  return files


def _weight_map(index: epath.Path) -> dict[str, str]:
  try:
    return dict(json.loads(index.read_text())['weight_map'])
  except (ValueError, KeyError, TypeError) as error:
    raise InputError(
      f'{index}: not an index of safetensors files ({error!r}); it must be JSON '
      "with a 'weight_map' from tensors to files."
    ) from error


def _others(names: Sequence[str]) -> str:
  return f' ({len(names) - 1} others likewise)' if len(names) > 1 else ''


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[str]:
  """The name of a local file with the content of `path`, which safetensors maps into memory."""
  if '://' not in str(path):
    yield os.fspath(path)
    return
  with tempfile.TemporaryDirectory() as folder:
    copy = os.path.join(folder, path.name)
    path.copy(copy)
    yield copy


@contextlib.contextmanager
def _opened(local: str, path: epath.Path) -> Iterator[Any]:
  try:
    reader = safe_open(local, 'np')
  except SafetensorError as error:
    raise InputError(
      f'{path}: not a whole safetensors file of {os.path.getsize(local)} bytes '
      f'({error}); fetch it again.'
    ) from error
  with reader:
    yield reader


def _check(reader, path: epath.Path, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
  """Refuses a file that is not what the index and config.json say."""
  there = set(reader.keys())
  for name in names:
    expected = list(tensors[name].shape)
    if name not in there:
      raise InputError(
        f'{path}: tensor {name} of shape {expected} is missing; the index says that '
        'it is in this file.'
      )
    found = reader.get_slice(name)
    if found.get_shape() != expected:
      raise InputError(
        f'{path}: tensor {name} has shape {found.get_shape()}; config.json asks for {expected}.'
      )
    if found.get_dtype() not in _DTYPES:
      raise InputError(
        f'{path}: tensor {name} has dtype {found.get_dtype()}; it must be one of '
        f'{", ".join(_DTYPES)}: quantised weights are not supported.'
      )
  for name in sorted(there - set(names)):
    if not name.endswith(_DERIVED):
      raise InputError(
        f'{path}: tensor {name} is unexpected; the index does not have it in this file.'
      )


def _read(reader, tensor: Tensor, like: jax.ShapeDtypeStruct, dtype) -> jax.Array:
  """One parameter in its layout, read a device's slice at a time."""

  def of_device(index):
    if len(tensor.shape) == 1:  # small, and a slice of its heads' entries is not in one piece
      return reader[:].reshape(like.shape)[index].astype(dtype)
    theirs, shape = _theirs(tensor, like.shape, index)
    block = reader[theirs].T if tensor.num_inputs else reader[theirs]
    return block.reshape(shape).astype(dtype)

  return jax.make_array_from_callback(like.shape, like.sharding, of_device)


def _theirs(
  tensor: Tensor, shape: Sequence[int], index: Sequence[slice]
) -> tuple[tuple[slice, ...], tuple[int, ...]]:
  """Slices of the file's matrix that hold ours[index], and the shape of ours[index].

  Dimensions that the file has as one must be whole but for the first.
  """
  ranges = [one.indices(size)[:2] for one, size in zip(index, shape)]
  dims, split = range(len(shape)), tensor.num_inputs
  if split:
    groups = (dims[split:], dims[:split])  # [out, in]
  else:
    groups = [[dim] for dim in dims]

  def flat(group):
    (start, stop), rest = ranges[group[0]], math.prod(shape[dim] for dim in group[1:])
    assert all(ranges[dim] == (0, shape[dim]) for dim in group[1:]), (tensor, index)
    return slice(start * rest, stop * rest)

  return tuple(flat(group) for group in groups), tuple(stop - start for start, stop in ranges)


# ---- Saving ----


def save(
  directory: epath.PathLike,
  config: model.Config,
  params: model.Params,
  values: Mapping[str, Any],
  dtype: str,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes config.json and safetensors files that transformers and vLLM read.

  Every host calls it, since the parameters are gathered one by one; the first one
  writes. A shard is in host memory at a time.

  Args:
    directory: local or remote; what it holds under these names is replaced.
    config: the decoder's shape.
    params: in the tree of `model.init`.
    values: the content of config.json; its dtype is set to `dtype`.
    dtype: 'float32', 'bfloat16' or 'float16', of all tensors.
    shard_bytes: of one file, at most, but for a tensor that is larger alone.
  """
  folder = epath.Path(directory).expanduser()
  writes = hosts.is_first()
  shards = _shards(architecture.tensors(config), np.dtype(dtype).itemsize, shard_bytes)
  names = (
    [_SINGLE]
    if len(shards) == 1
    else [
      f'model-{number:05d}-of-{len(shards):05d}.safetensors' for number in range(1, len(shards) + 1)
    ]
  )
  if writes:
    folder.mkdir(parents=True, exist_ok=True)
  for file, shard in zip(names, shards):
    arrays = {
      tensor.name: _gathered(_whole(params, path, layer), tensor, dtype)
      for (path, layer), tensor in shard.items()
    }
    if writes:
      _write(folder / file, arrays)
  if not writes:
    return
  if len(shards) > 1:
    count = sum(math.prod(t.shape) for shard in shards for t in shard.values())
    (folder / _INDEX).write_text(
      json.dumps(
        {
          'metadata': {'total_size': count * np.dtype(dtype).itemsize},
          'weight_map': {
            t.name: file for file, shard in zip(names, shards) for t in shard.values()
          },
        },
        indent=2,
      )
    )
  # Both spellings: transformers before and from version 5.
  (folder / 'config.json').write_text(
    json.dumps(dict(values) | {'torch_dtype': dtype, 'dtype': dtype}, indent=2)
  )


def _shards(tensors: Mapping[Any, Tensor], itemsize: int, limit: int) -> list[dict[Any, Tensor]]:
  shards, size = [{}], 0
  for place, tensor in tensors.items():
    own = math.prod(tensor.shape) * itemsize
    if shards[-1] and size + own > limit:
      shards, size = [*shards, {}], 0
    shards[-1][place] = tensor
    size += own
  return shards


def _whole(params: model.Params, path: Path, layer: int | None) -> jax.Array:
  leaf = _at(params, path)
  return leaf if layer is None else leaf[layer]


def _gathered(leaf: jax.Array, tensor: Tensor, dtype: str) -> np.ndarray:
  """A whole parameter as the file has it."""
  leaf = leaf.astype(dtype)
  whole = np.asarray(
    leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
  )
  if tensor.num_inputs:
    whole = whole.reshape(tensor.shape[::-1]).T
  # Contiguous, for safetensors writes the memory as it lies.
  return np.ascontiguousarray(whole.reshape(tensor.shape))


def _write(path: epath.Path, arrays: Mapping[str, np.ndarray]) -> None:
  if '://' not in str(path):
    _write_local(os.fspath(path), arrays)
    return
  with tempfile.TemporaryDirectory() as folder:
    copy = os.path.join(folder, path.name)
    _write_local(copy, arrays)
    epath.Path(copy).copy(path, overwrite=True)


def _write_local(path: str, arrays: Mapping[str, np.ndarray]) -> None:
  with open(path, 'wb') as file:
    mode = os.stat(file.fileno()).st_mode
  save_file(arrays, path, {'format': 'pt'})  # transformers asks for it; the layout is torch's
  os.chmod(path, mode)  # safetensors lets nobody but the owner read it


# ---- Trees ----


def _at(tree: Mapping[str, Any], path: Path, *default: Any) -> Any:
  for name in path:
    if default and name not in tree:
      return default[0]
    tree = tree[name]
  return tree


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = value


if __name__ == '__main__':
  # The command opens a run, which is above this file.
  runpy.run_module('exgrpo_jax.export', run_name='__main__')
