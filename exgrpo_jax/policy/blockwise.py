"""Causal attention in plain JAX on any platform: the 'blockwise' backend of attention.py.

Further shape letters: S keys, R = N/G query heads per key/value head, Q queries in a block or
strip, M = R * Q.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy.matmul import is_fast_bfloat16, product, transposed

# For longer sequences, scores exist for only one block of queries at a time: 18 MiB per head in
# float32 for 9,216 keys.
_LONGEST_WHOLE = 1024
_BLOCK = 512
# For shorter sequences, a strip of queries only attends to keys up to the strip's end. This saves a
# third of the scores at 192 tokens, and half of the time at 1,024. With narrower strips, the matrix
# products would be inefficiently small.
_STRIP = 64


class Limits(NamedTuple):
  """Limits on the earlier tokens that a token attends to; each is [B, T], or None for no limit."""

  segment_BT: Array | None = None  # int32, tokens with the same number attend to each other
  prefix_BT: Array | None = None  # int32, a second segment that a token attends to
  position_BT: Array | None = None  # int32, needed if a window is combined with prefixes


def scores_at_once(T: int) -> int:
  """Return how many scores per head are in memory at once in a backward pass over T tokens."""
  if T > _LONGEST_WHOLE:
    return _BLOCK * T
  return sum(_STRIP * min(T, start + _STRIP) for start in range(0, T, _STRIP))


def attend(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  limits: Limits,
  window: int,
  cap: float,
) -> jax.Array:
  """Compute `attention.causal` with the 'blockwise' backend."""
  B, T, N, H = query_BTNH.shape
  G = key_BTGH.shape[2]
  # Scale the queries rather than the scores, which have more elements if T exceeds H.
  query_BGRTH = (query_BTNH / math.sqrt(H)).reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4)
  key_BGHT, value_BGTH = key_BTGH.transpose(0, 2, 3, 1), value_BTGH.swapaxes(1, 2)
  attend = _attend_in_strips if T <= _LONGEST_WHOLE else _attend_in_blocks
  mixed_BGRTH = attend(query_BGRTH, key_BGHT, value_BGTH, limits, window, cap)
  return mixed_BGRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _attend_in_strips(
  query_BGRTH: jax.Array,
  key_BGHT: jax.Array,
  value_BGTH: jax.Array,
  limits: Limits,
  window: int,
  cap: float,
) -> jax.Array:
  """Attend for T up to _LONGEST_WHOLE, with the scores of all strips in memory at once."""
  T = query_BGRTH.shape[3]
  num_keys = _num_keys(_STRIP, T, limits, window)

  def attend_strip(start: int) -> jax.Array:
    end = min(T, start + _STRIP)
    first = max(0, end - num_keys)
    return _attend(
      query_BGRTH[..., start:end, :],
      key_BGHT[..., first:end],
      value_BGTH[..., first:end, :],
      start - first,
      jax.tree.map(lambda x_BT: x_BT[:, start:end], limits),
      jax.tree.map(lambda x_BT: x_BT[:, first:end], limits),
      window,
      cap,
    )

  return jnp.concatenate([attend_strip(start) for start in range(0, T, _STRIP)], axis=3)


def _attend_in_blocks(
  query_BGRTH: jax.Array,
  key_BGHT: jax.Array,
  value_BGTH: jax.Array,
  limits: Limits,
  window: int,
  cap: float,
) -> jax.Array:
  """Attend for any T, one block of queries at a time; the backward pass recomputes the scores."""
  B, G, R, T, H = query_BGRTH.shape
  query_BGRTH = pad_right(query_BGRTH, _BLOCK, axis=3)
  num_blocks = query_BGRTH.shape[3] // _BLOCK
  blocks = jnp.moveaxis(query_BGRTH.reshape(B, G, R, num_blocks, _BLOCK, H), 3, 0)

  limit_blocks = jax.tree.map(  # block by block
    lambda x_BT: pad_right(x_BT, _BLOCK, axis=1).reshape(B, num_blocks, _BLOCK).swapaxes(0, 1),
    limits,
  )
  num_keys = _num_keys(_BLOCK, T, limits, window)

  # Without the checkpoint, the loop would store every block's weights for the backward pass.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend_block(block: tuple[jax.Array, jax.Array, Limits]) -> jax.Array:
    query_BGRQH, start, query_limits = block
    if num_keys == T:
      return _attend(query_BGRQH, key_BGHT, value_BGTH, start, query_limits, limits, window, cap)
    first = jnp.clip(start + _BLOCK - num_keys, 0, T - num_keys)

    def keys(x: Array, axis: int) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, first, num_keys, axis)

    return _attend(
      query_BGRQH,
      keys(key_BGHT, 3),
      keys(value_BGTH, 2),
      start - first,
      query_limits,
      jax.tree.map(lambda x_BT: keys(x_BT, 1), limits),
      window,
      cap,
    )

  mixed_blocks = jax.lax.map(attend_block, (blocks, _BLOCK * jnp.arange(num_blocks), limit_blocks))
  return jnp.moveaxis(mixed_blocks, 0, 3).reshape(B, G, R, -1, H)[:, :, :, :T]


def _attend(
  query_BGRQH: jax.Array,
  key_BGHS: jax.Array,
  value_BGSH: jax.Array,
  start: int | jax.Array,
  query_limits: Limits,
  key_limits: Limits,
  window: int,
  cap: float,
) -> jax.Array:
  """Attend from scaled queries at positions start, start + 1, ... to keys at 0 .. S-1."""
  B, G, R, Q, H = query_BGRQH.shape
  S = key_BGHS.shape[3]
  # One matrix product with M = R * Q rows, so that the keys are read only once.
  query_BGMH = query_BGRQH.reshape(B, G, R * Q, H)
  # The mask is added because XLA:CPU fuses an addition, but not a select. It is finite, not -inf.
  is_seen_QS = jnp.arange(S) <= start + jnp.arange(Q)[:, None]
  if window and query_limits.position_BT is None:
    is_seen_QS &= jnp.arange(S) > start - window + jnp.arange(Q)[:, None]
  if query_limits.segment_BT is None:
    mask_BGMS = jnp.tile(jnp.where(is_seen_QS, 0.0, -1e30), (R, 1))
  else:
    is_seen_BQS = is_seen_QS & in_segments(query_limits, key_limits, window)
    mask_BGMS = jnp.tile(jnp.where(is_seen_BQS, 0.0, -1e30), (1, R, 1))[:, None]
  if cap:
    mixed_BGMH = _mix_with_weights(query_BGMH, key_BGHS, value_BGSH, mask_BGMS, cap)[0]
  else:
    mix = _mix_in_bfloat16 if is_fast_bfloat16(query_BGRQH.dtype) else _mix
    mixed_BGMH = mix(query_BGMH, key_BGHS, value_BGSH, mask_BGMS)
  return mixed_BGMH.reshape(B, G, R, Q, H)


def _num_keys(num_queries: int, T: int, limits: Limits, window: int) -> int:
  """Return how many of the latest keys the queries attend to, rounded up to whole strips."""
  if not window or limits.prefix_BT is not None:  # a prefix may be anywhere earlier
    return T
  return min(T, _STRIP * math.ceil((num_queries + window - 1) / _STRIP))


def in_segments(query_limits: Limits, key_limits: Limits, window: int) -> jax.Array:
  """Return True where the query attends to the key's segment, within the window: [B, Q, S]."""
  assert query_limits.segment_BT is not None and key_limits.segment_BT is not None
  segment_BS = key_limits.segment_BT
  is_seen_BQS = query_limits.segment_BT[:, :, None] == segment_BS[:, None]
  if query_limits.prefix_BT is not None:
    is_seen_BQS |= query_limits.prefix_BT[:, :, None] == segment_BS[:, None]
  if query_limits.position_BT is not None and key_limits.position_BT is not None:
    ahead_BQS = query_limits.position_BT[:, :, None] - key_limits.position_BT[:, None]
    is_seen_BQS &= ahead_BQS < window
  return is_seen_BQS


