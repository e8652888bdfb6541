"""A layer's key/value cache with one block per row and head, in two layouts.

`Transposed` is for CPU: keys are [H, S] and values are [S, H], so neither matrix product in a
decode step needs a transpose. With this layout, attention on CPU is nearly twice as fast as with
keys stored as [S, H]. `Dense` is for accelerators: each token's key and value are contiguous, so
they can be written with a scatter of whole rows.

Shape letters as in kv_cache.py; R = N/G is the number of query heads per key/value head.
"""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.matmul import from_bits, to_bits

MULTIPLE = 128  # S of `Dense` must be a multiple of this, because the kernels' blocks must divide S
_CACHE_AXES = ('batch', 'kv_heads', None, None)


class Transposed(NamedTuple):
  """Rotated keys and values in the CPU layout; bfloat16 is stored as raw bits."""

  key_BGHS: jax.Array
  value_BGSH: jax.Array


class Dense(NamedTuple):
  """Rotated keys and values in the accelerator layout; S is a multiple of MULTIPLE."""

  key_BGSH: jax.Array
  value_BGSH: jax.Array


def transposed_from_sequence(key_BTGH: jax.Array, value_BTGH: jax.Array) -> Transposed:
  """Build a layer's cache from the keys and values of T positions."""
  key_BTGH, value_BTGH = to_bits(key_BTGH), to_bits(value_BTGH)
  return Transposed(key_BGHS=key_BTGH.transpose(0, 2, 3, 1), value_BGSH=value_BTGH.swapaxes(1, 2))


def dense_from_sequence(key_BTGH: jax.Array, value_BTGH: jax.Array) -> Dense:
  """Build a layer's cache from the keys and values of T positions."""
  return Dense(key_BGSH=key_BTGH.swapaxes(1, 2), value_BGSH=value_BTGH.swapaxes(1, 2))


def write_transposed(
  layer: Transposed, key_BGH: jax.Array, value_BGH: jax.Array, position_B: Array
) -> Transposed:
  """Write each row's key and value at the row's position."""
  key_BGH, value_BGH = to_bits(key_BGH), to_bits(value_BGH)
  return Transposed(
    key_BGHS=_write_slices(layer.key_BGHS, key_BGH[..., None], position_B, 3),
    value_BGSH=_write_slices(layer.value_BGSH, value_BGH[:, :, None], position_B, 2),
  )


def write_dense(layer: Dense, key_BGH: jax.Array, value_BGH: jax.Array, position_B: Array) -> Dense:
  """Write each row's key and value at the row's position, which must be below S.

  Uses a flat scatter, because XLA:TPU turns a vmapped dynamic_update_slice into a loop over rows.
  Each device scatters into its own rows and heads, because GSPMD cannot partition a flat index.
  """
  write = sharding.per_shard(
    _write_rows, (_CACHE_AXES, ('batch', 'kv_heads', None), ('batch',)), _CACHE_AXES
  )
  position_B = jnp.asarray(position_B)
  return Dense(
    key_BGSH=write(layer.key_BGSH, key_BGH, position_B),
    value_BGSH=write(layer.value_BGSH, value_BGH, position_B),
  )


