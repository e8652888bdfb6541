"""Causal self-attention over whole sequences, for training, scoring and prefill.

One function, three kinds of it; none ever holds the scores of a long sequence:

  blockwise  plain JAX, on any platform, in blocks of queries
  cudnn      NVIDIA's flash attention; bfloat16, and H a multiple of 8 up to 128 (Hopper: 256)
  splash     Pallas kernels for TPU

Attention to a cache while decoding is in cache.py. Further shape letters: S keys,
R = N/G query heads that share a key/value head, Q queries of one block or strip.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from exgrpo_jax.policy import sharding

KINDS = ('blockwise', 'cudnn', 'splash')

# Queries whose scores are held at a time. float32 scores of a block at 9,216 keys: 18 MiB a head.
_BLOCK = 512
# Within a block, queries see keys up to the end of their own strip only, which at 192 tokens
# spares a third of the scores. Narrower strips make the matrix products too small to pay.
_STRIP = 64
# Splash attention's blocks are multiples of the lanes of a TPU's vector unit.
_LANES = 128


def backend_for(platform: str, dtype: str) -> str:
  """The fastest of KINDS on 'cpu', 'gpu' (or 'cuda') or 'tpu' for activations of `dtype`."""
  if platform == 'tpu':
    return 'splash'
  return 'cudnn' if platform in ('gpu', 'cuda') and dtype == 'bfloat16' else 'blockwise'


def causal(
  query_BTNH: jax.Array, key_BTGH: jax.Array, value_BTGH: jax.Array, kind: str
) -> jax.Array:
  """What each query finds at its own position and before; positions are 0 .. T-1.

  softmax(query . key / sqrt(H)) in float32, over values; N/G consecutive query heads
  share a key/value head. On the mesh of `jax.set_mesh` every device attends for its
  own rows and heads. `kind` is one of KINDS; another is a KeyError.
  [B, T, N, H] and twice [B, T, G, H] -> [B, T, N, H], in the query's dtype.
  """
  N, G = query_BTNH.shape[2], key_BTGH.shape[2]
  num_shards = sharding.num_shards('heads', N)
  repeats = num_shards // math.gcd(num_shards, G)
  if repeats > 1:  # more devices than key/value heads: each gets those that its queries read
    key_BTGH, value_BTGH = (jnp.repeat(x, repeats, axis=2) for x in (key_BTGH, value_BTGH))
  axes = ('batch', None, 'heads', None)
  attend = sharding.per_shard(_ATTEND[kind], (axes, axes, axes), axes)
  return attend(query_BTNH, key_BTGH, value_BTGH)


def _blockwise(query_BTNH, key_BTGH, value_BTGH):
  B, T, N, H = query_BTNH.shape
  G = key_BTGH.shape[2]
  # Scaled here and not as scores, of which there are more as soon as T is above H.
  query_BGRTH = (query_BTNH / math.sqrt(H)).reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4)
  key_BGHT, value_BGTH = key_BTGH.transpose(0, 2, 3, 1), value_BTGH.swapaxes(1, 2)
  attend = _in_strips if T <= _BLOCK else _in_blocks
  mixed_BGRTH = attend(query_BGRTH, key_BGHT, value_BGTH)
  return mixed_BGRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _in_strips(query_BGRTH, key_BGHT, value_BGTH):
  """For T of one block at most: all scores are held, of keys that some query may see."""

  def strip(first):
    end = first + _STRIP
    return _attend(
      query_BGRTH[..., first:end, :], key_BGHT[..., :end], value_BGTH[..., :end, :], first
    )

  T = query_BGRTH.shape[3]
  return jnp.concatenate([strip(first) for first in range(0, T, _STRIP)], axis=3)


def _in_blocks(query_BGRTH, key_BGHT, value_BGTH):
  """For any T: one block's scores are held at a time, and computed again backward."""
  B, G, R, T, H = query_BGRTH.shape
  query_BGRTH = _padded(query_BGRTH, _BLOCK, axis=3)
  num_blocks = query_BGRTH.shape[3] // _BLOCK
  blocks = jnp.moveaxis(query_BGRTH.reshape(B, G, R, num_blocks, _BLOCK, H), 3, 0)

  # Without the checkpoint the loop would keep every block's weights for its backward pass.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def block(query_and_first):
    query_BGRQH, first = query_and_first
    return _attend(query_BGRQH, key_BGHT, value_BGTH, first)

  mixed = jax.lax.map(block, (blocks, _BLOCK * jnp.arange(num_blocks)))
  return jnp.moveaxis(mixed, 0, 3).reshape(B, G, R, -1, H)[:, :, :, :T]


