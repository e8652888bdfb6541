"""The gradient of one minibatch: rows cut into microbatches, whose gradients are added up.

The normalisers are taken from the whole minibatch before it is cut (`objective.loss_inputs`),
so microbatches, their order and the mesh change nothing but rounding. Shape letters of
its own: W tokens of a row from its first response token on, which alone get logits;
M microbatches of one shape.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.algorithm import objective
from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Array, Batch
from exgrpo_jax.learner import optimizer
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.policy import logprobs, model, sharding

Sums = dict[str, jax.Array]  # of `objective.token_loss`, and 'loss'
Accumulator = tuple[model.Params, Sums]  # a gradient and its sums


@dataclasses.dataclass(frozen=True)
class Config:
  """How a minibatch becomes a gradient; changes nothing but rounding, memory and time."""

  tokens_per_microbatch: int = setting(
    '[1, inf)',
    'tokens of one forward and backward pass, and of a forward pass that scores stored responses, '
    'on each part of the rows, padding included; at least one row in any case',
  )
  remat: str = setting(tuple(model.REMAT), 'what of each layer the backward pass computes again')
  drop_zero_advantage: bool = setting(
    None, 'leave out rows of advantage 0, as groups of equal rewards have'
  )


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
  """All that an update depends on besides its arrays; static, so each value compiles once."""

  gradient: Config
  objective: objective.Config
  optimizer: optimizer.Config
  model: model.Config
  mesh: Mesh
  num_updates: int  # of the run, for the learning rate's schedule
  temperature: float  # of sampling
  max_response: int  # tokens
  logit_chunk: int  # tokens whose logits exist at once, on each part of the rows


class Microbatch(NamedTuple):
  """Some of a minibatch's rows, as one forward and backward pass sees them."""

  tokens_BT: Array  # int32
  first_B: Array  # int32, index of the first response token, at least 1
  target_BW: Array  # int32, tokens from there on
  inputs: objective.LossInputs  # [B, W], aligned with the targets


def minibatch_gradient(
  spec: UpdateSpec,
  params: model.Params,
  batch: Batch,
  clip: bool,
  is_first: bool,
  reference: model.Params | None = None,
) -> Accumulator:
  """The gradient of a minibatch's loss, laid out as the parameters, and its sums.

  Args:
    spec: which objective and model.
    params: of the policy.
    batch: all rows of the minibatch, NumPy.
    clip: whether fresh ratios are clipped now.
    is_first: whether it is the step's first minibatch.
    reference: parameters of the reference policy where the objective has a KL term.

  Returns:
    Both on the device, not awaited; the sums are float32 scalars.
  """
  inputs = objective.loss_inputs(batch, spec.objective, spec.max_response)
  _, num_shards = sharding.split(spec.mesh, 'batch')
  cut = microbatches(spec.gradient, batch, inputs, num_shards)
  accumulator = zero_accumulator(spec, params)
  for count, stack in stack_by_shape(cut, len(batch.advantage_B)):
    place = sharding.named(spec.mesh, (None, 'batch'), stack.first_B.shape)
    accumulator = accumulate(
      spec, params, accumulator, sharding.put(stack, place), count, clip, is_first, reference
    )
  return accumulator


@functools.partial(jax.jit, static_argnums=0)
def zero_accumulator(spec: UpdateSpec, params: model.Params) -> Accumulator:
  """The gradient and sums of no microbatch, with which `accumulate` begins."""
  sums = objective.zero_sums(spec.objective) | {'loss': jnp.float32(0)}
  return _lay_out(spec, jax.tree.map(jnp.zeros_like, params)), sums


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def accumulate(
  spec: UpdateSpec,
  params: model.Params,
  accumulator: Accumulator,
  stack: Microbatch,
  count: int,
  clip: bool,
  is_first: bool,
  reference: model.Params | None,
) -> Accumulator:
  """Adds the gradients and sums of the first `count` microbatches of a stack.

  A loop inside one program: what a pass needs only for a while is then allocated once.
  """

  def add(index: jax.Array, accumulator: Accumulator) -> Accumulator:
    rows = jax.tree.map(lambda stacked: stacked[index], stack)
    inputs = _with_whole_row_inputs(spec, params, rows, reference)

    def loss_of(params: model.Params) -> tuple[jax.Array, Sums]:
      return logprobs.fused_loss(
        *_predictor_states(spec, params, rows),
        rows.target_BW,
        inputs,
        functools.partial(
          objective.token_loss, config=spec.objective, clip=clip, is_first=is_first
        ),
        temperature=spec.temperature,
        chunk=spec.logit_chunk,
      )

    (loss, sums), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
    sums = sums | {'loss': loss}
    gradient_before, sums_before = accumulator
    return (
      _lay_out(spec, jax.tree.map(jnp.add, gradient_before, gradient)),
      objective.merge_sums([sums_before, sums]),
    )

  return jax.lax.fori_loop(0, count, add, accumulator)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def apply_gradient(
  spec: UpdateSpec, state: TrainState, gradient: model.Params
) -> tuple[TrainState, dict[str, jax.Array]]:
  """The state after AdamW's step, or unchanged where the gradient is refused.

  `state` is donated; use the one returned. See `optimizer.apply_gradient`.
  """
  return optimizer.apply_gradient(spec.optimizer, spec.num_updates, state, gradient)


def _with_whole_row_inputs(
  spec: UpdateSpec, params: model.Params, rows: Microbatch, reference: model.Params | None
) -> objective.LossInputs:
  """The rows' loss inputs, completed by what a forward pass over whole rows gives."""

  def logp_BW(params: model.Params) -> jax.Array:
    return logprobs.target_logprobs(
      *_predictor_states(spec, params, rows), rows.target_BW, spec.temperature, spec.logit_chunk
    )[0]

  inputs = rows.inputs
  if reference is not None:
    inputs = inputs._replace(reference_logp_BT=logp_BW(reference))
  if spec.objective.ratio == 'sequence':
    inputs = inputs._replace(row_log_ratio_B1=objective.row_log_ratio(logp_BW(params), inputs))
  return inputs


