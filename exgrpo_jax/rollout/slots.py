"""The host's side of the slots: which response is in which, and what is written of it.

Shape letters as in decode_loop.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from exgrpo_jax.datatypes import Array, Response
from exgrpo_jax.errors import counted
from exgrpo_jax.rollout import decode_loop, routes
from exgrpo_jax.rollout.decode_loop import Decoded, DecodeSpec, Forced
from exgrpo_jax.rollout.filling import Insertion
from exgrpo_jax.rollout.prefilled import Origin
from exgrpo_jax.rollout.sampler import Request
from exgrpo_jax.runtime import randomness


@dataclasses.dataclass
class Row:
  """A response that is being written."""

  index: int  # among the requests
  request: Request
  key_X: np.ndarray  # uint32, the data of its step's key
  pieces: list[tuple[Array, ...]]  # tokens, log-probabilities and entropies, as they were written
  length: int  # tokens in `pieces`
  is_filled: bool = False  # prompt and pieces, but for `forced`, are in the slot's cache
  truncated: bool | None = None  # once it has finished
  complete: Response | None = None  # once it has left its slot
  place: int = 0  # of its cache, where there is room for that to be kept between turns
  # The last tokens of `pieces`, which its cache does not have yet.
  forced: Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

  @property
  def cached(self) -> int:
    """Tokens of `pieces` that its cache has."""
    return self.length - len(self.forced)

  @property
  def position(self) -> int:
    """Cache position of the next token."""
    return len(self.request.prompt) + self.cached

  @functools.cached_property
  def origin(self) -> Origin:
    """Equal for rows that start from the same prefill."""
    return self.request.question, self.request.prompt.tobytes()

  def response(
    self,
    found_SLC: np.ndarray | None,
    is_complete: bool = False,
    truncated: bool = False,
  ) -> Response:
    """What is written of it, with the routes that were found of what its cache has."""
    tokens, logp, entropy = (np.concatenate(parts) for parts in zip(*self.pieces))
    length = len(self.request.prompt) + len(tokens)
    return Response(
      tokens=tokens,
      logp=logp,
      entropy=entropy,
      truncated=truncated,
      is_complete=is_complete,
      routes=routes.completed(self.request.begun.routes, found_SLC, self.position, length),
    )


Slots = list[Row | None]


class Sync(NamedTuple):
  """What was decoded between two syncs."""

  slots: int  # that decoded together
  steps: int  # in each of which every slot computed a token
  tokens: int  # that rows wrote, or read: fewer than steps x slots where slots were free


def rows_of(
  spec: DecodeSpec,
  requests: Sequence[Request],
  step_key: Callable[[int], jax.Array],
  before: Sequence[Row] = (),
) -> list[Row]:
  """A row for each request, numbered on from those `before`.

  `step_key` gives the key of the step in which a response began. The place of a row is its number,
  or that of the row that it follows.
  """
  for request in requests:
    fits = 1 <= len(request.prompt) <= spec.max_prompt and 1 <= request.limit <= spec.max_response
    assert fits, 'the cache has its limit'
  keys = {step: jax.random.key_data(step_key(step)) for step in {one.step for one in requests}}
  key_data = jax.device_get(keys)
  rows = list[Row]()
  for request in requests:
    index = len(before) + len(rows)
    row = Row(
      index=index,
      request=request,
      key_X=key_data[request.step],
      pieces=[(request.begun.tokens, request.begun.logp, request.begun.entropy)],
      length=len(request.begun.tokens),
      place=index,
    )
    if request.follows is not None:
      row.place = before[request.follows].place
      if row.place < spec.parked:
        row.forced = request.begun.tokens[before[request.follows].length :]
    rows.append(row)
  return rows


def take_slots(slots: Slots, waiting: collections.deque[Row]) -> None:
  """Gives each free slot a row that waits, the first to the first."""
  free = [slot for slot, row in enumerate(slots) if row is None]
  for slot in free[: len(waiting)]:
    slots[slot] = waiting.popleft()


def insertion_of(entries: Sequence[tuple[int, int, Row]], num_slots: int, count: int) -> Insertion:
  """The insertion of `count` rows that (slot, source, row) describe; missing rows fill no slot."""

  def padded(values: Sequence[int], fill: int = 0) -> np.ndarray:
    return np.array([*values, *[fill] * (count - len(values))], np.int32)

  rows = [row for _, _, row in entries]
  step_key_RX = np.zeros((count, randomness.key_size()), np.uint32)
  for key_X, row in zip(step_key_RX, rows):
    key_X[:] = row.key_X
  return Insertion(
    slot_R=padded([slot for slot, _, _ in entries], fill=num_slots),
    source_R=padded([source for _, source, _ in entries]),
    position_R=padded([row.position for row in rows], fill=1),
    length_R=padded([row.cached for row in rows]),
    step_key_RX=step_key_RX,
    question_row_R=padded([row.request.question for row in rows]),
    sample_index_R=padded([row.request.sample for row in rows]),
    limit_R=padded([row.request.limit for row in rows]),
  )


def forced_of(slots: Slots) -> Forced:
  """What the rows have to read before they write, as much as `decode` takes at once."""
  N, B = decode_loop.TOKENS_PER_SYNC, len(slots)
  tokens_NB, count_B = np.zeros((N, B), np.int32), np.zeros(B, np.int32)
  for slot, row in enumerate(slots):
    if row:
      count = count_B[slot] = min(N, len(row.forced))
      tokens_NB[:count, slot] = row.forced[:count]
  return Forced(tokens_NB, count_B)


def write(slots: Slots, decoded: Decoded) -> Sync:
  """Give the rows the tokens that they wrote."""
  counts = [0]
  for slot, row in enumerate(slots):
    if row is None or row.truncated is not None:
      continue
    count = int(decoded.length_B[slot]) - row.cached
    read = min(count, len(row.forced))
    row.forced = row.forced[read:]
    written = decoded.tokens_NB, decoded.logp_NB, decoded.entropy_NB
    row.pieces.append(tuple(values_NB[read:count, slot] for values_NB in written))
    row.length += count - read
    if not decoded.live_B[slot]:
      row.truncated = not decoded.ended_B[slot]
    counts.append(count)
  return Sync(slots=len(slots), steps=max(counts), tokens=sum(counts))


def finished(slots: Slots) -> list[int]:
  """Return the slots whose rows have finished."""
  return [slot for slot, row in enumerate(slots) if row and row.truncated is not None]


def harvest(
  slots: Slots, routes_of: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, Row, Response]]:
  """Frees the slots of the rows that have finished: (slot, row, response).

  `routes_of` are the routes [S, L, C] of these by slot, where they are kept.
  """
  for slot in finished(slots):
    row, slots[slot] = slots[slot], None
    assert row and row.truncated is not None
    row.complete = row.response(routes_of.get(slot), is_complete=True, truncated=row.truncated)
    yield slot, row, row.complete


def progress(rows: Sequence[Row]) -> str:
  """Responses and tokens up to the last sync."""
  complete = sum(row.complete is not None for row in rows)
  written = counted(sum(row.length for row in rows), 'token')
  return f'{complete} of {counted(len(rows), "response")}, {written}'


def metrics(syncs: Sequence[Sync]) -> dict[str, float]:
  """The share of the computed tokens that are part of a response; nothing without a sync."""
  computed = sum(sync.slots * sync.steps for sync in syncs)
  written = sum(sync.tokens for sync in syncs)
  return {'rollout/slots_busy': written / computed} if computed else {}