def _attend(query_BGRQH, key_BGHS, value_BGSH, first):
  """Scaled queries at positions first, first + 1, ... to keys at 0 .. S-1."""
  B, G, R, Q, H = query_BGRQH.shape
  S = key_BGHS.shape[3]
  # The R heads as rows of one matrix product, M = R * Q of them: the keys are read once.
  query_BGMH = query_BGRQH.reshape(B, G, R * Q, H)
  score_BGMS = jnp.einsum(
    'BGMH,BGHS->BGMS', query_BGMH, key_BGHS, preferred_element_type=jnp.float32
  )
  # Added, which XLA's CPU fuses; a select it does not. A finite stand-in for -inf.
  unseen_QS = jnp.where(jnp.arange(S) <= first + jnp.arange(Q)[:, None], 0.0, -1e30)
  score_BGMS += jnp.tile(unseen_QS, (R, 1))
  # No gradient through the maximum: it cancels out of the weights, whatever it is.
  weight_BGMS = jnp.exp(
    score_BGMS - jax.lax.stop_gradient(jnp.max(score_BGMS, axis=-1, keepdims=True))
  )
  mixed_BGMH = jnp.einsum(
    'BGMS,BGSH->BGMH',
    weight_BGMS.astype(value_BGSH.dtype),
    value_BGSH,
    preferred_element_type=jnp.float32,
  )
  # Divided by the weights' sum last, where there is the least to divide.
  mixed_BGMH /= jnp.sum(weight_BGMS, axis=-1, keepdims=True)
  return mixed_BGMH.astype(query_BGRQH.dtype).reshape(B, G, R, Q, H)


def _cudnn(query_BTNH, key_BTGH, value_BTGH):
  # JAX refuses the backward pass of an odd T.
  mixed_BTNH = jax.nn.dot_product_attention(
    *(_padded(x, 2, axis=1) for x in (query_BTNH, key_BTGH, value_BTGH)),
    implementation='cudnn',
    is_causal=True,
  )
  return mixed_BTNH[:, : query_BTNH.shape[1]]


def _splash(query_BTNH, key_BTGH, value_BTGH):
  _, T, N, H = query_BTNH.shape
  query_BNTH, key_BGTH, value_BGTH = (
    _padded(x, _LANES, axis=1).swapaxes(1, 2)
    for x in (query_BTNH / math.sqrt(H), key_BTGH, value_BTGH)
  )
  length = query_BNTH.shape[2]
  mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * N)
  attend = splash_attention.make_splash_mha_single_device(mask, block_sizes=_block_sizes(length))
  return jax.vmap(attend)(query_BNTH, key_BGTH, value_BGTH)[:, :, :T].swapaxes(1, 2)


def _block_sizes(T):
  """The widest blocks of at most _BLOCK that divide T, a multiple of _LANES."""
  size = max(size for size in range(_LANES, _BLOCK + 1, _LANES) if T % size == 0)
  return splash_attention.BlockSizes(
    block_q=size,
    block_kv=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_q_dq=size,
    block_kv_dq=size,
  )


def _padded(x, multiple, axis):
  """On the right, where causality keeps it from every query that counts."""
  room = [(0, 0)] * x.ndim
  room[axis] = 0, -x.shape[axis] % multiple
  return jnp.pad(x, room)


_ATTEND = dict(zip(KINDS, (_blockwise, _cudnn, _splash)))