def _predictor_states(
  spec: UpdateSpec, params: model.Params, rows: Microbatch
) -> tuple[jax.Array, jax.Array]:
  """(hidden_BWD, unembedding_DV), from which the rows' targets are predicted."""
  hidden_BTD = model.hidden_states(spec.model, params, rows.tokens_BT, spec.gradient.remat)
  hidden_BWD = logprobs.predictor_states(hidden_BTD, rows.first_B, rows.target_BW.shape[1])
  return hidden_BWD, model.unembedding(spec.model, params)


def _lay_out(spec: UpdateSpec, gradient: model.Params) -> model.Params:
  """Pins a gradient to the layout of the parameters."""
  return jax.lax.with_sharding_constraint(gradient, model.shardings(spec.model, spec.mesh))


# ---- Packing, on the host ----


def minibatches(batch: Batch, count: int) -> list[Batch]:
  """A step's rows in `count` equal parts of consecutive rows, and so of whole groups."""
  size = len(batch.advantage_B) // count
  return [
    jax.tree.map(lambda x, start=start: x[start : start + size], batch)
    for start in range(0, count * size, size)
  ]


def microbatches(
  config: Config, batch: Batch, inputs: objective.LossInputs, num_shards: int
) -> list[Microbatch]:
  """The rows by falling length, cut so that each pass has about as many tokens; NumPy.

  Rows without a response token are left out: they weigh nothing. Lengths and numbers of
  rows come from few values, so that few shapes are compiled; filler rows have an empty mask.

  Args:
    config: the budget, and whether rows of advantage 0 count.
    batch: the minibatch.
    inputs: its `objective.loss_inputs`.
    num_shards: parts over which rows are spread; the number of rows is a multiple.
  """
  mask_BT = np.asarray(inputs.mask_BT) > 0
  used_B = mask_BT.any(axis=1)
  if config.drop_zero_advantage:
    used_B &= np.asarray(batch.advantage_B) != 0
  length = mask_BT.shape[1]
  end_B = np.where(used_B, length - np.argmax(mask_BT[:, ::-1], axis=1), 2)
  first_B = np.where(used_B, np.argmax(mask_BT, axis=1), 1)
  order = sorted(np.flatnonzero(used_B), key=lambda row: -end_B[row])
  cut, start = [], 0
  while start < len(order) or not cut:  # a minibatch without tokens is still an update
    longest = end_B[order[start]] if order else 2
    size = length_bucket(int(longest), length)
    room = max(1, config.tokens_per_microbatch // size) * num_shards
    row_R = np.array(order[start : start + room], int)
    count = min(room, num_shards * _round_up(-(-len(row_R) // num_shards)))
    cut.append(_cut(batch, inputs, row_R, count, size, first_B, end_B))
    start += room
  return cut


def stack_by_shape(cut: Sequence[Microbatch], num_rows: int) -> list[tuple[int, Microbatch]]:
  """Microbatches of one shape stacked along a leading axis M, with how many there are; NumPy.

  M is as many as a minibatch of `num_rows` rows can have of that shape: it must not depend on
  the rows, or the program for it would be compiled anew. What is left over is zeros.
  """
  alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Microbatch]] = {}
  for rows in cut:
    alike.setdefault((rows.tokens_BT.shape, rows.target_BW.shape), []).append(rows)

  def stacked(*parts: np.ndarray) -> np.ndarray:
    stack = np.zeros((-(-num_rows // len(parts[0])), *parts[0].shape), parts[0].dtype)
    stack[: len(parts)] = parts
    return stack

  return [(len(group), jax.tree.map(stacked, *group)) for group in alike.values()]


def _round_up(count: int) -> int:
  """The next power of two or middle between two; at least 1."""
  power = 1 << max(0, count - 1).bit_length()
  return power * 3 // 4 if count <= power * 3 // 4 and power >= 4 else power


def _cut(
  batch: Batch,
  inputs: objective.LossInputs,
  row_R: np.ndarray,
  count: int,
  size: int,
  first_B: np.ndarray,
  end_B: np.ndarray,
) -> Microbatch:
  """The chosen rows, `size` tokens of each, in a microbatch of `count` rows."""
  window = length_bucket(int((end_B - first_B)[row_R].max(initial=1)), size)
  place_RW = first_B[row_R][:, None] + np.arange(window)
  inside_RW = place_RW < end_B[row_R][:, None]
  place_RW = np.minimum(place_RW, batch.tokens_BT.shape[1] - 1)

  def fill_up(rows: np.ndarray, value: int = 0) -> np.ndarray:
    filled = np.full((count, *rows.shape[1:]), value, rows.dtype)
    filled[: len(rows)] = rows
    return filled

  def take_window(x_BT: np.ndarray) -> np.ndarray:
    """[B, T] -> [count, W]; [B, 1] stays a column."""
    if x_BT.shape[1] == 1:
      return fill_up(x_BT[row_R])
    return fill_up(np.where(inside_RW, x_BT[row_R[:, None], place_RW], x_BT.dtype.type(0)))

  return Microbatch(
    tokens_BT=fill_up(np.asarray(batch.tokens_BT)[row_R, :size]),
    first_B=fill_up(first_B[row_R].astype(np.int32), 1),
    target_BW=take_window(np.asarray(batch.tokens_BT)),
    inputs=jax.tree.map(take_window, inputs),
  )
