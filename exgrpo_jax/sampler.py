"""Responses to prompts: a fixed set of slots decodes together, and a queue refills them.

What a row samples depends on its key, question row, sample index and tokens, not
on the rows beside it: slots, order and refills change nothing, up to the rounding
of the logits (a draw on a boundary may flip when they move by an ulp).

The device runs `_decode` until some rows have finished; then the host takes their
responses, prefills the next prompts, each once for all its samples, and writes
these into the slots that are free. It decides by small arrays that are the same on
every host. The cache is as long as the rows now in it need, not as the limit.

Shape letters here: B slots, S positions of the cache, P prompts prefilled together,
R slots filled together, N tokens decoded between two looks of the host.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import draw, model, sharding
from exgrpo_jax.types import Response

_SMALLEST_BUCKET = 32  # tokens; below it, compiling costs more than the padding
_BETWEEN_LOOKS = 64  # tokens (N): a look costs the device a moment without work
_PREFILL_TOKENS = 16384  # in one prefill, so that its activations stay small
_REFILL_SHARE = 8  # refill when one slot in so many has finished: few looks, few idle slots


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to sample; static, so that each distinct value compiles once."""

  draw: draw.Config
  slots: int  # rows that decode together
  max_response: int  # tokens, the end token included
  eos_ids: tuple[int, ...]  # any of these ends a response
  pad_id: int  # any valid token: padding is never seen


def bucket(length: int, limit: float = math.inf) -> int:
  """The next of 32, 48, 64, 96, 128 …, at most `limit`: few shapes, so few compilations."""
  power = 1 << (length - 1).bit_length()
  between = power * 3 // 4
  return min(limit, max(_SMALLEST_BUCKET, between if length <= between else power))


