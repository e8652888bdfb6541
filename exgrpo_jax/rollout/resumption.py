"""Responses that were begun before go on: their caches are computed again, right into slots.

Shape letters as in decode_loop.py; T tokens of each of P packed sequences.
"""

import functools

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.packing import Segments
from exgrpo_jax.policy import kv_cache, model
from exgrpo_jax.rollout import filling
from exgrpo_jax.rollout.decode_loop import State
from exgrpo_jax.rollout.filling import Insertion


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def resume(
  config: model.Config,
  params: model.Params,
  state: State,
  tokens_PT: Array,
  segments: Segments,
  insertion: Insertion,
  routes_PTLC: Array | None = None,
) -> State:
  """Prefills prompts with the responses so far, and puts them into slots.

  Args:
    config: the model's shape.
    params: in the decode layout.
    state: of the slots; donated.
    tokens_PT: int32, rows that are packed.
    segments: keep them apart.
    insertion: of these rows, in any order; a row's source is its first token among the P * T.
    routes_PTLC: the experts of their tokens, as far as they are known; see routes.py.
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
    # What follows a row's tokens there is meaningless.
    place_RT = jnp.minimum(start_R[:, None] + jnp.arange(T), tokens_PT.size - 1)
    routes_RTLC = routes_PTLC.reshape(-1, *routes_PTLC.shape[2:])[place_RT]
  return filling.filled(state._replace(cache=cache), insertion, last_RD, None, routes_RTLC)
