"""Scoring responses with a forward pass, and choosing which stored responses to replay."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.algorithm import objective, trajectory_rules
from exgrpo_jax.config import check_numbers
from exgrpo_jax.datatypes import Array, ReplayScores, Response, Trajectory
from exgrpo_jax.packing import Segments, Shape, right_padded
from exgrpo_jax.policy import attention, logprobs, model, sharding
from exgrpo_jax.policy.sharding import jit_for_training
from exgrpo_jax.rollout import routes
from exgrpo_jax.runtime.compilations import Program

# Approximate number of rows per pass and data shard.
_ROWS = 64
_RATIOS_TOGETHER = 65536  # tokens

Candidate = tuple[int, Trajectory]  # (group that may replay it, trajectory)


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
  """The settings of `score`."""

  model: model.ShapeConfig
  mesh: Mesh  # sequences are spread over its data axes
  limit: int  # maximum tokens per row
  tokens_per_pass: int  # tokens per forward pass and data shard, including padding; >= limit
  temperature: float  # sampling temperature; logits are divided by it
  logit_chunk: int  # tokens whose logits exist at the same time, per data shard
  keeps_routes: bool = False  # True if rows may have routes; see routes.py


def score(
  spec: ScoreSpec,
  params: model.Params,
  rows: Sequence[tuple[np.ndarray, np.ndarray]],
  row_routes: Sequence[np.ndarray | None] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Compute the log-probabilities and entropies of the response tokens of each row, in nats.

  Returns two lists of float32 arrays [T]. `rows` are (prompt, response) token arrays, which are
  packed into sequences (see packing.py); the packing affects only rounding. `row_routes` are used
  if `spec.keeps_routes`; if a row's routes are None, the router chooses the experts.
  """
  if not rows:
    return [], []
  tokens_RT, mask_RT = right_padded(rows, spec.limit, pad_id=0)
  routes_RTLC = None
  if spec.keeps_routes:  # the same program, whether or not the routes are known
    routes_RTLC = routes.padded(spec.model, row_routes or [None] * len(rows), tokens_RT.shape[1])
  length_R = np.array([len(prompt) + len(response) for prompt, response in rows])
  logp_RT, entropy_RT = (np.zeros(mask_RT.shape, np.float32) for _ in range(2))
  # Every position is scored, so no window limits the response tokens of a sequence.
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
    args = tokens_BT, segments, spec.temperature, spec.logit_chunk, routes_BTLC
    scores = score_tokens(spec.model, params, *args)
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
  """Return the (long, short) shapes of a pass."""
  _, num_shards = sharding.split(spec.mesh, 'batch')
  kind = attention.has_prefixes(spec.mesh), model.is_tiny(spec.model, spec.mesh)
  sizes = spec.tokens_per_pass, spec.limit, spec.limit, _ROWS * num_shards
  return packing.shapes(num_shards, *sizes, *kind)


