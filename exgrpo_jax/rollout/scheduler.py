"""The slot engine: a fixed set of slots that decode together and are refilled from a queue.

A row's samples depend only on its request, not on the other rows. So slot assignment, order and
refills affect only rounding: a draw close to a boundary may flip if a logit changes by an ulp.

The device runs `decode_loop.decode` in parts of several seconds (`_Pace`) until some rows have
finished. The host then collects the finished responses and inserts the next prompts into the free
slots. Each prompt is prefilled in advance, once for all its samples (`slots.Prefilled`). The
host bases its decisions on small arrays that are identical on every host.

Few programs are compiled. With ragged attention (`kv_cache.is_ragged`), the cache always has its
maximum length and all slots decode to the end, so there is one program of each kind. Otherwise the
cache is as long as its current rows need, rounded up to one of a few lengths. Once no prompts are
waiting, the remaining rows are compacted into fewer slots.

An engine that resumes accepts responses begun in earlier steps or turns (resuming.py). Its cache
always has its maximum length.

Shape letters as in decode_loop.py.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Response
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import decode_loop, drafts, resuming
from exgrpo_jax.rollout.decode_loop import DecodeSpec, State
from exgrpo_jax.rollout.sampler import More, OnFinish, Request, ignore, nothing_more
from exgrpo_jax.rollout.slots import (
  Past,
  Prefilled,
  Row,
  Slots,
  Sync,
  finished,
  harvest,
  insertion_of,
  joined,
  metrics,
  past_of,
  progress,
  rows_of,
  rows_per_insert,
  take_slots,
  text_length,
  texts_of,
  write,
)
from exgrpo_jax.runtime import activity, hosts

_PART = 10.0  # target time between progress updates, in seconds
_SHORTEST_CACHE = 128  # positions; compiling even shorter shapes would cost more than padding


@dataclasses.dataclass(frozen=True)
class SlotEngine:
  """The `Sampler` that runs the policy."""

  model: model.ShapeConfig
  spec: DecodeSpec
  mesh: Mesh  # for decoding; slots are split over its data axes if they divide evenly
  step_key: Callable[[int], jax.Array]  # the key of the step that began a response
  resumes: bool = False  # True to continue begun responses and to let on_finish stop the engine
  # False puts each resumed row into its own sequence. Use False if timing decides which rows are
  # resumed together, as with environments, because rounding must not depend on timing.
  packs_resumed: bool = True
  on_sync: Callable[[Sync], None] = lambda _: None

  def generate(
    self,
    params: Params,
    requests: Sequence[Request],
    on_finish: OnFinish = ignore,
    more: More = nothing_more,
  ) -> tuple[list[Response], dict[str, float]]:
    """See `Sampler.generate`. Adjacent equal prompts are prefilled once.

    Requests from `more` go to the front of the queue, but are numbered after `requests`, both in
    the indices for `on_finish` and in the result.
    """
    rows, syncs = rows_of(self.spec, requests, self.step_key), list[Sync]()
    past = past_of(requests)
    queue, slots = collections.deque(rows), list[Row | None]([None] * self.spec.slots)
    state, prefilled, parked_cache, is_enough, pace = None, None, None, False, _Pace()
    with jax.set_mesh(self.mesh), activity.doing(lambda: progress(rows)):
      is_fixed = self.resumes or kv_cache.is_ragged(sharding.platform())
      while not is_enough:
        new_requests = more(not (queue or any(slots)))
        rows += (new_rows := rows_of(self.spec, new_requests or (), self.step_key, rows))
        queue.extendleft(reversed(new_rows))
        if new_requests is None or not (queue or any(slots)):
          break
        if not queue and state is not None and not is_fixed:
          state, slots = _compact(state, slots)
        take_slots(slots, queue)
        length = self.spec.longest_row if is_fixed else _cache_length(self.spec, slots)
        if state is None or prefilled is None:
          state, prompts = decode_loop.empty(self.model, self.spec.at_any_temperature, length)
          prefilled = Prefilled(prompts)
          parked_cache = resuming.empty_parking(self.model, self.spec) if self.spec.parked else None
        state = _fit_cache(self.model, self.spec, state, length)
        if parked_cache is not None:
          state = resuming.unparked(self.spec, state, parked_cache, slots)
        state = self._fill_slots(params, state, prefilled, slots, queue)
        # If no rows are waiting and nothing can stop the engine, sync once all rows have finished.
        num_live = len(slots) - slots.count(None)
        min_finished = rows_per_insert(self.spec.slots) if queue or self.resumes else num_live
        state, sync = self._decode(params, state, slots, past, min(num_live, min_finished), pace)
        syncs.append(sync)
        self.on_sync(sync)
        turns = list[tuple[int, int]]()
        for slot, row, response in harvest(slots, self._read_routes(state, finished(slots))):
          is_enough |= bool(on_finish(row.index, response))
          past[row.request.question][row.request.sample] = response.tokens
          turns.append((slot, row.place))
        if parked_cache is not None:
          parked_cache = resuming.parked_with(self.spec, state, parked_cache, turns)
      row_indices = {slot: row.index for slot, row in enumerate(slots) if row}
      slot_routes = self._read_routes(state, [*row_indices])
    routes_of = {row_indices[slot]: routes_SLC for slot, routes_SLC in slot_routes.items()}
    responses = [row.complete or row.response(routes_of.get(row.index)) for row in rows]
    return responses, metrics(syncs)

  def _decode(
    self, params: Params, state: State, slots: Slots, past: Past, min_finished: int, pace: '_Pace'
  ) -> tuple[State, Sync]:
    """Decode until the next sync: after N steps, or once `min_finished` rows have finished.

    The number of parts affects only how often `progress` is updated.
    """
    steps, parts, N = 0, list[Sync](), decode_loop.TOKENS_PER_SYNC
    while steps < N and (missing := min_finished - len(finished(slots))) > 0:
      # Hosts must agree on the number of steps, and their clocks differ.
      max_steps = N - steps if hosts.are_several() else min(pace.steps, N - steps)
      start = time.monotonic()
      state, part = self._decode_part(params, state, slots, past, missing, max_steps)
      pace.adapt(part.steps, time.monotonic() - start)
      parts.append(part)
      steps += part.steps
      if part.steps < max_steps:  # enough have finished, or the cache is full
        break
    return state, joined(parts)

  def _decode_part(
    self, params: Params, state: State, slots: Slots, past: Past, missing: int, max_steps: int
  ) -> tuple[State, Sync]:
    """Decode until `missing` more rows have finished, for at most `max_steps` steps."""
    sampling, temperature = self.spec.sampling, self.spec.distribution.temperature or 1.0
    width = drafts.width(self.spec.drafts, len(slots), self.mesh)
    forced = resuming.forced_of(slots, width) if self.spec.parked else None
    decode_args = missing, max_steps, temperature, forced
    if not width:
      state, decoded = decode_loop.decode(self.model, sampling, params, state, *decode_args)
      return state, write(slots, jax.device_get(decoded))
    texts = texts_of(slots, past, text_length(self.model, self.spec, state))
    state, *results = drafts.decode(self.model, sampling, width, params, state, texts, *decode_args)
    decoded, counts = jax.device_get(results)
    return state, write(slots, decoded, width, counts)

  def _read_routes(self, state: State | None, slots: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the routes [S, L, C] of the given slots, or {} if routes are not kept."""
    slot_routes, count = dict[int, np.ndarray](), rows_per_insert(self.spec.slots)
    if state is None or not self.spec.keeps_routes:
      return slot_routes
    for start in range(0, len(slots), count):
      batch = slots[start : start + count]
      slot_R = np.array([*batch, *[0] * (count - len(batch))], np.int32)
      slot_routes |= zip(batch, jax.device_get(decode_loop.routes_of(state, slot_R)))
    return slot_routes

  def _fill_slots(
    self,
    params: Params,
    state: State,
    prefilled: Prefilled,
    slots: Slots,
    queue: collections.deque[Row],
  ) -> State:
    """Fill the slots of new rows, after prefilling any missing prompts."""
    if self.resumes:
      state = resuming.resumed(
        self.model, self.spec, self.mesh, params, state, slots, self.packs_resumed
      )
    new_rows = [
      (slot, row) for slot, row in enumerate(slots) if row is not None and not row.is_filled
    ]
    while new_rows:
      if any(row.origin not in prefilled.places for _, row in new_rows):
        rows = itertools.chain((row for _, row in new_rows), queue)
        prompts = ((row.origin, row.request.prompt) for row in rows if not row.length)
        prefilled.take_in(self.model, self.spec, params, self.mesh, prompts)
      ready_rows = [(slot, row) for slot, row in new_rows if row.origin in prefilled.places]
      new_rows = [(slot, row) for slot, row in new_rows if row.origin not in prefilled.places]
      count = rows_per_insert(self.spec.slots)
      for start in range(0, len(ready_rows), count):
        entries = [
          (slot, prefilled.places[row.origin], row)
          for slot, row in ready_rows[start : start + count]
        ]
        insertion = insertion_of(entries, self.spec.slots, count)
        state = decode_loop.insert(state, prefilled.prompts, insertion)
      for _, row in ready_rows:
        row.is_filled = True
    return state


