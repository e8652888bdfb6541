"""Causal self-attention over whole sequences, for training, scoring and prefill.

One function with three backends, none of which holds all scores of a long sequence at once:

  blockwise  plain JAX on any platform, in blocks of queries
  cudnn      NVIDIA's flash attention; bfloat16, and H a multiple of 8 up to 128 (Hopper: 256)
  splash     Pallas kernels for TPU

Decoding's attention to the cache is in kv_cache.py. Further shape letters: S keys,
R = N/G query heads that share a key/value head, Q queries of one block or strip.
"""

import functools
import math
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.matmul import on_matrix_units, product, transposed

BACKENDS = ('blockwise', 'cudnn', 'splash')
# Those in which a segment can continue another; splash's kernel compares one number per token.
_WITH_PREFIXES = ('blockwise', 'cudnn')

# In longer sequences only the scores of one block of queries exist at a time: 18 MiB per head in
# float32 for 9,216 keys.
_LONGEST_WHOLE = 1024
_BLOCK = 512
# In shorter ones, a strip of queries attends only to keys up to the strip's end. That saves a third
# of the scores at 192 tokens, and half of the time at 1,024. Narrower strips would make the matrix
# products inefficiently small.
_STRIP = 64
# Block sizes of splash attention are multiples of the number of lanes of a TPU's vector unit.
_LANES = 128


def backend_for(platform: str, dtype: str) -> str:
  """The fastest of BACKENDS on 'cpu', 'gpu' (or 'cuda') or 'tpu' for activations of `dtype`."""
  if platform == 'tpu':
    return 'splash'
  return 'cudnn' if platform in ('gpu', 'cuda') and dtype == 'bfloat16' else 'blockwise'


def has_prefixes(mesh: Mesh, dtype: str) -> bool:
  """Whether `causal` takes prefixes in the backend for a mesh's devices."""
  return backend_for(mesh.devices.flat[0].platform, dtype) in _WITH_PREFIXES


def causal(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  backend: str,
  segment_BT: Array | None = None,
  prefix_BT: Array | None = None,
) -> jax.Array:
  """Attends from each token to itself and earlier ones, within its segment and its prefix.

  softmax(query . key / sqrt(H)) in float32, over values; N/G consecutive query heads
  share a key/value head. On the mesh of `jax.set_mesh` each device computes its own rows
  and heads.

  Args:
    query_BTNH: rotated queries.
    key_BTGH: rotated keys, same dtype.
    value_BTGH: same dtype.
    backend: one of BACKENDS; any other is a KeyError.
    segment_BT: int32, tokens of equal number attend to each other; None is one segment per row.
    prefix_BT: int32, a segment to which a token attends beside its own; None where there is none,
      as where `has_prefixes` says so.

  Returns:
    [B, T, N, H] in the query's dtype.
  """
  chex.assert_rank(query_BTNH, 4)
  chex.assert_equal_shape([key_BTGH, value_BTGH])
  chex.assert_equal_shape_prefix([query_BTNH, key_BTGH], 2)
  attend = _ATTEND[backend]
  N, G = query_BTNH.shape[2], key_BTGH.shape[2]
  num_shards = sharding.num_shards('heads', N)
  repeats = num_shards // math.gcd(num_shards, G)
  if repeats > 1:  # more devices than key/value heads: each gets the heads its queries attend to
    key_BTGH, value_BTGH = (jnp.repeat(x, repeats, axis=2) for x in (key_BTGH, value_BTGH))
  axes = ('batch', None, 'heads', None)
  seen = tuple(x_BT for x_BT in (segment_BT, prefix_BT) if x_BT is not None)
  in_axes = (axes, axes, axes, *(('batch', None) for _ in seen))
  return sharding.per_shard(attend, in_axes, axes)(query_BTNH, key_BTGH, value_BTGH, *seen)


def scores_at_once(T: int) -> int:
  """Scores per head that 'blockwise' holds at once in a backward pass over T tokens."""
  if T > _LONGEST_WHOLE:
    return _BLOCK * T
  return sum(_STRIP * min(T, start + _STRIP) for start in range(0, T, _STRIP))


def _blockwise(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  *seen_BT: Array,
) -> jax.Array:
  """`seen_BT` are the numbers of the segments that a token attends to, its own first."""
  B, T, N, H = query_BTNH.shape
  G = key_BTGH.shape[2]
  # Queries are scaled rather than scores: there are more scores as soon as T exceeds H.
  query_BGRTH = (query_BTNH / math.sqrt(H)).reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4)
  key_BGHT, value_BGTH = key_BTGH.transpose(0, 2, 3, 1), value_BTGH.swapaxes(1, 2)
  attend = _attend_in_strips if T <= _LONGEST_WHOLE else _attend_in_blocks
  mixed_BGRTH = attend(query_BGRTH, key_BGHT, value_BGTH, seen_BT)
  return mixed_BGRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _attend_in_strips(
  query_BGRTH: jax.Array, key_BGHT: jax.Array, value_BGTH: jax.Array, seen: Sequence[Array]
) -> jax.Array:
  """For T of at most _LONGEST_WHOLE: all scores up to each strip's end exist at once."""

  def attend_strip(start: int) -> jax.Array:
    end = start + _STRIP
    return _attend(
      query_BGRTH[..., start:end, :],
      key_BGHT[..., :end],
      value_BGTH[..., :end, :],
      start,
      [x_BT[:, start:end] for x_BT in seen],
      [x_BT[:, :end] for x_BT in seen[:1]],
    )

  T = query_BGRTH.shape[3]
  return jnp.concatenate([attend_strip(start) for start in range(0, T, _STRIP)], axis=3)


