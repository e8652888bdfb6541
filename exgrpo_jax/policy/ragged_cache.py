"""A layer's key/value cache in pages, for Pallas' ragged paged attention on TPU.

The kernel reads only a row's used positions, rounded up to a block of pages, while plain attention
reads the whole cache. A row's pages are contiguous here, so the page table is the identity and the
cache is an ordinary array.

Shape letters as in kv_cache.py; C = 2G interleaved keys and values: key, value, key, ….
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.dense_cache import Dense, scattered

PAGE = 256  # positions
# Set by hand because the kernel's tuner needs a device. With several queries per block, the kernel
# computes each row's products for all of them. The compiler schedules 571 cycles per block for 8
# queries and 244 for one; on v5e, reading the block takes 480 cycles.
_PAGES_PER_BLOCK = 2
BLOCK = _PAGES_PER_BLOCK * PAGE  # positions of a row that are read together
_QUERIES_PER_BLOCK = 1
_HEAD_SIZE = 128  # the kernel's loads are as wide as a vector register
_AXES = ('batch', None, 'kv_heads', None)


class Ragged(NamedTuple):
  """Rotated keys and values; S is a multiple of PAGE."""

  pair_BSCH: jax.Array


def takes(G: int, H: int, dtype: str) -> bool:
  """Return True if the kernel supports G heads of size H on the active mesh (`jax.set_mesh`).

  The kernel requires bfloat16, a head size equal to the vector register width, and keys and values
  that fill whole tiles. The mesh must keep each key on the same device as its value.
  """
  num_shards = sharding.num_shards('kv_heads', G)
  keeps_pairs = num_shards == sharding.num_shards('kv_heads', 2 * G)
  heads = G // num_shards
  fill_tiles = heads in (1, 2, 4) or heads % 8 == 0
  return dtype == 'bfloat16' and H == _HEAD_SIZE and keeps_pairs and fill_tiles


def from_sequence(key_BTGH: jax.Array, value_BTGH: jax.Array) -> Ragged:
  """Build a layer's cache from the keys and values of T positions."""
  B, T, G, H = key_BTGH.shape
  return Ragged(jnp.stack([key_BTGH, value_BTGH], axis=3).reshape(B, T, 2 * G, H))


def as_dense(layer: Ragged) -> Dense:
  """Return a layer's keys and values as separate arrays, for attention in plain JAX."""
  pair_BCSH = layer.pair_BSCH.swapaxes(1, 2)
  return Dense(key_BGSH=pair_BCSH[:, ::2], value_BGSH=pair_BCSH[:, 1::2])


def write(layer: Ragged, key_BGH: jax.Array, value_BGH: jax.Array, position_B: Array) -> Ragged:
  """Write each row's key and value at the row's position, which must be below S."""
  return _write(layer, key_BGH[:, None], value_BGH[:, None], position_B)


def _write(layer: Ragged, key_BTGH: jax.Array, value_BTGH: jax.Array, position_B: Array) -> Ragged:
  new_layer = from_sequence(key_BTGH, value_BTGH)
  write_rows = sharding.per_shard(scattered, (_AXES, _AXES, ('batch',)), _AXES)
  return Ragged(write_rows(layer.pair_BSCH, new_layer.pair_BSCH, jnp.asarray(position_B)))


def attend(query_BNH: jax.Array, position_B: Array, layer: Ragged, cap: float = 0.0) -> jax.Array:
  """Attend from each row's query to positions 0 .. position_B, reading whole blocks of them.

  For a row at position 0, such as a free slot, only one block is read.
  """
  return _attend(query_BNH[:, None], position_B, layer, cap)[:, 0]


def attend_several(
  query_BTNH: jax.Array,
  new_BTGH: tuple[jax.Array, jax.Array],
  position_B: Array,
  layer: Ragged,
  cap: float = 0.0,
) -> tuple[jax.Array, Ragged]:
  """Write T tokens per row, starting at position_B; each attends to itself and earlier tokens.

  Returns the attention output [B, T, N, H] and the new layer. S must be at least position_B + T.
  Drafts that end up being rejected stay in the cache, past the positions that are read.
  """
  layer = _write(layer, *new_BTGH, position_B)
  return _attend(query_BTNH, position_B, layer, cap), layer


def _attend(query_BTNH: jax.Array, position_B: Array, layer: Ragged, cap: float) -> jax.Array:
  B, T, N, H = query_BTNH.shape
  G = layer.pair_BSCH.shape[2] // 2
  # Split by key/value heads: if the mesh replicates the heads, it replicates their queries too.
  axes = ('batch', None, 'kv_heads', None, None)
  call = functools.partial(_call_kernel, cap, T)
  attend_rows = sharding.per_shard(call, (axes, ('batch',), _AXES), axes)
  query_BTGRH = query_BTNH.reshape(B, T, G, N // G, H)
  return attend_rows(query_BTGRH, jnp.asarray(position_B), layer.pair_BSCH).reshape(B, T, N, H)


def _call_kernel(
  cap: float, T: int, query: jax.Array, position_B: jax.Array, pair_BSCH: jax.Array
) -> jax.Array:
  """Attend from T queries per row, the first at `position_B`; the result is shaped like `query`."""
  B, S, C, H = pair_BSCH.shape
  pages = S // PAGE
  mixed_MNH: jax.Array = ragged_paged_attention.ragged_paged_attention(
    query.reshape(B * T, -1, H),
    pair_BSCH.reshape(B * pages, PAGE, C, H),
    kv_lens=position_B + T,
    page_indices=jnp.arange(B * pages, dtype=jnp.int32).reshape(B, pages),
    # The start of each row's queries, and the end of the last row's.
    cu_q_lens=jnp.arange(B + 1, dtype=jnp.int32) * T,
    num_seqs=jnp.full(1, B, jnp.int32),
    sm_scale=1 / math.sqrt(H),
    soft_cap=cap or None,
    num_kv_pages_per_block=min(_PAGES_PER_BLOCK, pages),
    num_queries_per_block=_QUERIES_PER_BLOCK * T,
  )
  return mixed_MNH.reshape(query.shape)
