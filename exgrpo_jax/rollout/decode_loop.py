"""What the slots of a rollout do on the device: prefill, fill, decode.

Shape letters here: B slots, S positions of the cache, P prompts prefilled together,
R slots filled together, N tokens decoded between two looks of the host.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import token_sampling

BETWEEN_LOOKS = 64  # tokens (N): a look costs the device a moment without work


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to sample; static, so that each distinct value compiles once."""

  draw: token_sampling.Config
  slots: int  # rows that decode together
  max_response: int  # tokens, the end token included
  eos_ids: tuple[int, ...]  # any of these ends a response
  pad_id: int  # any valid token: padding is never seen


class State(NamedTuple):
  """The slots between two looks."""

  hidden_BD: jax.Array  # from which the next token is drawn
  position_B: jax.Array  # int32, in the cache, of the next token
  length_B: jax.Array  # int32, tokens of the response so far
  live_B: jax.Array  # bool
  question_row_B: jax.Array  # int32
  sample_index_B: jax.Array  # int32
  limit_B: jax.Array  # int32, of the response
  cache: kv_cache.Cache


class Places(NamedTuple):
  """Which slots are filled, and from what."""

  slot_R: np.ndarray  # int32; one beyond the last slot for none
  source_R: np.ndarray  # int32, place in what was prefilled together
  position_R: np.ndarray  # int32, the prompt's length
  question_row_R: np.ndarray  # int32
  sample_index_R: np.ndarray  # int32
  limit_R: np.ndarray  # int32


class Found(NamedTuple):
  """What a stretch of decoding brought; a row's tokens stand at the front."""

  tokens_NB: jax.Array  # int32
  logp_NB: jax.Array  # float32, nats
  entropy_NB: jax.Array  # float32, nats
  length_B: jax.Array  # int32, of the response so far
  live_B: jax.Array  # bool
  ended_B: jax.Array  # bool, by an end token


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty(config: model.Config, settings: Settings, length: int) -> State:
  """All slots free, with a cache of `length` positions."""
  B = settings.slots
  return State(
    sharding.constrain(jnp.zeros((B, config.width), config.dtype), ('batch', None)),
    *(jnp.zeros(B, jnp.int32) for _ in range(2)),
    jnp.zeros(B, bool),
    *(jnp.zeros(B, jnp.int32) for _ in range(3)),
    model.init_cache(config, B, length),
  )


@jax.jit
def select_slots(state: State, slot_R: jax.Array) -> State:
  """The state of some of the slots."""
  rest = jax.tree.map(lambda x: x[slot_R], state._replace(cache=()))
  return rest._replace(cache=kv_cache.select_rows(state.cache, slot_R))


def resize_cache(state: State, length: int) -> State:
  """The state with a cache of another length; it takes the old one's memory layer by layer."""

  def replaced(layer):
    other = _resized(layer, length)
    jax.tree.map(lambda old: old.delete(), layer)
    return other

  return state._replace(cache=tuple(replaced(layer) for layer in state.cache))


_resized = jax.jit(kv_cache.resized, static_argnums=1)


@functools.partial(jax.jit, static_argnums=0)
def prefill(
  config: model.Config, params: model.Params, tokens_PT: jax.Array, lengths_P: jax.Array
) -> tuple[jax.Array, kv_cache.Cache]:
  """The last token's hidden state [P, D] and the keys and values of each prompt."""
  hidden_PTD, cache = model.prefill(config, params, tokens_PT, tokens_PT.shape[1])
  return hidden_PTD[jnp.arange(len(lengths_P)), lengths_P - 1], cache


@functools.partial(jax.jit, donate_argnums=0)
def insert(state: State, prefilled: tuple[jax.Array, kv_cache.Cache], places: Places) -> State:
  """Puts prompts into slots; what stood in these is gone, and the others stay as they are."""
  hidden_PD, prompts = prefilled
  slot_R, source_R = places.slot_R, places.source_R

  def put(whole, part):
    return whole.at[slot_R].set(part, mode='drop')

  return State(
    hidden_BD=put(state.hidden_BD, hidden_PD[source_R]),
    position_B=put(state.position_B, places.position_R),
    length_B=put(state.length_B, 0),
    live_B=put(state.live_B, True),
    question_row_B=put(state.question_row_B, places.question_row_R),
    sample_index_B=put(state.sample_index_B, places.sample_index_R),
    limit_B=put(state.limit_B, places.limit_R),
    cache=kv_cache.replace_rows(state.cache, slot_R, kv_cache.select_rows(prompts, source_R)),
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def decode(
  config: model.Config,
  settings: Settings,
  params: model.Params,
  key: jax.Array,
  state: State,
  min_finished: int,
) -> tuple[State, Found]:
  """Up to N tokens of each live row; less where `min_finished` rows finish or the cache is full."""
  B, S, N = len(state.live_B), kv_cache.length(state.cache), BETWEEN_LOOKS
  unembedding_DV = model.unembedding(config, params)
  key_B = row_keys(key, state.question_row_B, state.sample_index_B)
  begun_B = state.live_B

  def goes_on(loop):
    time, state, _ = loop
    fits = jnp.all(~state.live_B | (state.position_B < S))
    return (time < N) & fits & (jnp.sum(begun_B & ~state.live_B) < min_finished)

  def step(loop):
    time, state, found = loop
    logits_BV = jnp.dot(state.hidden_BD, unembedding_DV, preferred_element_type=jnp.float32)
    token_B, logp_B, entropy_B = token_sampling.sample_token(
      settings.draw, logits_BV, uniforms(key_B, state.length_B)
    )
    ends_B = state.live_B & jnp.isin(token_B, jnp.array(settings.eos_ids))
    length_B = state.length_B + state.live_B
    live_B = state.live_B & ~ends_B & (length_B < state.limit_B)
    hidden_BD, cache = model.decode(config, params, token_B, state.position_B, state.cache)
    found = Found(
      found.tokens_NB.at[time].set(token_B),
      found.logp_NB.at[time].set(logp_B),
      found.entropy_NB.at[time].set(entropy_B),
      length_B,
      live_B,
      found.ended_B | ends_B,
    )
    return (
      time + 1,
      state._replace(
        hidden_BD=hidden_BD,
        position_B=state.position_B + live_B,
        length_B=length_B,
        live_B=live_B,
        cache=cache,
      ),
      found,
    )

  found = Found(
    *(jnp.zeros((N, B), kind) for kind in (jnp.int32, jnp.float32, jnp.float32)),
    state.length_B,
    state.live_B,
    jnp.zeros(B, bool),
  )
  _, state, found = jax.lax.while_loop(goes_on, step, (jnp.int32(0), state, found))
  # Replicated: every host reads them.
  return state, jax.tree.map(lambda x: sharding.constrain(x, (None,) * x.ndim), found)


def row_keys(key: jax.Array, question_row_B: jax.Array, sample_index_B: jax.Array) -> jax.Array:
  """Each row's key, of the step's key, its question and its sample."""

  def row_key(question_row, sample_index):
    return jax.random.fold_in(jax.random.fold_in(key, question_row), sample_index)

  return jax.vmap(row_key)(question_row_B, sample_index_B)


def uniforms(key_B: jax.Array, position_B: jax.Array) -> jax.Array:
  """float32 [B, 2], of each row's key and the position in its response."""

  def uniform(key, position):
    return jax.random.uniform(jax.random.fold_in(key, position), (2,))

  return jax.vmap(uniform)(key_B, position_B)
