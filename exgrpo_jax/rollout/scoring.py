"""Log-probabilities and entropies of written responses, by a forward pass."""

from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.datatypes import Array
from exgrpo_jax.packing import Segments, Shape, right_padded
from exgrpo_jax.policy import attention, logprobs, model, sharding
from exgrpo_jax.policy.sharding import jit_for_training
from exgrpo_jax.rollout import routes
from exgrpo_jax.runtime.compilations import Program

# About how many rows fit into a pass, on each part of the sequences.
_ROWS = 64


def score(
  config: model.ShapeConfig,
  params: model.Params,
  mesh: Mesh,
  rows: Sequence[tuple[np.ndarray, np.ndarray]],
  *,
  limit: int,
  tokens_per_pass: int,
  pad_id: int,
  temperature: float,
  logit_chunk: int,
  known: Sequence[np.ndarray | None] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Compute (log-probabilities, entropies) of response tokens, each [T] float32, nats.

  Rows are packed into sequences (see packing.py). Which rows share a sequence changes only
  rounding.

  Args:
    config: of the model.
    params: the policy.
    mesh: sequences are spread over its data axes.
    rows: (prompt, response) token arrays.
    limit: the longest row there can be, in tokens.
    tokens_per_pass: of one forward pass on each part of the sequences, with padding; >= `limit`.
    pad_id: any valid token.
    temperature: the temperature of sampling; logits are divided by it.
    logit_chunk: tokens whose logits exist at once, on each part of the rows.
    known: the routes of each row, None for the router's choice; see routes.py.
  """
  if not rows:
    return [], []
  tokens_RT, mask_RT = right_padded(rows, limit, pad_id)
  routes_RTLC = None if known is None else routes.padded(config, known, tokens_RT.shape[1])
  length_R = np.array([len(prompt) + len(response) for prompt, response in rows])
  logp_RT, entropy_RT = (np.zeros(mask_RT.shape, np.float32) for _ in range(2))
  # Every position is scored: no window bounds the response tokens of a sequence.
  prefixes = None
  if attention.has_prefixes(mesh):
    prompt_R = np.array([len(prompt) for prompt, _ in rows])
    prefixes = packing.shared_prompts(tokens_RT, prompt_R, routes_RTLC)
  shapes = pass_shapes(config, mesh, limit, tokens_per_pass)
  passes = packing.pack(length_R, np.zeros_like(length_R), *shapes, prefixes)
  for shape, sequences in passes:
    layout = packing.layout(shape, sequences, length_R, prefixes)
    routes_BTLC = None if routes_RTLC is None else layout.take(routes_RTLC)
    tokens_BT, segments, routes_BTLC = sharding.put(
      (layout.take(tokens_RT), layout.segments, routes_BTLC), sharding.batch(mesh, shape.count)
    )
    of_pass = tokens_BT, segments, temperature, logit_chunk, routes_BTLC
    scores = score_tokens(config, params, *of_pass)
    is_token_BT = np.asarray(layout.segments.segment_BT) > 0
    place = layout.row_BT[is_token_BT], layout.segments.position_BT[is_token_BT]
    for x_RT, x_BT in zip((logp_RT, entropy_RT), jax.device_get(scores), strict=True):
      x_RT[place] = x_BT[is_token_BT]
  logps, entropies = (
    [x_T[mask_T > 0] for x_T, mask_T in zip(x_RT, mask_RT, strict=True)]
    for x_RT in (logp_RT, entropy_RT)
  )
  return logps, entropies


def pass_shapes(
  config: model.ShapeConfig, mesh: Mesh, limit: int, tokens_per_pass: int
) -> tuple[Shape, Shape]:
  """Return the long and the short shape of a pass; arguments as in `score`."""
  _, num_shards = sharding.split(mesh, 'batch')
  num_rows = _ROWS * num_shards
  kind = attention.has_prefixes(mesh), model.is_tiny(config, mesh)
  return packing.shapes(num_shards, tokens_per_pass, limit, limit, num_rows, *kind)


def programs(
  config: model.ShapeConfig,
  params: model.Params,
  mesh: Mesh,
  *,
  limit: int,
  tokens_per_pass: int,
  temperature: float,
  logit_chunk: int,
  keeps_routes: bool,
  length_R: np.ndarray,
) -> Iterator[Program]:
  """Yield the programs of `score`; arguments as there.

  `length_R` are the tokens of the rows that a step scores. With `keeps_routes` they have routes.
  """
  shapes = pass_shapes(config, mesh, limit, tokens_per_pass)
  passes = packing.pack(length_R, np.zeros_like(length_R), *shapes) if len(length_R) else []
  for shape in dict.fromkeys(shapes):
    layout = sharding.batch(mesh, shape.count)
    sizes = shape.count, shape.length
    tokens_BT: Any = jax.ShapeDtypeStruct(sizes, np.int32, sharding=layout)
    segments = Segments(tokens_BT, tokens_BT, tokens_BT if attention.has_prefixes(mesh) else None)
    routes_BTLC = None
    if keeps_routes:
      dtype = np.dtype(config.route_dtype)
      routes_BTLC = jax.ShapeDtypeStruct((*sizes, *config.route_shape), dtype, sharding=layout)
    args = config, params, tokens_BT, segments, temperature, logit_chunk, routes_BTLC
    runs = sum(one.shape == shape for one in passes)
    yield Program('score', score_tokens, args, mesh, sizes, kept=params, runs=runs)


@jit_for_training(static_argnums=(0, 4, 5))
def score_tokens(
  config: model.ShapeConfig,
  params: model.Params,
  tokens_BT: Array,
  segments: Segments | None,
  temperature: float,
  logit_chunk: int,
  routes_BTLC: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Compute (logp_BT, entropy_BT), float32, nats, of every token under `params`.

  Nothing predicts the first token of a row. Its entries are meaningless, except at index 0, where
  they are 0. `segments` and routes as in `model.hidden_states_and_balance`.
  """
  chex.assert_rank(tokens_BT, 2)
  hidden_BTD = model.hidden_states(config, params, tokens_BT, segments, routes_BTLC=routes_BTLC)
  scores = logprobs.token_logprobs(
    hidden_BTD,
    model.unembedding(config, params),
    tokens_BT,
    temperature=temperature,
    chunk=logit_chunk,
    cap=config.logit_cap,
  )
  # Replicated because every host reads them.
  logp_BT, entropy_BT = (sharding.constrain(x_BT, (None, None)) for x_BT in scores)
  return logp_BT, entropy_BT
