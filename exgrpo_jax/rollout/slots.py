"""The host's side of the slots: which response is in which, and what is written of it.

Shape letters as in decode_loop.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from exgrpo_jax.datatypes import Array, Response
from exgrpo_jax.rollout import carry
from exgrpo_jax.rollout.decode_loop import Decoded, DecodeSpec, Insertion
from exgrpo_jax.rollout.prefilled import Origin
from exgrpo_jax.runtime import randomness


@dataclasses.dataclass
class Row:
  """A response that is being written."""

  index: int  # among the responses
  prompt: np.ndarray
  question_row: int
  sample_index: int
  limit: int  # of the response, in tokens
  key_X: np.ndarray  # uint32, the data of its step's key
  pieces: list[tuple[Array, ...]]  # tokens, log-probabilities and entropies, as they were written
  length: int  # tokens in `pieces`
  is_filled: bool = False  # prompt and pieces are in the slot's cache
  complete: Response | None = None  # once it is

  @property
  def position(self) -> int:
    """Cache position of the next token."""
    return len(self.prompt) + self.length

  @functools.cached_property
  def origin(self) -> Origin:
    """Equal for rows that start from the same prefill."""
    return self.question_row, self.prompt.tobytes()

  def response(self, is_complete: bool = False, truncated: bool = False) -> Response:
    """What is written of it."""
    tokens, logp, entropy = (np.concatenate(parts) for parts in zip(*self.pieces))
    return Response(
      tokens=tokens, logp=logp, entropy=entropy, truncated=truncated, is_complete=is_complete
    )


Slots = list[Row | None]


class Sync(NamedTuple):
  """What was decoded between two syncs with the host."""

  slots: int  # that decoded together
  steps: int  # in each of which every slot computed a token
  tokens: int  # that rows wrote: fewer than steps x slots where slots were free


def rows_of(
  spec: DecodeSpec,
  prompts: Sequence[np.ndarray],
  question_rows: Sequence[int],
  sample_indices: Sequence[int],
  key: jax.Array | Sequence[jax.Array],
  limits: Sequence[int] | None,
  begun: Sequence[Response] | None,
) -> list[Row]:
  """A row for each response; arguments as in `scheduler.generate`."""
  limits = [spec.max_response] * len(prompts) if limits is None else limits
  assert all(1 <= len(prompt) <= spec.max_prompt for prompt in prompts), 'the cache has its limit'
  assert all(1 <= limit <= spec.max_response for limit in limits), 'the cache has its limit'
  keys = key if isinstance(key, Sequence) else [key] * len(prompts)
  distinct = {id(one): one for one in keys}  # most have the key of one step, or of a few
  data = jax.device_get({name: jax.random.key_data(one) for name, one in distinct.items()})
  begun = [carry.UNBEGUN] * len(prompts) if begun is None else begun
  arguments = zip(prompts, question_rows, sample_indices, limits, keys, begun, strict=True)
  return [
    Row(
      index=index,
      prompt=prompt,
      question_row=question_row,
      sample_index=sample_index,
      limit=limit,
      key_X=data[id(own)],
      pieces=[(response.tokens, response.logp, response.entropy)],
      length=len(response.tokens),
    )
    for index, (prompt, question_row, sample_index, limit, own, response) in enumerate(arguments)
  ]


def take_slots(slots: Slots, waiting: collections.deque[Row]) -> None:
  """Gives each free slot a row that waits, the first to the first."""
  free = [slot for slot, row in enumerate(slots) if row is None]
  for slot in free[: len(waiting)]:
    slots[slot] = waiting.popleft()


def insertion_of(entries: Sequence[tuple[int, int, Row]], num_slots: int, count: int) -> Insertion:
  """(slot, source, row) of at most `count` rows; what is left over fills no slot."""

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
    length_R=padded([row.length for row in rows]),
    step_key_RX=step_key_RX,
    question_row_R=padded([row.question_row for row in rows]),
    sample_index_R=padded([row.sample_index for row in rows]),
    limit_R=padded([row.limit for row in rows]),
  )


def sync_of(slots: Slots, decoded: Decoded) -> Sync:
  """What was decoded since the last sync; call it before the rows take their tokens."""
  counts = [decoded.length_B[slot] - row.length for slot, row in enumerate(slots) if row]
  return Sync(slots=len(slots), steps=int(max(counts)), tokens=int(sum(counts)))


def harvest(slots: Slots, decoded: Decoded) -> Iterator[tuple[int, Response]]:
  """Gives the rows their tokens; (index, response) of those that are complete, and free a slot."""
  for slot, row in enumerate(slots):
    if row is None:
      continue
    count = int(decoded.length_B[slot]) - row.length
    written = decoded.tokens_NB, decoded.logp_NB, decoded.entropy_NB
    row.pieces.append(tuple(values_NB[:count, slot] for values_NB in written))
    row.length += count
    if not decoded.live_B[slot]:
      slots[slot] = None
      row.complete = row.response(is_complete=True, truncated=not decoded.ended_B[slot])
      yield row.index, row.complete


def progress(rows: Sequence[Row]) -> str:
  """How far they are, as of the last sync."""
  complete = sum(row.complete is not None for row in rows)
  return f'{complete} of {len(rows)} responses, {sum(row.length for row in rows):,} tokens'


def metrics(syncs: Sequence[Sync]) -> dict[str, float]:
  """How busy the slots were: the share of what they computed that became a response's token."""
  computed = sum(sync.slots * sync.steps for sync in syncs)
  written = sum(sync.tokens for sync in syncs)
  return {'rollout/slots_busy': written / computed} if computed else {}
