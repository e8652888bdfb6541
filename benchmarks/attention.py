"""Attention backends compared with the textbook formula: values, gradients and time.

Shape letters are the same as in policy/attention.py.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.frame import LIMITS, Bench, Figure, difference, in_turns
from exgrpo_jax.policy import attention, kv_cache, sharding


def measure(bench: Bench) -> list[Figure]:
  """Measure every backend of the platform, on whole sequences and in decoding."""
  platform, dtype = sharding.platform(), bench.model.dtype
  backends = dict.fromkeys(('blockwise', attention.backend_for(platform, dtype)))
  found = [figure for backend in backends for figure in _causal(bench, backend)]
  with jax.set_mesh(bench.meshes.decoding):
    return found + _decoding(bench)


def formula(
  query_BTNH: jax.Array,
  key_BSGH: jax.Array,
  value_BSGH: jax.Array,
  is_seen_BTS: jax.Array | np.ndarray,
) -> jax.Array:
  """Compute attention in float32, with all scores at once."""
  N, H = query_BTNH.shape[2:]
  key_BSNH, value_BSNH = (
    jnp.repeat(x, N // x.shape[2], axis=2).astype(jnp.float32) for x in (key_BSGH, value_BSGH)
  )
  score_BNTS = jnp.einsum('BTNH,BSNH->BNTS', query_BTNH.astype(jnp.float32), key_BSNH)
  score_BNTS = jnp.where(is_seen_BTS[:, None], score_BNTS / math.sqrt(H), -jnp.inf)
  return jnp.einsum('BNTS,BSNH->BTNH', jax.nn.softmax(score_BNTS), value_BSNH)


def _causal(bench: Bench, backend: str) -> list[Figure]:
  """Measure a backend with three rows packed in each sequence, as in training."""
  shape, B, T = bench.model, bench.config.rollout.questions, bench.config.rollout.longest_row
  N, G, H = shape.num_heads, shape.num_kv_heads, shape.head_size
  arrays = _random(bench.meshes.training, shape.dtype, (B, T, N, H), (B, T, G, H), (B, T, G, H))
  place_T = np.arange(T)
  segment_T = 1 + (place_T >= T // 2) + (place_T >= T // 2 + T // 3)
  segment_BT = np.tile(segment_T.astype(np.int32), (B, 1))
  is_seen_BTS = np.tril(np.ones((T, T), bool)) & (segment_BT[:, :, None] == segment_BT[:, None])
  attend = functools.partial(attention.causal, backend=backend, segment_BT=segment_BT)
  ours, textbook = map(
    _with_gradient, (attend, functools.partial(formula, is_seen_BTS=is_seen_BTS))
  )
  seconds, of_formula = in_turns(
    bench.size.repeats, lambda: ours(*arrays), lambda: textbook(*arrays)
  )
  return [
    Figure(
      f'{backend}, difference',
      difference(ours(*arrays), textbook(*arrays)),
      'relative',
      'values and gradients, compared with the formula in float32',
      limit=LIMITS[shape.dtype],
    ),
    Figure(
      f'{backend}, time',
      1e3 * seconds,
      'ms',
      f'{B} sequences of {T:,} tokens with gradient, one layer; '
      f'the formula takes {of_formula / seconds:.2f} times as long',
    ),
  ]


def _decoding(bench: Bench) -> list[Figure]:
  """Measure the platform's decoding: one token per slot attends to the slot's cache."""
  shape, B, S = bench.model, bench.config.rollout.slots, bench.config.rollout.longest_row
  N, G, H = shape.num_heads, shape.num_kv_heads, shape.head_size
  query_BNH, key_BSGH, value_BSGH = _random(
    bench.meshes.decoding, shape.dtype, (B, N, H), (B, S, G, H), (B, S, G, H)
  )
  cache = jax.jit(lambda *pair: kv_cache.resized(kv_cache.from_sequence(*pair), S))(
    key_BSGH, value_BSGH
  )
  attend = jax.jit(kv_cache.attend)
  position_B = jnp.arange(B) * (S - 1) // max(1, B - 1)  # from an empty slot to a full one
  full_B = jnp.full(B, S - 1)
  [seconds] = in_turns(bench.size.repeats, lambda: attend(query_BNH, full_B, cache))
  is_seen_B1S = (jnp.arange(S) <= position_B[:, None])[:, None]
  expected = formula(query_BNH[:, None], key_BSGH, value_BSGH, is_seen_B1S)[:, 0]
  size = key_BSGH.nbytes + value_BSGH.nbytes
  backend = kv_cache.backend_for(sharding.platform(), G, H, shape.dtype)
  return [
    Figure(
      f'decode {backend}, difference',
      difference(attend(query_BNH, position_B, cache), expected),
      'relative',
      'compared with the formula in float32',
      limit=LIMITS[shape.dtype],
    ),
    Figure(f'decode {backend}, time', 1e3 * seconds, 'ms', f'{B} slots of {S:,} tokens, one layer'),
    Figure(
      f'decode {backend}, share',
      100 * size / seconds / bench.bandwidth / bench.meshes.decoding.size,
      '%',
      'of the bandwidth of a plain copy',
    ),
  ]


def _random(mesh: jax.sharding.Mesh, dtype: str, *shapes: Sequence[int]) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [
    jax.device_put(jax.random.normal(key, shape).astype(dtype), sharding.batch(mesh, shape[0]))
    for key, shape in zip(keys, shapes)
  ]


def _with_gradient(attend: Callable[..., jax.Array]) -> Callable[..., object]:
  """Return a function that computes the values and the gradients of the sum of their squares."""

  def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    values = attend(*qkv)
    return jnp.sum(values.astype(jnp.float32) ** 2), values

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
