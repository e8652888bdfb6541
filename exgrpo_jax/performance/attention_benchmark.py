"""Attention's backends beside the textbook's formula: values, gradients and time.

Shape letters as in policy/attention.py.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.peaks import Peaks
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.performance.workload import Workload
from exgrpo_jax.policy import attention, kv_cache, sharding

# Of the largest difference, relative to the largest value.
LIMITS = {'bfloat16': 2e-2, 'float32': 1e-4}


def measure_causal(
  workload: Workload, mesh: Mesh, backend: str | None, peaks: Peaks
) -> list[Measurement]:
  """`attention.causal` by one of its backends, on rows of prompt and response.

  Of one row each, as in prefill, and packed, as in training. `backend` is one of those on the
  platform, by default the one that trains. Call it inside `jax.set_mesh(mesh)`.
  """
  shape, B, T = workload.model, workload.num_rows, workload.prompt + workload.response
  N, G, H = shape.num_heads, shape.num_kv_heads, shape.head_size
  arrays = _random(mesh, shape.dtype, (B, T, N, H), (B, T, G, H), (B, T, G, H), (B, T, N, H))
  segment_BT = jax.device_put(_segments(B, T), sharding.batch(mesh, B))
  backend = backend or attention.backend_for(sharding.platform(), shape.dtype)
  attend = functools.partial(attention.causal, backend=backend)
  whole, packed, reference, packed_reference = (
    _compiled(function)
    for function in (
      attend,
      functools.partial(attend, segment_BT=segment_BT),
      causal_reference,
      functools.partial(causal_reference, segment_BT=segment_BT),
    )
  )
  seconds, with_gradient, with_packed_gradient, of_reference = median_seconds(
    workload.repeats,
    *(
      functools.partial(_execute, function, args)
      for function, args in (
        (whole.values, arrays[:3]),
        (whole.gradients, arrays),
        (packed.gradients, arrays),
        (reference.values, arrays[:3]),
      )
    ),
  )
  flops = 2 * B * N * H * T**2  # two products, half of whose entries the mask leaves
  return [
    *_differences(shape.dtype, '', whole, reference, arrays),
    *_differences(shape.dtype, ', packed', packed, packed_reference, arrays),
    Measurement('forward', 1e3 * seconds, 'ms', f'{B} rows of {T:,} tokens, one layer'),
    Measurement('with gradient', 1e3 * with_gradient, 'ms', 'forward and backward'),
    Measurement(
      'with gradient, packed', 1e3 * with_packed_gradient, 'ms', 'three rows in each sequence'
    ),
    Measurement('reference, forward', 1e3 * of_reference, 'ms', 'the formula in float32'),
    Measurement(
      'share of FLOPs',
      100 * flops / seconds / peaks.flops / mesh.size,
      '%',
      f'of {peaks.note}, forward: {flops / seconds / 1e12:.3g} TFLOP/s',
    ),
  ]


def causal_reference(
  query_BTNH: jax.Array,
  key_BTGH: jax.Array,
  value_BTGH: jax.Array,
  segment_BT: jax.Array | None = None,
) -> jax.Array:
  """Causal attention in float32, with all scores at once; to a token's own segment."""
  _, T, N, H = query_BTNH.shape
  key_BTNH, value_BTNH = (
    jnp.repeat(x, N // x.shape[2], axis=2).astype(jnp.float32) for x in (key_BTGH, value_BTGH)
  )
  score_BNTS = jnp.einsum('BTNH,BSNH->BNTS', query_BTNH.astype(jnp.float32), key_BTNH)
  is_seen = jnp.tril(jnp.ones((T, T), bool))
  if segment_BT is not None:
    is_seen = (is_seen & (segment_BT[:, :, None] == segment_BT[:, None]))[:, None]
  weight_BNTS = jax.nn.softmax(jnp.where(is_seen, score_BNTS / math.sqrt(H), -jnp.inf))
  return jnp.einsum('BNTS,BSNH->BTNH', weight_BNTS, value_BTNH)


def measure_decoding(
  workload: Workload, mesh: Mesh, backend: str | None, peaks: Peaks
) -> list[Measurement]:
  """`kv_cache.attend`: a token of each slot beside a cache of prompt and response.

  `backend` is one of those on the platform, by default the one that decodes. Call it
  inside `jax.set_mesh(mesh)`.
  """
  shape, B, S = workload.model, workload.slots, workload.prompt + workload.response
  N, G, H = shape.num_heads, shape.num_kv_heads, shape.head_size
  query_BNH, key_BSGH, value_BSGH = _random(
    mesh, shape.dtype, (B, N, H), (B, S, G, H), (B, S, G, H)
  )
  position_B = jnp.arange(B) * (S - 1) // max(1, B - 1)  # from an empty slot to a full one
  cache = jax.jit(lambda *pair: kv_cache.resized(kv_cache.from_sequence(*pair), S))(
    key_BSGH, value_BSGH
  )
  attend = jax.jit(functools.partial(kv_cache.attend, backend=backend))
  full_B = jnp.full(B, S - 1)
  (seconds,) = median_seconds(
    workload.repeats, lambda: jax.block_until_ready(attend(query_BNH, full_B, cache))
  )
  size = jnp.dtype(shape.dtype).itemsize * (key_BSGH.size + value_BSGH.size)
  return [
    _difference(
      shape.dtype,
      'values',
      attend(query_BNH, position_B, cache),
      decoding_reference(query_BNH, position_B, key_BSGH, value_BSGH),
    ),
    Measurement('a token', 1e3 * seconds, 'ms', f'{B} slots of {S:,} tokens each, one layer'),
    Measurement(
      'share of bandwidth',
      100 * size / seconds / peaks.bandwidth / mesh.size,
      '%',
      f'of {peaks.note}: {size / seconds / 1e9:.3g} GB/s of the cache',
    ),
  ]


@jax.jit
def decoding_reference(
  query_BNH: jax.Array, position_B: jax.Array, key_BSGH: jax.Array, value_BSGH: jax.Array
) -> jax.Array:
  """Attention of each row's query to positions 0 .. position_B, in float32."""
  _, N, H = query_BNH.shape
  key_BSNH, value_BSNH = (
    jnp.repeat(x, N // x.shape[2], axis=2).astype(jnp.float32) for x in (key_BSGH, value_BSGH)
  )
  score_BNS = jnp.einsum('BNH,BSNH->BNS', query_BNH.astype(jnp.float32), key_BSNH)
  seen_BNS = (jnp.arange(key_BSGH.shape[1]) <= position_B[:, None])[:, None]
  weight_BNS = jax.nn.softmax(jnp.where(seen_BNS, score_BNS / math.sqrt(H), -jnp.inf))
  return jnp.einsum('BNS,BSNH->BNH', weight_BNS, value_BSNH)


def _random(mesh: Mesh, dtype: str, *shapes: Sequence[int]) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [
    jax.device_put(jax.random.normal(key, shape).astype(dtype), sharding.batch(mesh, shape[0]))
    for key, shape in zip(keys, shapes)
  ]


def _segments(B: int, T: int) -> np.ndarray:
  """[B, T] int32: a row of a half of each sequence, one of a third, and one of the rest."""
  place_T = np.arange(T)
  segment_T = 1 + (place_T >= T // 2) + (place_T >= T // 2 + T // 3)
  return np.tile(segment_T.astype(np.int32), (B, 1))


class _Compiled(NamedTuple):
  """One form of attention; each function is compiled at its first call."""

  values: Callable[..., jax.Array]  # of queries, keys and values
  # Of these and a direction: with respect to the three, of the values' product with it.
  gradients: Callable[..., tuple[jax.Array, ...]]


def _compiled(attend: Callable[..., jax.Array]) -> _Compiled:
  def product(*arrays: jax.Array) -> jax.Array:
    return jnp.sum(attend(*arrays[:3]).astype(jnp.float32) * arrays[3].astype(jnp.float32))

  return _Compiled(jax.jit(attend), jax.jit(jax.grad(product, argnums=(0, 1, 2))))


def _execute(function: Callable[..., object], args: Sequence[jax.Array]) -> None:
  jax.block_until_ready(function(*args))


def _differences(
  dtype: str,
  suffix: str,
  found: _Compiled,
  reference: _Compiled,
  arrays: Sequence[jax.Array],
) -> list[Measurement]:
  """Of values and of gradients."""
  values = (form.values(*arrays[:3]) for form in (found, reference))
  gradients = (form.gradients(*arrays) for form in (found, reference))
  return [
    _difference(dtype, f'values{suffix}', *values),
    _difference(dtype, f'gradients{suffix}', *gradients),
  ]


def _difference(dtype: str, name: str, found: object, reference: object) -> Measurement:
  """The largest of the differences between two trees of arrays, relative to the largest value."""
  value = max(
    float(jnp.max(jnp.abs(x.astype(jnp.float32) - y)) / jnp.max(jnp.abs(y)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True)
  )
  meaning = 'the largest difference from the formula in float32, of the largest value'
  return Measurement(name, value, 'relative', meaning, limit=LIMITS[dtype])
