"""The key/value cache for decoding, and attention over it.

Each decoding backend reads one cache layout:

  transposed  plain JAX, for CPU
  dense       plain JAX, for accelerators
  cudnn       NVIDIA's flash attention, in bfloat16
  ragged      Pallas' ragged paged attention for TPU, which reads only the positions in use

The names of a layer's arrays end in their dimensions, and layout-independent code relies on these
names. Further shape letters: S positions in the cache, R rows selected from the B rows, P packed
sequences of T tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import dense_cache, matmul, ragged_cache, sharding
from exgrpo_jax.policy.dense_cache import Dense, Transposed
from exgrpo_jax.policy.ragged_cache import Ragged

DECODE_BACKENDS = ('transposed', 'dense', 'cudnn', 'ragged')

LayerCache = Transposed | Dense | Ragged
Cache = tuple[LayerCache, ...]  # one per layer


class NewTokens(NamedTuple):
  """A layer's rotated keys and values for T tokens per row that are not in the cache yet."""

  key_BTGH: jax.Array
  value_BTGH: jax.Array


_Layer = TypeVar('_Layer', bound=LayerCache)
_LOGICAL_AXES = {'B': 'batch', 'G': 'kv_heads', 'C': 'kv_heads'}


def backend_for(platform: str, G: int, H: int, dtype: str, cap: float = 0.0) -> str:
  """Choose one of DECODE_BACKENDS for G heads of size H on 'cpu', 'gpu' (or 'cuda') or 'tpu'.

  `cap` is the cap on the scores, or 0 for none; the layout never depends on it. On TPU, the choice
  depends on the active mesh. Plain JAX handles shapes that the kernel does not support.
  """
  if platform == 'cpu':
    return 'transposed'
  if platform == 'tpu':
    return 'ragged' if ragged_cache.takes(G, H, dtype) else 'dense'
  return 'cudnn' if dense_cache.takes_on_gpu(H, dtype) and not cap else 'dense'


def is_ragged(platform: str) -> bool:
  """Return True if attention skips unused cache positions, as on TPU.

  The cache then has its full length from the start, and slots are never compacted.
  """
  return platform == 'tpu'


def empty(B: int, G: int, H: int, S: int, dtype: str) -> LayerCache:
  """Make an empty cache for a layer: S positions, possibly rounded up, for each of B rows."""
  layout = _LAYOUTS[backend_for(sharding.platform(), G, H, dtype)]
  sizes = dict(B=B, G=G, C=2 * G, H=H, S=_round_up(layout, S))
  if layout is Transposed:
    dtype = matmul.storage_dtype(dtype)
  layer = layout(
    *(jnp.zeros([sizes[axis] for axis in _axes(name)], dtype) for name in layout._fields)
  )
  return _constrain(layer)


def from_sequence(key_BTGH: jax.Array, value_BTGH: jax.Array) -> LayerCache:
  """Build a layer's cache from the keys and values of T positions."""
  G, H = key_BTGH.shape[2:]
  backend = backend_for(sharding.platform(), G, H, str(key_BTGH.dtype))
  return _FROM_SEQUENCE[_LAYOUTS[backend]](key_BTGH, value_BTGH)


def length(layer: LayerCache) -> int:
  """Return the number of positions in the layer's cache."""
  return layer[0].shape[_axes(layer._fields[0]).index('S')]


def resized(layer: _Layer, size: int) -> _Layer:
  """Truncate or zero-pad a layer's cache to `size` positions, rounded up."""
  size = _round_up(type(layer), size)

  def resize(x: jax.Array, axes: str) -> jax.Array:
    axis = axes.index('S')
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, widths)

  return _constrain(_map_arrays(resize, layer))


def fitted(cache: Cache, sizes: Sequence[int], length_B: Array) -> Cache:
  """Resize each layer to its entry in `sizes`; shrunk layers keep the last positions (`ring`)."""
  return tuple(
    resized(ring(layer, size, length_B) if size < length(layer) else layer, size)
    for layer, size in zip(cache, sizes, strict=True)
  )


