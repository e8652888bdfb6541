"""The decode steps that the scheduler makes for responses of given lengths, without a model.

`decoded` follows scheduler.py where attention is ragged, in NumPy; `partial_rollouts` follows
partial.py on top of it. Tests hold both to the real scheduler, sync for sync.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import chex
import numpy as np

from exgrpo_jax.rollout import decode_loop, partial, scheduler, settings

# Steps of partial rollouts: until the schedule no longer depends on how the first one began, and
# to average over.
_FIRST_STEPS, _STEADY_STEPS = 12, 16


class Span(NamedTuple):
  """The decode steps between two syncs with the host."""

  steps: int
  positions: float  # of the cache that attention reads, of all slots; mean over the steps


class Generation(NamedTuple):
  """What the device does to generate the responses of a step."""

  spans: list[Span]
  prompt: int  # tokens of each prompt
  tokens: int  # decoded
  prompts: int  # whose first responses are begun
  begun: int  # responses that get their first token
  resumed: np.ndarray  # int, tokens of each row that is prefilled again, prompt included

  @property
  def decode_steps(self) -> int:
    """How often the slots decode."""
    return sum(span.steps for span in self.spans)


class Step(NamedTuple):
  """One training step with partial rollouts."""

  generation: Generation
  trained: list[np.ndarray]  # tokens of the responses of each group that it trains
  ages: np.ndarray  # int, of these groups: steps since the one that wrote their first token
  carried: int  # tokens of these groups that earlier steps wrote


class _Group(NamedTuple):
  """A group in flight."""

  lengths: np.ndarray  # int [K], tokens of its responses
  done: np.ndarray  # int [K], tokens written so far
  begun: int  # the step that wrote its first token; 0 before


def generation(
  lengths: np.ndarray, num_prompts: int, prompt: int, slots: int, block: int
) -> Generation:
  """A rollout that ends once all its responses are complete; arguments as in `decoded`."""
  following = decoded(lengths, np.zeros_like(lengths), prompt, slots, block, to_the_end=True)
  found = [span for span, _ in following]
  return Generation(found, prompt, int(lengths.sum()), num_prompts, len(lengths), np.zeros(0, int))


def decoded(
  lengths_N: np.ndarray,
  begun_N: np.ndarray,
  prompt: int,
  slots: int,
  block: int,
  *,
  to_the_end: bool,
) -> Iterator[tuple[Span, np.ndarray]]:
  """Yields each span and, int [N], the tokens that the responses have after it.

  Args:
    lengths_N: int, tokens of the responses in the order in which they wait.
    begun_N: int, tokens that they have before; those that are complete get no slot.
    prompt: tokens of each prompt.
    slots: rows that decode together.
    block: positions of a row that attention reads together; of a free slot it reads one block.
    to_the_end: once none waits, decode until all have finished, without looking in between.
  """
  chex.assert_equal_shape([lengths_N, begun_N])
  done_N = begun_N.copy()
  waiting_N = np.flatnonzero(done_N < lengths_N)
  row_B = np.full(slots, -1)  # the response in each slot; -1 where it is free
  while len(waiting_N) or (row_B >= 0).any():
    free = np.flatnonzero(row_B < 0)[: len(waiting_N)]
    row_B[free], waiting_N = waiting_N[: len(free)], waiting_N[len(free) :]
    is_live_B = row_B >= 0
    left_B = np.where(is_live_B, lengths_N[row_B] - done_N[row_B], 0)
    position_B = prompt + np.where(is_live_B, done_N[row_B], 0)
    live = is_live_B.sum()
    enough = live if to_the_end and not len(waiting_N) else scheduler.rows_per_insert(slots)
    first = np.sort(left_B[is_live_B])[min(enough, live) - 1]  # steps until enough have finished
    steps = int(min(first, decode_loop.TOKENS_PER_SYNC))
    grown_B = np.minimum(left_B, steps)
    # Each of a row's tokens is decoded with all before it in the cache, itself included.
    blocks_B = _blocks_up_to(position_B + grown_B, block) - _blocks_up_to(position_B, block)
    blocks = (blocks_B + steps - grown_B).sum()
    done_N[row_B[is_live_B]] += grown_B[is_live_B]
    row_B[left_B <= steps] = -1
    yield Span(steps, block * float(blocks) / steps), done_N.copy()


def with_partial_rollouts(rollout: settings.Config) -> settings.Config:
  """The config with partial rollouts, as it is where it has them already."""
  if rollout.carry:
    return rollout
  return dataclasses.replace(rollout, carry=True, in_flight=0)


def num_groups(rollout: settings.Config) -> int:
  """How many groups `steady` draws."""
  return rollout.groups_in_flight + rollout.questions * (_FIRST_STEPS + _STEADY_STEPS - 1)


def steady(
  groups: Sequence[np.ndarray], rollout: settings.Config, prompt: int, block: int
) -> list[Step]:
  """Some steps of the steady state; arguments as in `partial_rollouts`, of `num_groups` groups."""
  return list(partial_rollouts(groups, rollout, prompt, block))[_FIRST_STEPS:]


def partial_rollouts(
  groups: Iterable[np.ndarray], rollout: settings.Config, prompt: int, block: int
) -> Iterator[Step]:
  """Yields one training step after another, for as long as there are groups.

  Args:
    groups: int, tokens of the responses of each group, in the order in which groups are drawn.
    rollout: of the run.
    prompt: tokens of each prompt.
    block: see `decoded`.
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
  """What a step does with the groups in flight, and the groups that it leaves."""
  starts = np.cumsum([0] + [len(group.lengths) for group in groups[:-1]])
  lengths_N = np.concatenate([group.lengths for group in groups])
  before_N = done_N = np.concatenate([group.done for group in groups])
  begun = [group.begun or step for group in groups]
  following = decoded(lengths_N, before_N, prompt, rollout.slots, block, to_the_end=False)
  spans = []
  while True:
    complete = np.logical_and.reduceat(done_N == lengths_N, starts).tolist()
    chosen = partial.trained(begun, complete, step, rollout.questions, rollout.max_age)
    if chosen is not None:
      break
    span, done_N = next(following)
    spans.append(span)
  grew_N = done_N > before_N
  taken = Step(
    generation=Generation(
      spans=spans,
      prompt=prompt,
      tokens=int(done_N.sum() - before_N.sum()),
      prompts=int(np.logical_or.reduceat(grew_N & (before_N == 0), starts).sum()),
      begun=int((grew_N & (before_N == 0)).sum()),
      resumed=prompt + before_N[grew_N & (before_N > 0)],
    ),
    trained=[groups[index].lengths for index in chosen],
    ages=step - np.array([begun[index] for index in chosen]),
    carried=sum(int(groups[index].done.sum()) for index in chosen),
  )
  left = [
    _Group(group.lengths, done, first if done.any() else 0)
    for group, done, first in zip(groups, np.split(done_N, starts[1:]), begun)
  ]
  return taken, [group for index, group in enumerate(left) if index not in chosen]


def _blocks_up_to(length_B: np.ndarray, block: int) -> np.ndarray:
  """Sum over positions 1 … `length` of the blocks that hold so many."""
  whole_B, rest_B = np.divmod(length_B, block)
  return block * whole_B * (whole_B + 1) // 2 + rest_B * (whole_B + 1)
