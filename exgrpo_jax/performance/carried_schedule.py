"""What the scheduler does where responses span training steps (`settings.Config.carry`).

The policy of rollout/carry.py on that of the scheduler, followed in NumPy without a model.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from exgrpo_jax.performance import rollout_schedule
from exgrpo_jax.performance.rollout_schedule import Generation
from exgrpo_jax.rollout import carry, settings

# Before the schedule no longer depends on how the first step began; and to average over.
_FIRST_STEPS, _STEADY_STEPS = 12, 16


class Step(NamedTuple):
  """One training step."""

  generation: Generation
  trained: list[np.ndarray]  # tokens of the responses of each group that it trains
  ages: np.ndarray  # int, of these groups: steps since the one that wrote their first token
  carried: int  # tokens of these groups that earlier steps wrote


class _Group(NamedTuple):
  """In flight."""

  lengths: np.ndarray  # int [K], tokens of its responses
  done: np.ndarray  # int [K], tokens that they have
  begun: int  # the step that wrote its first token; 0 without one


def with_carry(rollout: settings.Config) -> settings.Config:
  """The same where responses span steps; what is set for that counts only where they do."""
  if rollout.carry:
    return rollout
  return dataclasses.replace(rollout, carry=True, in_flight=0)


def num_groups(rollout: settings.Config) -> int:
  """How many groups `steady` draws."""
  return rollout.groups_in_flight + rollout.questions * (_FIRST_STEPS + _STEADY_STEPS - 1)


def steady(
  groups: Sequence[np.ndarray], rollout: settings.Config, prompt: int, block: int
) -> list[Step]:
  """Some steps of the steady state; arguments as in `steps`, of `num_groups` groups."""
  return list(steps(groups, rollout, prompt, block))[_FIRST_STEPS:]


def steps(
  groups: Iterable[np.ndarray], rollout: settings.Config, prompt: int, block: int
) -> Iterator[Step]:
  """One step after the other, from the first, for as long as there are groups.

  Args:
    groups: int, tokens of the responses of each group, in the order in which groups are drawn.
    rollout: of the run.
    prompt: tokens of each prompt.
    block: see `rollout_schedule.decoded`.
  """
  drawn = (_Group(lengths, np.zeros_like(lengths), 0) for lengths in groups)
  in_flight: list[_Group] = []
  for step in itertools.count(1):
    in_flight += itertools.islice(drawn, rollout.groups_in_flight - len(in_flight))
    if len(in_flight) < rollout.groups_in_flight:
      return
    taken, in_flight = _take(in_flight, step, rollout, prompt, block)
    yield taken


def _take(
  groups: list[_Group], step: int, rollout: settings.Config, prompt: int, block: int
) -> tuple[Step, list[_Group]]:
  """What a step does with the groups in flight, and those that it leaves."""
  starts = np.cumsum([0] + [len(group.lengths) for group in groups[:-1]])
  lengths_N = np.concatenate([group.lengths for group in groups])
  before_N = done_N = np.concatenate([group.done for group in groups])
  begun = [group.begun or step for group in groups]
  following = rollout_schedule.decoded(
    lengths_N, before_N, prompt, rollout.slots, block, to_the_end=False
  )
  spans = []
  while True:
    complete = np.logical_and.reduceat(done_N == lengths_N, starts).tolist()
    chosen = carry.trained(begun, complete, step, rollout.questions, rollout.max_age)
    if chosen is not None:
      break
    span, done_N = next(following)
    spans.append(span)
  grew_N = done_N > before_N
  generation = Generation(
    spans=spans,
    tokens=int(done_N.sum() - before_N.sum()),
    prompts=int(np.logical_or.reduceat(grew_N & (before_N == 0), starts).sum()),
    resumed=prompt + before_N[grew_N & (before_N > 0)],
  )
  taken = Step(
    generation=generation,
    trained=[groups[index].lengths for index in chosen],
    ages=step - np.array([begun[index] for index in chosen]),
    carried=sum(int(groups[index].done.sum()) for index in chosen),
  )
  left = [
    _Group(group.lengths, done, first if done.any() else 0)
    for group, done, first in zip(groups, np.split(done_N, starts[1:]), begun)
  ]
  return taken, [group for index, group in enumerate(left) if index not in chosen]
