"""From hidden states and the unembedding to log-probabilities, entropies and losses.

The one place that knows the token shift: the hidden state at t - 1 predicts the
token at t. Logits exist for one chunk of positions at a time, never [B, T, V].
"""

import jax
import jax.numpy as jnp

from exgrpo_jax.policy import sharding


def predictor_states(hidden_BTD, first_B, window: int):
  """The hidden states that predict tokens first_B … first_B + window - 1 of each row.

  Args:
    hidden_BTD: after the final norm.
    first_B: int32, at least 1: token 0 has no past.
    window: W, tokens of each row.

  Returns:
    hidden_BWD; where the window leaves the row it repeats the row's last state.
  """
  place_BW = first_B[:, None] - 1 + jnp.arange(window)
  place_BW = jnp.clip(place_BW, 0, hidden_BTD.shape[1] - 1)
  return jnp.take_along_axis(hidden_BTD, place_BW[..., None], axis=1)


def token_logprobs(hidden_BTD, unembedding_DV, tokens_BT, *, temperature: float, chunk: int):
  """Log-probability of every token given those before it, and the entropy there.

  Its backward pass computes the logits of a chunk again; `fused_loss` does not have to.

  Args:
    hidden_BTD: after the final norm, any float dtype.
    unembedding_DV: same dtype.
    tokens_BT: int32.
    temperature: that of sampling; logits are divided by it.
    chunk: positions times rows whose logits exist at once; at least one position.

  Returns:
    (logp_BT, entropy_BT), float32, nats, aligned with tokens_BT: entry t is of
    token t. Entry 0 has no past and is 0.
  """
  found = target_logprobs(hidden_BTD[:, :-1], unembedding_DV, tokens_BT[:, 1:], temperature, chunk)
  return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in found)


def fused_loss(
  hidden_BWD, unembedding_DV, target_BW, operands, loss_of_tokens, *, temperature: float, chunk: int
):
  """A token loss and, where it is differentiated, its gradient in the same pass over the logits.

  A chunk's logits give its log-probabilities and entropies, these the loss's gradient by
  both, and these in closed form that by the logits: three products with the vocabulary, where
  recomputing in the backward pass takes four. The backward pass only scales and casts. The
  idea, for cross-entropy, is Liger Kernel's (arXiv:2410.10989).

  Args:
    hidden_BWD: entry w predicts target w (`predictor_states`); any float dtype.
    unembedding_DV: same dtype.
    target_BW: int32.
    operands: a pytree of [B, W] and [B, 1] arrays, cut like the targets. No gradient reaches them.
    loss_of_tokens: (logp_BS, entropy_BS, operands_BS) -> (loss, sums). Its loss adds up over
      positions, so that its gradient can be taken chunk by chunk; both arguments are float32,
      nats. It may close over arrays, but not over any that are being differentiated.
    temperature: that of sampling; logits are divided by it.
    chunk: positions times rows whose logits exist at once; at least one position.

  Returns:
    (loss, sums) of all positions. Only the loss has a gradient.
  """

  @jax.custom_vjp
  def total(hidden_BWD, unembedding_DV, target_BW, operands):
    found = target_logprobs(hidden_BWD, unembedding_DV, target_BW, temperature, chunk)
    return loss_of_tokens(*found, operands)

  def forward(hidden_BWD, unembedding_DV, target_BW, operands):
    logp_BW, entropy_BW, *gradients = _scored_with_gradients(
      hidden_BWD, unembedding_DV, target_BW, operands, loss_of_tokens, temperature, chunk
    )
    # Once for all chunks: sums over rows that are spread over devices are collectives.
    return loss_of_tokens(logp_BW, entropy_BW, operands), gradients

  def backward(gradients, cotangents):
    scale, _ = cotangents
    d_hidden_BWD, d_unembedding_DV = (scale * gradient for gradient in gradients)
    return (
      d_hidden_BWD.astype(hidden_BWD.dtype),
      d_unembedding_DV.astype(unembedding_DV.dtype),
      None,
      None,
    )

  total.defvjp(forward, backward)
  return total(hidden_BWD, unembedding_DV, target_BW, operands)


def target_logprobs(hidden_BWD, unembedding_DV, target_BW, temperature, chunk):
  """Log-probability of each target and the entropy there: hidden state w predicts target w.

  [B, W, D], [D, V], int32 [B, W] -> (logp_BW, entropy_BW), float32, nats. `temperature` and
  `chunk` as in `token_logprobs`.
  """
  num_chunks, size = _chunks(*target_BW.shape, chunk)
  unembedding_DV = sharding.constrain(unembedding_DV, (None, 'vocab'))

  def of_chunk(pair):
    hidden_BSD, target_BS = pair
    *_, logp_BS, entropy_BS = _distribution(hidden_BSD, unembedding_DV, target_BS, temperature)
    return logp_BS, entropy_BS

  if num_chunks == 1:  # recomputing the only chunk backwards would save nothing
    return of_chunk((hidden_BWD, target_BW))
  stacked = jax.lax.map(
    jax.checkpoint(of_chunk), tuple(_cut(x, num_chunks, size) for x in (hidden_BWD, target_BW))
  )
  return tuple(_joined(x, target_BW.shape[1]) for x in stacked)