def _attend_in_blocks(
  query_BGRTH: jax.Array, key_BGHT: jax.Array, value_BGTH: jax.Array, seen: Sequence[Array]
) -> jax.Array:
  """For any T: one block's scores exist at a time, and the backward pass recomputes them."""
  B, G, R, T, H = query_BGRTH.shape
  query_BGRTH = _pad_right(query_BGRTH, _BLOCK, axis=3)
  num_blocks = query_BGRTH.shape[3] // _BLOCK
  blocks = jnp.moveaxis(query_BGRTH.reshape(B, G, R, num_blocks, _BLOCK, H), 3, 0)

  of_queries = [  # block by block
    _pad_right(x_BT, _BLOCK, axis=1).reshape(B, num_blocks, _BLOCK).swapaxes(0, 1) for x_BT in seen
  ]

  # Without the checkpoint, the loop would store every block's weights for the backward pass.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend_block(block: tuple[jax.Array, jax.Array, list[jax.Array]]) -> jax.Array:
    query_BGRQH, start, seen_by_queries = block
    return _attend(query_BGRQH, key_BGHT, value_BGTH, start, seen_by_queries, seen[:1])

  mixed = jax.lax.map(attend_block, (blocks, _BLOCK * jnp.arange(num_blocks), of_queries))
  return jnp.moveaxis(mixed, 0, 3).reshape(B, G, R, -1, H)[:, :, :, :T]


def _attend(
  query_BGRQH: jax.Array,
  key_BGHS: jax.Array,
  value_BGSH: jax.Array,
  start: int | jax.Array,
  seen: Sequence[Array],
  segments: Sequence[Array],
) -> jax.Array:
  """Attends from scaled queries at positions start, start + 1, ... to keys at 0 .. S-1.

  `seen` are the numbers of the segments that each query attends to, its own first, [B, Q] each, and
  `segments` that of each key, one [B, S]; without any, every earlier key is seen.
  """
  B, G, R, Q, H = query_BGRQH.shape
  S = key_BGHS.shape[3]
  # One matrix product with M = R * Q rows, so that the keys are read only once.
  query_BGMH = query_BGRQH.reshape(B, G, R * Q, H)
  # The mask is added because XLA:CPU fuses an addition, but not a select. Finite in place of -inf.
  is_seen_QS = jnp.arange(S) <= start + jnp.arange(Q)[:, None]
  if not seen:
    mask_BGMS = jnp.tile(jnp.where(is_seen_QS, 0.0, -1e30), (R, 1))
  else:
    is_seen_BQS = is_seen_QS & _in_segments(seen, *segments)
    mask_BGMS = jnp.tile(jnp.where(is_seen_BQS, 0.0, -1e30), (1, R, 1))[:, None]
  mix = _mix_on_matrix_units if on_matrix_units(query_BGRQH.dtype) else _mix
  mixed_BGMH = mix(query_BGMH, key_BGHS, value_BGSH, mask_BGMS)
  return mixed_BGMH.reshape(B, G, R, Q, H)


def _in_segments(seen: Sequence[Array], segment_BS: Array) -> jax.Array:
  """Whether the key's segment is one of those that the query attends to: [B, Q, S]."""
  is_equal = (seen_BQ[:, :, None] == segment_BS[:, None] for seen_BQ in seen)
  return functools.reduce(jnp.logical_or, is_equal)


def _mix(
  query_BGMH: jax.Array, key_BGHS: jax.Array, value_BGSH: jax.Array, mask_BGMS: jax.Array
) -> jax.Array:
  """softmax(query . key + mask) over values, in the query's dtype."""
  return _mixed(query_BGMH, key_BGHS, value_BGSH, mask_BGMS)[0]