def generate(
    config: model.Config,
    params: model.Params,
    prompts: Sequence[np.ndarray],
    question_rows: Sequence[int],
    sample_indices: Sequence[int],
    key: jax.Array,
    settings: Settings,
    mesh: Mesh,
    on_finish: Callable[[int, Response], None] | None = None,
    limits: Sequence[int] | None = None,
) -> list[Response]:
  """One response per prompt, in the prompts' order.

  Args:
    config: of the model.
    params: of the model, on `mesh`; best in `model.decode_layout`.
    prompts: int32 [T], at least one token each. Equal prompts of one question are
      prefilled once if they stand behind one another.
    question_rows: each prompt's question; with the sample index it seeds the row.
    sample_indices: which of its question's samples each row is.
    key: of this step.
    settings: how to sample.
    mesh: slots are spread over its data axes where these divide them.
    on_finish: called with (index, response) as responses finish, while others decode.
    limits: of each response, in tokens, from 1 to settings.max_response; by default that.
  """
  assert all(len(prompt) for prompt in prompts), 'a prompt has at least one token'
  limits = [settings.max_response] * len(prompts) if limits is None else limits
  waiting = collections.deque(
      _Row(index, *own) for index, own in enumerate(
          zip(prompts, question_rows, sample_indices, limits, strict=True)))
  slots: list[_Row | None] = [None] * settings.slots
  responses: list[Response | None] = [None] * len(prompts)
  with jax.set_mesh(mesh):
    state, prefilled = None, {}
    while waiting or any(slots):
      free = [slot for slot, row in enumerate(slots) if row is None]
      for slot, row in zip(free, _taken(waiting, len(free))):
        slots[slot] = row
      if not waiting and state is not None:
        state, slots = _closed_up(state, slots)
      state = _fitted(config, settings, state, slots)
      state = _filled(config, settings, params, state, prefilled, slots, waiting)
      live = sum(row is not None for row in slots)
      quorum = max(1, settings.slots // _REFILL_SHARE) if waiting else live
      state, found = _decode(config, settings, params, key, state, quorum)
      for slot, response in _harvested(slots, jax.device_get(found)):
        index = slots[slot].index
        slots[slot] = None
        responses[index] = response
        if on_finish is not None:
          on_finish(index, response)
  return responses


# ---- The host's side ----


@dataclasses.dataclass
class _Row:
  """A response on its way."""

  index: int  # among the responses
  prompt: np.ndarray
  question_row: int
  sample_index: int
  limit: int  # of the response, in tokens
  is_filled: bool = False  # its prompt is in the slot's cache
  pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
  length: int = 0  # tokens in `pieces`

  @property
  def position(self) -> int:
    """In the cache, of the next token."""
    return len(self.prompt) + self.length

  @functools.cached_property
  def origin(self) -> tuple[int, bytes]:
    """What rows share that start from one prefill."""
    return self.question_row, self.prompt.tobytes()


def _taken(waiting, count):
  return [waiting.popleft() for _ in range(min(count, len(waiting)))]


def _closed_up(state, slots):
  """A quarter of the slots, once the live rows fit there and no others will come."""
  live = [slot for slot, row in enumerate(slots) if row is not None]
  count = len(slots) // 4  # halves would compile twice as many programs
  if len(live) > count:
    return state, slots
  free = [slot for slot, row in enumerate(slots) if row is None]
  chosen = [*live, *free[:count - len(live)]]
  closer = _chosen(state, np.array(chosen, np.int32))
  jax.tree.map(lambda old: old.delete(), state.cache)
  return closer, [slots[slot] for slot in chosen]


def _fitted(config, settings, state, slots):
  """The state with a cache as long as the rows in the slots need until the next looks."""
  longest = max(row.position for row in slots if row is not None)
  furthest = max(len(row.prompt) + row.limit for row in slots if row is not None)
  needed = min(longest + _BETWEEN_LOOKS, furthest)
  length = bucket(needed)
  if state is None:
    return _empty(config, settings, length)
  present = state.cache[0].key_BGSH.shape[2]
  if present < length or present >= 4 * length:  # not back and forth between two lengths
    state = state._replace(cache=tuple(_replaced(layer, length) for layer in state.cache))
  return state


def _filled(config, settings, params, state, prefilled, slots, waiting):
  """The state with the prompts of new rows in their slots.

  `prefilled` is brought up to date: it keeps what rows that still wait will start from.
  """
  new = {slot: row for slot, row in enumerate(slots) if row is not None and not row.is_filled}
  absent = {row.origin: row.prompt for row in new.values() if row.origin not in prefilled}
  by_bucket = collections.defaultdict(list)
  for origin, prompt in absent.items():
    by_bucket[bucket(len(prompt))].append((origin, prompt))
  for length, group in sorted(by_bucket.items()):
    together = max(1, _PREFILL_TOKENS // length)
    for start in range(0, len(group), together):
      prefilled |= _prefilled(config, settings, params, group[start:start + together], length)
  batches = collections.defaultdict(list)
  for slot, row in new.items():
    batch, place = prefilled[row.origin]
    batches[id(batch)].append((slot, row, place, batch))
    row.is_filled = True
  for entries in batches.values():
    state = _insert(state, entries[0][3], _places(entries, settings.slots))
  still = {row.origin for row in waiting}
  for origin in [origin for origin in prefilled if origin not in still]:
    del prefilled[origin]
  return state


def _prefilled(config, settings, params, group, length):
  """origin -> (what was prefilled together, place in it)."""
  count = 1 << (len(group) - 1).bit_length()
  tokens_PT = np.full((count, length), settings.pad_id, np.int32)
  lengths_P = np.ones(count, np.int32)
  for place, (_, prompt) in enumerate(group):
    tokens_PT[place, :len(prompt)], lengths_P[place] = prompt, len(prompt)
  batch = _prefill(config, params, tokens_PT, lengths_P)
  return {origin: (batch, place) for place, (origin, _) in enumerate(group)}


def _places(entries, num_slots):
  """The rows to fill, as many as a power of two; those too many go to no slot."""
  count = 1 << (len(entries) - 1).bit_length()
  places = np.zeros((len(_Places._fields), count), np.int32)
  places[0] = num_slots
  for number, (slot, row, place, _) in enumerate(entries):
    places[:, number] = (
        slot, place, len(row.prompt), row.question_row, row.sample_index, row.limit)
  return _Places(*places)


def _harvested(slots, found):
  """(slot, response) of the rows that finished; keeps the tokens of those that did not."""
  for slot, row in enumerate(slots):
    if row is None:
      continue
    count = found.length_B[slot] - row.length
    row.pieces.append(tuple(values_NB[:count, slot] for values_NB in (
        found.tokens_NB, found.logp_NB, found.entropy_NB)))
    row.length += int(count)
    if not found.live_B[slot]:
      tokens, logp, entropy = (np.concatenate(parts) for parts in zip(*row.pieces))
      yield slot, Response(tokens=tokens, logp=logp, entropy=entropy,
                           truncated=not found.ended_B[slot])


# ---- The device's side ----


class _State(NamedTuple):
  """The slots between two looks."""

  hidden_BD: jax.Array  # from which the next token is drawn
  position_B: jax.Array  # int32, in the cache, of the next token
  length_B: jax.Array  # int32, tokens of the response so far
  live_B: jax.Array  # bool
  question_row_B: jax.Array  # int32
  sample_index_B: jax.Array  # int32
  limit_B: jax.Array  # int32, of the response
  cache: model.Cache


class _Places(NamedTuple):
  """Which slots are filled, and from what."""

  slot_R: np.ndarray  # int32; one beyond the last slot for none
  source_R: np.ndarray  # int32, place in what was prefilled together
  position_R: np.ndarray  # int32, the prompt's length
  question_row_R: np.ndarray  # int32
  sample_index_R: np.ndarray  # int32
  limit_R: np.ndarray  # int32


class _Found(NamedTuple):
  """What a stretch of decoding brought; a row's tokens stand at the front."""

  tokens_NB: jax.Array  # int32
  logp_NB: jax.Array  # float32, nats
  entropy_NB: jax.Array  # float32, nats
  length_B: jax.Array  # int32, of the response so far
  live_B: jax.Array  # bool
  ended_B: jax.Array  # bool, by an end token


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(config, settings, length):
  B = settings.slots
  return _State(
      sharding.constrain(jnp.zeros((B, config.width), config.dtype), ('batch', None)),
      *(jnp.zeros(B, jnp.int32) for _ in range(2)), jnp.zeros(B, bool),
      *(jnp.zeros(B, jnp.int32) for _ in range(3)), model.init_cache(config, B, length))


def _replaced(layer, length):
  """The layer's cache in another length; the old one is freed, so that two are never whole."""
  resized = _resized(layer, length)
  jax.tree.map(lambda old: old.delete(), layer)
  return resized


@jax.jit
def _chosen(state, slot_R):
  cache = jax.tree.map(lambda whole_BGSH: sharding.constrain(
      whole_BGSH[slot_R], ('batch', 'kv_heads', None, None)), state.cache)
  return jax.tree.map(lambda x: x[slot_R], state._replace(cache=()))._replace(cache=cache)


@functools.partial(jax.jit, static_argnums=1)
def _resized(layer, length):
  def resized(cache_BGSH):
    B, G, S, H = cache_BGSH.shape
    cache_BGSH = cache_BGSH[:, :, :length]
    cache_BGSH = jnp.pad(cache_BGSH, ((0, 0), (0, 0), (0, max(0, length - S)), (0, 0)))
    return sharding.constrain(cache_BGSH, ('batch', 'kv_heads', None, None))

  return jax.tree.map(resized, layer)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(config, params, tokens_PT, lengths_P):
  """The last token's hidden state and the keys and values of each prompt."""
  hidden_PTD, cache = model.prefill(config, params, tokens_PT, tokens_PT.shape[1])
  return hidden_PTD[jnp.arange(len(lengths_P)), lengths_P - 1], cache


@functools.partial(jax.jit, donate_argnums=0)
def _insert(state, prefilled, places):
  """Puts prompts into slots; what stood in these is gone, and the others stay as they are."""
  hidden_PD, cache = prefilled
  slot_R, source_R = places.slot_R, places.source_R

  def put(whole, part):
    return whole.at[slot_R].set(part, mode='drop')

  def put_layer(whole_BGSH, part_PGTH):
    length = min(part_PGTH.shape[2], whole_BGSH.shape[2])  # the rest of the bucket is padding
    return whole_BGSH.at[slot_R, :, :length].set(part_PGTH[source_R, :, :length], mode='drop')

  return _State(
      hidden_BD=put(state.hidden_BD, hidden_PD[source_R]),
      position_B=put(state.position_B, places.position_R),
      length_B=put(state.length_B, 0),
      live_B=put(state.live_B, True),
      question_row_B=put(state.question_row_B, places.question_row_R),
      sample_index_B=put(state.sample_index_B, places.sample_index_R),
      limit_B=put(state.limit_B, places.limit_R),
      cache=jax.tree.map(put_layer, state.cache, cache))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _decode(config, settings, params, key, state, quorum):
  """Up to N tokens of each live row; less where `quorum` rows finish or the cache is full."""
  (B, _, S, _), N = state.cache[0].key_BGSH.shape, _BETWEEN_LOOKS
  unembedding_DV = model.unembedding(config, params)
  key_B = _row_keys(key, state.question_row_B, state.sample_index_B)
  begun_B = state.live_B

  def goes_on(loop):
    time, state, _ = loop
    fits = jnp.all(~state.live_B | (state.position_B < S))
    return (time < N) & fits & (jnp.sum(begun_B & ~state.live_B) < quorum)

  def step(loop):
    time, state, found = loop
    logits_BV = jnp.dot(state.hidden_BD, unembedding_DV, preferred_element_type=jnp.float32)
    token_B, logp_B, entropy_B = draw.draw(
        settings.draw, logits_BV, _uniforms(key_B, state.length_B))
    ends_B = state.live_B & jnp.isin(token_B, jnp.array(settings.eos_ids))
    length_B = state.length_B + state.live_B
    live_B = state.live_B & ~ends_B & (length_B < state.limit_B)
    hidden_BD, cache = model.decode(config, params, token_B, state.position_B, state.cache)
    found = _Found(
        found.tokens_NB.at[time].set(token_B), found.logp_NB.at[time].set(logp_B),
        found.entropy_NB.at[time].set(entropy_B), length_B, live_B, found.ended_B | ends_B)
    return time + 1, state._replace(
        hidden_BD=hidden_BD, position_B=state.position_B + live_B, length_B=length_B,
        live_B=live_B, cache=cache), found

  found = _Found(
      *(jnp.zeros((N, B), kind) for kind in (jnp.int32, jnp.float32, jnp.float32)),
      state.length_B, state.live_B, jnp.zeros(B, bool))
  _, state, found = jax.lax.while_loop(goes_on, step, (jnp.int32(0), state, found))
  # Replicated: every host reads them.
  return state, jax.tree.map(lambda x: sharding.constrain(x, (None,) * x.ndim), found)


def _row_keys(key, question_row_B, sample_index_B):
  def row_key(question_row, sample_index):
    return jax.random.fold_in(jax.random.fold_in(key, question_row), sample_index)

  return jax.vmap(row_key)(question_row_B, sample_index_B)


def _uniforms(key_B, position_B):
  """Two for each row, of its key and the position in its response."""
  def uniform(key, position):
    return jax.random.uniform(jax.random.fold_in(key, position), (2,))

  return jax.vmap(uniform)(key_B, position_B)
