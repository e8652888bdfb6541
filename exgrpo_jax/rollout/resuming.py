"""Resuming responses that began in an earlier step or an earlier turn of an episode.

The tokens of such a response are prefilled together with its prompt, directly into its slot, and
decoding continues from there. Rows are packed into sequences of two lengths (see packing.py).

The first `spec.parked` episodes of a call instead keep their caches between turns, so a later turn
reads only the observation, token by token, while other slots keep decoding. Timing must not decide
which episodes these are, because rounding in a cache depends on how the cache was computed.

Shape letters as in decode_loop.py, but P counts packed sequences of T tokens each.
"""

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.datatypes import Array
from exgrpo_jax.packing import Segments, Shape
from exgrpo_jax.policy import kv_cache, model
from exgrpo_jax.rollout import decode_loop, routes, slots
from exgrpo_jax.rollout.decode_loop import DecodeSpec, Forced, Insertion, State
from exgrpo_jax.rollout.slots import Slots, insertion_of, rows_per_insert

# Maximum resumed responses per sequence. With lognormal lengths and a 99th percentile of 8 times
# the median, passes compute 1.02 tokens per real token. With at most 4, it is 1.04; with 3, 1.10.
_ROWS_OF_SEQUENCE = 8

_Name = TypeVar('_Name', bound=Hashable)


# ---- Prefilling begun responses again ----


def resumed(
  config: model.ShapeConfig,
  spec: DecodeSpec,
  mesh: Mesh,
  params: model.Params,
  state: State,
  rows: Slots,
  shares: bool,
) -> State:
  """Prefill the slots of rows that already have tokens. For `shares`, see `packed_passes`."""
  begun_rows = {
    slot: row for slot, row in enumerate(rows) if row and row.length and not row.is_filled
  }
  texts = {
    slot: np.concatenate([row.request.prompt, *(tokens for tokens, *_ in row.pieces)])
    for slot, row in begun_rows.items()
  }
  routes_RTLC = None
  if spec.keeps_routes:
    row_routes = [row.request.prefix.routes for row in begun_rows.values()]
    routes_RTLC = routes.padded(config, row_routes, max(map(len, texts.values()), default=0))
  passes = packed(texts, spec.longest_row, spec.slots, mesh, routes_RTLC, shares)
  for tokens_PT, segments, starts, routes_PTLC in passes:
    entries = [(slot, start, begun_rows[slot]) for slot, start in starts]
    insertion = insertion_of(entries, spec.slots, packed_rows(len(tokens_PT), spec.slots))
    state = resume(config, params, state, tokens_PT, segments, insertion, routes_PTLC)
  for row in begun_rows.values():
    row.is_filled = True
  return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def resume(
  config: model.ShapeConfig,
  params: model.Params,
  state: State,
  tokens_PT: Array,
  segments: Segments,
  insertion: Insertion,
  routes_PTLC: Array | None = None,
) -> State:
  """Prefill prompts together with their partial responses, directly into slots.

  `params` are in the decode layout. `state` is donated. `tokens_PT` (int32) contains packed rows,
  separated by `segments`. `insertion` lists these rows in any order; here `source_R` is the index
  of a row's first token in the flattened `tokens_PT`. `routes_PTLC` are the known routes of the
  tokens; see routes.py.
  """
  slot_R, start_R, length_R, *_ = map(jnp.asarray, insertion)
  T, no_cache = tokens_PT.shape[1], (None,) * config.num_layers
  sizes = config.layer_lengths(T)

  def store(
    number: int, x_PTD: jax.Array, packed: kv_cache.LayerCache
  ) -> tuple[jax.Array, kv_cache.LayerCache]:
    layer = state.cache[number]
    layer = kv_cache.unpack_rows(layer, packed, slot_R, start_R, length_R, sizes[number])
    # Finish this layer before the next, so that only one layer's packed cache exists at a time.
    return jax.lax.optimization_barrier((x_PTD, layer))

  hidden_PTD, cache, routes_PTLC = model.apply_layers(
    config, params, tokens_PT, segments.position_BT, no_cache, segments, routes_PTLC, store
  )
  last_RD = hidden_PTD[jnp.divmod(start_R + length_R - 1, T)]
  routes_RTLC = None
  if routes_PTLC is not None and state.routes_BSLC is not None:
    # Entries after a row's tokens are meaningless.
    place_RT = jnp.minimum(start_R[:, None] + jnp.arange(T), tokens_PT.size - 1)
    routes_RTLC = routes_PTLC.reshape(-1, *routes_PTLC.shape[2:])[place_RT]
  return decode_loop.filled(state._replace(cache=cache), insertion, last_RD, None, routes_RTLC)


def packed(
  rows: Mapping[_Name, np.ndarray],
  longest_row: int,
  max_rows: int,
  mesh: Mesh,
  routes_RTLC: np.ndarray | None = None,
  shares: bool = True,
) -> Iterator[tuple[np.ndarray, Segments, list[tuple[_Name, int]], np.ndarray | None]]:
  """Pack rows and yield the passes: (tokens_PT int32, segments, starts, routes_PTLC).

  `rows` maps names to token arrays: at most `max_rows` arrays of at most `longest_row` tokens.
  `starts` lists each row's name and the index of its first token in the flattened `tokens_PT`.
  `routes_RTLC` are the rows' routes, at least as long as the rows (see routes.py), or None. For
  `shares`, see `packed_passes`.
  """
  if not rows:
    return
  names, length_R = list(rows), np.array([len(tokens) for tokens in rows.values()])
  tokens_RT = np.zeros((len(rows), length_R.max()), np.int32)
  for row_T, tokens in zip(tokens_RT, rows.values()):
    row_T[: len(tokens)] = tokens
  for shape, sequences in packed_passes(length_R, longest_row, max_rows, mesh, shares):
    layout = packing.layout(shape, sequences, length_R)
    starts = [
      (names[row], number * shape.length + int(start))
      for number, sequence in enumerate(sequences)
      for row, start in zip(sequence, np.cumsum([0, *length_R[sequence]]))
    ]
    routes_PTLC = None if routes_RTLC is None else layout.take(routes_RTLC)
    yield layout.take(tokens_RT), layout.segments, starts, routes_PTLC


