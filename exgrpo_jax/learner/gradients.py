"""The update of one minibatch: rows cut into microbatches, gradients added up, one AdamW step.

The normalisers are taken from the whole minibatch before it is cut (`objective.loss_inputs`),
so microbatches, their order and the mesh change nothing but rounding. Shape letters of
its own: W tokens of a row from its first response token on, which alone get logits;
M microbatches of one shape.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.algorithm import objective
from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.learner import optimizer
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.policy import logprobs, model, sharding


@dataclasses.dataclass(frozen=True)
class Config:
  tokens_per_microbatch: int = setting(
    '[1, inf)',
    'tokens of one forward and backward pass on each part of the rows, padding '
    'included; at least one row in any case',
  )
  remat: str = setting(tuple(model.REMAT), 'what of each layer the backward pass computes again')
  drop_zero_advantage: bool = setting(
    None, 'leave out rows of advantage 0, as groups of equal rewards have'
  )


@dataclasses.dataclass(frozen=True)
class Settings:
  """All that an update depends on besides its arrays; static."""

  gradient: Config
  objective: objective.Config
  optimizer: optimizer.Config
  model: model.Config
  mesh: Mesh
  num_updates: int  # of the run, for the learning rate's schedule
  temperature: float  # of sampling
  max_response: int  # tokens
  logit_chunk: int  # tokens whose logits exist at once


class Microbatch(NamedTuple):
  """Some of a minibatch's rows, as one forward and backward pass sees them."""

  tokens_BT: jax.Array  # int32
  first_B: jax.Array  # int32, place of the first response token, at least 1
  target_BW: jax.Array  # int32, tokens from there on
  tokens: objective.LossInputs  # [B, W], aligned with the targets