def _scored_with_gradients(
  hidden_BWD, unembedding_DV, target_BW, operands, loss_of_tokens, temperature, chunk
):
  """(logp_BW, entropy_BW, d_hidden_BWD, d_unembedding_DV), the last in float32."""
  num_rows, window = target_BW.shape
  num_chunks, size = _chunks(num_rows, window, chunk)
  num_shards = sharding.num_shards('batch', num_rows)
  unembedding_DV = sharding.constrain(unembedding_DV, (None, 'vocab'))

  def of_chunk(d_unembedding_GDV, chunk):
    hidden_BSD, target_BS, operands_BS = chunk
    logp_BSV, is_target_BSV, logp_BS, entropy_BS = _distribution(
      hidden_BSD, unembedding_DV, target_BS, temperature
    )
    d_logp_BS, d_entropy_BS = jax.grad(
      lambda *scored: loss_of_tokens(*scored, operands_BS)[0], (0, 1)
    )(logp_BS, entropy_BS)
    # By logits z: d logp = 1[target] - p, d entropy = -p (log p + entropy).
    slope_BSV = d_logp_BS[..., None] + d_entropy_BS[..., None] * (logp_BSV + entropy_BS[..., None])
    d_logits_BSV = (
      jnp.where(is_target_BSV, d_logp_BS[..., None], 0.0) - jnp.exp(logp_BSV) * slope_BSV
    ) / temperature
    # In the model's dtype, as every other gradient: products of float32 are many times slower.
    d_logits_BSV = _laid_out(d_logits_BSV.astype(hidden_BSD.dtype))
    d_hidden_BSD = jnp.einsum(
      'bsv,dv->bsd', d_logits_BSV, unembedding_DV, preferred_element_type=jnp.float32
    )
    # A sum for each shard of rows, added up behind the loop: one sum for all would cross the
    # devices in every chunk.
    d_unembedding_GDV += jnp.einsum(
      'grsd,grsv->gdv',
      *(x.reshape(num_shards, -1, *x.shape[1:]) for x in (hidden_BSD, d_logits_BSV)),
      preferred_element_type=jnp.float32,
    )
    return (
      sharding.constrain(d_unembedding_GDV, ('batch', None, 'vocab')),
      (logp_BS, entropy_BS, d_hidden_BSD.astype(hidden_BSD.dtype)),
    )

  start_GDV = sharding.constrain(
    jnp.zeros((num_shards, *unembedding_DV.shape), jnp.float32), ('batch', None, 'vocab')
  )
  d_unembedding_GDV, stacked = jax.lax.scan(
    of_chunk,
    start_GDV,
    jax.tree.map(lambda x: _cut(x, num_chunks, size), (hidden_BWD, target_BW, operands)),
  )
  return *(_joined(x, window) for x in stacked), sharding.constrain(
    d_unembedding_GDV.sum(axis=0), ('embed', 'vocab')
  )


def _distribution(hidden_BSD, unembedding_DV, target_BS, temperature):
  """(log p_BSV, is_target_BSV, log p of the target_BS, entropy_BS), float32."""
  logits_BSV = _laid_out(
    jnp.einsum('bsd,dv->bsv', hidden_BSD, unembedding_DV, preferred_element_type=jnp.float32)
    / temperature
  )
  # No gradient through the maximum: it cancels. And no log_softmax, whose result XLA's CPU would
  # store: one array more that is as wide as the vocabulary.
  above_BSV = logits_BSV - jax.lax.stop_gradient(jnp.max(logits_BSV, axis=-1, keepdims=True))
  total_BS = jnp.sum(jnp.exp(above_BSV), axis=-1)
  log_total_BS = jnp.log(total_BS)
  # A sum of selected entries, not a gather: the vocabulary may be spread over devices.
  is_target_BSV = jnp.arange(logits_BSV.shape[-1]) == target_BS[..., None]
  logp_BS = jnp.sum(jnp.where(is_target_BSV, above_BSV, 0.0), axis=-1) - log_total_BS
  entropy_BS = log_total_BS - jnp.sum(jnp.exp(above_BSV) * above_BSV, axis=-1) / total_BS
  return above_BSV - log_total_BS[..., None], is_target_BSV, logp_BS, entropy_BS


def _laid_out(x_BSV):
  return sharding.constrain(x_BSV, ('batch', None, 'vocab'))


def _chunks(num_rows, window, chunk):
  """(number of chunks, positions in each), as even as can be."""
  # By position, not by row: rows stay on the devices that hold them.
  num_chunks = -(-window // max(1, chunk // num_rows))
  return num_chunks, -(-window // num_chunks)


def _cut(x, num_chunks, size):
  """[B, W, …] -> [chunks, B, S, …], zeros behind the end; [B, 1] is every chunk's.

  Zero hidden states add nothing to the unembedding's gradient, whatever their loss.
  """
  num_rows, window = x.shape[:2]
  if window == 1:
    return jnp.broadcast_to(x, (num_chunks, *x.shape))
  padded = jnp.pad(x, ((0, 0), (0, num_chunks * size - window)) + ((0, 0),) * (x.ndim - 2))
  return padded.reshape(num_rows, num_chunks, size, *x.shape[2:]).swapaxes(0, 1)


def _joined(stacked, window):
  """[chunks, B, S, …] -> [B, W, …]."""
  x = stacked.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :window]
