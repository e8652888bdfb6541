"""The key/value cache: what decoding remembers of each row, and attention over it.

Shape letters here: S positions of the cache, R rows chosen of B.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.policy import sharding


class LayerCache(NamedTuple):
  """One layer's rotated keys and values.

  Keys stand as [H, S] and values as [S, H] for each row and head: the decode step's
  two matrix products then read both as they lie, which makes attention on CPU nearly
  twice as fast as with keys as [S, H].
  """

  key_BGHS: jax.Array
  value_BGSH: jax.Array


Cache = tuple[LayerCache, ...]  # L of them


def empty(num_layers: int, B: int, G: int, H: int, S: int, dtype: str) -> Cache:
  """Room for S positions of each of B rows."""
  layer = LayerCache(jnp.zeros((B, G, H, S), dtype), jnp.zeros((B, G, S, H), dtype))
  return (_spread(layer),) * num_layers


def from_sequence(key_BTGH: jax.Array, value_BTGH: jax.Array) -> LayerCache:
  """A layer's cache of T positions, all of them written."""
  return LayerCache(key_BTGH.transpose(0, 2, 3, 1), value_BTGH.swapaxes(1, 2))


def length(cache: Cache) -> int:
  """Positions that it has room for."""
  return cache[0].value_BGSH.shape[2]


def resized(layer: LayerCache, size: int) -> LayerCache:
  """The first `size` positions of a layer's cache, or all of them and room for more."""

  def fitted(whole, axis):
    whole = jax.lax.slice_in_dim(whole, 0, min(size, whole.shape[axis]), axis=axis)
    room = [(0, 0)] * 4
    room[axis] = 0, size - whole.shape[axis]
    return jnp.pad(whole, room)

  return _spread(LayerCache(fitted(layer.key_BGHS, 3), fitted(layer.value_BGSH, 2)))


def select_rows(cache: Cache, row_R: jax.Array) -> Cache:
  """The cache of some of the rows."""
  return tuple(_spread(jax.tree.map(lambda whole: whole[row_R], layer)) for layer in cache)


def replace_rows(cache: Cache, row_R: jax.Array, others: Cache) -> Cache:
  """The cache with `others`, R rows of any length, in place of rows `row_R`.

  A row that the cache does not have is dropped, and so is what `others` holds beyond
  the cache's length.
  """

  def put(whole, part):
    _, _, first, second = (min(sizes) for sizes in zip(whole.shape, part.shape))
    return whole.at[row_R, :, :first, :second].set(part[:, :, :first, :second], mode='drop')

  return jax.tree.map(put, cache, others)


def write_token(
  layer: LayerCache, key_BGH: jax.Array, value_BGH: jax.Array, position_B: jax.Array
) -> LayerCache:
  """The layer's cache with each row's new key and value at its own position."""
  return LayerCache(
    _write(layer.key_BGHS, key_BGH[..., None], position_B, 3),
    _write(layer.value_BGSH, value_BGH[:, :, None], position_B, 2),
  )


def attend(query_BNH: jax.Array, position_B: jax.Array, layer: LayerCache) -> jax.Array:
  """What each row's query finds at positions 0 .. position_B. [B, N, H] -> [B, N, H]."""
  B, N, H = query_BNH.shape
  _, G, _, S = layer.key_BGHS.shape
  query_BGRH = query_BNH.reshape(B, G, N // G, H)  # N / G queries share a key
  score_BGRS = jnp.einsum(
    'BGRH,BGHS->BGRS', query_BGRH, layer.key_BGHS, preferred_element_type=jnp.float32
  ) / math.sqrt(H)
  # Added, which XLA's CPU fuses with the product; a select it does not. A finite stand-in for
  # -inf: position 0 is always seen, so no row is without weight.
  unseen_BS = jnp.where(jnp.arange(S) <= position_B[:, None], 0.0, -1e30)
  score_BGRS += unseen_BS[:, None, None]
  weight_BGRS = jnp.exp(score_BGRS - jnp.max(score_BGRS, axis=-1, keepdims=True))
  mixed_BGRH = jnp.einsum(
    'BGRS,BGSH->BGRH',
    weight_BGRS.astype(query_BNH.dtype),
    layer.value_BGSH,
    preferred_element_type=jnp.float32,
  )
  # Divided by the weights' sum last, where there is the least to divide.
  mixed_BGRH /= jnp.sum(weight_BGRS, axis=-1, keepdims=True)
  mixed_BGRH = mixed_BGRH.astype(query_BNH.dtype)
  return mixed_BGRH.reshape(B, N, H)


def _write(whole, new, position_B, axis):
  """`new` has one position along `axis`."""
  # As a scatter, which XLA does in place within a loop; a select copies the cache.
  return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))(
    whole, new, position_B
  )


def _spread(layer):
  return jax.tree.map(
    lambda whole: sharding.constrain(whole, ('batch', 'kv_heads', None, None)), layer
  )