def packed_passes(
  length_R: np.ndarray, longest_row: int, max_rows: int, mesh: Mesh, shares: bool = True
) -> list[packing.Pass]:
  """Pack rows of these lengths into passes. For the other arguments, see `packed`.

  If `shares` is False, each row gets its own sequence, whose length depends only on the row's
  length; see `SlotEngine.packs_resumed`.
  """
  long, short = packed_shapes(longest_row, max_rows, mesh)
  if shares:
    return packing.pack(length_R, np.ones_like(length_R), long, short)
  is_short_R = length_R <= short.length
  return [
    packing.Pass(shape, [[row] for row in rows[start : start + shape.count]])
    for shape, rows in (
      (short, np.flatnonzero(is_short_R).tolist()),
      (long, np.flatnonzero(~is_short_R).tolist()),
    )
    for start in range(0, len(rows), shape.count)
  ]


def packed_shapes(longest_row: int, max_rows: int, mesh: Mesh) -> tuple[Shape, Shape]:
  """Return the (long, short) shapes; here, `window` limits the number of rows per sequence."""
  short = -(-longest_row // 4)
  long, short = (
    Shape(slots.prefilled_together(length, max_rows, mesh), length, _ROWS_OF_SEQUENCE)
    for length in (longest_row, short if short >= slots.SHORTEST_PREFILL else longest_row)
  )
  return long, short


def packed_rows(num_sequences: int, max_rows: int) -> int:
  """Return the maximum number of rows to resume in `num_sequences` sequences."""
  return min(max_rows, num_sequences * _ROWS_OF_SEQUENCE)


# ---- Parking: keeping the caches of episodes between turns ----


def parked_with(
  spec: DecodeSpec, state: State, parked_cache: kv_cache.Cache, turns: Sequence[tuple[int, int]]
) -> kv_cache.Cache:
  """Park the caches of complete turns, given as (slot, place); skip places that don't exist."""
  parked_turns = [(slot, place) for slot, place in turns if place < spec.parked]
  count = rows_per_insert(spec.slots)
  for start in range(0, len(parked_turns), count):
    batch = parked_turns[start : start + count]
    padding = [(0, spec.parked)] * (count - len(batch))
    slot_R, place_R = np.array([*batch, *padding], np.int32).T
    parked_cache = park(state, parked_cache, slot_R, place_R)
  return parked_cache


def unparked(spec: DecodeSpec, state: State, parked_cache: kv_cache.Cache, rows: Slots) -> State:
  """Copy parked caches into the slots of new rows that continue parked episodes."""
  entries = [
    (slot, row.place, row)
    for slot, row in enumerate(rows)
    if row and len(row.forced) and not row.is_filled
  ]
  count = rows_per_insert(spec.slots)
  for start in range(0, len(entries), count):
    state = unpark(
      state, parked_cache, insertion_of(entries[start : start + count], spec.slots, count)
    )
  for _, _, row in entries:
    row.is_filled = True
  return state


def forced_of(rows: Slots, width: int = 0) -> Forced:
  """Collect the tokens that rows must read before sampling, at most one sync's worth per row."""
  N, B = decode_loop.TOKENS_PER_SYNC * (width + 1), len(rows)
  tokens_NB, count_B = np.zeros((N, B), np.int32), np.zeros(B, np.int32)
  for slot, row in enumerate(rows):
    if row:
      count = count_B[slot] = min(N, len(row.forced))
      tokens_NB[:count, slot] = row.forced[:count]
  return Forced(tokens_NB, count_B)


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty_parking(config: model.ShapeConfig, spec: DecodeSpec) -> kv_cache.Cache:
  """Return an empty cache for `spec.parked` rows, of the same length as the slots' cache."""
  return kv_cache.constrained(model.init_cache(config, spec.parked, spec.longest_row))


@functools.partial(jax.jit, donate_argnums=1)
def park(
  state: State, parked_cache: kv_cache.Cache, slot_R: Array, place_R: Array
) -> kv_cache.Cache:
  """Copy the caches of `slot_R` to places `place_R`; drop caches whose place is out of range."""
  rows = kv_cache.select_rows(state.cache, slot_R)
  return kv_cache.constrained(kv_cache.replace_rows(parked_cache, place_R, rows))


@functools.partial(jax.jit, donate_argnums=0)
def unpark(state: State, parked_cache: kv_cache.Cache, insertion: Insertion) -> State:
  """Copy parked caches into slots. The next token of each row must be forced."""
  R, D = len(insertion.source_R), state.hidden_BD.shape[1]
  cache = kv_cache.select_rows(parked_cache, insertion.source_R)
  hidden_RD = jnp.zeros((R, D), state.hidden_BD.dtype)  # never sampled from
  # The routes of these tokens were read when the caches were parked.
  return decode_loop.filled(state, insertion, hidden_RD, cache, None)
