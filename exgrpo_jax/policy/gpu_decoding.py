"""Attention kernels for decoding on NVIDIA GPUs, over the `Dense` layout of a layer's cache.

Both are lowered for CUDA in tests, but no GPU was at hand when this was written: neither was run or
measured on one, and which is faster is for `benchmark` to say.

To the kernels a row and a key/value head are one sequence with R = N/G queries and a single key
head. So the cache is read as it lies, where [B, S, G, H], which both document, would be a
transposed copy of it.

Shape letters as in kv_cache.py; M = B * G sequences.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import decode_attention

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.dense_cache import Dense

_AXES = ('batch', 'kv_heads', None, None)

_Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def cudnn_takes(H: int, dtype: str) -> bool:
  """Whether cuDNN's flash attention takes heads of size H in this dtype, on every generation."""
  return dtype == 'bfloat16' and H % 8 == 0 and H <= 128


def attend_cudnn(query_BNH: jax.Array, position_B: Array, layer: Dense) -> jax.Array:
  """Attention by cuDNN of each row's query to positions 0 .. position_B."""

  def attend(query_MRH: jax.Array, key: jax.Array, value: jax.Array, count_M: Array) -> jax.Array:
    mixed_M1RH: jax.Array = jax.nn.dot_product_attention(
      query_MRH[:, None],
      key[:, :, None],
      value[:, :, None],
      implementation='cudnn',
      key_value_seq_lengths=count_M,
    )
    return mixed_M1RH[:, 0]

  return _by_sequence(attend, query_BNH, position_B, layer)


def attend_pallas(query_BNH: jax.Array, position_B: Array, layer: Dense) -> jax.Array:
  """Attention by Pallas of each row's query to positions 0 .. position_B."""
  splits, block = _blocks(layer.key_BGSH.shape[2])

  def attend(query_MRH: jax.Array, key: jax.Array, value: jax.Array, count_M: Array) -> jax.Array:
    mixed_MRH: jax.Array = decode_attention.mqa(
      query_MRH, key, value, kv_seq_len=count_M, k_splits=splits, block_k=block
    )
    return mixed_MRH

  return _by_sequence(attend, query_BNH, position_B, layer)


def _blocks(S: int) -> tuple[int, int]:
  """Parts of S positions that multiprocessors take side by side, and positions of a block of them.

  As many parts as leave blocks, whose sizes are powers of two, of at least 64 positions. S is a
  multiple of 128, so two parts do.
  """
  for splits in (16, 8, 4, 2):
    part = S // splits
    block = min(256, part & -part)  # the largest power of two that divides it
    if block >= 64:
      break
  return splits, block


def _by_sequence(
  attend: _Kernel, query_BNH: jax.Array, position_B: Array, layer: Dense
) -> jax.Array:
  """`attend` of the sequences of each device."""
  B, N, H = query_BNH.shape
  G = layer.key_BGSH.shape[1]

  def attend_shard(
    query_BGRH: jax.Array, key_BGSH: jax.Array, value_BGSH: jax.Array, position_B: jax.Array
  ) -> jax.Array:
    query_MRH, key_MSH, value_MSH = (
      x.reshape(-1, *x.shape[2:]) for x in (query_BGRH, key_BGSH, value_BGSH)
    )
    count_M = jnp.repeat(position_B + 1, key_BGSH.shape[1])
    return attend(query_MRH, key_MSH, value_MSH, count_M).reshape(query_BGRH.shape)

  # By key/value heads, so that where the mesh replicates these it replicates their queries.
  per_shard = sharding.per_shard(attend_shard, (_AXES, _AXES, _AXES, ('batch',)), _AXES)
  query_BGRH = query_BNH.reshape(B, G, N // G, H)
  mixed_BGRH = per_shard(query_BGRH, layer.key_BGSH, layer.value_BGSH, jnp.asarray(position_B))
  return mixed_BGRH.reshape(B, N, H)