def _mix(
  query_BGMH: jax.Array, key_BGHS: jax.Array, value_BGSH: jax.Array, mask_BGMS: jax.Array
) -> jax.Array:
  """Compute softmax(query . key + mask) value, in the query's dtype."""
  return _mix_with_weights(query_BGMH, key_BGHS, value_BGSH, mask_BGMS)[0]


def _mix_with_weights(
  query_BGMH: jax.Array,
  key_BGHS: jax.Array,
  value_BGSH: jax.Array,
  mask_BGMS: jax.Array,
  cap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return (result of `_mix`, unnormalized weights in the value's dtype, their totals)."""
  score_BGMS = jnp.einsum(
    'BGMH,BGHS->BGMS', query_BGMH, key_BGHS, preferred_element_type=jnp.float32
  )
  if cap:
    score_BGMS = cap * jnp.tanh(score_BGMS / cap)
  score_BGMS += mask_BGMS
  # No gradient flows through the maximum, because it cancels out.
  weight_BGMS = jnp.exp(
    score_BGMS - jax.lax.stop_gradient(jnp.max(score_BGMS, axis=-1, keepdims=True))
  )
  cast_BGMS = weight_BGMS.astype(value_BGSH.dtype)
  mixed_BGMH = jnp.einsum(
    'BGMS,BGSH->BGMH', cast_BGMS, value_BGSH, preferred_element_type=jnp.float32
  )
  # Normalize last, because the result has the fewest entries to divide.
  total_BGM1 = jnp.sum(weight_BGMS, axis=-1, keepdims=True)
  mixed_BGMH /= total_BGM1
  return mixed_BGMH.astype(query_BGMH.dtype), cast_BGMS, total_BGM1


# A custom gradient: autodiff's products would have a float32 operand and a transposed left operand.
_mix_in_bfloat16 = jax.custom_vjp(_mix)


def _mix_forward(
  query_BGMH: jax.Array, key_BGHS: jax.Array, value_BGSH: jax.Array, mask_BGMS: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  mixed_BGMH, *rest = _mix_with_weights(query_BGMH, key_BGHS, value_BGSH, mask_BGMS)
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


_mix_in_bfloat16.defvjp(_mix_forward, _mix_backward)


def pad_right(x: Array, multiple: int, axis: int) -> jax.Array:
  """Pad `axis` on the right to a multiple of `multiple`; causality hides the padding."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, -x.shape[axis] % multiple
  return jnp.pad(x, widths)
