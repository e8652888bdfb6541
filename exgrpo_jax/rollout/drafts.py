"""Exact drafts: decoding several tokens per row per pass (`rollout.drafts`).

A token is a function of the logits and of noise that depends only on seed, step, question, sample
and position. A pass over a row's next token and k drafted tokens draws a token after each of them,
and therefore produces the same tokens as decoding one at a time. At the first draft that differs
from its draw, the draw is used, and later drafts are discarded. Drafts are copied from texts for
the same question: the row's prompt and response, responses in other slots, and past responses.

Shape letters as in decode_loop.py, plus T tokens per row per pass (the next token and the
drafts after it), R texts, M texts that a row drafts from, X last tokens of a row.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.matmul import OutputMajor
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import Decoded, Forced, Sampling, State

CHOICES = ('0', '1', '3', '7', 'auto')  # the allowed values of `rollout.drafts`
SOURCES = ('own', 'siblings', 'past')  # the kinds of text that drafts are copied from
MAX_TEXTS = 16  # M: a row drafts from its own text and at most 15 others
LONGEST_MATCH = 5  # X
# Number of activation rows per device that cost about as much as a single row, because reading the
# weights takes longer than multiplying by them. Not measured on GPUs. 0 on TPUs, because the TPU
# kernel has not been tried with several queries per row.
_FREE_ROWS = {'cpu': 8, 'gpu': 64, 'tpu': 0}


def width(setting: str, slots: int, mesh: Mesh) -> int:
  """Return how many tokens each of `slots` rows drafts per pass; `setting` is one of CHOICES.

  'auto' chooses as many tokens as possible without exceeding a limit on the rows of the matrix
  products on each device. The limit depends on the platform.
  """
  if setting != 'auto':
    return int(setting)
  (rows,) = sharding.batch(mesh, slots).shard_shape((slots,))
  free_rows = _FREE_ROWS[mesh.devices.flat[0].platform]
  return max(int(k) for k in CHOICES[:-1] if k == '0' or rows * (int(k) + 1) <= free_rows)


class Texts(NamedTuple):
  """The texts that drafts are copied from. The first B of the R texts belong to the slots."""

  tokens_RS: Array  # int32; prompt and response; past responses keep only the end of the prompt
  length_R: Array  # int32
  start_R: Array  # int32, where the response begins
  peers_BM: Array  # int32, each slot's texts, its own text first; -1 means no text


class Counts(NamedTuple):
  """The work done in one call to `decode`, across all rows."""

  passes: jax.Array  # int32
  row_passes: jax.Array  # int32, passes of live rows
  drafted_X: jax.Array  # int32, tokens drafted by each of SOURCES
  accepted_X: jax.Array  # int32, drafted tokens that became part of a response


class _Draws(NamedTuple):
  """Drawn tokens with their log-probabilities and entropies, in nats."""

  token: jax.Array
  logp: jax.Array
  entropy: jax.Array


class _Carry(NamedTuple):
  state: State
  next_B: _Draws  # each row's next token, which is already part of `texts`
  texts: Texts
  decoded: Decoded
  num_decoded_B: jax.Array  # int32, tokens in `decoded`
  counts: Counts


class _CheckedTokens(NamedTuple):
  """The tokens of a pass, checked against the draws."""

  token_BT: jax.Array  # the row's next token, then the drafts
  draws_BT: _Draws  # the draw after each token
  following_BT: jax.Array  # the token after each token: the forced one, if any, otherwise the draw
  kept_BT: jax.Array  # bool, True for the tokens to keep, the first few of each live row
  ended_B: jax.Array  # bool, True if an end token has ended the row


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(
  config: model.ShapeConfig,
  sampling: Sampling,
  num_drafts: int,
  params: model.Params,
  state: State,
  texts: Texts,
  min_finished: int,
  max_passes: int,
  temperature: float,
  forced: Forced | None = None,
) -> tuple[State, Decoded, Counts]:
  """Decode like `decode_loop.decode`, in at most `max_passes` passes of T = num_drafts + 1 tokens.

  The columns of `Decoded` and of `forced` have room for T tokens per pass.
  """
  S = model.cache_length(config, state.cache)
  pass_limit = jnp.minimum(max_passes, decode_loop.TOKENS_PER_SYNC)
  live_before_B = state.live_B
  unembedding = decode_loop.padded_unembedding(config, params)
  draw = functools.partial(_draw_tokens, config, sampling, unembedding, temperature)

  def goes_on(carry: _Carry) -> jax.Array:
    state = carry.state
    fits = jnp.all(~state.live_B | (state.position_B < S))
    has_enough = jnp.sum(live_before_B & ~state.live_B) >= min_finished
    return (carry.counts.passes < pass_limit) & fits & ~has_enough

  def decode_pass(carry: _Carry) -> _Carry:
    state, proposal = carry.state, propose(carry.texts, num_drafts)
    token_BT = jnp.concatenate([carry.next_B.token[:, None], proposal[0]], axis=1)
    token_BT, is_forced_BT = _read_forced(forced, token_BT, carry.num_decoded_B)
    hidden_BTD, new_cache, routes_BTLC = model.decode_new(
      config, params, jnp.maximum(token_BT, 0), state.position_B, state.cache
    )
    draws_BT = draw(hidden_BTD, state, 1)
    following_BT, _ = _read_forced(forced, draws_BT.token, carry.num_decoded_B + 1)
    ends_BT = ~is_forced_BT & jnp.isin(token_BT, jnp.array(sampling.eos_ids))
    kept_BT = _mark_kept(state, token_BT, following_BT, ends_BT, S)
    ended_B = jnp.any(kept_BT & ends_BT, axis=1)
    tokens = _CheckedTokens(token_BT, draws_BT, following_BT, kept_BT, ended_B)
    counts = _add_counts(carry, proposal, is_forced_BT, kept_BT)
    rests_at = 0 if forced is None else S - 1
    carry = _advance(carry, tokens, hidden_BTD, routes_BTLC, rests_at)
    count_B = jnp.maximum(jnp.sum(kept_BT, axis=1), 1)
    cache = model.keep(config, state.cache, new_cache, state.position_B, count_B)
    return carry._replace(state=carry.state._replace(cache=cache), counts=counts)

  # Only the first of the T equal rows is used. A single row would round differently than a pass, so
  # results would depend on when the last call ended.
  hidden_BTD = jnp.repeat(state.hidden_BD[:, None], num_drafts + 1, axis=1)
  first_B1 = _Draws(*(x_BT[:, :1] for x_BT in draw(hidden_BTD, state, 0)))
  start = _first_carry(num_drafts, state, texts, forced, first_B1)
  carry = jax.lax.while_loop(goes_on, decode_pass, start)
  return decode_loop.laid_out(carry.state), *decode_loop.for_hosts((carry.decoded, carry.counts))


def _draw_tokens(
  config: model.ShapeConfig,
  sampling: Sampling,
  unembedding: jax.Array | OutputMajor,
  temperature: float,
  hidden_BTD: jax.Array,
  state: State,
  ahead: int,
) -> _Draws:
  """Draw a token after each hidden state; each row's first draw has index length_B + ahead."""
  B, T, D = hidden_BTD.shape
  hidden_MD = hidden_BTD.reshape(B * T, D)
  key_M = jax.random.wrap_key_data(jnp.repeat(state.key_BX, T, axis=0))
  length_M = (state.length_B[:, None] + ahead + jnp.arange(T)).reshape(-1)
  draws = decode_loop.draw(config, sampling, unembedding, hidden_MD, key_M, length_M, temperature)
  return _Draws(*(x_M.reshape(B, T) for x_M in draws))


