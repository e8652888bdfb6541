"""Responses to prompts: a fixed set of slots decodes together, and a queue refills them.

What a row samples depends on its key, question row, sample index and tokens, not on the
rows beside it. So slots, order and refills change nothing up to the rounding of the logits
(a draw on a boundary may flip when they move by an ulp).

The device runs `decode_loop.decode` until some rows have finished. The host then takes their
responses, prefills the next prompts, each once for all its samples, and inserts them into the
free slots. It decides from small arrays that are the same on every host. The cache is as long
as the rows now in it need, rounded up to one of few lengths, and never longer than the limit.

Shape letters as in decode_loop.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array, Response
from exgrpo_jax.padding import length_bucket, rows_within
from exgrpo_jax.policy import kv_cache, model
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import Decoded, DecodeSpec, Insertion, State
from exgrpo_jax.runtime import activity

PREFILL_TOKENS = 16384  # in one prefill, so that its activations stay small
# Refill once one slot in this many has finished: few host syncs, few idle slots.
_REFILL_SHARE = 8

# What rows of one question and prompt start from: (hidden_PD, cache) of the prompts prefilled
# together, and the index of their own among these.
_Prefilled = tuple[tuple[jax.Array, kv_cache.Cache], int]
_Origin = tuple[int, bytes]


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
  assert all(1 <= len(prompt) <= spec.max_prompt for prompt in prompts), 'the cache has its limit'
  assert all(1 <= limit <= spec.max_response for limit in limits), 'the cache has its limit'
  waiting = collections.deque(
    _Row(index, prompt, question_row, sample_index, limit)
    for index, (prompt, question_row, sample_index, limit) in enumerate(
      zip(prompts, question_rows, sample_indices, limits, strict=True)
    )
  )
  slots: list[_Row | None] = [None] * spec.slots
  responses: dict[int, Response] = {}
  prefilled: dict[_Origin, _Prefilled] = {}
  state = None
  with jax.set_mesh(mesh), activity.doing(lambda: _progress(slots, responses, len(prompts))):
    while waiting or any(slots):
      free = [slot for slot, row in enumerate(slots) if row is None]
      for slot in free[: len(waiting)]:
        slots[slot] = waiting.popleft()
      if not waiting and state is not None:
        state, slots = _compact(state, slots)
      state = _fit_cache(config, spec, state, slots)
      state = _fill(config, spec, params, state, prefilled, slots, waiting)
      live = sum(row is not None for row in slots)
      min_finished = max(1, spec.slots // _REFILL_SHARE) if waiting else live
      state, decoded = decode_loop.decode(config, spec, params, key, state, min_finished)
      for slot, index, response in _harvest(slots, jax.device_get(decoded)):
        slots[slot] = None
        responses[index] = response
        if on_finish is not None:
          on_finish(index, response)
  return [responses[index] for index in range(len(prompts))]


def prefilled_together(length: int) -> int:
  """The most prompts of `length` tokens in one prefill: a power of two, for few shapes."""
  return 1 << rows_within(PREFILL_TOKENS, length).bit_length() - 1


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
  def origin(self) -> _Origin:
    """Equal for rows that start from the same prefill."""
    return self.question_row, self.prompt.tobytes()


_Slots = list[_Row | None]


def _progress(slots: _Slots, responses: Mapping[int, Response], total: int) -> str:
  """How far it is, as of the last sync."""
  finished = list(responses.values())
  tokens = sum(len(response.tokens) for response in finished)
  tokens += sum(row.length for row in slots if row is not None)
  return f'{len(finished)} of {total} responses, {tokens:,} tokens'


def _compact(state: State, slots: _Slots) -> tuple[State, _Slots]:
  """A quarter of the slots, once the live rows fit into these and no others wait."""
  live = [slot for slot, row in enumerate(slots) if row is not None]
  count = len(slots) // 4  # halves would compile twice as many programs
  if len(live) > count:
    return state, slots
  free = [slot for slot, row in enumerate(slots) if row is None]
  kept = [*live, *free[: count - len(live)]]
  compacted = decode_loop.select_slots(state, np.array(kept, np.int32))
  jax.tree.map(lambda old: old.delete(), state.cache)
  return compacted, [slots[slot] for slot in kept]


def _fit_cache(config: model.Config, spec: DecodeSpec, state: State | None, slots: _Slots) -> State:
  """The state with a cache as long as its rows need until the next sync."""
  rows = [row for row in slots if row is not None]
  longest = max(row.position for row in rows)
  furthest = max(len(row.prompt) + row.limit for row in rows)
  # At the limit the bucket is the limit itself: the next power of two may take a third more memory.
  needed = min(longest + decode_loop.TOKENS_PER_SYNC, furthest)
  length = length_bucket(needed, spec.longest_row)
  if state is None:
    return decode_loop.empty(config, spec, length)
  present = kv_cache.length(state.cache)
  if present < length or present >= 4 * length:  # no switching back and forth between two lengths
    return decode_loop.resize_cache(state, length)
  return state


def _fill(
  config: model.Config,
  spec: DecodeSpec,
  params: model.Params,
  state: State,
  prefilled: dict[_Origin, _Prefilled],
  slots: _Slots,
  waiting: collections.deque[_Row],
) -> State:
  """The state with the prompts of new rows in their slots.

  Updates `prefilled`, which keeps what rows that still wait will start from.
  """
  new = {slot: row for slot, row in enumerate(slots) if row is not None and not row.is_filled}
  if not new:
    return state
  absent = {row.origin: row.prompt for row in new.values() if row.origin not in prefilled}
  by_bucket = collections.defaultdict(list)
  for origin, prompt in absent.items():
    by_bucket[length_bucket(len(prompt), spec.max_prompt)].append((origin, prompt))
  for length, group in sorted(by_bucket.items()):
    together = prefilled_together(length)
    for start in range(0, len(group), together):
      prefilled |= _prefill(config, spec, params, group[start : start + together], length)
  batches = {}
  entries = collections.defaultdict(list)
  for slot, row in new.items():
    batch, source = prefilled[row.origin]
    batches[id(batch)] = batch
    entries[id(batch)].append((slot, source, row))
    row.is_filled = True
  for name, batch in batches.items():
    state = decode_loop.insert(state, batch, _insertion(entries[name], spec.slots))
  needed = {row.origin for row in waiting}
  for origin in [origin for origin in prefilled if origin not in needed]:
    del prefilled[origin]
  return state


def _prefill(
  config: model.Config,
  spec: DecodeSpec,
  params: model.Params,
  group: Sequence[tuple[_Origin, np.ndarray]],
  length: int,
) -> Mapping[_Origin, _Prefilled]:
  """The group's prompts, prefilled together in rows of `length` tokens."""
  count = 1 << (len(group) - 1).bit_length()  # few shapes
  tokens_PT = np.full((count, length), spec.pad_id, np.int32)
  lengths_P = np.ones(count, np.int32)
  for source, (_, prompt) in enumerate(group):
    tokens_PT[source, : len(prompt)], lengths_P[source] = prompt, len(prompt)
  batch = decode_loop.prefill(config, params, tokens_PT, lengths_P)
  return {origin: (batch, source) for source, (origin, _) in enumerate(group)}


def _insertion(entries: Sequence[tuple[int, int, _Row]], num_slots: int) -> Insertion:
  """(slot, source, row) as arrays whose length is a power of two; what is left over fills none."""
  count = 1 << (len(entries) - 1).bit_length()

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
