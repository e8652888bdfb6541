"""The gradient of a minibatch: pack rows into microbatches and add up their gradients.

The normalizers are computed from the whole minibatch before it is split (`objective.loss_inputs`),
so packing, microbatches, their order and the mesh only affect rounding. Shape letters are the same
as in packing.py; M is the number of microbatches of one shape. B counts sequences here, except in a
`Batch` and its loss inputs, which have one row per response.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.algorithm import objective
from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Array, Batch
from exgrpo_jax.learner import optimizer
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.packing import Segments, Shape
from exgrpo_jax.policy import attention, logprobs, lora, mlp, model, sharding
from exgrpo_jax.policy.sharding import jit_for_training
from exgrpo_jax.runtime.compilations import Program

Sums = dict[str, jax.Array]  # the sums of `objective.token_loss`, and 'loss'
Accumulator = tuple[model.Params, Sums]  # a gradient and its sums


@dataclasses.dataclass(frozen=True)
class MicrobatchConfig:
  """Settings for splitting up minibatches; they affect only rounding, memory and time."""

  tokens: int = setting(
    9216,
    '[1, inf)',
    'number of tokens per shard, including padding, in one forward and backward pass, and in a '
    'forward pass that scores stored responses; a shard always has room for one row of the longest '
    'allowed length',
  )
  remat: str = setting(
    'all', tuple(model.REMAT), 'the part of each layer that the backward pass recomputes'
  )
  drop_zero_advantage: bool = setting(
    False,
    None,
    'leave out rows with advantage 0, such as all rows of a group with equal rewards; loss '
    'metrics, such as entropy, also leave them out',
  )


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
  """All static inputs to an update; updates are compiled once per distinct value."""

  microbatch: MicrobatchConfig
  objective: objective.ObjectiveConfig
  optimizer: optimizer.OptimizerConfig
  model: model.ShapeConfig
  lora: lora.LoraConfig
  mesh: Mesh
  num_updates: int  # in the whole run; the learning rate schedule needs it
  temperature: float  # sampling temperature
  longest_row: int  # maximum tokens of a prompt and its response
  max_response: int  # tokens
  logit_chunk: int  # tokens per shard of rows whose logits exist at the same time


class Microbatch(NamedTuple):
  """Rows of a minibatch, packed into sequences for one forward and backward pass."""

  tokens_BT: Array  # int32
  segments: Segments  # [B, T]
  predictor_BW: Array  # int32, each target's position minus 1
  target_BW: Array  # int32
  inputs: objective.LossInputs  # [B, W], aligned with the targets
  routes_BTLC: Array | None = None  # `Batch.routes_BTLC`


Stack = tuple[int, Microbatch]  # number of microbatches, and their arrays with a leading axis M


def trained_shapes(spec: UpdateSpec) -> model.Params:
  """Return the shapes, dtypes and shardings of the trained parameters (with LoRA, the adapters)."""
  return lora.shapes(spec.lora, model.shapes(spec.model, spec.mesh))


def minibatch_gradient(
  spec: UpdateSpec,
  params: model.Params,
  batch: Batch,
  clip: bool,
  is_first: bool,
  initial: model.Params | None = None,
  stopped: jax.Array | None = None,
  stacks: Sequence[Stack] | None = None,
) -> Accumulator:
  """Compute the gradient of a minibatch's loss and the sums for its metrics.

  `batch` contains all rows of the minibatch as NumPy arrays. `clip` is True if fresh ratios are
  clipped in this step, and `is_first` is True in the step's first minibatch. `initial` are the
  run's initial parameters, needed only as the base of LoRA adapters and as the reference policy of
  a KL term. If `stopped` (see `not_stopped`) is 1, nothing is computed and the results are 0.
  `stacks` is the result of `packed` for this batch, if already computed.

  Returns (gradient, sums), both still being computed on the device. The gradient is laid out like
  the parameters. The sums are float32 scalars, except 'choices_LE', which is [L, E].
  """
  accumulator = zero_accumulator(spec, params)
  layout = sharding.layout_of(accumulator)
  for count, stack in packed(spec, batch) if stacks is None else stacks:
    place = sharding.named(spec.mesh, (None, 'batch'), stack.tokens_BT.shape[:2])
    on_device = sharding.put(stack, place)
    new_accumulator = accumulate(
      spec, params, accumulator, on_device, count, clip, is_first, initial, stopped
    )
    accumulator = sharding.restore_layout(new_accumulator, layout)
  return accumulator


@functools.partial(jax.jit, static_argnums=0)
def zero_accumulator(spec: UpdateSpec, params: model.Params) -> Accumulator:
  """Return the zero gradient and zero sums that `accumulate` starts from."""
  sums = objective.zero_sums(spec.objective, spec.optimizer.measures_kl)
  sums |= mlp.zero_balance_sums(spec.model)
  sums['loss'] = jnp.float32(0)
  return _lay_out(spec, jax.tree.map(jnp.zeros_like, params)), sums


@jit_for_training(static_argnums=0, donate_argnums=(2,))
def accumulate(
  spec: UpdateSpec,
  params: model.Params,
  accumulator: Accumulator,
  stack: Microbatch,
  count: int,
  clip: bool,
  is_first: bool,
  initial: model.Params | None,
  stopped: jax.Array | None = None,
) -> Accumulator:
  """Add the gradients and sums of a stack's first `count` microbatches; add nothing if stopped.

  The loop runs inside the program so that the temporary arrays of a pass are allocated only once.
  """

  def add(index: jax.Array, accumulator: Accumulator) -> Accumulator:
    microbatch = jax.tree.map(lambda x: x[index], stack)
    policy = lora.joined(spec.lora, initial, params)
    reference = initial if spec.objective.kl_coefficient else None
    inputs = _with_whole_row_inputs(spec, policy, microbatch, reference, is_first)

    def loss_of(params: model.Params) -> tuple[jax.Array, Sums]:
      states, load = _predictor_states(spec, lora.joined(spec.lora, initial, params), microbatch)
      loss, sums = logprobs.fused_loss(
        *states,
        microbatch.target_BW,
        inputs,
        functools.partial(
          objective.token_loss,
          config=spec.objective,
          clip=clip,
          is_first=is_first,
          measures_kl=spec.optimizer.measures_kl,
        ),
        temperature=spec.temperature,
        chunk=spec.logit_chunk,
        cap=spec.model.logit_cap,
      )
      balance_sums = mlp.balance_sums(load)
      if balance_sums:
        loss += spec.objective.balance_coefficient * balance_sums['balance']
      return loss, sums | balance_sums

    (loss, sums), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
    sums = sums | {'loss': loss}
    gradient_before, sums_before = accumulator
    return (
      _lay_out(spec, jax.tree.map(jnp.add, gradient_before, gradient)),
      objective.merge_sums([sums_before, sums]),
    )

  trips = count if stopped is None else jnp.where(stopped > 0, 0, count)
  return jax.lax.fori_loop(0, trips, add, accumulator)


def not_stopped(spec: UpdateSpec) -> jax.Array | None:
  """Return a step's initial `stopped` flag, 0. Updates return 1 once the KL exceeds `max_kl`.

  The flag stays on the device, so the host doesn't wait for it. Returns None if `max_kl` is inf.
  """
  if spec.optimizer.max_kl == float('inf'):
    return None
  return sharding.put(np.float32(0), sharding.replicated(spec.mesh))


def apply_gradient(
  spec: UpdateSpec,
  state: TrainState,
  gradient: model.Params,
  sums: Sums | None = None,
  stopped: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Apply one AdamW update, or skip it; see `optimizer.apply_gradient`.

  `state` is donated; use the returned state. If `stopped` is given (see `not_stopped`), the update
  is also skipped if the KL in the minibatch's `sums` exceeds `optimizer.max_kl`. The returned dict
  then contains 'skipped_by_kl' (the new value of `stopped`) and 'updates' (0 if nothing was
  computed).
  """
  layout = sharding.layout_of(state)
  kl_inputs = None if sums is None or stopped is None else (sums, stopped)
  state, norms = optimizer_step(spec, state, gradient, kl_inputs)
  if kl_inputs:
    replicated = sharding.replicated(spec.mesh)
    norms['skipped_by_kl'] = sharding.restore_layout(norms['skipped_by_kl'], replicated)
  return sharding.restore_layout(state, layout), norms


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def optimizer_step(
  spec: UpdateSpec,
  state: TrainState,
  gradient: model.Params,
  kl_inputs: tuple[Sums, jax.Array] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Run `optimizer.apply_gradient` under jit; XLA chooses the layout of the returned state."""
  new_state, norms = optimizer.apply_gradient(spec.optimizer, spec.num_updates, state, gradient)
  if kl_inputs is None:
    return new_state, norms
  sums, stopped = kl_inputs
  stops = (stopped > 0) | (objective.approx_kl(sums) > spec.optimizer.max_kl)
  next_state = jax.tree.map(lambda new, old: jnp.where(stops, old, new), new_state, state)
  is_computed = 1 - stopped
  norms = {name: is_computed * value for name, value in norms.items()}
  return next_state, norms | {'skipped_by_kl': stops.astype(jnp.float32), 'updates': is_computed}


def _with_whole_row_inputs(
  spec: UpdateSpec,
  params: model.Params,
  microbatch: Microbatch,
  reference: model.Params | None,
  is_first: bool,
) -> objective.LossInputs:
  """Add the loss inputs that need a forward pass over whole rows."""

  def logp_BW(params: model.Params) -> jax.Array:
    states, _ = _predictor_states(spec, params, microbatch)
    target, cap = microbatch.target_BW, spec.model.logit_cap
    return logprobs.target_logprobs(*states, target, spec.temperature, spec.logit_chunk, cap)[0]

  inputs = microbatch.inputs
  if reference is not None:
    inputs = inputs._replace(reference_logp_BT=logp_BW(reference))
  if spec.objective.importance_level != 'token':
    # A token and its predictor, the token before it, belong to the same row.
    segment_BW = jnp.take_along_axis(
      microbatch.segments.segment_BT, microbatch.predictor_BW, axis=1
    )
    log_ratio_BW = objective.row_log_ratio(
      logp_BW(params), inputs, segment_BW, spec.objective, is_first
    )
    inputs = inputs._replace(row_log_ratio_BT=log_ratio_BW)
  return inputs


def _predictor_states(
  spec: UpdateSpec, params: model.Params, microbatch: Microbatch
) -> tuple[tuple[jax.Array, jax.Array], mlp.Balance | None]:
  """Return ((states that predict the targets [B, W, D], unembedding), load balance of experts)."""
  counted = None
  if spec.model.num_experts:
    weight_BW = microbatch.inputs.entropy_weight_BT
    counted = mlp.counted_balance(
      microbatch.predictor_BW, weight_BW, microbatch.segments.segment_BT
    )
  rows = microbatch.tokens_BT, microbatch.segments, spec.microbatch.remat, microbatch.routes_BTLC
  hidden_BTD, load = model.hidden_states_and_balance(spec.model, params, *rows, counted)
  hidden_BWD = logprobs.predictor_states(hidden_BTD, microbatch.predictor_BW)
  return (hidden_BWD, model.unembedding(spec.model, params)), load


def _lay_out(spec: UpdateSpec, gradient: model.Params) -> model.Params:
  """Pin a gradient to the parameters' layout."""
  layout = jax.tree.map(lambda shape: shape.sharding, trained_shapes(spec))
  return jax.lax.with_sharding_constraint(gradient, layout)


# ---- From rows to microbatches, on the host ----


def minibatches(batch: Batch, count: int, order_Q: np.ndarray | None = None) -> Iterator[Batch]:
  """Split a step's rows into `count` equal parts; groups stay whole.

  The step's Q groups are split in the order `order_Q` if it is given, otherwise in batch order.
  """
  row_B = np.arange(len(batch.advantage_B))
  if order_Q is not None:
    row_B = row_B.reshape(len(order_Q), -1)[order_Q].reshape(-1)
  size = len(row_B) // count
  for start in range(0, count * size, size):
    part = slice(start, start + size)
    rows = part if order_Q is None else row_B[part]
    yield jax.tree.map(lambda x, rows=rows: x[rows], batch)


def packed(spec: UpdateSpec, batch: Batch) -> list[Stack]:
  """Pack a minibatch's rows into stacks of microbatches, one stack per shape, in NumPy."""
  inputs = objective.loss_inputs(batch, spec.objective, spec.max_response)
  _, num_shards = sharding.split(spec.mesh, 'batch')
  return stack_by_shape(microbatches(spec, batch, inputs, num_shards), len(batch.advantage_B))


def microbatches(
  spec: UpdateSpec, batch: Batch, inputs: objective.LossInputs, num_shards: int
) -> list[Microbatch]:
  """Pack a minibatch's rows, in NumPy, into passes with the two shapes defined in packing.py.

  Leaves out rows without response tokens, because they have no weight, and rows that
  `drop_zero_advantage` drops. A minibatch with no rows left still gets one pass, because its update
  is applied anyway. `inputs` are the minibatch's `objective.loss_inputs`. Sequences are split over
  `num_shards` shards.
  """
  mask_BT = np.asarray(inputs.mask_BT) > 0
  is_used_B = mask_BT.any(axis=1)
  if spec.microbatch.drop_zero_advantage:
    is_used_B &= np.asarray(batch.advantage_B) != 0
  length_B = np.where(is_used_B, mask_BT.shape[1] - np.argmax(mask_BT[:, ::-1], axis=1), 0)
  shapes = pass_shapes(spec, num_shards, len(length_B))
  shares_prompts = attention.has_prefixes(spec.mesh)
  prompt_B = np.where(is_used_B, np.argmax(mask_BT, axis=1), 0)
  rows = np.asarray(batch.tokens_BT), prompt_B, batch.routes_BTLC
  prefixes = packing.shared_prompts(*rows) if shares_prompts else None
  return [
    _microbatch(batch, inputs, shape, packing.layout(shape, sequences, length_B, prefixes))
    for shape, sequences in packing.pack(length_B, mask_BT.sum(axis=1), *shapes, prefixes)
  ]


def pass_shapes(spec: UpdateSpec, num_shards: int, num_rows: int) -> tuple[Shape, Shape]:
  """Return the (long, short) microbatch shapes for a minibatch of `num_rows` rows."""
  return packing.shapes(
    num_shards,
    spec.microbatch.tokens,
    spec.longest_row,
    spec.max_response,
    num_rows,
    attention.has_prefixes(spec.mesh),
    model.is_tiny(spec.model, spec.mesh),
  )


def stack_by_shape(microbatch_list: Sequence[Microbatch], num_rows: int) -> list[Stack]:
  """Stack the microbatches of each shape along a leading axis M, in NumPy.

  Returns (number of microbatches, stack) for each shape. M is the largest number of microbatches of
  this shape that `num_rows` rows can need; unused entries are zero. M does not depend on the rows'
  lengths, so the program is compiled only once.
  """
  groups: dict[tuple[int, ...], list[Microbatch]] = {}
  for microbatch in microbatch_list:
    groups.setdefault(microbatch.tokens_BT.shape, []).append(microbatch)

  def stack_arrays(*parts: np.ndarray) -> np.ndarray:
    max_count = -(-num_rows // len(parts[0]))  # if each sequence has only one row
    stack = np.zeros((max_count, *parts[0].shape), parts[0].dtype)
    stack[: len(parts)] = parts
    return stack

  return [(len(group), jax.tree.map(stack_arrays, *group)) for group in groups.values()]


def _microbatch(
  batch: Batch, inputs: objective.LossInputs, shape: Shape, layout: packing.Layout
) -> Microbatch:
  mask_BT = layout.take(np.asarray(inputs.mask_BT)) > 0
  predictor_BW = packing.predictors(mask_BT, shape.window)
  is_target_BW = np.take_along_axis(mask_BT, predictor_BW + 1, axis=1)
  tokens_RT = np.asarray(batch.tokens_BT)

  def take_targets(x_RT: np.ndarray) -> np.ndarray:
    """Gather the targets' values, [R, T'] -> [B, W]; 0 at positions that predict no target."""
    x_BW = np.take_along_axis(layout.take(x_RT), predictor_BW + 1, axis=1)
    return np.where(is_target_BW, x_BW, x_BW.dtype.type(0))

  return Microbatch(
    tokens_BT=layout.take(tokens_RT),
    segments=layout.segments,
    predictor_BW=predictor_BW,
    target_BW=take_targets(tokens_RT),
    inputs=jax.tree.map(take_targets, inputs),
    routes_BTLC=jax.tree.map(layout.take, batch.routes_BTLC),
  )


# ---- Compiled programs ----


def programs(
  spec: UpdateSpec,
  state: TrainState,
  initial: model.Params | None,
  empty_batch: Batch,
  minibatch_passes: Sequence[Sequence[packing.Pass]] = (),
) -> Iterator[Program]:
  """Yield the compiled programs used by a step's updates.

  `state` is the train state, or its shapes. For `initial`, see `minibatch_gradient`. `empty_batch`
  is a step-sized batch without any tokens to train on (`programs.empty_batch`). `minibatch_passes`
  lists each minibatch's passes, to count how often each program runs.
  """
  mesh, num_minibatches = spec.mesh, spec.optimizer.minibatches
  epochs, num_updates = spec.optimizer.epochs, spec.optimizer.updates_per_step
  zero_args = spec, state.params
  run_arrays = state.params, initial
  zero = Program('zero', zero_accumulator, zero_args, mesh, kept=run_arrays, runs=num_updates)
  kept_arrays = *run_arrays, (accumulator := zero.results())
  yield zero
  shortest, longest = (1, 1), (spec.longest_row - spec.max_response, spec.max_response)
  minibatch, sizes = next(minibatches(empty_batch, num_minibatches)), set[tuple[int, ...]]()
  stopped = None
  if spec.optimizer.max_kl < float('inf'):
    stopped = jax.ShapeDtypeStruct((), np.float32, sharding=sharding.replicated(mesh))
  for row in (longest, shortest):
    [(_, stack)] = packed(spec, one_row(minibatch, *row))
    M, B, T = stack.tokens_BT.shape
    if (B, T) in sizes:
      continue
    sizes.add((B, T))
    layout = sharding.named(mesh, (None, 'batch'), (M, B))
    shapes = jax.tree.map(
      lambda x, layout=layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), stack
    )
    args = spec, state.params, accumulator, shapes, 1, False, True, initial, stopped
    counts = [
      sum((shape.count, shape.length) == (B, T) for shape, _ in passes)
      for passes in minibatch_passes
    ]
    runs = sum(count > 0 for count in counts)
    trips = sum(counts) / max(1, runs)
    runs *= epochs
    yield Program(
      'update', accumulate, args, mesh, (B, T), kept=kept_arrays, runs=runs, trips=trips
    )
  step_args = spec, state, accumulator[0], None if stopped is None else (accumulator[1], stopped)
  step = Program('optimizer', optimizer_step, step_args, mesh, kept=kept_arrays, runs=num_updates)
  yield step
  _, norms = step.results()
  sums = [accumulator[1] | {'updates': np.float32(1)} | norms] * num_minibatches
  yield Program('merge_sums', objective.merge_sums, (sums,), mesh, runs=epochs, kept=kept_arrays)


def passes(spec: UpdateSpec, length_R: np.ndarray, response_R: np.ndarray) -> list[packing.Pass]:
  """Pack a minibatch of rows with these lengths and no shared prompts; see `packing.pack`."""
  _, num_shards = sharding.split(spec.mesh, 'batch')
  return packing.pack(length_R, response_R, *pass_shapes(spec, num_shards, len(length_R)))


def one_row(empty_batch: Batch, prompt: int, response: int) -> Batch:
  """Make a batch with a single row to train on, so that it packs into one pass.

  `prompt` and `response` are the row's lengths, in tokens.
  """
  mask_BT = empty_batch.response_mask_BT.copy()
  mask_BT[0, prompt : prompt + response] = 1
  advantage_B = np.ones_like(empty_batch.advantage_B)
  return dataclasses.replace(empty_batch, response_mask_BT=mask_BT, advantage_B=advantage_B)