def _first_carry(
  num_drafts: int, state: State, texts: Texts, forced: Forced | None, first_B1: _Draws
) -> _Carry:
  """Return the carry before the first pass."""
  zeros_B, zeros_X = jnp.zeros_like(state.length_B), jnp.zeros(len(SOURCES), jnp.int32)
  token_B1, _ = _read_forced(forced, first_B1.token, zeros_B)
  texts = decode_loop.for_hosts(jax.tree.map(jnp.asarray, texts))
  return _Carry(
    state=state,
    next_B=_Draws(token_B1[:, 0], first_B1.logp[:, 0], first_B1.entropy[:, 0]),
    texts=_with_following(texts, token_B1, zeros_B + 1),
    decoded=decode_loop.nothing_decoded(state, decode_loop.TOKENS_PER_SYNC * (num_drafts + 1)),
    num_decoded_B=zeros_B,
    counts=Counts(jnp.int32(0), jnp.int32(0), zeros_X, zeros_X),
  )


def _read_forced(
  forced: Forced | None, token_BT: jax.Array, place_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Overwrite tokens with the forced tokens for their places, if any, and mark the forced ones.

  `place_B` is the place of each row's first token, counted from the row's first forced token.
  """
  if forced is None:
    return token_BT, jnp.zeros(token_BT.shape, bool)
  tokens_NB = jnp.asarray(forced.tokens_NB)
  place_BT = place_B[:, None] + jnp.arange(token_BT.shape[1])
  is_forced_BT = place_BT < jnp.asarray(forced.count_B)[:, None]
  place_BT = jnp.minimum(place_BT, len(tokens_NB) - 1)
  return jnp.where(is_forced_BT, tokens_NB[place_BT, _rows(place_BT)], token_BT), is_forced_BT


def _mark_kept(
  state: State, token_BT: jax.Array, following_BT: jax.Array, ends_BT: jax.Array, S: int
) -> jax.Array:
  """Mark the tokens to keep: a row stops before a mismatch, after an end token or at a limit."""
  room_B = jnp.minimum(state.limit_B - state.length_B, S - state.position_B)
  agrees_BK = (token_BT[:, 1:] == following_BT[:, :-1]) & ~ends_BT[:, :-1]
  agrees_BT = jnp.pad(agrees_BK, ((0, 0), (1, 0)), constant_values=True)
  within_BT = jnp.arange(token_BT.shape[1]) < room_B[:, None]
  kept_BT = jnp.cumprod(agrees_BT & within_BT, axis=1).astype(bool)
  return kept_BT & state.live_B[:, None]


def _advance(
  carry: _Carry,
  tokens: _CheckedTokens,
  hidden_BTD: jax.Array,
  routes_BTLC: jax.Array | None,
  rests_at: int,
) -> _Carry:
  """Return the carry after a pass, except for its cache and counts."""
  state, (token_BT, draws_BT, following_BT, kept_BT, ended_B) = carry.state, tokens
  count_B = jnp.sum(kept_BT, axis=1)
  last_B = jnp.maximum(count_B, 1) - 1

  def at_last(x: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, last_B.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

  length_B, position_B = state.length_B + count_B, state.position_B + count_B
  live_B = state.live_B & ~ended_B & (length_B < state.limit_B)
  decoded = _with_tokens(carry, token_BT, draws_BT)
  return carry._replace(
    state=state._replace(
      # The draw after a finished row is part of its text, so another call must repeat it.
      hidden_BD=jnp.where(state.live_B[:, None], at_last(hidden_BTD), state.hidden_BD),
      position_B=jnp.where(live_B, position_B, jnp.minimum(position_B, rests_at)),
      length_B=length_B,
      live_B=live_B,
      routes_BSLC=decode_loop.with_routes(state, routes_BTLC, kept_BT),
    ),
    next_B=_Draws(at_last(following_BT), at_last(draws_BT.logp), at_last(draws_BT.entropy)),
    texts=_with_following(carry.texts, following_BT, count_B),
    decoded=decoded._replace(
      length_B=length_B, live_B=live_B, ended_B=carry.decoded.ended_B | ended_B
    ),
    num_decoded_B=carry.num_decoded_B + count_B,
  )


def _with_tokens(carry: _Carry, token_BT: jax.Array, draws_BT: _Draws) -> Decoded:
  """Add tokens to the columns; the next pass overwrites tokens that are not kept."""
  decoded, next_B = carry.decoded, carry.next_B
  place_BT = carry.num_decoded_B[:, None] + jnp.arange(token_BT.shape[1])

  def put(values_NB: jax.Array, new_BT: jax.Array) -> jax.Array:
    return values_NB.at[place_BT, _rows(place_BT)].set(new_BT, mode='drop')

  def from_next(next_B: jax.Array, drawn_BT: jax.Array) -> jax.Array:
    return jnp.concatenate([next_B[:, None], drawn_BT[:, :-1]], axis=1)

  return decoded._replace(
    tokens_NB=put(decoded.tokens_NB, token_BT),
    logp_NB=put(decoded.logp_NB, from_next(next_B.logp, draws_BT.logp)),
    entropy_NB=put(decoded.entropy_NB, from_next(next_B.entropy, draws_BT.entropy)),
  )


def _with_following(texts: Texts, token_BT: jax.Array, count_B: jax.Array) -> Texts:
  """Append the first `count_B` tokens to the slots' texts. Nothing reads past a text's end."""
  B, T = token_BT.shape
  place_BT = texts.length_R[:B, None] + jnp.arange(T)
  tokens_RS, length_R = jnp.asarray(texts.tokens_RS), jnp.asarray(texts.length_R)
  return texts._replace(
    tokens_RS=tokens_RS.at[_rows(place_BT), place_BT].set(token_BT, mode='drop'),
    length_R=length_R.at[:B].add(count_B),
  )


def _rows(x_BT: Array) -> jax.Array:
  return jnp.arange(len(x_BT))[:, None]


def _add_counts(
  carry: _Carry, proposal: tuple[jax.Array, jax.Array], is_forced_BT: jax.Array, kept_BT: jax.Array
) -> Counts:
  counts, live_B, (drafts_BK, source_BK) = carry.counts, carry.state.live_B, proposal
  is_draft_BK = (drafts_BK >= 0) & ~is_forced_BT[:, 1:] & live_B[:, None]
  of_source_XBK = source_BK == jnp.arange(len(SOURCES))[:, None, None]
  return Counts(
    passes=counts.passes + 1,
    row_passes=counts.row_passes + jnp.sum(live_B),
    drafted_X=counts.drafted_X + jnp.sum(of_source_XBK & is_draft_BK, axis=(1, 2)),
    accepted_X=counts.accepted_X
    + jnp.sum(of_source_XBK & is_draft_BK & kept_BT[:, 1:], axis=(1, 2)),
  )


# ---- Proposals ----


def propose(texts: Texts, num: int) -> tuple[jax.Array, jax.Array]:
  """Draft each slot's next tokens by a majority vote among the texts that it may copy from.

  A text's match is the longest run of the row's last tokens, at most five, that occurs in the text;
  ties go to the last occurrence. Only texts with the longest match vote on the first token. On each
  later token, only texts that agreed with all earlier winners vote. Ties go to the first text.
  From texts other than the row's own, only response tokens are copied.

  Returns:
    (tokens int32 [B, num], indices into SOURCES int32 [B, num]); a token is -1 if no text votes.
  """
  B, S = len(texts.peers_BM), texts.tokens_RS.shape[1]
  chex.assert_rank([texts.tokens_RS, texts.length_R, texts.start_R], [2, 1, 1])
  match_BM, place_BM = _longest_matches(texts)
  votes_BM = (match_BM > 0) & (match_BM == jnp.max(match_BM, axis=1, keepdims=True))
  end_BM = jnp.minimum(texts.length_R[texts.peers_BM], S)
  of_text_BM = jnp.where(texts.peers_BM < B, 1, 2).at[:, 0].set(0)
  tokens, sources = [], []
  for ahead in range(1, num + 1):
    votes_BM &= place_BM + ahead < end_BM
    token_BM = texts.tokens_RS[texts.peers_BM, jnp.minimum(place_BM + ahead, S - 1)]
    alike_BMM = (token_BM[:, :, None] == token_BM[:, None]) & votes_BM[:, None]
    count_BM = jnp.where(votes_BM, jnp.sum(alike_BMM, axis=2), 0)
    winner_B1 = jnp.argmax(count_BM, axis=1)[:, None]
    token_B1 = jnp.take_along_axis(token_BM, winner_B1, axis=1)
    tokens.append(jnp.where(jnp.any(votes_BM, axis=1, keepdims=True), token_B1, -1))
    sources.append(jnp.take_along_axis(of_text_BM, winner_B1, axis=1))
    votes_BM &= token_BM == token_B1
  return jnp.concatenate(tokens, axis=1), jnp.concatenate(sources, axis=1)


def _longest_matches(texts: Texts) -> tuple[jax.Array, jax.Array]:
  """Find the longest match of each slot's last tokens in each text that it may copy from.

  A match must be followed by a token that may be copied. Returns the length of each match (0 if
  there is no match) and the index of its last token in the text, both [B, M].
  """
  (B, M), S = texts.peers_BM.shape, texts.tokens_RS.shape[1]
  is_own_M = jnp.arange(M) == 0
  start_BM = jnp.where(is_own_M, 0, texts.start_R[texts.peers_BM])
  end_BM = jnp.where(texts.peers_BM < 0, 0, texts.length_R[texts.peers_BM])
  last_BX = texts.length_R[:B, None] - 1 - jnp.arange(LONGEST_MATCH)
  last_BX = jnp.where(
    (last_BX >= 0) & (last_BX < S), texts.tokens_RS[_rows(last_BX), jnp.clip(last_BX, 0, S - 1)], -1
  )
  tokens_BMS = texts.tokens_RS[texts.peers_BM]
  equal_BMS, match_BMS = jnp.ones(tokens_BMS.shape, bool), jnp.zeros(tokens_BMS.shape, jnp.int32)
  for number in range(LONGEST_MATCH):
    shifted_BMS = jnp.pad(tokens_BMS, ((0, 0), (0, 0), (number, 0)), constant_values=-2)[..., :S]
    equal_BMS &= shifted_BMS == last_BX[:, number, None, None]
    match_BMS += equal_BMS
  place_S = jnp.arange(S)
  is_followed_BMS = (place_S + 1 >= start_BM[..., None]) & (place_S + 1 < end_BM[..., None])
  # The longest match; ties go to the last one.
  best_BM = jnp.max(jnp.where(is_followed_BMS, match_BMS * S + place_S, 0), axis=2)
  return best_BM // S, best_BM % S
