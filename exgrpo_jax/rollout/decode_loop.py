"""Jitted programs that fill the rollout slots and decode in them.

Shape letters: B slots, S cache positions, W prompts kept prefilled, P rows prefilled together,
R slots filled together, N tokens decoded between two host syncs, X words of key data.
"""

import dataclasses
import functools
import math
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import kv_cache, logprobs, matmul, model, sharding
from exgrpo_jax.policy.matmul import OutputMajor
from exgrpo_jax.rollout import token_sampling
from exgrpo_jax.runtime import randomness

# Upper bound on N. Each host sync idles the device, so decode many tokens between syncs.
TOKENS_PER_SYNC = 64

MOST_DRAFTS = 7  # the largest number that `rollout.drafts` allows


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Static settings of `decode`, which is compiled separately for each distinct value."""

  distribution: token_sampling.Distribution
  eos_ids: tuple[int, ...]  # any of these ends a response


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
  """All settings for sampling, but not the model, the requests or the random keys.

  This is a static argument of jitted programs, which are compiled separately for each value.
  """

  distribution: token_sampling.Distribution
  slots: int  # rows that decode together
  prompts: int  # W, number of prompts kept prefilled at a time
  max_prompt: int  # tokens
  max_response: int  # tokens, including the end token
  eos_ids: tuple[int, ...]  # any of these ends a response
  pad_id: int  # any valid token, because padding is never read
  keeps_routes: bool = False  # True if responses include their routes; see routes.py
  parked: int = 0  # episodes whose caches are kept between turns, outside the slots
  drafts: str = '0'  # tokens drafted per row per pass; see `drafts.width`

  @property
  def longest_row(self) -> int:
    """Return the maximum cache length in tokens: longest prompt plus longest response."""
    return self.max_prompt + self.max_response

  @property
  def at_any_temperature(self) -> 'DecodeSpec':
    """Return the spec with temperature 1 (0 stays 0); pass the actual temperature to `decode`."""
    temperature = min(1.0, math.ceil(self.distribution.temperature))
    return dataclasses.replace(
      self, distribution=dataclasses.replace(self.distribution, temperature=temperature)
    )

  @property
  def sampling(self) -> Sampling:
    """Return the static settings of `decode`."""
    return Sampling(self.at_any_temperature.distribution, self.eos_ids)


class State(NamedTuple):
  """The state of the slots between two host syncs."""

  hidden_BD: jax.Array  # the next token is sampled from this hidden state
  position_B: jax.Array  # int32, cache position of the next token; 0 in free slots
  length_B: jax.Array  # int32, response tokens so far
  live_B: jax.Array  # bool
  key_BX: jax.Array  # uint32, key data from `randomness.row_keys`
  limit_B: jax.Array  # int32, maximum response tokens
  cache: kv_cache.Cache
  routes_BSLC: jax.Array | None  # routes of the cached tokens; None if not kept


class Prompts(NamedTuple):
  """Prefilled prompts, ready to be copied into slots."""

  hidden_WD: jax.Array  # hidden state of each prompt's last token
  cache: kv_cache.Cache  # spec.max_prompt positions
  routes_WSLC: jax.Array | None


_Rows = TypeVar('_Rows', State, Prompts)
_Decoded = TypeVar('_Decoded')


class Forced(NamedTuple):
  """Tokens that rows read before sampling. They become part of the response but never end it."""

  tokens_NB: Array  # int32; only the first `count_B` of each column are used
  count_B: Array  # int32


class Decoded(NamedTuple):
  """The tokens decoded since the last sync. Values after a row's last token are undefined."""

  tokens_NB: jax.Array  # int32
  logp_NB: jax.Array  # float32, nats
  entropy_NB: jax.Array  # float32, nats
  length_B: jax.Array  # int32, response tokens so far
  live_B: jax.Array  # bool
  ended_B: jax.Array  # bool, True if the row sampled an end token


