"""Caches of episodes that have no slot, on the device. Shape letters as in decode_loop.py."""

import functools

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import kv_cache, model
from exgrpo_jax.rollout import filling
from exgrpo_jax.rollout.decode_loop import DecodeSpec, State
from exgrpo_jax.rollout.filling import Insertion


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty(config: model.Config, spec: DecodeSpec) -> kv_cache.Cache:
  """Room for the caches of `spec.parked` rows, as long as the slots'."""
  return kv_cache.constrained(model.init_cache(config, spec.parked, spec.longest_row))


@functools.partial(jax.jit, donate_argnums=1)
def park(state: State, parked: kv_cache.Cache, slot_R: Array, place_R: Array) -> kv_cache.Cache:
  """Copies the caches of slots to their places; one past the last place is nowhere."""
  rows = kv_cache.select_rows(state.cache, slot_R)
  return kv_cache.constrained(kv_cache.replace_rows(parked, place_R, rows))


@functools.partial(jax.jit, donate_argnums=0)
def unpark(state: State, parked: kv_cache.Cache, insertion: Insertion) -> State:
  """Copies parked caches into slots, whose rows have to read a forced token next."""
  R, D = len(insertion.source_R), state.hidden_BD.shape[1]
  cache = kv_cache.select_rows(parked, insertion.source_R)
  hidden_RD = jnp.zeros((R, D), state.hidden_BD.dtype)  # nobody draws from it
  # Their routes are known since they were parked.
  return filling.filled(state, insertion, hidden_RD, cache, None)
