"""From hidden states and the unembedding to log-probabilities and entropies.

The one place that knows the token shift: the hidden state at t - 1 predicts the
token at t. Logits exist for one chunk of positions at a time, never [B, T, V].
"""

import jax
import jax.numpy as jnp


def of_tokens(hidden_BTD, unembedding_DV, tokens_BT, *, temperature: float, chunk: int):
  """Log-probability of every token given those before it, and the entropy there.

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
  num_rows, length, width = hidden_BTD.shape
  # By position, not by row: rows stay on the devices that hold them.
  size = max(1, min(chunk // num_rows, length - 1))
  num_chunks = -(-(length - 1) // size)
  padding = num_chunks * size - (length - 1)
  hidden = jnp.pad(hidden_BTD[:, :-1], ((0, 0), (0, padding), (0, 0)))
  target = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, padding)))

  def of_chunk(pair):
    hidden_BSD, target_BS = pair
    logits = jnp.einsum('bsd,dv->bsv', hidden_BSD, unembedding_DV,
                        preferred_element_type=jnp.float32) / temperature
    logp = jax.nn.log_softmax(logits)
    entropy_BS = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.take_along_axis(logp, target_BS[..., None], axis=-1)[..., 0], entropy_BS

  if num_chunks == 1:  # recomputing the only chunk in the backward pass would save nothing
    values = of_chunk((hidden, target))
  else:
    chunks = (hidden.reshape(num_rows, num_chunks, size, width).swapaxes(0, 1),
              target.reshape(num_rows, num_chunks, size).swapaxes(0, 1))
    stacked = jax.lax.map(jax.checkpoint(of_chunk), chunks)
    values = [x.swapaxes(0, 1).reshape(num_rows, -1)[:, :length - 1] for x in stacked]
  return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in values)
