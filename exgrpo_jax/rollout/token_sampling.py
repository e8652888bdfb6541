"""Sampling tokens from logits, with temperature and truncation. Only truncation needs sorting.

Shape letters: C blocks of W tokens cover the vocabulary.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.policy import sharding

_LANES = 128  # block sizes are multiples of the widest vector register


@dataclasses.dataclass(frozen=True)
class Distribution:
  """The distribution that tokens are sampled from.

  Jitted programs are compiled separately for each distinct value.
  """

  temperature: float = 1.0  # 0 picks the most probable token
  top_k: int = 0  # keep only the k most probable tokens; 0 keeps all
  top_p: float = 1.0  # keep only the most probable tokens whose probabilities add up to this value
  min_p: float = 0.0  # keep only tokens with at least this fraction of the highest probability

  def __str__(self) -> str:
    """Describe the settings in use, such as 'temperature 0.6, top_p 0.95'."""
    values = dataclasses.asdict(self).items()
    settings = [(k, v) for k, v in values if k == 'temperature' or v != getattr(Distribution, k)]
    return ', '.join(f'{name} {value:g}' for name, value in settings)


def padded_size(vocab_size: int) -> int:
  """Pad the vocabulary size so that each shard of the vocabulary consists of whole blocks.

  Block sums then need no data from other shards. If the active mesh does not split the vocabulary,
  no padding is added.
  """
  num_shards = sharding.num_shards('vocab', vocab_size)
  if num_shards == 1:
    return vocab_size
  return _round_up(vocab_size, num_shards * _block_width(vocab_size))


def sample_token(
  distribution: Distribution,
  logits_BV: jax.Array,
  uniform_B2: jax.Array,
  vocab_size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sample a token per row by inverse CDF; return its log-probability and the entropy, in nats.

  Both values describe the sampling distribution, after temperature and truncation. Temperature
  0 picks the most probable token; both values are then computed at temperature 1. Sampling uses one
  uniform number to choose a block of the vocabulary, and another to choose a token in that block.

  Both input arrays are float32, and `uniform_B2` is in [0, 1). `vocab_size` is the number of real
  tokens, V by default; further columns are padding (see `padded_size`).

  Returns:
    (token_B int32, logp_B float32, entropy_B float32).
  """
  chex.assert_shape(uniform_B2, (len(logits_BV), 2))
  V = logits_BV.shape[-1]
  vocab_size = vocab_size or V
  logits_BV = logits_BV / (distribution.temperature or 1.0)
  if vocab_size < V:
    logits_BV = jnp.where(jnp.arange(V) < vocab_size, logits_BV, -jnp.inf)
  logits_BV = truncate(distribution, logits_BV)
  shifted_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
  weight_BV = jnp.exp(shifted_BV)
  width = _block_width(vocab_size)  # near the square root of the vocabulary size
  padded_BV = jnp.pad(weight_BV, ((0, 0), (0, _round_up(V, width) - V)))
  blocks_BCW = padded_BV.reshape(len(padded_BV), -1, width)
  # Replicated, like the chosen block's weights below. Both are small, and drawing from replicated
  # weights needs no sums over shards.
  block_BC = sharding.constrain(jnp.sum(blocks_BCW, axis=-1), ('batch', None))
  log_total_B = jnp.log(jnp.sum(block_BC, axis=-1))
  # Impossible tokens add 0, not 0 * -inf.
  product_BV = jnp.where(weight_BV > 0, weight_BV * shifted_BV, 0)
  entropy_B = log_total_B - jnp.sum(product_BV, axis=-1) * jnp.exp(-log_total_B)
  if distribution.temperature == 0:
    token_B = jnp.argmax(logits_BV, axis=-1)
  else:
    chosen_B = inverse_cdf(block_BC, uniform_B2[:, 0])
    within_BW = jnp.take_along_axis(blocks_BCW, chosen_B[:, None, None], axis=1)[:, 0]
    within_BW = sharding.constrain(within_BW, ('batch', None))
    token_B = chosen_B * within_BW.shape[-1] + inverse_cdf(within_BW, uniform_B2[:, 1])
  logp_B = jnp.take_along_axis(shifted_BV, token_B[:, None], axis=-1)[:, 0] - log_total_B
  return token_B.astype(jnp.int32), logp_B, entropy_B


def inverse_cdf(weight_BN: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """Return the first index with positive weight whose cumulative sum exceeds uniform * total.

  If rounding leaves no such index, the result is the last index with positive weight.
  float32 [B, N], [B] -> int [B].
  """
  chex.assert_rank([weight_BN, uniform_B], [2, 1])
  cumulative_BN = jnp.cumsum(weight_BN, axis=-1)
  possible_BN = weight_BN > 0
  beyond_BN = cumulative_BN > (uniform_B * cumulative_BN[:, -1])[:, None]
  last_B = weight_BN.shape[-1] - 1 - jnp.argmax(possible_BN[:, ::-1], axis=-1)
  return jnp.where(beyond_BN[:, -1], jnp.argmax(beyond_BN & possible_BN, axis=-1), last_B)


def truncate(distribution: Distribution, logits_BV: jax.Array) -> jax.Array:
  """Set logits to -inf outside top-k, then outside top-p of the rest, and then below min-p.

  All ties are kept.
  """
  if 0 < distribution.top_k < logits_BV.shape[-1]:
    least_B1 = jax.lax.top_k(logits_BV, distribution.top_k)[0][:, -1:]
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  if distribution.top_p < 1:
    falling_BV = -jnp.sort(-logits_BV, axis=-1)
    p_BV = jax.nn.softmax(falling_BV, axis=-1)
    needed_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < distribution.top_p  # the sum before each token
    # The first token is always kept, even if top_p is so small that rounding hides it.
    count_B1 = jnp.maximum(1, jnp.sum(needed_BV, axis=-1, keepdims=True))
    least_B1 = jnp.take_along_axis(falling_BV, count_B1 - 1, axis=-1)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  if distribution.min_p > 0:
    least_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + math.log(distribution.min_p)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  return logits_BV


def _block_width(vocab_size: int) -> int:
  return _round_up(math.ceil(math.sqrt(vocab_size)), _LANES)


def _round_up(size: int, multiple: int) -> int:
  return multiple * math.ceil(size / multiple)
