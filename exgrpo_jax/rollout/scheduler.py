"""Responses to prompts: a fixed set of slots decodes together, and a queue refills them.

What a row samples depends on its key, question row, sample index and tokens, not
on the rows beside it: slots, order and refills change nothing, up to the rounding
of the logits (a draw on a boundary may flip when they move by an ulp).

The device runs `slots.decode` until some rows have finished; then the host takes their
responses, prefills the next prompts, each once for all its samples, and writes
these into the slots that are free. It decides by small arrays that are the same on
every host. The cache is as long as the rows now in it need, not as the limit.

Shape letters as in slots.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Response
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.policy import kv_cache, model
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import Settings

PREFILL_TOKENS = 16384  # in one prefill, so that its activations stay small
_REFILL_SHARE = 8  # refill when one slot in so many has finished: few looks, few idle slots


def generate(
  config: model.Config,
  params: model.Params,
  prompts: Sequence[np.ndarray],
  question_rows: Sequence[int],
  sample_indices: Sequence[int],
  key: jax.Array,
  settings: Settings,
  mesh: Mesh,
  on_finish: Callable[[int, Response], None] | None = None,
  limits: Sequence[int] | None = None,
) -> list[Response]:
  """One response per prompt, in the prompts' order.

  Args:
    config: of the model.
    params: of the model, on `mesh`; in `model.decode_layout`.
    prompts: int32 [T], at least one token each. Equal prompts of one question are
      prefilled once if they stand behind one another.
    question_rows: each prompt's question; with the sample index it seeds the row.
    sample_indices: which of its question's samples each row is.
    key: of this step.
    settings: how to sample.
    mesh: slots are spread over its data axes where these divide them.
    on_finish: called with (index, response) as responses finish, while others decode.
    limits: of each response, in tokens, from 1 to settings.max_response; by default that.
  """
  assert all(len(prompt) for prompt in prompts), 'a prompt has at least one token'
  limits = [settings.max_response] * len(prompts) if limits is None else limits
  waiting = collections.deque(
    _Row(index, *own)
    for index, own in enumerate(zip(prompts, question_rows, sample_indices, limits, strict=True))
  )
  slots: list[_Row | None] = [None] * settings.slots
  responses: list[Response | None] = [None] * len(prompts)
  with jax.set_mesh(mesh):
    state, prefilled = None, {}
    while waiting or any(slots):
      free = [slot for slot, row in enumerate(slots) if row is None]
      for slot, row in zip(free, _taken(waiting, len(free))):
        slots[slot] = row
      if not waiting and state is not None:
        state, slots = _closed_up(state, slots)
      state = _fitted(config, settings, state, slots)
      state = _filled(config, settings, params, state, prefilled, slots, waiting)
      live = sum(row is not None for row in slots)
      min_finished = max(1, settings.slots // _REFILL_SHARE) if waiting else live
      state, found = decode_loop.decode(config, settings, params, key, state, min_finished)
      for slot, response in _harvested(slots, jax.device_get(found)):
        index = slots[slot].index
        slots[slot] = None
        responses[index] = response
        if on_finish is not None:
          on_finish(index, response)
  return responses


# ---- The host's side ----


@dataclasses.dataclass
class _Row:
  """A response on its way."""

  index: int  # among the responses
  prompt: np.ndarray
  question_row: int
  sample_index: int
  limit: int  # of the response, in tokens
  is_filled: bool = False  # its prompt is in the slot's cache
  pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
  length: int = 0  # tokens in `pieces`

  @property
  def position(self) -> int:
    """In the cache, of the next token."""
    return len(self.prompt) + self.length

  @functools.cached_property
  def origin(self) -> tuple[int, bytes]:
    """What rows share that start from one prefill."""
    return self.question_row, self.prompt.tobytes()


def _taken(waiting, count):
  return [waiting.popleft() for _ in range(min(count, len(waiting)))]


def _closed_up(state, slots):
  """A quarter of the slots, once the live rows fit there and no others will come."""
  live = [slot for slot, row in enumerate(slots) if row is not None]
  count = len(slots) // 4  # halves would compile twice as many programs
  if len(live) > count:
    return state, slots
  free = [slot for slot, row in enumerate(slots) if row is None]
  chosen = [*live, *free[: count - len(live)]]
  closer = decode_loop.select_slots(state, np.array(chosen, np.int32))
  jax.tree.map(lambda old: old.delete(), state.cache)
  return closer, [slots[slot] for slot in chosen]


def _fitted(config, settings, state, slots):
  """The state with a cache as long as the rows in the slots need until the next looks."""
  longest = max(row.position for row in slots if row is not None)
  furthest = max(len(row.prompt) + row.limit for row in slots if row is not None)
  needed = min(longest + decode_loop.TOKENS_PER_SYNC, furthest)
  length = length_bucket(needed)
  if state is None:
    return decode_loop.empty(config, settings, length)
  present = kv_cache.length(state.cache)
  if present < length or present >= 4 * length:  # not back and forth between two lengths
    return decode_loop.resize_cache(state, length)
  return state


def _filled(config, settings, params, state, prefilled, slots, waiting):
  """The state with the prompts of new rows in their slots.

  `prefilled` is brought up to date: it keeps what rows that still wait will start from.
  """
  new = {slot: row for slot, row in enumerate(slots) if row is not None and not row.is_filled}
  if not new:
    return state
  absent = {row.origin: row.prompt for row in new.values() if row.origin not in prefilled}
  by_bucket = collections.defaultdict(list)
  for origin, prompt in absent.items():
    by_bucket[length_bucket(len(prompt))].append((origin, prompt))
  for length, group in sorted(by_bucket.items()):
    together = max(1, PREFILL_TOKENS // length)
    for start in range(0, len(group), together):
      prefilled |= _prefilled(config, settings, params, group[start : start + together], length)
  batches = collections.defaultdict(list)
  for slot, row in new.items():
    batch, place = prefilled[row.origin]
    batches[id(batch)].append((slot, row, place, batch))
    row.is_filled = True
  for entries in batches.values():
    state = decode_loop.insert(state, entries[0][3], _places(entries, settings.slots))
  still = {row.origin for row in waiting}
  for origin in [origin for origin in prefilled if origin not in still]:
    del prefilled[origin]
  return state


def _prefilled(config, settings, params, group, length):
  """Origin -> (what was prefilled together, place in it)."""
  count = 1 << (len(group) - 1).bit_length()
  tokens_PT = np.full((count, length), settings.pad_id, np.int32)
  lengths_P = np.ones(count, np.int32)
  for place, (_, prompt) in enumerate(group):
    tokens_PT[place, : len(prompt)], lengths_P[place] = prompt, len(prompt)
  batch = decode_loop.prefill(config, params, tokens_PT, lengths_P)
  return {origin: (batch, place) for place, (origin, _) in enumerate(group)}


def _places(entries, num_slots):
  """The rows to fill, as many as a power of two; those too many go to no slot."""
  count = 1 << (len(entries) - 1).bit_length()
  places = np.zeros((len(decode_loop.Places._fields), count), np.int32)
  places[0] = num_slots
  for number, (slot, row, place, _) in enumerate(entries):
    places[:, number] = (
      slot,
      place,
      len(row.prompt),
      row.question_row,
      row.sample_index,
      row.limit,
    )
  return decode_loop.Places(*places)


def _harvested(slots, found):
  """(slot, response) of the rows that finished; keeps the tokens of those that did not."""
  for slot, row in enumerate(slots):
    if row is None:
      continue
    count = found.length_B[slot] - row.length
    row.pieces.append(
      tuple(
        values_NB[:count, slot] for values_NB in (found.tokens_NB, found.logp_NB, found.entropy_NB)
      )
    )
    row.length += int(count)
    if not found.live_B[slot]:
      tokens, logp, entropy = (np.concatenate(parts) for parts in zip(*row.pieces))
      yield (
        slot,
        Response(tokens=tokens, logp=logp, entropy=entropy, truncated=not found.ended_B[slot]),
      )
