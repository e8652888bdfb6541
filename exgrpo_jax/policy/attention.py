"""Causal self-attention over whole sequences, for training, scoring and prefill.

None of the three backends materializes all scores of a long sequence:

  blockwise  plain JAX on any platform, in blocks of queries; see blockwise.py
  cudnn      NVIDIA's flash attention; bfloat16, H a multiple of 8 up to 128, no cap on scores
  splash     Pallas kernels for TPU

For attention over the cache during decoding, see kv_cache.py.
"""

import math

import chex
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import blockwise, dense_cache, sharding
from exgrpo_jax.policy.blockwise import Limits, in_segments, pad_right

BACKENDS = ('blockwise', 'cudnn', 'splash')
# Backends in which a segment can continue another segment. Splash supports one segment per token.
_WITH_PREFIXES = ('blockwise', 'cudnn')

# Splash attention's block sizes are multiples of the number of lanes in a TPU's vector unit.
_LANES, _BLOCK = 128, 512


def backend_for(platform: str, dtype: str, head_size: int = 128, cap: float = 0.0) -> str:
  """Choose the fastest of BACKENDS for `platform`: 'cpu', 'gpu' (or 'cuda') or 'tpu'.

  `dtype` is the activations' dtype, and `head_size` is H. A `cap` of 0 leaves scores unchanged.
  """
  if platform == 'tpu':
    return 'splash'
  is_supported = dense_cache.takes_on_gpu(head_size, dtype) and not cap
  return 'cudnn' if platform in ('gpu', 'cuda') and is_supported else 'blockwise'


def has_prefixes(mesh: Mesh) -> bool:
  """Return True if `causal` supports prefixes on the mesh's devices."""
  return backend_for(mesh.devices.flat[0].platform, 'bfloat16') in _WITH_PREFIXES


def causal(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  backend: str,
  segment_BT: Array | None = None,
  prefix_BT: Array | None = None,
  position_BT: Array | None = None,
  *,
  window: int = 0,
  cap: float = 0.0,
) -> jax.Array:
  """Attend from each token to itself and to earlier tokens of its segment and its prefix.

  Computes softmax(query . key / sqrt(H)) value, with the softmax in float32. N/G consecutive query
  heads share a key/value head. Each device of the active mesh (`jax.set_mesh`) computes its own
  rows and heads.

  Args:
    query_BTNH: rotated queries.
    key_BTGH: rotated keys, of the same dtype.
    value_BTGH: values, of the same dtype.
    backend: one of BACKENDS; any other value raises KeyError.
    segment_BT: int32; tokens with the same number attend to each other. None means that each
      sequence is one segment.
    prefix_BT: int32, a second segment that a token attends to; None means no prefixes. Must be None
      if `has_prefixes` is False.
    position_BT: int32, each token's position in its row; needed if there are prefixes and a window.
    window: number of tokens that a token attends to, including itself; 0 means no limit.
    cap: scores become cap * tanh(score / cap); 0 leaves them unchanged.

  Returns:
    [B, T, N, H] in the query's dtype.
  """
  chex.assert_rank(query_BTNH, 4)
  chex.assert_equal_shape([key_BTGH, value_BTGH])
  chex.assert_equal_shape_prefix([query_BTNH, key_BTGH], 2)
  window = 0 if window >= query_BTNH.shape[1] else window
  has_positions = window and prefix_BT is not None
  limits = Limits(segment_BT, prefix_BT, position_BT if has_positions else None)
  arrays, structure = jax.tree.flatten(limits)

  def attend(query: jax.Array, key: jax.Array, value: jax.Array, *arrays: Array) -> jax.Array:
    return _ATTEND[backend](query, key, value, structure.unflatten(arrays), window, cap)

  N, G = query_BTNH.shape[2], key_BTGH.shape[2]
  num_shards = sharding.num_shards('heads', N)
  repeats = num_shards // math.gcd(num_shards, G)
  if repeats > 1:  # more devices than key/value heads: repeat heads for the devices that need them
    key_BTGH, value_BTGH = (jnp.repeat(x, repeats, axis=2) for x in (key_BTGH, value_BTGH))
  axes = ('batch', None, 'heads', None)
  in_axes = (axes, axes, axes, *(('batch', None) for _ in arrays))
  return sharding.per_shard(attend, in_axes, axes)(query_BTNH, key_BTGH, value_BTGH, *arrays)


def _cudnn(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  limits: Limits,
  window: int,
  cap: float,
) -> jax.Array:
  assert not cap, cap
  mask_B1TT = None
  if limits.segment_BT is not None:
    # The mask takes two bytes per token pair because JAX does not expose cuDNN's packed layout.
    limits = jax.tree.map(lambda x_BT: pad_right(x_BT, 2, axis=1), limits)
    mask_B1TT = in_segments(limits, limits, window)[:, None]
  is_by_index = window and limits.position_BT is None
  # Pad, because JAX has no backward pass for an odd T.
  mixed_BTNH: jax.Array = jax.nn.dot_product_attention(
    *(pad_right(x, 2, axis=1) for x in (query_BTNH, key_BTGH, value_BTGH)),
    mask=mask_B1TT,
    implementation='cudnn',
    is_causal=True,
    local_window_size=(window - 1, 0) if is_by_index else None,
  )
  return mixed_BTNH[:, : query_BTNH.shape[1]]


def _splash(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  limits: Limits,
  window: int,
  cap: float,
) -> jax.Array:
  _, T, N, H = query_BTNH.shape
  query_BNTH, key_BGTH, value_BGTH = (
    pad_right(x, _LANES, axis=1).swapaxes(1, 2)
    for x in (query_BTNH / math.sqrt(H), key_BTGH, value_BTGH)
  )
  length = query_BNTH.shape[2]
  pairs = length, length
  mask = splash_attention.CausalMask(pairs)
  if window:
    mask = splash_attention.LocalMask(pairs, (window - 1, 0), offset=0)
  attend = splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([mask] * N),
    block_sizes=_block_sizes(length),
    attn_logits_soft_cap=cap or None,
  )
  segments = None
  if limits.segment_BT is not None:
    segment_BT = pad_right(limits.segment_BT, _LANES, axis=1)
    segments = splash_attention.SegmentIds(q=segment_BT, kv=segment_BT)
  mixed_BNTH = jax.vmap(attend)(query_BNTH, key_BGTH, value_BGTH, segments)
  assert isinstance(mixed_BNTH, jax.Array)  # a tuple only if residuals are saved
  return mixed_BNTH[:, :, :T].swapaxes(1, 2)


def _block_sizes(T: int) -> splash_attention.BlockSizes:
  """Choose the largest block size up to _BLOCK that divides T, which is a multiple of _LANES."""
  size = max(size for size in range(_LANES, _BLOCK + 1, _LANES) if T % size == 0)
  return splash_attention.BlockSizes(
    block_q=size,
    block_kv=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_q_dq=size,
    block_kv_dq=size,
  )


_ATTEND = {'blockwise': blockwise.attend, 'cudnn': _cudnn, 'splash': _splash}
