"""Responses to prompts: a fixed set of slots decodes together, and a queue refills them.

What a row samples depends on its key, question row, sample index and tokens, not on the
rows beside it. So slots, order and refills change nothing up to the rounding of the logits
(a draw on a boundary may flip when they move by an ulp).

The device runs `decode_loop.decode` until some rows have finished. The host then takes their
responses, and inserts the next prompts, which were prefilled before, each once for all its samples
(prefilled.py), into the free slots. It decides from small arrays that are the same on every host.

Few programs are compiled. With ragged attention (`kv_cache.is_ragged`) the cache always has the
length of the limit and all slots decode to the end, so there is one program of each kind. Else the
cache is as long as the rows now in it need, rounded up to one of few lengths, and once no prompts
wait the last rows close up.

A response may have been begun in an earlier step. What is written of it is prefilled, right into
its slot, and decoding goes on from there; then too the cache has the length of the limit.

Shape letters as in decode_loop.py.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Response
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import DecodeSpec, Insertion, State
from exgrpo_jax.rollout.prefilled import Prefilled, batches, resume_lengths
from exgrpo_jax.rollout.slots import (
  Row,
  Slots,
  Sync,
  harvest,
  insertion_of,
  progress,
  rows_of,
  sync_of,
  take_slots,
)
from exgrpo_jax.runtime import activity

# Refill once one slot in this many has finished, and so many at a time: few host syncs, few idle
# slots.
_REFILL_SHARE = 16
_SHORTEST_CACHE = 128  # positions; below it, compiling another shape costs more than the padding


def generate(
  config: model.Config,
  params: model.Params,
  prompts: Sequence[np.ndarray],
  question_rows: Sequence[int],
  sample_indices: Sequence[int],
  key: jax.Array | Sequence[jax.Array],
  spec: DecodeSpec,
  mesh: Mesh,
  on_finish: Callable[[int, Response], None] = lambda *_: None,
  limits: Sequence[int] | None = None,
  begun: Sequence[Response] | None = None,
  is_enough: Callable[[], bool] = lambda: False,
  on_sync: Callable[[Sync], None] = lambda _: None,
) -> list[Response]:
  """One response per prompt, in the prompts' order.

  Args:
    config: of the model.
    params: on `mesh`, in `model.decode_layout`.
    prompts: int32 [T], from one token to spec.max_prompt. Equal prompts of one question are
      prefilled once if they follow one another.
    question_rows: each prompt's question; with the sample index it seeds the row.
    sample_indices: which of its question's samples each row is.
    key: of this step; or of each response's, the step in which it began.
    spec: how to sample.
    mesh: slots are spread over its data axes where these divide them.
    on_finish: called with (index, response) as responses finish, while others still decode.
    limits: of each response, in tokens, from 1 to spec.max_response, the default.
    begun: what is written of each response already; none is complete.
    is_enough: whether to return with what is written, asked first and after each sync.
    on_sync: called at each sync.
  """
  rows = rows_of(spec, prompts, question_rows, sample_indices, key, limits, begun)
  waiting, slots = collections.deque(rows), list[Row | None]([None] * spec.slots)
  sampling, temperature = spec.sampling, spec.distribution.temperature or 1.0
  state, prefilled = None, None
  with jax.set_mesh(mesh), activity.doing(lambda: progress(rows)):
    is_fixed = begun is not None or kv_cache.is_ragged(sharding.platform())
    while (waiting or any(slots)) and not is_enough():
      if not waiting and state is not None and not is_fixed:
        state, slots = _compact(state, slots)
      take_slots(slots, waiting)
      length = spec.longest_row if is_fixed else _cache_length(spec, slots)
      if state is None or prefilled is None:
        state, places = decode_loop.empty(config, spec.at_any_temperature, length)
        prefilled = Prefilled(places)
      state = _fit_cache(spec, state, length)
      state = _filled(config, spec, params, mesh, state, prefilled, slots, waiting)
      # Until all have finished, where none waits and nobody asks whether it is enough.
      live = len(slots) - slots.count(None)
      at_once = rows_per_insert(spec.slots) if waiting or begun is not None else live
      state, decoded = decode_loop.decode(
        config, sampling, params, state, min(live, at_once), temperature
      )
      decoded = jax.device_get(decoded)
      on_sync(sync_of(slots, decoded))
      for index, response in harvest(slots, decoded):
        on_finish(index, response)
  return [row.complete or row.response() for row in rows]


def rows_per_insert(slots: int) -> int:
  """R: how many slots are filled together."""
  return max(1, slots // _REFILL_SHARE)


def compacted_slots(slots: int) -> int:
  """How many are left of so many slots when the last rows close up; 0 is not at all."""
  return slots // 4  # halves would compile twice as many programs


def cache_lengths(longest_row: int, platform: str) -> list[int]:
  """Every length that the cache may have in a run, shortest first."""
  if kv_cache.is_ragged(platform):
    return [longest_row]
  lengths = [_SHORTEST_CACHE]
  while lengths[-1] * 2 <= longest_row:
    lengths.append(lengths[-1] * 2)
  # One that is nearly the longest would be a program for little.
  return [length for length in lengths if length * 4 <= longest_row * 3] + [longest_row]


def _compact(state: State, slots: Slots) -> tuple[State, Slots]:
  """A quarter of the slots, once the live rows fit into these and no others wait."""
  live = [slot for slot, row in enumerate(slots) if row is not None]
  count = compacted_slots(len(slots))
  if len(live) > count:
    return state, slots
  free = [slot for slot, row in enumerate(slots) if row is None]
  kept = [*live, *free[: count - len(live)]]
  compacted = decode_loop.select_slots(state, np.array(kept, np.int32))
  jax.tree.map(lambda old: old.delete(), state.cache)
  return compacted, [slots[slot] for slot in kept]


def _cache_length(spec: DecodeSpec, slots: Slots) -> int:
  """How long a cache the rows need until the next sync."""
  rows = [row for row in slots if row is not None]
  longest = max(row.position for row in rows)
  furthest = max(len(row.prompt) + row.limit for row in rows)
  needed = min(longest + decode_loop.TOKENS_PER_SYNC, furthest)
  lengths = cache_lengths(spec.longest_row, sharding.platform())
  return next(length for length in lengths if length >= needed)


def _fit_cache(spec: DecodeSpec, state: State, length: int) -> State:
  """The state with a cache of at least this length, and not much longer."""
  present = kv_cache.length(state.cache)
  if length <= present < 4 * length:  # no switching back and forth between two lengths
    return state
  lengths = cache_lengths(spec.longest_row, sharding.platform())
  now, then = lengths.index(present), lengths.index(length)
  step = 1 if then > now else -1
  for place in range(now + step, then + step, step):  # one by one: few pairs to compile
    state = decode_loop.resize_cache(state, lengths[place])
  return state


def _filled(
  config: model.Config,
  spec: DecodeSpec,
  params: model.Params,
  mesh: Mesh,
  state: State,
  prefilled: Prefilled,
  slots: Slots,
  waiting: collections.deque[Row],
) -> State:
  """The state with the slots of new rows filled; prompts that `prefilled` lacks are prefilled."""
  for tokens_PT, insertion in _resumptions(spec, mesh, slots):
    state = decode_loop.resume(config, params, state, tokens_PT, insertion)
  new = [(slot, row) for slot, row in enumerate(slots) if row is not None and not row.is_filled]
  while new:
    if any(row.origin not in prefilled.places for _, row in new):
      following = itertools.chain((row for _, row in new), waiting)
      wanted = ((row.origin, row.prompt) for row in following if not row.length)
      prefilled.take_in(config, spec, params, mesh, wanted)
    ready = [(slot, row) for slot, row in new if row.origin in prefilled.places]
    new = [(slot, row) for slot, row in new if row.origin not in prefilled.places]
    count = rows_per_insert(spec.slots)
    for start in range(0, len(ready), count):
      entries = [
        (slot, prefilled.places[row.origin], row) for slot, row in ready[start : start + count]
      ]
      insertion = insertion_of(entries, spec.slots, count)
      state = decode_loop.insert(state, prefilled.prompts, insertion)
    for _, row in ready:
      row.is_filled = True
  return state


def _resumptions(
  spec: DecodeSpec, mesh: Mesh, slots: Slots
) -> Iterator[tuple[np.ndarray, Insertion]]:
  """Fills the slots of rows that are partly written: what `decode_loop.resume` takes."""
  begun = {slot: row for slot, row in enumerate(slots) if row and row.length and not row.is_filled}
  written = {
    slot: np.concatenate([row.prompt, *(tokens for tokens, *_ in row.pieces)])
    for slot, row in begun.items()
  }
  lengths = resume_lengths(spec.longest_row)
  for tokens_PT, filled in batches(written, lengths, spec.slots, mesh, spec.pad_id):
    entries = [(slot, 0, begun[slot]) for slot in filled]
    yield tokens_PT, insertion_of(entries, spec.slots, len(tokens_PT))
  for row in begun.values():
    row.is_filled = True