def attend(
  query_BNH: jax.Array, position_B: Array, layer: Transposed | Dense, cap: float = 0.0
) -> jax.Array:
  """Attend from each row's query to positions 0 .. position_B, reading the whole cache."""
  B, N, H = query_BNH.shape
  key, value_BGSH = (from_bits(x) for x in layer)
  G, S = value_BGSH.shape[1:3]
  products = 'BGRH,BGHS->BGRS' if isinstance(layer, Transposed) else 'BGRH,BGSH->BGRS'
  query_BGRH = query_BNH.reshape(B, G, N // G, H)
  score_BGRS = jnp.einsum(
    products, query_BGRH, key, preferred_element_type=jnp.float32
  ) / math.sqrt(H)
  if cap:
    score_BGRS = cap * jnp.tanh(score_BGRS / cap)
  # The mask is added because XLA:CPU can fuse the product with an addition, but not with a select.
  # It can be finite instead of -inf, because every row sees position 0.
  mask_BS = jnp.where(jnp.arange(S) <= position_B[:, None], 0.0, -1e30)
  score_BGRS += mask_BS[:, None, None]
  weight_BGRS = jnp.exp(score_BGRS - jnp.max(score_BGRS, axis=-1, keepdims=True))
  mixed_BGRH = jnp.einsum(
    'BGRS,BGSH->BGRH',
    weight_BGRS.astype(query_BNH.dtype),
    value_BGSH,
    preferred_element_type=jnp.float32,
  )
  # Normalize last, because the result has the fewest entries to divide.
  mixed_BGRH /= jnp.sum(weight_BGRS, axis=-1, keepdims=True)
  return mixed_BGRH.astype(query_BNH.dtype).reshape(B, N, H)


def attend_new(
  query_BTNH: jax.Array,
  new_BTGH: tuple[jax.Array, jax.Array],
  position_B: Array,
  layer: Transposed | Dense,
  window: int = 0,
  cap: float = 0.0,
) -> jax.Array:
  """Attend from each row's T new tokens to the cache and to the new tokens, in plain JAX.

  Args:
    query_BTNH: rotated queries; token t is at position_B + t.
    new_BTGH: rotated keys and values of the new tokens. The cache does not contain them.
    position_B: int32, the number of cached tokens in each row.
    layer: the cache; with a window, token p is in slot p % window.
    window: number of tokens that a token attends to, including itself; 0 means no limit.
    cap: see `kv_cache.attend`.

  Returns:
    [B, T, N, H].
  """
  B, T, N, H = query_BTNH.shape
  key, value_BGSH = (from_bits(x) for x in layer)
  G, S = value_BGSH.shape[1:3]
  products = 'BGTRH,BGHS->BGTRS' if isinstance(layer, Transposed) else 'BGTRH,BGSH->BGTRS'
  query_BGTRH = query_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 1, 3, 4)

  def score_keys(products: str, key: jax.Array, is_seen_BTS: jax.Array) -> jax.Array:
    score = jnp.einsum(products, query_BGTRH, key, preferred_element_type=jnp.float32)
    score /= math.sqrt(H)
    if cap:
      score = cap * jnp.tanh(score / cap)
    return score + jnp.where(is_seen_BTS, 0.0, -1e30)[:, None, :, None]  # see `attend`

  new_key, new_value = new_BTGH
  is_seen_BTS, is_seen_BTU = _seen_masks(jnp.asarray(position_B), T, S, window)
  scores = (
    score_keys(products, key, is_seen_BTS),
    score_keys('BGTRH,BUGH->BGTRU', new_key, is_seen_BTU),
  )
  largest = jnp.maximum(*(jnp.max(score, axis=-1, keepdims=True) for score in scores))

  def mix_values(products: str, score: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight = jnp.exp(score - largest)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight.astype(query_BTNH.dtype)
    return jnp.einsum(products, weight, value, preferred_element_type=jnp.float32), total

  old_BGTRH, old_total = mix_values('BGTRS,BGSH->BGTRH', scores[0], value_BGSH)
  new_BGTRH, new_total = mix_values('BGTRU,BUGH->BGTRH', scores[1], new_value)
  mixed_BGTRH = (old_BGTRH + new_BGTRH) / (old_total + new_total)
  return mixed_BGTRH.astype(query_BTNH.dtype).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def _seen_masks(position_B: jax.Array, T: int, S: int, window: int) -> tuple[jax.Array, jax.Array]:
  """Mark what each new token attends to: cache slots [B, T, S] and new tokens [1, T, T]."""
  place_S, number_T = jnp.arange(S), jnp.arange(T)
  ahead_TT = number_T[:, None] - number_T
  if not window:
    is_seen_BTS = jnp.broadcast_to(place_S < position_B[:, None, None], (len(position_B), T, S))
    return is_seen_BTS, (ahead_TT >= 0)[None]
  last_B1 = position_B[:, None] - 1
  position_BS = last_B1 - (last_B1 - place_S) % window  # the position of the token in each slot
  is_filled_BS = (position_BS >= 0) & (place_S < window)
  first_BT = position_B[:, None] + number_T - window + 1
  is_seen_BTS = is_filled_BS[:, None] & (position_BS[:, None] >= first_BT[:, :, None])
  return is_seen_BTS, ((ahead_TT >= 0) & (ahead_TT < window))[None]


def scattered(x_MS: jax.Array, new_MT: jax.Array, position_M: jax.Array) -> jax.Array:
  """Write T entries into each row, starting at the row's position.

  S must be at least position + T. Both arrays may have further dimensions, which must match.
  """
  M, S, *rest = x_MS.shape
  T = new_MT.shape[1]
  chex.assert_shape(new_MT, (M, T, *rest))
  chex.assert_shape(position_M, (M,))
  place_MT = (jnp.arange(M) * S + position_M)[:, None] + jnp.arange(T)
  return (
    x_MS.reshape(M * S, *rest)
    .at[place_MT.reshape(-1)]
    .set(
      new_MT.reshape(M * T, *rest),
      unique_indices=True,
      indices_are_sorted=True,
      mode='promise_in_bounds',
    )
    .reshape(x_MS.shape)
  )


def _write_rows(x_BGSH: jax.Array, new_BGH: jax.Array, position_B: jax.Array) -> jax.Array:
  B, G, S, H = x_BGSH.shape
  x_MSH = scattered(
    x_BGSH.reshape(B * G, S, H), new_BGH.reshape(B * G, 1, H), jnp.repeat(position_B, G)
  )
  return x_MSH.reshape(B, G, S, H)


def _write_slices(x: jax.Array, new: jax.Array, position_B: Array, axis: int) -> jax.Array:
  """Write `new`, which has size 1 along `axis`, at each row's position."""
  # This becomes a scatter, which XLA runs in place inside a loop; a select would copy the cache.
  return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))(
    x, new, position_B
  )