def _mixed(
  query_BGMH: jax.Array, key_BGHS: jax.Array, value_BGSH: jax.Array, mask_BGMS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(`_mix`, the weights before their division, in the value's dtype, and their totals)."""
  score_BGMS = jnp.einsum(
    'BGMH,BGHS->BGMS', query_BGMH, key_BGHS, preferred_element_type=jnp.float32
  )
  score_BGMS += mask_BGMS
  # No gradient through the maximum: it cancels out of the weights, whatever its value.
  weight_BGMS = jnp.exp(
    score_BGMS - jax.lax.stop_gradient(jnp.max(score_BGMS, axis=-1, keepdims=True))
  )
  cast_BGMS = weight_BGMS.astype(value_BGSH.dtype)
  mixed_BGMH = jnp.einsum(
    'BGMS,BGSH->BGMH', cast_BGMS, value_BGSH, preferred_element_type=jnp.float32
  )
  # Normalised last, where there are fewest entries to divide.
  total_BGM1 = jnp.sum(weight_BGMS, axis=-1, keepdims=True)
  mixed_BGMH /= total_BGM1
  return mixed_BGMH.astype(query_BGMH.dtype), cast_BGMS, total_BGM1


# Autodiff's products would have one operand in float32, and transpose the left one.
_mix_on_matrix_units = jax.custom_vjp(_mix)


def _mix_forward(
  query_BGMH: jax.Array, key_BGHS: jax.Array, value_BGSH: jax.Array, mask_BGMS: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  mixed_BGMH, *rest = _mixed(query_BGMH, key_BGHS, value_BGSH, mask_BGMS)
  return mixed_BGMH, (query_BGMH, key_BGHS, value_BGSH, mixed_BGMH, *rest)


def _mix_backward(
  residuals: tuple[jax.Array, ...], d_mixed_BGMH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  query_BGMH, key_BGHS, value_BGSH, mixed_BGMH, weight_BGMS, total_BGM1 = residuals
  # With mixed = (weight value) / total and total = sum of weights:
  # d weight_s = (d mixed . value_s - d mixed . mixed) / total, and d score = weight * d weight.
  d_exact_BGMH = d_mixed_BGMH.astype(jnp.float32) / total_BGM1
  inner_BGM1 = jnp.sum(d_exact_BGMH * mixed_BGMH, axis=-1, keepdims=True)
  d_BGMH = d_exact_BGMH.astype(query_BGMH.dtype)
  d_weight_BGMS = jnp.einsum(
    'BGMH,BGSH->BGMS', d_BGMH, value_BGSH, preferred_element_type=jnp.float32
  )
  d_score_BGMS = (weight_BGMS * (d_weight_BGMS - inner_BGM1)).astype(query_BGMH.dtype)
  return (
    product(d_score_BGMS, key_BGHS.swapaxes(2, 3)),
    product(transposed(query_BGMH), d_score_BGMS),
    product(transposed(weight_BGMS), d_BGMH),
    None,
  )


_mix_on_matrix_units.defvjp(_mix_forward, _mix_backward)


def _cudnn(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  *seen_BT: Array,
) -> jax.Array:
  mask_B1TT = None
  if seen_BT:
    # A mask of two bytes per pair of tokens, for JAX does not expose cuDNN's packed layout.
    seen = [_pad_right(x_BT, 2, axis=1) for x_BT in seen_BT]
    mask_B1TT = _in_segments(seen, seen[0])[:, None]
  # Padded because JAX has no backward pass for an odd T.
  mixed_BTNH: jax.Array = jax.nn.dot_product_attention(
    *(_pad_right(x, 2, axis=1) for x in (query_BTNH, key_BTGH, value_BTGH)),
    mask=mask_B1TT,
    implementation='cudnn',
    is_causal=True,
  )
  return mixed_BTNH[:, : query_BTNH.shape[1]]


def _splash(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  segment_BT: Array | None = None,
) -> jax.Array:
  _, T, N, H = query_BTNH.shape
  query_BNTH, key_BGTH, value_BGTH = (
    _pad_right(x, _LANES, axis=1).swapaxes(1, 2)
    for x in (query_BTNH / math.sqrt(H), key_BTGH, value_BTGH)
  )
  length = query_BNTH.shape[2]
  mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * N)
  attend = splash_attention.make_splash_mha_single_device(mask, block_sizes=_block_sizes(length))
  segments = None
  if segment_BT is not None:
    segment_BT = _pad_right(segment_BT, _LANES, axis=1)
    segments = splash_attention.SegmentIds(q=segment_BT, kv=segment_BT)
  mixed_BNTH = jax.vmap(attend)(query_BNTH, key_BGTH, value_BGTH, segments)
  assert isinstance(mixed_BNTH, jax.Array)  # a tuple only if residuals are saved
  return mixed_BNTH[:, :, :T].swapaxes(1, 2)


def _block_sizes(T: int) -> splash_attention.BlockSizes:
  """The largest blocks of at most _BLOCK that divide T, a multiple of _LANES."""
  size = max(size for size in range(_LANES, _BLOCK + 1, _LANES) if T % size == 0)
  return splash_attention.BlockSizes(
    block_q=size,
    block_kv=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_q_dq=size,
    block_kv_dq=size,
  )


def _pad_right(x: Array, multiple: int, axis: int) -> jax.Array:
  """Pads to a multiple on the right, where causality hides the padding from real queries."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, -x.shape[axis] % multiple
  return jnp.pad(x, widths)


_ATTEND = {'blockwise': _blockwise, 'cudnn': _cudnn, 'splash': _splash}
