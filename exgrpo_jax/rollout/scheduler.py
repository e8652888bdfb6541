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

Shape letters as in decode_loop.py.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array, Response
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import Decoded, DecodeSpec, Insertion, State
from exgrpo_jax.rollout.prefilled import Origin, Prefilled
from exgrpo_jax.runtime import activity, randomness

# Refill once one slot in this many has finished, and so many at a time: few host syncs, few idle
# slots.
_REFILL_SHARE = 8
_SHORTEST_CACHE = 128  # positions; below it, compiling another shape costs more than the padding


def generate(
  config: model.Config,
  params: model.Params,
  prompts: Sequence[np.ndarray],
  question_rows: Sequence[int],
  sample_indices: Sequence[int],
  key: jax.Array,
  spec: DecodeSpec,
  mesh: Mesh,
  on_finish: Callable[[int, Response], None] | None = None,
  limits: Sequence[int] | None = None,
) -> list[Response]:
  """One response per prompt, in the prompts' order.

  Args:
    config: of the model.
    params: of the model, on `mesh`; in `model.decode_layout`.
    prompts: int32 [T], from one token to spec.max_prompt. Equal prompts of one question are
      prefilled once if they follow one another.
    question_rows: each prompt's question; with the sample index it seeds the row.
    sample_indices: which of its question's samples each row is.
    key: of this step.
    spec: how to sample.
    mesh: slots are spread over its data axes where these divide them.
    on_finish: called with (index, response) as responses finish, while others still decode.
    limits: of each response, in tokens, from 1 to spec.max_response, the default.
  """
  limits = [spec.max_response] * len(prompts) if limits is None else limits
  _check_lengths(spec, prompts, limits)
  numbered = zip(range(len(prompts)), prompts, question_rows, sample_indices, limits, strict=True)
  waiting = collections.deque(_Row(*row) for row in numbered)
  program_spec, temperature = spec.at_any_temperature, spec.distribution.temperature or 1.0
  slots: list[_Row | None] = [None] * spec.slots
  responses: dict[int, Response] = {}
  state, prefilled = None, None
  key = randomness.moved(key, mesh)
  with jax.set_mesh(mesh), activity.doing(lambda: _progress(slots, responses, len(prompts))):
    while waiting or any(slots):
      if not waiting and state is not None and not kv_cache.is_ragged(sharding.platform()):
        state, slots = _compact(state, slots)
      _take_slots(slots, waiting)
      length = _cache_length(spec, slots)
      if state is None or prefilled is None:
        state, places = decode_loop.empty(config, program_spec, length)
        prefilled = Prefilled(places)
      state = _fit_cache(spec, state, length)
      for new in _insertions(config, spec, params, mesh, prefilled, slots, waiting):
        state = decode_loop.insert(state, prefilled.prompts, new)
      min_finished = rows_per_insert(spec.slots) if waiting else len(slots) - slots.count(None)
      state, decoded = decode_loop.decode(
        config, program_spec, params, key, state, min_finished, temperature
      )
      for slot, index, response in _harvest(slots, jax.device_get(decoded)):
        slots[slot] = None
        responses[index] = response
        if on_finish is not None:
          on_finish(index, response)
  return [responses[index] for index in range(len(prompts))]


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


# ---- The host's side ----


@dataclasses.dataclass
class _Row:
  """A response that is being written."""

  index: int  # among the responses
  prompt: np.ndarray
  question_row: int
  sample_index: int
  limit: int  # of the response, in tokens
  is_filled: bool = False  # its prompt is in the slot's cache
  pieces: list[tuple[Array, ...]] = dataclasses.field(default_factory=list)
  length: int = 0  # tokens in `pieces`

  @property
  def position(self) -> int:
    """Cache position of the next token."""
    return len(self.prompt) + self.length

  @functools.cached_property
  def origin(self) -> Origin:
    """Equal for rows that start from the same prefill."""
    return self.question_row, self.prompt.tobytes()


_Slots = list[_Row | None]


