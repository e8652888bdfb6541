"""Responses to prompts: prefill, then a jitted decode loop over a fixed set of slots.

What a row samples depends on its key, question row, sample index and tokens, not
on the rows beside it: slots, order and batch size change nothing, up to the
rounding of the logits (a draw on a boundary may flip when they move by an ulp).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from exgrpo_jax import model, sharding
from exgrpo_jax.types import Response

_SMALLEST_BUCKET = 32  # tokens; below it, compiling costs more than the padding


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to sample; static, so that each distinct value compiles once."""

  temperature: float  # 0 takes the most probable token
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
) -> list[Response]:
  """One response per prompt, in the prompts' order.

  Args:
    config: of the model.
    params: of the model, on `mesh`.
    prompts: int32 [T], at least one token each.
    question_rows: each prompt's question; with the sample index it seeds the row.
    sample_indices: which of its question's samples each row is.
    key: of this step.
    settings: how to sample.
    mesh: rows are spread over its data axes where these divide the slots.
    on_finish: called with (index, response) as soon as a row's batch is done,
      so that grading runs while the next batch decodes.
  """
  assert all(len(prompt) for prompt in prompts), 'a prompt has at least one token'
  prompt_length = bucket(max(map(len, prompts), default=1))
  responses = []
  for start in range(0, len(prompts), settings.slots):
    rows = slice(start, start + settings.slots)
    batch = _pad(prompts[rows], question_rows[rows], sample_indices[rows], prompt_length, settings)
    with jax.set_mesh(mesh):
      samples = jax.device_get(_sample(config, settings, params, key, batch))
    for index, response in enumerate(_split(samples, len(prompts[rows])), start):
      responses.append(response)
      if on_finish is not None:
        on_finish(index, response)
  return responses


