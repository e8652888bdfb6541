"""The question stream: the order in which steps read questions. A cursor marks the position."""

import functools
from collections.abc import Collection, Mapping

import numpy as np

from exgrpo_jax.datatypes import Cursor
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose


@functools.lru_cache(maxsize=4)  # a step reads from one epoch, or from two at the boundary
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
  """Return an epoch's question order, determined only by the arguments: int64 [size], read-only."""
  rng = randomness.generator(seed, Purpose.QUESTION_STREAM, epoch)
  order = rng.permutation(size)
  order.flags.writeable = False  # the cache shares it between callers
  return order


def reads_retired(epoch: int, size: int, retired_epoch: Mapping[int, int], at_once: int) -> bool:
  """Return True if `epoch` must reread retired questions because too few others remain.

  `size` is the total number of questions. `retired_epoch` maps a row to the epoch in which it
  retired; the stream skips the row from the next epoch onward. `at_once` is the number of
  questions in a step: Q or, with partial rollouts, the number in flight.

  >>> reads_retired(epoch=1, size=5, retired_epoch={0: 0, 3: 0}, at_once=4)
  True
  """
  return size - sum(row_epoch < epoch for row_epoch in retired_epoch.values()) < at_once


def take(
  cursor: Cursor,
  count: int,
  size: int,
  seed: int,
  retired_epoch: Mapping[int, int],
  taken: Collection[int],
  at_once: int,
) -> tuple[list[int], Cursor]:
  """Return the next `count` distinct rows of the stream and the cursor after them.

  Skips rows that retired in an earlier epoch (unless `reads_retired`) and rows in `taken`. A call
  that crosses into the next epoch also skips the rows that it has already read. The cursor enters
  the next epoch only when a row from it is needed. A question that retires in the step that reads
  an epoch's last row is therefore recorded as retired in that epoch.

  `taken` contains the rows that are in flight or that the step replays. `count + len(taken)` must
  not exceed `at_once`, except when `count` is 0: a resumed run may have fewer slots than before,
  which lowers `at_once`. `seed` determines the permutations. For the other arguments, see
  `reads_retired`. Raises InputError if the training data has fewer questions than a step needs.
  """
  if not count:
    return [], cursor
  if size < at_once:
    raise InputError(
      f'the training data has {counted(size, "question")}, but a step needs {at_once} distinct '
      'questions. Add data, or use fewer questions per step.'
    )
  if count + len(taken) > at_once:
    raise ValueError(f'{count=} plus the {len(taken)} rows already taken exceeds {at_once=}.')
  epoch, position = cursor.epoch, cursor.position
  rows, skipped_rows = [], set(taken)
  while len(rows) < count:
    order = permutation(seed, epoch, size)
    includes_retired = reads_retired(epoch, size, retired_epoch, at_once)
    while position < size and len(rows) < count:
      row = int(order[position])
      position += 1
      if row not in skipped_rows and (includes_retired or retired_epoch.get(row, epoch) >= epoch):
        skipped_rows.add(row)
        rows.append(row)
    if len(rows) < count:
      epoch, position = epoch + 1, 0
  return rows, Cursor(epoch, position)