@dataclasses.dataclass
class _Pace:
  """The number of decode steps per part, chosen so that a part takes about `_PART` seconds."""

  steps: int = 1  # the speed is unknown at first

  def adapt(self, steps: int, seconds: float) -> None:
    """Adapt to the measured duration of a part, including waiting and compilation."""
    max_steps = steps * _PART / max(seconds, 1e-9)
    self.steps = round(min(max(max_steps, 1), decode_loop.TOKENS_PER_SYNC))


def compacted_slots(slots: int) -> int:
  """Return how many slots are left after compaction, or 0 if compaction is not possible."""
  return slots // 4  # halving would compile twice as many programs


def cache_lengths(longest_row: int, platform: str) -> list[int]:
  """Return every length that the cache can have in a run, shortest first."""
  if kv_cache.is_ragged(platform):
    return [longest_row]
  lengths = [_SHORTEST_CACHE]
  while lengths[-1] * 2 <= longest_row:
    lengths.append(lengths[-1] * 2)
  # A length close to the maximum isn't worth another program.
  return [length for length in lengths if length * 4 <= longest_row * 3] + [longest_row]


def _compact(state: State, slots: Slots) -> tuple[State, Slots]:
  """Keep a quarter of the slots if the live rows fit into them. Requires an empty queue."""
  live_slots = [slot for slot, row in enumerate(slots) if row is not None]
  count = compacted_slots(len(slots))
  if len(live_slots) > count:
    return state, slots
  free_slots = [slot for slot, row in enumerate(slots) if row is None]
  kept_slots = [*live_slots, *free_slots[: count - len(live_slots)]]
  new_state = decode_loop.select_slots(state, np.array(kept_slots, np.int32))
  jax.tree.map(lambda old: old.delete(), state.cache)
  return new_state, [slots[slot] for slot in kept_slots]