def programs(spec: ScoreSpec, params: model.Params, length_R: np.ndarray) -> Iterator[Program]:
  """Yield the programs of `score`. `length_R` are the lengths of a step's rows, in tokens."""
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
    runs = sum(pass_shape == shape for pass_shape, _ in passes)
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
  """Compute (logp_BT, entropy_BT) of every token under `params`: float32 arrays, in nats.

  Nothing predicts a row's first token, so its entries are meaningless. Entries at index 0 are 0.
  For `segments` and routes, see `model.hidden_states_and_balance`.
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


# ---- Choosing the stored trajectory that a question replays ----


def pick(
  kind: str,
  stored: Sequence[Sequence[Trajectory]],
  score: Callable[[Sequence[Candidate]], list[ReplayScores]],
  rng: np.random.Generator,
  costs: Sequence[float] | np.ndarray | None = None,
) -> tuple[list[Trajectory | None], list[ReplayScores | None]]:
  """Pick the trajectory that each group replays. Returns the trajectories and their scores.

  Both are None for a group without stored trajectories. `kind` is `replay.trajectory_selection`.
  `stored` lists each group's trajectories, oldest first; ties go to the oldest. `score` is called
  with all candidates if the choice depends on scores, otherwise only with the picked trajectories.
  `rng` is used if `kind` is 'random'. If the caller must compute the costs for this kind, `costs`
  are the candidates' costs, in order.
  """
  candidates = [
    (group, trajectory) for group, trajectories in enumerate(stored) for trajectory in trajectories
  ]
  ends = np.cumsum([len(trajectories) for trajectories in stored]).tolist()
  ranges = [range(end - len(trajectories), end) for end, trajectories in zip(ends, stored)]
  if cost := trajectory_rules.RULES[kind]:
    scores = dict(enumerate(score(candidates)))
    costs = [cost(scores[place]) for place in range(len(candidates))]
    entropies = [float(np.mean(scores[place].entropy)) for place in range(len(candidates))]
    if np.isfinite(entropies).all():  # otherwise, the policy is broken, which has its own error
      key, shape = 'replay.trajectory_selection', (len(candidates),)
      check_numbers(key, kind, costs, shape, lowest=-np.inf, highest=np.inf)
    picks = _cheapest(ranges, costs)
    for places in ranges:
      rival_entropies = tuple(entropies[places.start : places.stop])
      for place in places:
        scores[place] = dataclasses.replace(scores[place], candidate_entropies=rival_entropies)
  else:
    count = len(candidates)
    if costs is None:
      costs = rng.random(count) if kind == 'random' else -np.arange(count)
    picks = _cheapest(ranges, costs)
    scored_places = [place for place in picks if place is not None]
    scores = dict(zip(scored_places, score([candidates[place] for place in scored_places])))
  return [None if place is None else candidates[place][1] for place in picks], [
    None if place is None else scores[place] for place in picks
  ]


def with_valid_steps(
  stored: Sequence[Sequence[Trajectory]],
  check_steps: Sequence[Callable[[str], bool] | None],
  decode: Callable[[np.ndarray], str],
) -> list[Sequence[Trajectory]]:
  """Drop the trajectories that contain a wrong step, group by group.

  A group stays unchanged if all of its trajectories contain a wrong step, or if its task has no
  way to check steps.
  """

  def valid(
    trajectories: Sequence[Trajectory], check: Callable[[str], bool] | None
  ) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if check and check(decode(trajectory.tokens))]

  return [
    valid(trajectories, check) or trajectories for trajectories, check in zip(stored, check_steps)
  ]


def shaped_ratios(
  config: objective.ObjectiveConfig,
  mesh: Mesh,
  logps: Sequence[np.ndarray],
  past: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """Compute f(w) for the tokens of each row, as in the loss: float32 arrays [T].

  `logps` are the current log-probabilities. `past` are the log-probabilities under the policy in
  the denominator of the ratio w. Both are in nats.
  """
  if not logps:
    return []
  ends = np.cumsum([len(logp) for logp in logps])
  flat_2N = np.stack([np.concatenate(logps), np.concatenate(past)]).astype(np.float32)
  pieces = []
  for start in range(0, ends[-1], _RATIOS_TOGETHER):  # one compiled shape
    piece_2N = flat_2N[:, start : start + _RATIOS_TOGETHER]
    padded_2N = np.pad(piece_2N, ((0, 0), (0, _RATIOS_TOGETHER - piece_2N.shape[1])))
    pieces.append(_shaped_ratios(sharding.put(padded_2N, sharding.replicated(mesh)), config))
  return np.split(np.concatenate(jax.device_get(pieces))[: ends[-1]], ends[:-1])


def _cheapest(ranges: Sequence[range], costs: Sequence[float] | np.ndarray) -> list[int | None]:
  return [min(places, key=lambda place: costs[place]) if places else None for places in ranges]


@functools.partial(jax.jit, static_argnums=1)
def _shaped_ratios(flat_2N: jax.Array, config: objective.ObjectiveConfig) -> jax.Array:
  logp_N, past_N = flat_2N
  return jnp.asarray(objective.shaped_ratios(logp_N, logp_N - past_N, config))


def differences(
  trainer_logps: Iterable[np.ndarray], responses: Iterable[Response], step: int = 0
) -> dict[str, float]:
  """Compare the trainer's and the sampler's log-probabilities of tokens from `step`.

  Returns the mean and maximum absolute difference, in nats. `trainer_logps` yields [T] per
  response.
  """
  gaps = []
  for logp, response in zip(trainer_logps, responses):
    step_tokens = slice(response.tokens_before(step), None)
    gaps.append((logp - response.logp)[step_tokens][response.own[step_tokens]])
  gap_N = np.abs(np.concatenate(gaps))
  return {
    'rollout_mismatch/logprob_mean': float(gap_N.mean()),
    'rollout_mismatch/logprob_max': float(gap_N.max()),
  }
