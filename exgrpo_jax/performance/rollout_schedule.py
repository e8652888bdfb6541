"""What the scheduler does with responses of given lengths: how often it decodes, and on how much.

The policy of rollout/scheduler.py where attention is ragged, followed in NumPy without a model.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from exgrpo_jax.rollout import decode_loop, scheduler


class Span(NamedTuple):
  """The decode steps between two syncs with the host."""

  steps: int
  positions: float  # of the cache that attention reads, of all slots together; mean over the steps


class Generation(NamedTuple):
  """What the device does to generate the responses of a step."""

  spans: list[Span]
  tokens: int  # decoded
  prompts: int  # whose first responses are begun
  resumed: np.ndarray  # int, tokens of each row that is prefilled anew, prompt included

  @property
  def decode_steps(self) -> int:
    """How often the slots decode."""
    return sum(span.steps for span in self.spans)


def generation(
  lengths: np.ndarray, num_prompts: int, prompt: int, slots: int, block: int
) -> Generation:
  """Of a rollout that ends once all of its responses are complete; arguments as in `decoded`."""
  following = decoded(lengths, np.zeros_like(lengths), prompt, slots, block, to_the_end=True)
  found = [span for span, _ in following]
  return Generation(found, int(lengths.sum()), num_prompts, np.zeros(0, int))


def decoded(
  lengths_N: np.ndarray,
  begun_N: np.ndarray,
  prompt: int,
  slots: int,
  block: int,
  *,
  to_the_end: bool,
) -> Iterator[tuple[Span, np.ndarray]]:
  """Each span, and int [N], the tokens that the responses have after it.

  Args:
    lengths_N: int, tokens of the responses in the order in which they wait.
    begun_N: int, tokens that they have before; those that have all get no slot.
    prompt: tokens of each prompt.
    slots: rows that decode together.
    block: positions of a row that attention reads together; of a free slot it reads one block.
    to_the_end: whether nobody asks before all have finished, once none waits.
  """
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
    first = np.sort(left_B[is_live_B])[min(enough, live) - 1]  # steps until so many have finished
    steps = int(min(first, decode_loop.TOKENS_PER_SYNC))
    grown_B = np.minimum(left_B, steps)
    # Each of a row's tokens is decoded with all before it in the cache, itself included.
    blocks_B = _blocks_up_to(position_B + grown_B, block) - _blocks_up_to(position_B, block)
    blocks = (blocks_B + steps - grown_B).sum()
    done_N[row_B[is_live_B]] += grown_B[is_live_B]
    row_B[left_B <= steps] = -1
    yield Span(steps, block * float(blocks) / steps), done_N.copy()


def _blocks_up_to(length_B: np.ndarray, block: int) -> np.ndarray:
  """Blocks that hold one position, those that hold two, … those that hold `length`: their sum."""
  whole_B, rest_B = np.divmod(length_B, block)
  return block * whole_B * (whole_B + 1) // 2 + rest_B * (whole_B + 1)