def minibatch(
  settings: Settings,
  state: TrainState,
  batch: Batch,
  clip: bool,
  is_first: bool,
  reference: model.Params | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimiser update.

  Args:
    settings: which objective, model and optimiser.
    state: given away; use the one returned.
    batch: all rows of the minibatch, NumPy.
    clip: whether fresh ratios are clipped now.
    is_first: whether it is the step's first minibatch.
    reference: parameters of the reference policy where the objective has a KL term.

  Returns:
    The new state, and float32 scalars on the device, not awaited: the sums of
    `objective.token_loss`, 'loss', 'gradient_norm', 'skipped', 'updates' (1).
  """
  found, sums = gradient(settings, state.params, batch, clip, is_first, reference)
  state, norms = apply_gradient(settings, state, found)
  return state, sums | norms | {'updates': jnp.float32(1)}


def gradient(
  settings: Settings,
  params: model.Params,
  batch: Batch,
  clip: bool,
  is_first: bool,
  reference: model.Params | None = None,
) -> tuple[model.Params, dict[str, jax.Array]]:
  """Of the minibatch's loss, laid out as the parameters, and its sums; see `minibatch`."""
  tokens = objective.loss_inputs(batch, settings.objective, settings.max_response)
  shards = sharding.split(settings.mesh, 'batch')[1]
  found = zero_accumulator(settings, params)
  for number, rows in stack_by_shape(
    microbatches(settings.gradient, batch, tokens, shards), len(batch.advantage_B)
  ):
    place = sharding.named(settings.mesh, (None, 'batch'), rows.first_B.shape)
    found = accumulate(
      settings, params, found, sharding.put(rows, place), number, clip, is_first, reference
    )
  return found


def microbatches(
  config: Config, batch: Batch, tokens: objective.LossInputs, shards: int
) -> list[Microbatch]:
  """The rows by falling length, cut so that each pass has about as many tokens; NumPy.

  Rows without a response token are left out: they weigh nothing. Lengths and numbers of
  rows come from few values, so that few shapes are compiled; rows that fill up have
  an empty mask.

  Args:
    config: the budget, and whether rows of advantage 0 count.
    batch: the minibatch.
    tokens: its `objective.loss_inputs`.
    shards: parts over which rows are spread; the number of rows is a multiple.
  """
  mask_BT = tokens.mask_BT > 0
  used_B = mask_BT.any(axis=1)
  if config.drop_zero_advantage:
    used_B &= batch.advantage_B != 0
  length = mask_BT.shape[1]
  end_B = np.where(used_B, length - np.argmax(mask_BT[:, ::-1], axis=1), 2)
  first_B = np.where(used_B, np.argmax(mask_BT, axis=1), 1)
  order = sorted(np.flatnonzero(used_B), key=lambda row: -end_B[row])
  found, start = [], 0
  while start < len(order) or not found:  # a minibatch without tokens is still an update
    longest = end_B[order[start]] if order else 2
    size = length_bucket(int(longest), length)
    room = max(1, config.tokens_per_microbatch // size) * shards
    rows = order[start : start + room]
    count = min(room, shards * _rounded(-(-len(rows) // shards)))
    found.append(_cut(batch, tokens, np.array(rows, int), count, size, first_B, end_B))
    start += room
  return found


def _rounded(count: int) -> int:
  """The next power of two or middle between two; at least 1."""
  power = 1 << max(0, count - 1).bit_length()
  return power * 3 // 4 if count <= power * 3 // 4 and power >= 4 else power


def _cut(batch, tokens, row_R, count, size, first_B, end_B):
  """The chosen rows, `size` tokens of each, in a microbatch of `count` rows."""
  window = length_bucket(int((end_B - first_B)[row_R].max(initial=1)), size)
  place_RW = first_B[row_R][:, None] + np.arange(window)
  inside_RW = place_RW < end_B[row_R][:, None]
  place_RW = np.minimum(place_RW, batch.tokens_BT.shape[1] - 1)

  def filled_up(part, value=0):
    whole = np.full((count, *part.shape[1:]), value, part.dtype)
    whole[: len(part)] = part
    return whole

  def windowed(x_BT):
    """[B, T] -> [count, W]; [B, 1] stays a column."""
    if x_BT.shape[1] == 1:
      return filled_up(x_BT[row_R])
    return filled_up(np.where(inside_RW, x_BT[row_R[:, None], place_RW], x_BT.dtype.type(0)))

  return Microbatch(
    filled_up(batch.tokens_BT[row_R, :size]),
    filled_up(first_B[row_R].astype(np.int32), 1),
    windowed(batch.tokens_BT),
    jax.tree.map(windowed, tokens),
  )


def stack_by_shape(found: list[Microbatch], num_rows: int) -> list[tuple[int, Microbatch]]:
  """Microbatches of one shape as one, with a leading axis M; and how many there are; NumPy.

  M is as many as a minibatch of `num_rows` rows can have of that shape: it must not depend on
  the rows, or the program for it would be compiled anew. What is not needed is zeros.
  """
  alike = {}
  for rows in found:
    alike.setdefault((rows.tokens_BT.shape, rows.target_BW.shape), []).append(rows)

  def stacked(*parts):
    whole = np.zeros((-(-num_rows // len(parts[0])), *parts[0].shape), parts[0].dtype)
    whole[: len(parts)] = parts
    return whole

  return [(len(group), jax.tree.map(stacked, *group)) for group in alike.values()]


@functools.partial(jax.jit, static_argnums=0)
def zero_accumulator(settings, params):
  """(gradient, sums) of no microbatch, with which `accumulate` begins."""
  sums = objective.zero_sums(settings.objective) | {'loss': jnp.float32(0)}
  return _spread(settings, jax.tree.map(jnp.zeros_like, params)), sums


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def accumulate(settings, params, so_far, rows_M, number, clip, is_first, reference):
  """(gradient, sums) so far, with those of the first `number` microbatches of a stack.

  One program for all of them: what a pass needs for a while is then allocated once.
  """

  def with_next(index, so_far):
    gradient, sums = so_far
    own, own_sums = _gradient_of(
      settings, params, jax.tree.map(lambda stack: stack[index], rows_M), clip, is_first, reference
    )
    return (
      _spread(settings, jax.tree.map(jnp.add, gradient, own)),
      objective.merge_sums(jax.tree.map(lambda *parts: jnp.stack(parts), sums, own_sums)),
    )

  return jax.lax.fori_loop(0, number, with_next, so_far)


def _gradient_of(settings, params, rows, clip, is_first, reference):
  """A microbatch's share in the gradient, and its sums."""

  def hidden_of(params):
    hidden_BTD = model.hidden_states(
      settings.model, params, rows.tokens_BT, settings.gradient.remat
    )
    hidden_BWD = logprobs.predictor_states(hidden_BTD, rows.first_B, rows.target_BW.shape[1])
    return hidden_BWD, model.unembedding(settings.model, params)

  def logp_of(params):
    return logprobs.target_logprobs(
      *hidden_of(params), rows.target_BW, settings.temperature, settings.logit_chunk
    )[0]

  tokens = rows.tokens
  if reference is not None:
    tokens = tokens._replace(reference_logp_BT=logp_of(reference))
  if settings.objective.ratio == 'sequence':
    tokens = tokens._replace(row_log_ratio_B1=objective.row_log_ratio(logp_of(params), tokens))

  def loss_of(params):
    return logprobs.fused_loss(
      *hidden_of(params),
      rows.target_BW,
      tokens,
      functools.partial(
        objective.token_loss, config=settings.objective, clip=clip, is_first=is_first
      ),
      temperature=settings.temperature,
      chunk=settings.logit_chunk,
    )

  (loss, sums), found = jax.value_and_grad(loss_of, has_aux=True)(params)
  return found, sums | {'loss': loss}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def apply_gradient(settings, state, found):
  """The state after AdamW's step, or the same where the gradient is refused."""
  return optimizer.apply_gradient(settings.optimizer, settings.num_updates, state, found)


def _spread(settings, total):
  """Laid out as the parameters are."""
  return jax.lax.with_sharding_constraint(total, model.shardings(settings.model, settings.mesh))
