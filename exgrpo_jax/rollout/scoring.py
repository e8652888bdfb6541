"""Log-probabilities and entropies of responses that are already written, by a forward pass."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array
from exgrpo_jax.padding import length_bucket, right_padded, rows_within
from exgrpo_jax.policy import logprobs, model, sharding

# A pass has as many rows as the budget has room for, or half, a quarter or an eighth of them.
_LEAST_SHARE = 8


def score(
  config: model.Config,
  params: model.Params,
  mesh: Mesh,
  rows: Sequence[tuple[np.ndarray, np.ndarray]],
  *,
  limit: int,
  tokens_per_pass: int,
  pad_id: int,
  temperature: float,
  logit_chunk: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """(log-probabilities, entropies) of response tokens under `params`, each [T] float32, nats.

  Rows of similar length share a forward pass. How many do changes nothing but rounding.

  Args:
    config: of the model.
    params: the policy.
    mesh: rows are spread over its data axes.
    rows: (prompt, response) token arrays.
    limit: the longest row there can be, in tokens.
    tokens_per_pass: of one forward pass on each part of the rows, padding included; a row that is
      longer has a pass of its own.
    pad_id: any valid token.
    temperature: that of sampling; logits are divided by it.
    logit_chunk: tokens whose logits exist at once, on each part of the rows.
  """
  logp_of: dict[int, np.ndarray] = {}
  entropy_of: dict[int, np.ndarray] = {}
  lengths = [length_bucket(len(prompt) + len(response), limit) for prompt, response in rows]
  _, num_shards = sharding.split(mesh, 'batch')
  for length in sorted(set(lengths)):
    same = [row for row, bucket in enumerate(lengths) if bucket == length]
    room = rows_within(tokens_per_pass, length)
    for start in range(0, len(same), room * num_shards):
      chosen = same[start : start + room * num_shards]
      # Some rows are repeated, so that few numbers of rows are compiled.
      repeated = np.resize(chosen, num_shards * _num_rows(room, -(-len(chosen) // num_shards)))
      tokens_BT, mask_BT = right_padded([rows[row] for row in repeated], limit, pad_id)
      tokens_BT = sharding.put(tokens_BT, sharding.batch(mesh, len(tokens_BT)))
      logp_BT, entropy_BT = jax.device_get(
        score_tokens(config, params, tokens_BT, temperature, logit_chunk)
      )
      for b, row in enumerate(chosen):
        logp_of[row] = logp_BT[b, mask_BT[b] > 0]
        entropy_of[row] = entropy_BT[b, mask_BT[b] > 0]
  return [logp_of[row] for row in range(len(rows))], [entropy_of[row] for row in range(len(rows))]


def _num_rows(room: int, needed: int) -> int:
  """The least of room, room / 2, … room / _LEAST_SHARE that is at least `needed`."""
  count, least = room, max(1, room // _LEAST_SHARE)
  while count // 2 >= max(needed, least):
    count //= 2
  return count


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def score_tokens(
  config: model.Config,
  params: model.Params,
  tokens_BT: Array,
  temperature: float,
  logit_chunk: int,
) -> tuple[jax.Array, jax.Array]:
  """(logp_BT, entropy_BT), float32, nats, of every token under `params`; entry 0 is 0."""
  hidden_BTD = model.hidden_states(config, params, tokens_BT)
  scores = logprobs.token_logprobs(
    hidden_BTD,
    model.unembedding(config, params),
    tokens_BT,
    temperature=temperature,
    chunk=logit_chunk,
  )
  # Replicated, for every host reads them.
  logp_BT, entropy_BT = (sharding.constrain(x_BT, (None, None)) for x_BT in scores)
  return logp_BT, entropy_BT