def draw(
    logits_BV: jax.Array, uniform_B: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A token per row by inverse CDF; its log-probability and the entropy, in nats.

  The token is the first of positive probability whose cumulative sum exceeds
  uniform * total, or the last of positive probability where rounding leaves none.
  At temperature 0 it is the most probable one, and the figures are those of
  temperature 1. float32 [B, V], float32 [B] in [0, 1) -> int32, float32, float32 [B].
  """
  logp_BV = jax.nn.log_softmax(logits_BV / (temperature or 1.0))
  p_BV = jnp.exp(logp_BV)
  entropy_B = -jnp.sum(jnp.where(p_BV > 0, p_BV * logp_BV, 0), axis=-1)  # not 0 * -inf
  if temperature == 0:
    token_B = jnp.argmax(logits_BV, axis=-1)
  else:
    token_B = _inverse_cdf(p_BV, uniform_B)
  logp_B = jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]
  return token_B.astype(jnp.int32), logp_B, entropy_B


def _inverse_cdf(p_BV, uniform_B):
  cumulative_BV = jnp.cumsum(p_BV, axis=-1)
  possible_BV = p_BV > 0
  beyond_BV = cumulative_BV > (uniform_B * cumulative_BV[:, -1])[:, None]
  last_B = p_BV.shape[-1] - 1 - jnp.argmax(possible_BV[:, ::-1], axis=-1)
  return jnp.where(beyond_BV[:, -1], jnp.argmax(beyond_BV & possible_BV, axis=-1), last_B)


class _Rows(NamedTuple):
  """What a batch of slots starts from."""

  tokens_BT: np.ndarray  # int32, padded on the right
  prompt_length_B: np.ndarray  # int32
  question_row_B: np.ndarray  # int32
  sample_index_B: np.ndarray  # int32
  unused_B: np.ndarray  # bool, slots without a prompt


class _Samples(NamedTuple):
  """What the loop writes; time first, so that a step writes one contiguous row."""

  tokens_TB: jax.Array  # int32
  logp_TB: jax.Array  # float32, nats
  entropy_TB: jax.Array  # float32, nats
  length_B: jax.Array  # int32, tokens written
  ended_B: jax.Array  # bool, by an end token


class _Loop(NamedTuple):
  time: jax.Array  # int32, the position in the response of the token drawn next
  hidden_BD: jax.Array  # from which it is drawn
  cache: model.Cache
  samples: _Samples


def _pad(prompts, question_rows, sample_indices, prompt_length, settings):
  """Rows for every slot; one without a prompt gets a prompt of one padding token."""
  rows = _Rows(
      np.full((settings.slots, prompt_length), settings.pad_id, np.int32),
      *(np.full(settings.slots, value, np.int32) for value in (1, 0, 0)),
      np.arange(settings.slots) >= len(prompts))
  for slot, prompt in enumerate(prompts):
    rows.tokens_BT[slot, :len(prompt)] = prompt
    rows.prompt_length_B[slot] = len(prompt)
  rows.question_row_B[:len(prompts)] = question_rows
  rows.sample_index_B[:len(prompts)] = sample_indices
  return rows


# Replicated results: every host reads them all. A spec, so the mesh is that of jax.set_mesh.
@functools.partial(jax.jit, static_argnames=('config', 'settings'), out_shardings=PartitionSpec())
def _sample(config, settings, params, key, rows):
  rows = jax.tree.map(lambda x: sharding.constrain(x, ('batch',) + (None,) * (x.ndim - 1)), rows)
  unembedding_DV = model.unembedding(config, params)
  key_B = _row_keys(key, rows)

  def unfinished(loop):
    return (loop.time < settings.max_response) & ~jnp.all(loop.samples.ended_B)

  def step(loop):
    logits_BV = jnp.dot(loop.hidden_BD, unembedding_DV, preferred_element_type=jnp.float32)
    drawn = draw(logits_BV, _uniform(key_B, loop.time), settings.temperature)
    samples = _record(loop.samples, loop.time, *drawn, settings.eos_ids)
    hidden_BD, cache = model.decode(
        config, params, drawn[0], rows.prompt_length_B + loop.time, loop.cache)
    return _Loop(loop.time + 1, hidden_BD, cache, samples)

  B, T = rows.tokens_BT.shape
  hidden_BTD, cache = model.prefill(config, params, rows.tokens_BT, T + settings.max_response)
  last_BD = hidden_BTD[jnp.arange(B), rows.prompt_length_B - 1]
  start = _Loop(jnp.int32(0), last_BD, cache, _no_samples(settings.max_response, rows.unused_B))
  return jax.lax.while_loop(unfinished, step, start).samples


def _row_keys(key, rows):
  def row_key(question_row, sample_index):
    return jax.random.fold_in(jax.random.fold_in(key, question_row), sample_index)

  return jax.vmap(row_key)(rows.question_row_B, rows.sample_index_B)


def _uniform(key_B, time):
  return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, time)))(key_B)


def _no_samples(max_response, unused_B):
  shape = (max_response, len(unused_B))
  return _Samples(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape),
                  jnp.zeros(len(unused_B), jnp.int32), unused_B)


def _record(samples, time, token_B, logp_B, entropy_B, eos_ids):
  """Writes the column of `time`; a row that has ended no longer grows."""
  return _Samples(
      samples.tokens_TB.at[time].set(token_B),
      samples.logp_TB.at[time].set(logp_B),
      samples.entropy_TB.at[time].set(entropy_B),
      samples.length_B + ~samples.ended_B,
      samples.ended_B | jnp.isin(token_B, jnp.array(eos_ids)))


def _split(samples, num_rows):
  """The responses of the first `num_rows` slots, without what followed their end."""
  for row in range(num_rows):
    length = samples.length_B[row]
    yield Response(
        tokens=samples.tokens_TB[:length, row].copy(),
        logp=samples.logp_TB[:length, row].copy(),
        entropy=samples.entropy_TB[:length, row].copy(),
        truncated=not samples.ended_B[row])