def _check_lengths(spec: DecodeSpec, prompts: Sequence[np.ndarray], limits: Sequence[int]) -> None:
  assert all(1 <= len(prompt) <= spec.max_prompt for prompt in prompts), 'the cache has its limit'
  assert all(1 <= limit <= spec.max_response for limit in limits), 'the cache has its limit'


def _progress(slots: _Slots, responses: Mapping[int, Response], total: int) -> str:
  """How far it is, as of the last sync."""
  finished = list(responses.values())
  tokens = sum(len(response.tokens) for response in finished)
  tokens += sum(row.length for row in slots if row is not None)
  return f'{len(finished)} of {total} responses, {tokens:,} tokens'


def _take_slots(slots: _Slots, waiting: collections.deque[_Row]) -> None:
  """Gives each free slot a row that waits, the first to the first."""
  free = [slot for slot, row in enumerate(slots) if row is None]
  for slot in free[: len(waiting)]:
    slots[slot] = waiting.popleft()


def _compact(state: State, slots: _Slots) -> tuple[State, _Slots]:
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


def _cache_length(spec: DecodeSpec, slots: _Slots) -> int:
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


def _insertions(
  config: model.Config,
  spec: DecodeSpec,
  params: model.Params,
  mesh: Mesh,
  prefilled: Prefilled,
  slots: _Slots,
  waiting: collections.deque[_Row],
) -> Iterator[Insertion]:
  """Fills the slots of new rows, as many at a time as one insertion takes.

  Each refers to what `prefilled` holds when it is returned; prompts that it lacks are prefilled.
  """
  new = [(slot, row) for slot, row in enumerate(slots) if row is not None and not row.is_filled]
  while new:
    if any(row.origin not in prefilled.places for _, row in new):
      following = itertools.chain((row for _, row in new), waiting)
      wanted = ((row.origin, row.prompt) for row in following)
      prefilled.take_in(config, spec, params, mesh, wanted)
    ready = [(slot, row) for slot, row in new if row.origin in prefilled.places]
    new = [(slot, row) for slot, row in new if row.origin not in prefilled.places]
    count = rows_per_insert(spec.slots)
    for start in range(0, len(ready), count):
      entries = [
        (slot, prefilled.places[row.origin], row) for slot, row in ready[start : start + count]
      ]
      yield insertion(entries, spec.slots)
    for _, row in ready:
      row.is_filled = True


def insertion(entries: Sequence[tuple[int, int, _Row]], num_slots: int) -> Insertion:
  """(slot, source, row) of at most `rows_per_insert` rows; what is left over fills no slot."""
  count = rows_per_insert(num_slots)

  def padded(values: Sequence[int], fill: int = 0) -> np.ndarray:
    return np.array([*values, *[fill] * (count - len(values))], np.int32)

  rows = [row for _, _, row in entries]
  return Insertion(
    slot_R=padded([slot for slot, _, _ in entries], fill=num_slots),
    source_R=padded([source for _, source, _ in entries]),
    position_R=padded([len(row.prompt) for row in rows]),
    question_row_R=padded([row.question_row for row in rows]),
    sample_index_R=padded([row.sample_index for row in rows]),
    limit_R=padded([row.limit for row in rows]),
  )


def _harvest(slots: _Slots, decoded: Decoded) -> Iterator[tuple[int, int, Response]]:
  """(slot, index, response) of the rows that finished; keeps the tokens of those that did not."""
  for slot, row in enumerate(slots):
    if row is None:
      continue
    count = decoded.length_B[slot] - row.length
    row.pieces.append(
      tuple(
        values_NB[:count, slot]
        for values_NB in (decoded.tokens_NB, decoded.logp_NB, decoded.entropy_NB)
      )
    )
    row.length += int(count)
    if not decoded.live_B[slot]:
      tokens, logp, entropy = (np.concatenate(parts) for parts in zip(*row.pieces))
      truncated = not decoded.ended_B[slot]
      response = Response(tokens=tokens, logp=logp, entropy=entropy, truncated=truncated)
      yield slot, row.index, response