def _cache_length(spec: DecodeSpec, slots: Slots) -> int:
  """Return the cache length that the rows need until the next sync."""
  rows = [row for row in slots if row is not None]
  max_position = max(row.position for row in rows)
  max_length = max(len(row.request.prompt) + row.request.limit for row in rows)
  min_length = min(max_position + decode_loop.TOKENS_PER_SYNC, max_length)
  lengths = cache_lengths(spec.longest_row, sharding.platform())
  return next(length for length in lengths if length >= min_length)


def _fit_cache(config: model.ShapeConfig, spec: DecodeSpec, state: State, length: int) -> State:
  """Resize the cache if it is shorter than `length`, or at least four times as long."""
  current_length = model.cache_length(config, state.cache)
  # Avoid switching back and forth between two lengths.
  if length <= current_length < 4 * length or current_length == model.UNLIMITED:
    return state
  lengths = cache_lengths(spec.longest_row, sharding.platform())
  # The longest length may have been rounded up to whole blocks; all others need no rounding.
  now, then = lengths.index(min(current_length, lengths[-1])), lengths.index(length)
  step = 1 if then > now else -1
  for place in range(now + step, then + step, step):  # one length at a time: fewer pairs to compile
    state = decode_loop.resize_cache(config, state, lengths[place])
  return state