def ring(layer: _Layer, window: int, length_B: Array, start_B: Array | None = None) -> _Layer:
  """Keep each row's last `window` positions, laid out as the ring buffer that decoding uses.

  Position p is stored in slot p % window. `length_B` is each row's number of tokens, at least 1.
  `start_B` is the position in the layer where the row begins, by default 0.
  """
  place_W = jnp.arange(window)
  last_BW = length_B[:, None] - 1 - (length_B[:, None] - 1 - place_W) % window
  source_BW = jnp.maximum(last_BW, 0)  # unused slots of short rows are never read
  if start_B is not None:
    source_BW += start_B[:, None]

  def select(x: jax.Array, axes: str) -> jax.Array:
    axis = axes.index('S')
    index = source_BW.reshape(
      [-1 if name == 'B' else window if name == 'S' else 1 for name in axes]
    )
    return jnp.take_along_axis(x, index, axis)

  return _map_arrays(select, layer)


def constrained(cache: Cache) -> Cache:
  """Pin the cache's layout inside jit, with rows and heads split over their mesh axes."""
  return tuple(map(_constrain, cache))


def select_rows(cache: Cache, row_R: Array) -> Cache:
  """Select rows `row_R` of the cache."""
  return tuple(_constrain(jax.tree.map(lambda x: x[row_R], layer)) for layer in cache)


def replace_rows(cache: Cache, row_R: Array, replacement: Cache) -> Cache:
  """Write the R rows of `replacement` to rows `row_R` of the cache.

  Drops rows whose entry in `row_R` is out of range, and positions beyond the cache's length.
  If `replacement` is shorter than the cache, the remaining positions are unchanged.
  """

  def write(x: jax.Array, new: jax.Array) -> jax.Array:
    _, *inner = (slice(min(sizes)) for sizes in zip(x.shape, new.shape, strict=True))
    return x.at[row_R, *inner].set(new[:, *inner], mode='drop')

  return jax.tree.map(write, cache, replacement)


def unpack_rows(
  layer: LayerCache,
  packed_layer: LayerCache,
  row_R: Array,
  start_R: Array,
  length_R: Array,
  size: int,
) -> LayerCache:
  """Replace rows `row_R` of a layer's cache with consecutive rows from the packed sequences.

  Args:
    layer: the cache to write to; its contents beyond each row's length become meaningless.
    packed_layer: the layer's cache for the P packed sequences of T tokens.
    row_R: int32, rows of the cache; out-of-range rows are not written.
    start_R: int32, index of each row's first token among the P * T tokens.
    length_R: int32, number of tokens in each row, at least 1.
    size: number of tokens that the layer keeps per row: T, or the layer's window.
  """
  chex.assert_rank([row_R, start_R, length_R], 1)
  sequence_R, first_R = jnp.divmod(start_R, length(packed_layer))
  if size < length(packed_layer):
    (rows,) = select_rows((packed_layer,), sequence_R)
    return replace_rows((layer,), row_R, (ring(rows, size, length_R, first_R),))[0]
  arrays = [
    _copy_rows(x, sequences, _axes(name), row_R, sequence_R, first_R)
    for name, x, sequences in zip(layer._fields, layer, packed_layer, strict=True)
  ]
  return type(layer)(*arrays)


def write_token(
  layer: LayerCache, key_BGH: jax.Array, value_BGH: jax.Array, position_B: Array
) -> LayerCache:
  """Write each row's new key and value at the row's position.

  All positions must be below the cache's length, even in rows that are never read.
  """
  chex.assert_rank([key_BGH, value_BGH, position_B], [3, 3, 1])
  return _WRITE[type(layer)](layer, key_BGH, value_BGH, position_B)


def room_for(drafts: int) -> int:
  """Return the number of extra positions that a cache needs for passes with `drafts` drafts.

  Only the TPU kernel writes drafts to the cache before they are accepted.
  """
  return drafts + 1 if drafts and is_ragged(sharding.platform()) else 0


def attend(
  query_BNH: jax.Array, position_B: Array, layer: LayerCache, cap: float = 0.0
) -> jax.Array:
  """Attend from each row's rotated query to positions 0 .. position_B. [B, N, H] -> [B, N, H].

  Scores become cap * tanh(score / cap); a cap of 0 leaves them unchanged.
  """
  is_ragged = isinstance(layer, Ragged)
  G = layer.pair_BSCH.shape[2] // 2 if is_ragged else layer.value_BGSH.shape[1]
  dtype, H = str(layer[0].dtype), query_BNH.shape[-1]
  backend = backend_for(sharding.platform(), G, H, dtype, cap)
  return _ATTEND[backend](query_BNH, position_B, layer, cap)


