"""The choice of the stored success that a question replays, and its scores now."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.algorithm import objective, trajectory_rules
from exgrpo_jax.datatypes import ReplayScores, Trajectory
from exgrpo_jax.policy import sharding

_WEIGHTS_TOGETHER = 65536  # tokens

Candidate = tuple[int, Trajectory]  # (group that may replay it, trajectory)


def pick(
  kind: str,
  stored: Sequence[Sequence[Trajectory]],
  score: Callable[[Sequence[Candidate]], list[ReplayScores]],
  rng: np.random.Generator,
  costs: Sequence[float] | np.ndarray | None = None,
) -> tuple[list[Trajectory | None], list[ReplayScores | None]]:
  """Pick the trajectory that each group replays, with its scores; None for a group without any.

  Args:
    kind: `replay.trajectory_selection`. Ties go to the oldest.
    stored: by group, the trajectories to choose from, oldest first.
    score: returns the scores of some candidates. It is called for all of them if the scores decide,
      else only for the picked ones.
    rng: for the kind 'random'.
    costs: of all candidates, in their order, for a kind whose costs the caller computes.
  """
  candidates = [(group, trajectory) for group, own in enumerate(stored) for trajectory in own]
  ends = np.cumsum([len(own) for own in stored]).tolist()
  places = [range(end - len(own), end) for end, own in zip(ends, stored)]
  if cost := trajectory_rules.RULES[kind]:
    scores = dict(enumerate(score(candidates)))
    costs = [cost(scores[place]) for place in range(len(candidates))]
    picked = _cheapest(places, costs)
    entropies = [float(np.mean(scores[place].entropy)) for place in range(len(candidates))]
    for own in places:
      for place in own:
        of_rivals = tuple(entropies[own.start : own.stop])
        scores[place] = dataclasses.replace(scores[place], candidate_entropies=of_rivals)
  else:
    count = len(candidates)
    if costs is None:
      costs = rng.random(count) if kind == 'random' else -np.arange(count)
    picked = _cheapest(places, costs)
    chosen = [place for place in picked if place is not None]
    scores = dict(zip(chosen, score([candidates[place] for place in chosen])))
  return [None if place is None else candidates[place][1] for place in picked], [
    None if place is None else scores[place] for place in picked
  ]


def with_valid_steps(
  stored: Sequence[Sequence[Trajectory]],
  check_steps: Sequence[Callable[[str], bool] | None],
  decode: Callable[[np.ndarray], str],
) -> list[Sequence[Trajectory]]:
  """Keep the trajectories of each group that have no wrong step.

  A group stays as it was if none is valid or its task cannot check steps.
  """

  def valid(own: Sequence[Trajectory], check: Callable[[str], bool] | None) -> list[Trajectory]:
    return [one for one in own if check and check(decode(one.tokens))]

  return [valid(own, check) or own for own, check in zip(stored, check_steps)]


def weights(
  config: objective.ObjectiveConfig,
  mesh: Mesh,
  logps: Sequence[np.ndarray],
  past: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """Compute f(w) of the tokens of rows as the loss does: float32 arrays [T].

  `logps` are their log-probabilities now, `past` under the policy that the ratio w refers to, in
  nats.
  """
  if not logps:
    return []
  ends = np.cumsum([len(logp) for logp in logps])
  flat_2N = np.stack([np.concatenate(logps), np.concatenate(past)]).astype(np.float32)
  pieces = []
  for start in range(0, ends[-1], _WEIGHTS_TOGETHER):  # one compiled shape
    piece_2N = flat_2N[:, start : start + _WEIGHTS_TOGETHER]
    padded_2N = np.pad(piece_2N, ((0, 0), (0, _WEIGHTS_TOGETHER - piece_2N.shape[1])))
    pieces.append(_weights(sharding.put(padded_2N, sharding.replicated(mesh)), config))
  return np.split(np.concatenate(jax.device_get(pieces))[: ends[-1]], ends[:-1])


def _cheapest(places: Sequence[range], costs: Sequence[float] | np.ndarray) -> list[int | None]:
  return [min(own, key=lambda place: costs[place]) if own else None for own in places]


@functools.partial(jax.jit, static_argnums=1)
def _weights(flat_2N: jax.Array, config: objective.ObjectiveConfig) -> jax.Array:
  logp_N, past_N = flat_2N
  return jnp.asarray(objective.replay_weights(logp_N, logp_N - past_N, config))