# ---- Decoding on NVIDIA GPUs ----

# Each pair of a row and a key/value head is passed to the kernel as one sequence with R = N/G
# queries and a single key head. This lets the kernel read the cache in place; the documented layout
# [B, S, G, H] would need a transposed copy. Tests run the same call with XLA on a CPU; the kernel
# itself has not been run on a GPU yet.
#
# Shape letters as in kv_cache.py; M = B * G sequences.


def takes_on_gpu(H: int, dtype: str) -> bool:
  """Return True if the kernels of all GPU generations support heads of size H in this dtype."""
  return dtype == 'bfloat16' and H % 8 == 0 and H <= 128


def attend_on_gpu(
  query_BNH: jax.Array, position_B: Array, layer: Dense, cap: float = 0.0
) -> jax.Array:
  """Attend from each row's query to positions 0 .. position_B; a cap is not supported."""
  assert not cap, cap
  chex.assert_rank([query_BNH, position_B], [3, 1])
  B, N, H = query_BNH.shape
  G = layer.key_BGSH.shape[1]

  def attend_shard(
    query_BGRH: jax.Array, key_BGSH: jax.Array, value_BGSH: jax.Array, position_B: jax.Array
  ) -> jax.Array:
    query_MRH, key_MSH, value_MSH = (
      x.reshape(-1, *x.shape[2:]) for x in (query_BGRH, key_BGSH, value_BGSH)
    )
    mixed_M1RH: jax.Array = jax.nn.dot_product_attention(
      query_MRH[:, None],
      key_MSH[:, :, None],
      value_MSH[:, :, None],
      implementation='cudnn',
      key_value_seq_lengths=jnp.repeat(position_B + 1, key_BGSH.shape[1]),
    )
    return mixed_M1RH.reshape(query_BGRH.shape)

  # Split by key/value heads: if the mesh replicates the heads, it replicates their queries too.
  per_shard = sharding.per_shard(
    attend_shard, (_CACHE_AXES, _CACHE_AXES, _CACHE_AXES, ('batch',)), _CACHE_AXES
  )
  query_BGRH = query_BNH.reshape(B, G, N // G, H)
  mixed_BGRH = per_shard(query_BGRH, layer.key_BGSH, layer.value_BGSH, jnp.asarray(position_B))
  return mixed_BGRH.reshape(B, N, H)
