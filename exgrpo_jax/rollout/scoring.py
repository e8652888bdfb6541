"""Log-probabilities and entropies of written responses, by a forward pass."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
  """The settings of `score`."""

  model: model.ShapeConfig
  mesh: Mesh  # sequences are spread over its data axes
  limit: int  # tokens of the longest row there can be
  tokens_per_pass: int  # of one forward pass on each part of the sequences, with padding; >= limit
  temperature: float  # of sampling; logits are divided by it
  logit_chunk: int  # tokens whose logits exist at once, on each part of the rows
  keeps_routes: bool = False  # whether rows may have routes, see routes.py


def score(
  spec: ScoreSpec,
  params: model.Params,
  rows: Sequence[tuple[np.ndarray, np.ndarray]],
  known: Sequence[np.ndarray | None] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Compute (log-probabilities, entropies) of response tokens, each [T] float32, nats.

  `rows` are (prompt, response) token arrays. They are packed into sequences (see packing.py). Which
  rows share a sequence changes only rounding. `known` are the routes of each row if
  `spec.keeps_routes`; None is the router's choice.
  """
  if not rows:
    return [], []
  tokens_RT, mask_RT = right_padded(rows, spec.limit, pad_id=0)
  routes_RTLC = None
  if spec.keeps_routes:  # one program, whether they are known or not
    routes_RTLC = routes.padded(spec.model, known or [None] * len(rows), tokens_RT.shape[1])
  length_R = np.array([len(prompt) + len(response) for prompt, response in rows])
  logp_RT, entropy_RT = (np.zeros(mask_RT.shape, np.float32) for _ in range(2))
  # Every position is scored: no window bounds the response tokens of a sequence.
  prefixes = None
  if attention.has_prefixes(spec.mesh):
    prompt_R = np.array([len(prompt) for prompt, _ in rows])
    prefixes = packing.shared_prompts(tokens_RT, prompt_R, routes_RTLC)
  passes = packing.pack(length_R, np.zeros_like(length_R), *_shapes(spec), prefixes)
  for shape, sequences in passes:
    layout = packing.layout(shape, sequences, length_R, prefixes)
    routes_BTLC = None if routes_RTLC is None else layout.take(routes_RTLC)
    tokens_BT, segments, routes_BTLC = sharding.put(
      (layout.take(tokens_RT), layout.segments, routes_BTLC), sharding.batch(spec.mesh, shape.count)
    )
    of_pass = tokens_BT, segments, spec.temperature, spec.logit_chunk, routes_BTLC
    scores = score_tokens(spec.model, params, *of_pass)
    is_token_BT = np.asarray(layout.segments.segment_BT) > 0
    place = layout.row_BT[is_token_BT], layout.segments.position_BT[is_token_BT]
    for x_RT, x_BT in zip((logp_RT, entropy_RT), jax.device_get(scores), strict=True):
      x_RT[place] = x_BT[is_token_BT]
  logps, entropies = (
    [x_T[mask_T > 0] for x_T, mask_T in zip(x_RT, mask_RT, strict=True)]
    for x_RT in (logp_RT, entropy_RT)
  )
  return logps, entropies


def _shapes(spec: ScoreSpec) -> tuple[Shape, Shape]:
  """Return the long and the short shape of a pass."""
  _, num_shards = sharding.split(spec.mesh, 'batch')
  kind = attention.has_prefixes(spec.mesh), model.is_tiny(spec.model, spec.mesh)
  sizes = spec.tokens_per_pass, spec.limit, spec.limit, _ROWS * num_shards
  return packing.shapes(num_shards, *sizes, *kind)


def programs(spec: ScoreSpec, params: model.Params, length_R: np.ndarray) -> Iterator[Program]:
  """Yield the programs of `score`. `length_R` are the tokens of the rows that a step scores."""
  shapes = _shapes(spec)
  passes = packing.pack(length_R, np.zeros_like(length_R), *shapes) if len(length_R) else []
  for shape in dict.fromkeys(shapes):
    layout = sharding.batch(spec.mesh, shape.count)
    sizes = shape.count, shape.length
    tokens_BT: Any = jax.ShapeDtypeStruct(sizes, np.int32, sharding=layout)
    has_prefixes = attention.has_prefixes(spec.mesh)
    segments = Segments(tokens_BT, tokens_BT, tokens_BT if has_prefixes else None)
    routes_BTLC = None
    if spec.keeps_routes:
      dtype = np.dtype(spec.model.route_dtype)
      routes_BTLC = jax.ShapeDtypeStruct((*sizes, *spec.model.route_shape), dtype, sharding=layout)
    args = params, tokens_BT, segments, spec.temperature, spec.logit_chunk, routes_BTLC
    runs = sum(one.shape == shape for one in passes)
    yield Program(
      'score', score_tokens, (spec.model, *args), spec.mesh, sizes, kept=params, runs=runs
    )


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