_Carry = tuple[jax.Array, State, Decoded]  # (step of the loop, slots, decoded tokens)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty(config: model.ShapeConfig, spec: DecodeSpec, length: int) -> tuple[State, Prompts]:
  """Return free slots with `length` cache positions each, and room for prompts."""
  B = spec.slots
  zeros_B = jnp.zeros(B, jnp.int32)
  most_drafts = MOST_DRAFTS if spec.drafts == 'auto' else int(spec.drafts)

  def hidden(rows: int) -> jax.Array:
    return jnp.zeros((rows, config.width), config.dtype)

  def routes(rows: int, length: int) -> jax.Array | None:
    shape = rows, length, *config.route_shape
    return jnp.zeros(shape, config.route_dtype) if spec.keeps_routes else None

  state = State(
    hidden_BD=hidden(B),
    position_B=zeros_B,
    length_B=zeros_B,
    live_B=jnp.zeros(B, bool),
    key_BX=jnp.zeros((B, randomness.key_size()), jnp.uint32),
    limit_B=zeros_B,
    cache=model.init_cache(config, B, length + kv_cache.room_for(most_drafts)),
    routes_BSLC=routes(B, spec.longest_row),
  )
  W, max_prompt = spec.prompts, spec.max_prompt
  prompts = Prompts(hidden(W), model.init_cache(config, W, max_prompt), routes(W, max_prompt))
  return laid_out(state), laid_out(prompts)


@jax.jit
def select_slots(state: State, slot_R: Array) -> State:
  """Return the state of slots `slot_R` only."""
  rest = jax.tree.map(lambda x: x[slot_R], state._replace(cache=()))
  return laid_out(rest._replace(cache=kv_cache.select_rows(state.cache, slot_R)))


def resize_cache(config: model.ShapeConfig, state: State, length: int) -> State:
  """Resize the cache to `length` positions. Frees the old cache layer by layer."""

  def resize(layer: kv_cache.LayerCache, size: int) -> kv_cache.LayerCache:
    if size == kv_cache.length(layer):
      return layer
    new_layer = resize_layer(layer, size)
    jax.tree.map(lambda old: old.delete(), layer)
    return new_layer

  sizes = config.layer_lengths(length)
  return state._replace(cache=tuple(map(resize, state.cache, sizes)))


resize_layer = jax.jit(kv_cache.resized, static_argnums=1)


@jax.jit
def routes_of(state: State, slot_R: Array) -> jax.Array:
  """Return the routes of slots `slot_R`, [R, S, L, C]."""
  assert state.routes_BSLC is not None, 'the state has no routes; set keeps_routes'
  return sharding.constrain(state.routes_BSLC[slot_R], (None,) * 4)  # every host reads them


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode(
  config: model.ShapeConfig,
  sampling: Sampling,
  params: model.Params,
  state: State,
  min_finished: int,
  max_steps: int,
  temperature: float,
  forced: Forced | None = None,
) -> tuple[State, Decoded]:
  """Decode up to min(`max_steps`, `TOKENS_PER_SYNC`) tokens in each live slot.

  Rows read their `forced` tokens before they sample. Stops early once `min_finished` rows have
  finished or the cache is full. Logits are divided by `temperature` and by any nonzero temperature
  in `sampling`; see `DecodeSpec.at_any_temperature`.
  """
  S, N = model.cache_length(config, state.cache), jnp.minimum(max_steps, TOKENS_PER_SYNC)
  unembedding = padded_unembedding(config, params)
  key_B, live_before_B = jax.random.wrap_key_data(state.key_BX), state.live_B

  def goes_on(carry: _Carry) -> jax.Array:
    time, state, _ = carry
    fits = jnp.all(~state.live_B | (state.position_B < S))
    return (time < N) & fits & (jnp.sum(live_before_B & ~state.live_B) < min_finished)

  def decode_token(carry: _Carry) -> _Carry:
    time, state, decoded = carry
    token_B, logp_B, entropy_B = draw(
      config, sampling, unembedding, state.hidden_BD, key_B, state.length_B, temperature
    )
    token_B, is_sampled_B = _next_tokens(forced, time, token_B, state.live_B)
    ends_B = is_sampled_B & jnp.isin(token_B, jnp.array(sampling.eos_ids))
    length_B = state.length_B + state.live_B
    live_B = state.live_B & ~ends_B & (length_B < state.limit_B)
    hidden_BD, cache, routes_BTLC = model.decode(
      config, params, token_B, state.position_B, state.cache
    )
    decoded = _with_token(decoded, time, token_B, logp_B, entropy_B)
    decoded = decoded._replace(length_B=length_B, live_B=live_B, ended_B=decoded.ended_B | ends_B)
    # Finished rows keep writing to a position that is never read: position 0 or, with `forced`, the
    # position after their last token.
    rests_B = 0 if forced is None else jnp.minimum(state.position_B + state.live_B, S - 1)
    state = state._replace(
      hidden_BD=hidden_BD,
      position_B=jnp.where(live_B, state.position_B + 1, rests_B),
      length_B=length_B,
      live_B=live_B,
      cache=cache,
      routes_BSLC=with_routes(state, routes_BTLC, state.live_B[:, None]),
    )
    return time + 1, state, decoded

  start = jnp.int32(0), state, nothing_decoded(state)
  _, state, decoded = jax.lax.while_loop(goes_on, decode_token, start)
  decoded = for_hosts(decoded)
  return laid_out(state), decoded


