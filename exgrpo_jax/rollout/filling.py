"""Filling slots: prompts are prefilled and inserted, and responses that have begun are resumed.

Shape letters as in decode_loop.py.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.packing import Segments
from exgrpo_jax.policy import kv_cache, model
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import DecodeSpec, Prompts, State
from exgrpo_jax.runtime import randomness


class Insertion(NamedTuple):
  """The slots to fill, and their contents."""

  slot_R: Array  # int32; one past the last slot to fill none
  source_R: Array  # int32, among prompts or parked caches; see also `resume`
  position_R: Array  # int32, tokens of the prompt and of the response so far
  length_R: Array  # int32, tokens of the response so far
  step_key_RX: Array  # uint32, the data of the key of the step in which the response began
  question_row_R: Array  # int32
  sample_index_R: Array  # int32
  limit_R: Array  # int32


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(
  config: model.ShapeConfig,
  params: model.Params,
  prompts: Prompts,
  tokens_PT: Array,
  lengths_P: Array,
  place_P: Array,
) -> Prompts:
  """Prefill prompts together and store each at its place; a place one past the last drops it."""
  T = tokens_PT.shape[1]
  hidden_PTD, cache, routes_PTLC = model.prefill(config, params, tokens_PT, lengths_P, T)
  last_PD = hidden_PTD[jnp.arange(len(lengths_P)), lengths_P - 1]
  updated = Prompts(
    hidden_WD=prompts.hidden_WD.at[place_P].set(last_PD, mode='drop'),
    cache=kv_cache.replace_rows(prompts.cache, place_P, cache),
    routes_WSLC=_with_routes(prompts.routes_WSLC, place_P, routes_PTLC),
  )
  return decode_loop.laid_out(updated)


@functools.partial(jax.jit, donate_argnums=0)
def insert(state: State, prompts: Prompts, insertion: Insertion) -> State:
  """Copy prefilled prompts into slots. Other slots are unchanged."""
  source_R = insertion.source_R
  cache = kv_cache.select_rows(prompts.cache, source_R)
  routes_RSLC = None if prompts.routes_WSLC is None else prompts.routes_WSLC[source_R]
  return filled(state, insertion, prompts.hidden_WD[source_R], cache, routes_RSLC)


def filled(
  state: State,
  insertion: Insertion,
  hidden_RD: jax.Array,
  cache: kv_cache.Cache | None,
  routes_RTLC: jax.Array | None,
) -> State:
  """Return the state with `insertion.slot_R` filled, with cache and routes of R rows.

  Cache or routes are None if the state has them already.
  """
  slot_R = insertion.slot_R
  chex.assert_equal_shape([slot_R, insertion.position_R, insertion.limit_R])
  chex.assert_rank([hidden_RD, insertion.step_key_RX], 2)
  key_R = randomness.row_keys(
    jax.random.wrap_key_data(jnp.asarray(insertion.step_key_RX)),
    jnp.asarray(insertion.question_row_R),
    jnp.asarray(insertion.sample_index_R),
  )

  def put(values: jax.Array, new: Array | bool) -> jax.Array:
    return values.at[slot_R].set(new, mode='drop')

  updated = State(
    hidden_BD=put(state.hidden_BD, hidden_RD),
    position_B=put(state.position_B, insertion.position_R),
    length_B=put(state.length_B, insertion.length_R),
    live_B=put(state.live_B, True),
    key_BX=put(state.key_BX, jax.random.key_data(key_R)),
    limit_B=put(state.limit_B, insertion.limit_R),
    cache=kv_cache.replace_rows(state.cache, slot_R, cache) if cache else state.cache,
    routes_BSLC=_with_routes(state.routes_BSLC, slot_R, routes_RTLC),
  )
  return decode_loop.laid_out(updated)


def _with_routes(
  kept_BSLC: jax.Array | None, row_R: Array, routes_RTLC: jax.Array | None
) -> jax.Array | None:
  """Store the routes of some rows' first T tokens; a row one past the last drops them."""
  if kept_BSLC is None or routes_RTLC is None:
    return kept_BSLC
  routes_RTLC = routes_RTLC.astype(kept_BSLC.dtype)
  return kept_BSLC.at[row_R, : routes_RTLC.shape[1]].set(routes_RTLC, mode='drop')


# ---- Parking: slots set aside and taken back ----


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty_parking(config: model.ShapeConfig, spec: DecodeSpec) -> kv_cache.Cache:
  """Return empty caches for `spec.parked` rows, as long as the slots' caches."""
  return kv_cache.constrained(model.init_cache(config, spec.parked, spec.longest_row))


@functools.partial(jax.jit, donate_argnums=1)
def park(state: State, parked: kv_cache.Cache, slot_R: Array, place_R: Array) -> kv_cache.Cache:
  """Copy the caches of slots to their places; a place one past the last drops the cache."""
  rows = kv_cache.select_rows(state.cache, slot_R)
  return kv_cache.constrained(kv_cache.replace_rows(parked, place_R, rows))


@functools.partial(jax.jit, donate_argnums=0)
def unpark(state: State, parked: kv_cache.Cache, insertion: Insertion) -> State:
  """Copy parked caches into slots. Their rows must read a forced token next."""
  R, D = len(insertion.source_R), state.hidden_BD.shape[1]
  cache = kv_cache.select_rows(parked, insertion.source_R)
  hidden_RD = jnp.zeros((R, D), state.hidden_BD.dtype)  # nobody draws from it
  # Their routes are known since they were parked.
  return filled(state, insertion, hidden_RD, cache, None)


# ---- Resuming responses of an earlier step ----

# Shape letters as in decode_loop.py; T tokens of each of P packed sequences.


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
  """Prefill prompts with the responses so far, and put them into slots.

  `params` are in the decode layout. `state` is donated. `tokens_PT`, int32, holds packed rows, and
  `segments` keep them apart. `insertion` has these rows in any order; a row's source is its first
  token among the P * T. `routes_PTLC` are the experts of their tokens, as far as known; see
  routes.py.
  """
  slot_R, start_R, length_R, *_ = map(jnp.asarray, insertion)
  T, nothing = tokens_PT.shape[1], (None,) * config.num_layers
  sizes = config.layer_lengths(T)

  def store(
    number: int, x_PTD: jax.Array, packed: kv_cache.LayerCache
  ) -> tuple[jax.Array, kv_cache.LayerCache]:
    layer = state.cache[number]
    layer = kv_cache.unpack_rows(layer, packed, slot_R, start_R, length_R, sizes[number])
    # Before the next layer, so that the packed caches of all layers never exist at once.
    return jax.lax.optimization_barrier((x_PTD, layer))

  hidden_PTD, cache, routes_PTLC = model.apply_layers(
    config, params, tokens_PT, segments.position_BT, nothing, segments, routes_PTLC, store
  )
  last_RD = hidden_PTD[jnp.divmod(start_R + length_R - 1, T)]
  routes_RTLC = None
  if routes_PTLC is not None and state.routes_BSLC is not None:
    # Entries after a row's tokens are meaningless.
    place_RT = jnp.minimum(start_R[:, None] + jnp.arange(T), tokens_PT.size - 1)
    routes_RTLC = routes_PTLC.reshape(-1, *routes_PTLC.shape[2:])[place_RT]
  return filled(state._replace(cache=cache), insertion, last_RD, None, routes_RTLC)