def attend_new(
  query_BTNH: jax.Array,
  new_tokens: NewTokens,
  position_B: Array,
  layer: LayerCache,
  window: int = 0,
  cap: float = 0.0,
) -> tuple[jax.Array, LayerCache | NewTokens]:
  """Attend from T > 1 new tokens per row to the cache and the new tokens: [B, T, N, H].

  The cache contains each row's first `position_B` tokens. Usually, the new tokens are not written
  to the cache, because drafts that end up being rejected would overwrite tokens that a window still
  needs. The second result is then `new_tokens`. The TPU kernel, however, reads the new tokens from
  the cache. With this kernel, the second result is the updated cache.
  """
  if isinstance(layer, Ragged) and not window:
    return ragged_cache.attend_several(query_BTNH, new_tokens, position_B, layer, cap)
  plain_layer = ragged_cache.as_dense(layer) if isinstance(layer, Ragged) else layer
  mixed_BTNH = dense_cache.attend_new(query_BTNH, new_tokens, position_B, plain_layer, window, cap)
  return mixed_BTNH, new_tokens


_LAYOUTS: dict[str, type[LayerCache]] = {
  'transposed': Transposed,
  'dense': Dense,
  'cudnn': Dense,
  'ragged': Ragged,
}
_FROM_SEQUENCE: dict[type[LayerCache], Callable[..., LayerCache]] = {
  Transposed: dense_cache.transposed_from_sequence,
  Dense: dense_cache.dense_from_sequence,
  Ragged: ragged_cache.from_sequence,
}
_WRITE: dict[type[LayerCache], Callable[..., LayerCache]] = {
  Transposed: dense_cache.write_transposed,
  Dense: dense_cache.write_dense,
  Ragged: ragged_cache.write,
}
_ATTEND: dict[str, Callable[..., jax.Array]] = {
  'transposed': dense_cache.attend,
  'dense': dense_cache.attend,
  'cudnn': dense_cache.attend_on_gpu,
  'ragged': ragged_cache.attend,
}


def _copy_rows(
  x: jax.Array, sequences: jax.Array, axes: str, row_R: Array, sequence_R: Array, first_R: Array
) -> jax.Array:
  """Run `unpack_rows` on one array. Each device copies its own rows one by one, in place."""
  logical_axes = [_LOGICAL_AXES.get(axis) for axis in axes]
  copy = sharding.per_shard(
    functools.partial(_copy_own_rows, axes.index('S')),
    (logical_axes, [None, *logical_axes[1:]], ('batch',), (None,), (None,), (None,)),
    logical_axes,
  )
  return copy(x, sequences, jnp.arange(len(x)), row_R, sequence_R, first_R)


def _copy_own_rows(
  axis: int,
  x: jax.Array,
  sequences: jax.Array,
  number_B: jax.Array,
  row_R: jax.Array,
  sequence_R: jax.Array,
  first_R: jax.Array,
) -> jax.Array:
  """Run `_copy_rows` on one device, which stores rows `number_B`; `axis` is the position axis."""
  place_R = row_R - number_B[0]
  is_own_R = (place_R >= 0) & (place_R < len(number_B))
  order_R = jnp.argsort(~is_own_R)

  def copy(index: jax.Array, x: jax.Array) -> jax.Array:
    row = order_R[index]
    sequence = jax.lax.dynamic_index_in_dim(sequences, sequence_R[row])
    # Sizes must be static, so T positions are copied for rows of any length.
    two_copies = jnp.concatenate([sequence, sequence], axis)
    values = jax.lax.dynamic_slice_in_dim(two_copies, first_R[row], sequences.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, values, place_R[row], 0)

  return jax.lax.fori_loop(0, jnp.sum(is_own_R), copy, x)


def _round_up(layout: type[LayerCache], S: int) -> int:
  """Round S up to a length that the layout supports."""
  multiple = {Transposed: 1, Dense: dense_cache.MULTIPLE, Ragged: ragged_cache.PAGE}[layout]
  return multiple * math.ceil(S / multiple)


def _axes(name: str) -> str:
  """Return the dimension letters at the end of an array's name."""
  return name.rpartition('_')[2]


def _map_arrays(function: Callable[[jax.Array, str], jax.Array], layer: _Layer) -> _Layer:
  """Replace each array x in the layer with `function(x, dimension letters of x)`."""
  return type(layer)(*(function(x, _axes(name)) for name, x in layer._asdict().items()))


def _constrain(layer: _Layer) -> _Layer:
  return _map_arrays(
    lambda x, axes: sharding.constrain(x, [_LOGICAL_AXES.get(axis) for axis in axes]), layer
  )
