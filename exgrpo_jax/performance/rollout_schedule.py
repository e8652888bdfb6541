"""What the scheduler does with responses of given lengths: how often it decodes, and on how much.

The policy of rollout/scheduler.py where attention is ragged, followed in NumPy without a model.
"""

from typing import NamedTuple

import numpy as np

from exgrpo_jax.rollout import decode_loop, scheduler


class Span(NamedTuple):
  """The decode steps between two syncs with the host."""

  steps: int
  positions: float  # of the cache that attention reads, of all slots together; mean over the steps


def spans(lengths: np.ndarray, prompt: int, slots: int, block: int) -> list[Span]:
  """All spans of a rollout, in order.

  Args:
    lengths: int, tokens of the responses in the order in which they wait.
    prompt: tokens of each prompt.
    slots: rows that decode together.
    block: positions of a row that attention reads together; of a free slot it reads one block.
  """
  left = np.zeros(slots, int)  # tokens that each slot still has to decode; 0 where it is free
  done = np.zeros(slots, int)  # tokens decoded
  start, found = 0, []
  while start < len(lengths) or left.any():
    free = np.flatnonzero(left == 0)[: len(lengths) - start]
    left[free], done[free] = lengths[start : start + len(free)], 0
    start += len(free)
    live = np.flatnonzero(left)
    enough = scheduler.rows_per_insert(slots) if start < len(lengths) else len(live)
    first = np.sort(left[live])[min(enough, len(live)) - 1]  # steps until so many have finished
    steps = int(min(first, decode_loop.TOKENS_PER_SYNC))
    step_N = np.arange(1, steps + 1)
    # Each of a row's tokens is decoded with all before it in the cache, itself included.
    blocks_BN = -(-(prompt + done[:, None] + step_N) // block)
    blocks = np.where(step_N <= left[:, None], blocks_BN, 1).sum()
    found.append(Span(steps, block * float(blocks) / steps))
    decoded = np.minimum(left, steps)
    left, done = left - decoded, done + decoded
  return found
