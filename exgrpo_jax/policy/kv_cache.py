"""The key/value cache that decoding keeps for each row, and attention over it.

Further shape letters: S positions of the cache, R rows selected from B.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding


class LayerCache(NamedTuple):
  """One layer's rotated keys and values.

  Keys are stored as [H, S] and values as [S, H] for each row and head, so that the two matrix
  products of a decode step read both without transposing. On CPU this makes attention nearly
  twice as fast as with keys as [S, H].
  """

  key_BGHS: jax.Array
  value_BGSH: jax.Array


Cache = tuple[LayerCache, ...]  # L of them


def empty(num_layers: int, B: int, G: int, H: int, S: int, dtype: str) -> Cache:
  """A cache of zeros with S positions for each of B rows."""
  layer = LayerCache(
    key_BGHS=jnp.zeros((B, G, H, S), dtype), value_BGSH=jnp.zeros((B, G, S, H), dtype)
  )
  return (_constrain(layer),) * num_layers


def from_sequence(key_BTGH: jax.Array, value_BTGH: jax.Array) -> LayerCache:
  """A layer's cache of T positions, all of them written."""
  return LayerCache(key_BGHS=key_BTGH.transpose(0, 2, 3, 1), value_BGSH=value_BTGH.swapaxes(1, 2))


def length(cache: Cache) -> int:
  """How many positions the cache has."""
  return cache[0].value_BGSH.shape[2]


def resized(layer: LayerCache, size: int) -> LayerCache:
  """A layer's cache truncated, or padded with zeros, to `size` positions."""

  def resize(x: jax.Array, axis: int) -> jax.Array:
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * 4
    widths[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, widths)

  return _constrain(
    LayerCache(key_BGHS=resize(layer.key_BGHS, 3), value_BGSH=resize(layer.value_BGSH, 2))
  )


def select_rows(cache: Cache, row_R: Array) -> Cache:
  """The cache of rows `row_R`."""
  return tuple(_constrain(jax.tree.map(lambda x: x[row_R], layer)) for layer in cache)


def replace_rows(cache: Cache, row_R: Array, replacement: Cache) -> Cache:
  """The cache with the R rows of `replacement` written to rows `row_R`.

  Row numbers beyond the cache are dropped, and so are positions of `replacement` beyond the
  cache's length; where `replacement` is shorter, the remaining positions keep their contents.
  """

  def write(x: jax.Array, new: jax.Array) -> jax.Array:
    _, _, first, second = (min(sizes) for sizes in zip(x.shape, new.shape))
    return x.at[row_R, :, :first, :second].set(new[:, :, :first, :second], mode='drop')

  return jax.tree.map(write, cache, replacement)


def write_token(
  layer: LayerCache, key_BGH: jax.Array, value_BGH: jax.Array, position_B: Array
) -> LayerCache:
  """The layer's cache with each row's new key and value written at its own position."""
  return LayerCache(
    key_BGHS=_write(layer.key_BGHS, key_BGH[..., None], position_B, 3),
    value_BGSH=_write(layer.value_BGSH, value_BGH[:, :, None], position_B, 2),
  )


def attend(query_BNH: jax.Array, position_B: Array, layer: LayerCache) -> jax.Array:
  """Attention of each row's query to positions 0 .. position_B. [B, N, H] -> [B, N, H]."""
  B, N, H = query_BNH.shape
  _, G, _, S = layer.key_BGHS.shape
  query_BGRH = query_BNH.reshape(B, G, N // G, H)  # here R = N / G queries share a key
  score_BGRS = jnp.einsum(
    'BGRH,BGHS->BGRS', query_BGRH, layer.key_BGHS, preferred_element_type=jnp.float32
  ) / math.sqrt(H)
  # The mask is added because XLA:CPU fuses an addition with the product, but not a select. Finite
  # in place of -inf: every row sees position 0, so no row is masked entirely.
  mask_BS = jnp.where(jnp.arange(S) <= position_B[:, None], 0.0, -1e30)
  score_BGRS += mask_BS[:, None, None]
  weight_BGRS = jnp.exp(score_BGRS - jnp.max(score_BGRS, axis=-1, keepdims=True))
  mixed_BGRH = jnp.einsum(
    'BGRS,BGSH->BGRH',
    weight_BGRS.astype(query_BNH.dtype),
    layer.value_BGSH,
    preferred_element_type=jnp.float32,
  )
  # Normalised last, where there are fewest entries to divide.
  mixed_BGRH /= jnp.sum(weight_BGRS, axis=-1, keepdims=True)
  mixed_BGRH = mixed_BGRH.astype(query_BNH.dtype)
  return mixed_BGRH.reshape(B, N, H)


def _write(x: jax.Array, new: jax.Array, position_B: Array, axis: int) -> jax.Array:
  """Writes `new`, of size 1 along `axis`, at each row's position."""
  # A scatter, which XLA does in place inside a loop; a select would copy the cache.
  return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))(
    x, new, position_B
  )


def _constrain(layer: LayerCache) -> LayerCache:
  return jax.tree.map(lambda x: sharding.constrain(x, ('batch', 'kv_heads', None, None)), layer)
