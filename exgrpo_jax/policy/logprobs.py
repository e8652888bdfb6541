"""Log-probabilities, entropies and losses from hidden states and the unembedding.

The hidden state at t - 1 predicts the token at t. `token_logprobs` shifts whole rows; training
gathers the states at the positions from `packing.predictors`. Logits exist for one chunk of
positions at a time, never for all [B, T] positions. Further shape letters: W target positions in a
sequence (its window), S positions in a chunk.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding

# (logp_BS, entropy_BS, operands_BS) -> (loss, sums); logp and entropy are float32, in nats.
TokenLoss = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
_Gradients = tuple[jax.Array, jax.Array]  # d_hidden_BWD, d_unembedding_DV


def predictor_states(hidden_BTD: jax.Array, position_BW: Array) -> jax.Array:
  """Gather the hidden states that predict a sequence's targets: [B, T, D] -> [B, W, D].

  `position_BW` (int32) is below T and increasing in each sequence (see `packing.predictors`).
  """
  chex.assert_rank([hidden_BTD, position_BW], [3, 2])

  def select(hidden_TD: jax.Array, position_W: Array) -> jax.Array:
    return hidden_TD.at[position_W].get(
      mode='promise_in_bounds', unique_indices=True, indices_are_sorted=True
    )

  return jax.vmap(select)(hidden_BTD, position_BW)


def token_logprobs(
  hidden_BTD: jax.Array,
  unembedding_DV: jax.Array,
  tokens_BT: Array,
  *,
  temperature: float,
  chunk: int,
  cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Compute each token's log-probability given the previous tokens, and the prediction's entropy.

  Use `fused_loss` for training. `hidden_BTD` are the hidden states after the final norm, and
  `unembedding_DV` has the same float dtype. Logits are divided by the sampling `temperature`.
  Only one chunk's logits are in memory at once: at most `chunk` tokens per shard of rows, but at
  least one position per row. For `cap`, see `capped`.

  Returns (logp_BT, entropy_BT), float32, in nats, aligned with tokens_BT (int32). Entry 0 is 0,
  because nothing predicts token 0.
  """
  chex.assert_rank([hidden_BTD, unembedding_DV, tokens_BT], [3, 2, 2])
  logp, entropy = target_logprobs(
    hidden_BTD[:, :-1], unembedding_DV, tokens_BT[:, 1:], temperature, chunk, cap
  )
  return jnp.pad(logp, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


def fused_loss(
  hidden_BWD: jax.Array,
  unembedding_DV: jax.Array,
  target_BW: Array,
  operands: Any,
  loss_of_tokens: TokenLoss,
  *,
  temperature: float,
  chunk: int,
  cap: float = 0.0,
) -> tuple[jax.Array, Any]:
  """Compute a token loss and, if differentiated, its gradient in a single pass over the logits.

  The logits' gradient follows in closed form from the loss's gradient with respect to
  log-probabilities and entropies. This takes three vocabulary-sized matrix products instead of
  four. The backward pass only scales and casts the result, as in Liger Kernel (arXiv:2410.10989).

  Args:
    hidden_BWD: hidden states; entry w predicts target w (see `predictor_states`); any float dtype.
    unembedding_DV: the unembedding, of the same dtype.
    target_BW: int32, the target tokens.
    operands: a pytree of [B, W] arrays, chunked like the targets; no gradient flows to them.
    loss_of_tokens: a `TokenLoss` that sums over positions, so that its gradient can be computed
      chunk by chunk. It may close over arrays that are not differentiated.
    temperature: the sampling temperature; logits are divided by it.
    chunk: see `token_logprobs`.
    cap: see `capped`.

  Returns:
    (loss, sums) over all positions. Only the loss has a gradient.
  """
  chex.assert_rank([hidden_BWD, unembedding_DV, target_BW], [3, 2, 2])
  chex.assert_shape(jax.tree.leaves(operands), target_BW.shape)
  head = temperature, chunk, cap

  @jax.custom_vjp
  def total(
    hidden_BWD: jax.Array, unembedding_DV: jax.Array, target_BW: Array, operands: Any
  ) -> tuple[jax.Array, Any]:
    return loss_of_tokens(*target_logprobs(hidden_BWD, unembedding_DV, target_BW, *head), operands)

  def forward(
    hidden_BWD: jax.Array, unembedding_DV: jax.Array, target_BW: Array, operands: Any
  ) -> tuple[tuple[jax.Array, Any], _Gradients]:
    logp_BW, entropy_BW, gradients = _logprobs_with_gradients(
      hidden_BWD, unembedding_DV, target_BW, operands, loss_of_tokens, *head
    )
    # Called once for all chunks, because a sum over rows on several devices is a collective.
    return loss_of_tokens(logp_BW, entropy_BW, operands), gradients

  def backward(
    gradients: _Gradients, cotangents: tuple[jax.Array, Any]
  ) -> tuple[jax.Array, jax.Array, None, None]:
    scale, _ = cotangents
    d_hidden_BWD, d_unembedding_DV = (scale * gradient for gradient in gradients)
    d_hidden_BWD = d_hidden_BWD.astype(hidden_BWD.dtype)
    return d_hidden_BWD, d_unembedding_DV.astype(unembedding_DV.dtype), None, None

  total.defvjp(forward, backward)
  return total(hidden_BWD, unembedding_DV, target_BW, operands)


def target_logprobs(
  hidden_BWD: jax.Array,
  unembedding_DV: jax.Array,
  target_BW: Array,
  temperature: float,
  chunk: int,
  cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Compute each target's log-probability and the prediction's entropy; state w predicts target w.

  [B, W, D], [D, V], int32 [B, W] -> (logp_BW, entropy_BW), float32, in nats. See `token_logprobs`
  for `temperature`, `chunk` and `cap`.
  """
  chex.assert_rank([hidden_BWD, unembedding_DV], [3, 2])
  chex.assert_shape(target_BW, hidden_BWD.shape[:2])
  num_rows, window = target_BW.shape
  num_chunks, size = chunk_sizes(num_rows, window, chunk)
  unembedding_DV = sharding.constrain(unembedding_DV, (None, 'vocab'))

  def score_chunk(states_and_targets: tuple[jax.Array, Array]) -> tuple[jax.Array, jax.Array]:
    hidden_BSD, target_BS = states_and_targets
    *_, logp_BS, entropy_BS = _distribution(hidden_BSD, unembedding_DV, target_BS, temperature, cap)
    return logp_BS, entropy_BS

  logp, entropy = jax.lax.map(
    score_chunk, tuple(_split_chunks(x, num_chunks, size) for x in (hidden_BWD, target_BW))
  )
  return _join_chunks(logp, window), _join_chunks(entropy, window)


def _logprobs_with_gradients(
  hidden_BWD: jax.Array,
  unembedding_DV: jax.Array,
  target_BW: Array,
  operands: Any,
  loss_of_tokens: TokenLoss,
  temperature: float,
  chunk: int,
  cap: float,
) -> tuple[jax.Array, jax.Array, _Gradients]:
  """Return (logp_BW, entropy_BW, gradients); the unembedding's gradient is float32."""
  num_rows, window = target_BW.shape
  num_chunks, size = chunk_sizes(num_rows, window, chunk)
  num_shards = sharding.num_shards('batch', num_rows)
  unembedding_DV = sharding.constrain(unembedding_DV, (None, 'vocab'))

  def add_chunk(
    d_unembedding_GDV: jax.Array, chunk: tuple[jax.Array, jax.Array, Any]
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    hidden_BSD, target_BS, operands_BS = chunk
    logits_BSV, logp_BSV, is_target_BSV, logp_BS, entropy_BS = _distribution(
      hidden_BSD, unembedding_DV, target_BS, temperature, cap
    )
    d_logp_BS, d_entropy_BS = jax.grad(
      lambda logp_BS, entropy_BS: loss_of_tokens(logp_BS, entropy_BS, operands_BS)[0], (0, 1)
    )(logp_BS, entropy_BS)
    # With respect to logits z: d logp = 1[target] - p, d entropy = -p (log p + entropy).
    slope_BSV = d_logp_BS[..., None] + d_entropy_BS[..., None] * (logp_BSV + entropy_BS[..., None])
    d_logits_BSV = (
      jnp.where(is_target_BSV, d_logp_BS[..., None], 0.0) - jnp.exp(logp_BSV) * slope_BSV
    ) / temperature
    d_logits_BSV = _gradient_before_cap(d_logits_BSV, logits_BSV, temperature, cap)
    # In the model's dtype, like all other gradients, because float32 products are far slower.
    d_logits_BSV = _constrain_logits(d_logits_BSV.astype(hidden_BSD.dtype))
    d_hidden_BSD = jnp.einsum(
      'bsv,dv->bsd', d_logits_BSV, unembedding_DV, preferred_element_type=jnp.float32
    )
    # One sum for each of G shards of rows, added up after the loop, because a single sum would be
    # all-reduced for every chunk.
    d_unembedding_GDV += jnp.einsum(
      'grsd,grsv->gdv',
      *(x.reshape(num_shards, -1, *x.shape[1:]) for x in (hidden_BSD, d_logits_BSV)),
      preferred_element_type=jnp.float32,
    )
    return (
      sharding.constrain(d_unembedding_GDV, ('batch', None, 'vocab')),
      (logp_BS, entropy_BS, d_hidden_BSD.astype(hidden_BSD.dtype)),
    )

  zeros_GDV = sharding.constrain(
    jnp.zeros((num_shards, *unembedding_DV.shape), jnp.float32), ('batch', None, 'vocab')
  )
  d_unembedding_GDV, chunk_results = jax.lax.scan(
    add_chunk,
    zeros_GDV,
    jax.tree.map(lambda x: _split_chunks(x, num_chunks, size), (hidden_BWD, target_BW, operands)),
  )
  logp_BW, entropy_BW, d_hidden_BWD = (_join_chunks(x, window) for x in chunk_results)
  d_unembedding_DV = sharding.constrain(d_unembedding_GDV.sum(axis=0), ('embed', 'vocab'))
  return logp_BW, entropy_BW, (d_hidden_BWD, d_unembedding_DV)


def capped(logits: jax.Array, cap: float) -> jax.Array:
  """Return cap * tanh(logits / cap), or the logits if cap is 0; apply before the temperature."""
  return cap * jnp.tanh(logits / cap) if cap else logits


def _gradient_before_cap(
  d_logits: jax.Array, logits: jax.Array, temperature: float, cap: float
) -> jax.Array:
  """Return the gradient with respect to the input of `capped`; tanh' is 1 - tanh^2."""
  return d_logits * (1 - (logits * (temperature / cap)) ** 2) if cap else d_logits


def _distribution(
  hidden_BSD: jax.Array, unembedding_DV: jax.Array, target_BS: Array, temperature: float, cap: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
  """Return (logits_BSV, logp_BSV, is_target_BSV, logp_BS of the targets, entropy_BS).

  All except is_target_BSV are float32.
  """
  product_BSV = jnp.einsum(
    'bsd,dv->bsv', hidden_BSD, unembedding_DV, preferred_element_type=jnp.float32
  )
  logits_BSV = _constrain_logits(capped(product_BSV, cap) / temperature)
  # jax.nn.log_softmax is avoided because XLA:CPU would materialize its result: one more array as
  # wide as the vocabulary.
  shifted_BSV = logits_BSV - jnp.max(logits_BSV, axis=-1, keepdims=True)
  total_BS = jnp.sum(jnp.exp(shifted_BSV), axis=-1)
  log_total_BS = jnp.log(total_BS)
  # A sum over a one-hot mask instead of a gather, because the vocabulary may be sharded.
  is_target_BSV = jnp.arange(logits_BSV.shape[-1]) == target_BS[..., None]
  logp_BS = jnp.sum(jnp.where(is_target_BSV, shifted_BSV, 0.0), axis=-1) - log_total_BS
  entropy_BS = log_total_BS - jnp.sum(jnp.exp(shifted_BSV) * shifted_BSV, axis=-1) / total_BS
  logp_BSV = shifted_BSV - log_total_BS[..., None]
  return logits_BSV, logp_BSV, is_target_BSV, logp_BS, entropy_BS


def _constrain_logits(x_BSV: jax.Array) -> jax.Array:
  return sharding.constrain(x_BSV, ('batch', None, 'vocab'))


def chunk_sizes(num_rows: int, window: int, chunk: int) -> tuple[int, int]:
  """Choose (number of chunks, positions per chunk) so that chunks are as even as possible."""
  # Split by position, not by row, so that rows stay on their devices and each device only computes
  # logits for its own rows.
  rows_per_shard = num_rows // sharding.num_shards('batch', num_rows)
  num_chunks = -(-window // max(1, chunk // rows_per_shard))
  return num_chunks, -(-window // num_chunks)


def _split_chunks(x: Array, num_chunks: int, size: int) -> jax.Array:
  """Split [B, W, …] into [chunks, B, S, …], padded with zeros at the end.

  All-zero hidden states add nothing to the unembedding's gradient, regardless of their loss.
  """
  num_rows, window = x.shape[:2]
  padded = jnp.pad(x, ((0, 0), (0, num_chunks * size - window)) + ((0, 0),) * (x.ndim - 2))
  return padded.reshape(num_rows, num_chunks, size, *x.shape[2:]).swapaxes(0, 1)


def _join_chunks(chunks: jax.Array, window: int) -> jax.Array:
  """Join [chunks, B, S, …] into [B, W, …]."""
  x = chunks.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :window]