def draw(
  config: model.ShapeConfig,
  sampling: Sampling,
  unembedding: jax.Array | OutputMajor,
  hidden_BD: jax.Array,
  key_B: jax.Array,
  length_B: jax.Array,
  temperature: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draw each row's token at index `length_B`; see `token_sampling.sample_token` and `decode`."""
  logits_BV = logprobs.capped(matmul.logits(hidden_BD, unembedding), config.logit_cap)
  # Divide by the actual temperature. `sample_token` divides by 1: see `at_any_temperature`.
  logits_BV = logits_BV / temperature
  uniform_B2 = randomness.uniforms(key_B, length_B)
  return token_sampling.sample_token(
    sampling.distribution, logits_BV, uniform_B2, config.vocab_size
  )


def _with_token(
  decoded: Decoded, time: jax.Array, token_B: jax.Array, logp_B: jax.Array, entropy_B: jax.Array
) -> Decoded:
  return decoded._replace(
    tokens_NB=decoded.tokens_NB.at[time].set(token_B),
    logp_NB=decoded.logp_NB.at[time].set(logp_B),
    entropy_NB=decoded.entropy_NB.at[time].set(entropy_B),
  )


def with_routes(
  state: State, routes_BTLC: jax.Array | None, is_new_BT: jax.Array
) -> jax.Array | None:
  """Store the routes of each row's new tokens, starting at the row's position."""
  routes_BSLC = state.routes_BSLC
  if routes_BSLC is None or routes_BTLC is None:
    return routes_BSLC
  place_BT = state.position_B[:, None] + jnp.arange(is_new_BT.shape[1])
  place_BT = jnp.where(is_new_BT, place_BT, routes_BSLC.shape[1])
  row_B1 = jnp.arange(len(place_BT))[:, None]
  return routes_BSLC.at[row_B1, place_BT].set(routes_BTLC.astype(routes_BSLC.dtype), mode='drop')


def _next_tokens(
  forced: Forced | None, time: jax.Array, token_B: jax.Array, live_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Return each row's next token, and a mask of the rows whose token was sampled."""
  if forced is None:
    return token_B, live_B
  is_forced_B = time < forced.count_B
  return jnp.where(is_forced_B, forced.tokens_NB[time], token_B), live_B & ~is_forced_B


def for_hosts(decoded: _Decoded) -> _Decoded:
  """Replicate arrays so that every host can read them."""
  return jax.tree.map(lambda x: sharding.constrain(x, (None,) * x.ndim), decoded)


def laid_out(rows: _Rows) -> _Rows:
  """Shard slots or prompts over the mesh.

  With a fixed layout, the programs that read these arrays are not recompiled.
  """
  rest = jax.tree.map(
    lambda x: sharding.constrain(x, ('batch', *(None,) * (x.ndim - 1))), rows._replace(cache=())
  )
  return rest._replace(cache=kv_cache.constrained(rows.cache))


def padded_unembedding(config: model.ShapeConfig, params: model.Params) -> jax.Array | OutputMajor:
  """Pad the unembedding to `token_sampling.padded_size` tokens."""
  unembedding = model.decode_unembedding(config, params)
  padding = token_sampling.padded_size(config.vocab_size) - config.vocab_size
  if not padding:
    return unembedding
  if isinstance(unembedding, OutputMajor):
    padded_VD = jnp.pad(unembedding.kernel_OI, ((0, padding), (0, 0)))
    return OutputMajor(sharding.constrain(padded_VD, ('vocab', None)))
  return sharding.constrain(jnp.pad(unembedding, ((0, 0), (0, padding))), (None, 'vocab'))


def nothing_decoded(state: State, N: int = TOKENS_PER_SYNC) -> Decoded:
  """Return an empty `Decoded` with room for N tokens per row."""
  B = len(state.live_B)
  return Decoded(
    tokens_NB=jnp.zeros((N, B), jnp.int32),
    logp_NB=jnp.zeros((N, B), jnp.float32),
    entropy_NB=jnp.zeros((N, B), jnp.float32),
    length_B=state.length_B,
    live_B=state.live_B,
    ended_B=jnp.zeros(B, bool),
  )


# ---- Filling slots with prefilled prompts ----


class Insertion(NamedTuple):
  """The slots to fill and what to put in them."""

  slot_R: Array  # int32; an index one past the last slot fills no slot
  source_R: Array  # int32, index of a prompt; resuming.py uses it for other indices
  position_R: Array  # int32, prompt tokens plus response tokens so far
  length_R: Array  # int32, response tokens so far
  step_key_RX: Array  # uint32, key data of the step that began the response
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
  """Prefill prompts and store them at `place_P`; prompts with out-of-range places are dropped."""
  T = tokens_PT.shape[1]
  hidden_PTD, cache, routes_PTLC = model.prefill(config, params, tokens_PT, lengths_P, T)
  last_PD = hidden_PTD[jnp.arange(len(lengths_P)), lengths_P - 1]
  prompts = Prompts(
    hidden_WD=prompts.hidden_WD.at[place_P].set(last_PD, mode='drop'),
    cache=kv_cache.replace_rows(prompts.cache, place_P, cache),
    routes_WSLC=_with_row_routes(prompts.routes_WSLC, place_P, routes_PTLC),
  )
  return laid_out(prompts)


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
  """Fill slots `insertion.slot_R` with R rows and return the state.

  `cache` and `routes_RTLC` are None if the state already contains them.
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

  state = State(
    hidden_BD=put(state.hidden_BD, hidden_RD),
    position_B=put(state.position_B, insertion.position_R),
    length_B=put(state.length_B, insertion.length_R),
    live_B=put(state.live_B, True),
    key_BX=put(state.key_BX, jax.random.key_data(key_R)),
    limit_B=put(state.limit_B, insertion.limit_R),
    cache=kv_cache.replace_rows(state.cache, slot_R, cache) if cache else state.cache,
    routes_BSLC=_with_row_routes(state.routes_BSLC, slot_R, routes_RTLC),
  )
  return laid_out(state)


def _with_row_routes(
  routes_BSLC: jax.Array | None, row_R: Array, routes_RTLC: jax.Array | None
) -> jax.Array | None:
  """Store the routes of the first T tokens of rows `row_R`. Out-of-range rows are dropped."""
  if routes_BSLC is None or routes_RTLC is None:
    return routes_BSLC
  routes_RTLC = routes_RTLC.astype(routes_BSLC.dtype)
  return routes_BSLC.at[row_R, : routes_RTLC.shape[1]].set(routes_RTLC, mode='drop')
