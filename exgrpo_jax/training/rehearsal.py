"""Compiles the programs of a run without taking a step: each runs once, on next to nothing.

A run calls the same functions with arrays of the same shapes and layouts, so it finds all of its
programs in the compilation cache. The memory is that of a run.
"""

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.algorithm import loss_sums
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.experiment import generation, warm_start
from exgrpo_jax.experiment.experiment import Experiment, update_spec
from exgrpo_jax.learner import checksums, gradients, optimizer
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.packing import right_padded
from exgrpo_jax.policy import kv_cache, lora, model, sharding
from exgrpo_jax.rollout import decode_loop, filling, routes, scheduler, selection, slots
from exgrpo_jax.rollout.decode_loop import DecodeSpec, State
from exgrpo_jax.rollout.slots import (
  Prefilled,
  insertion_of,
  packed_rows,
  packed_shapes,
  prefill_lengths,
)
from exgrpo_jax.rollout.stages import Rollout
from exgrpo_jax.runtime import activity, randomness
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.training.run import first_params


def run(experiment: Experiment, rollout: Rollout) -> None:
  """Compiles what a run of the experiment may ask for; call it on the training mesh."""
  config = experiment.config
  key = randomness.key(config.warm_start_seed, Purpose.INIT)
  if config.warm_start.num_updates:
    with activity.doing('compiling the warm start'):
      warm_start.rehearse(experiment)
  params = model.init(experiment.model, key, experiment.meshes.training)
  if config.lora.rank:
    params = model.frozen(experiment.model, params, experiment.meshes.training)
    checksums.of_base(params)
  initial, trained = first_params(experiment, params)
  policy = lora.joined(config.lora, initial, trained)
  with activity.doing('compiling the rollout'):
    _score(rollout, policy)
    decode_params = model.decode_layout(experiment.model, policy, experiment.meshes)
    for spec in _decode_specs(experiment):
      _decode(experiment, decode_params, spec)
    del decode_params
  with activity.doing('compiling the update'):
    state = optimizer.init(config.optimizer, config.num_updates, trained)
    state = _update(experiment, rollout, state, initial)
    jax.block_until_ready(checksums.bit_sums(state))


def _decode_specs(experiment: Experiment) -> Iterable[DecodeSpec]:
  """How training and evaluation sample; one, where they compile to the same programs."""
  distributions = (None, experiment.config.evaluation.distribution)
  specs = (generation.decode_spec(experiment, distribution) for distribution in distributions)
  return dict.fromkeys(spec.at_any_temperature for spec in specs)


def _decode(experiment: Experiment, params: model.Params, spec: DecodeSpec) -> None:
  """Prefill, insertion and decoding with every length of the cache and number of slots."""
  shape, mesh = experiment.model, experiment.meshes.decoding
  has_turns = bool(experiment.config.environment.name)
  forced = slots.forced_of([None] * spec.slots) if spec.parked else None

  def decode(state: State) -> State:
    state, _ = decode_loop.decode(shape, spec.sampling, params, state, 0, 0, 1.0, forced)
    if spec.keeps_routes:
      decode_loop.routes_of(state, nothing.source_R)
    return state

  nothing = insertion_of([], spec.slots, scheduler.rows_per_insert(spec.slots))
  with jax.set_mesh(mesh):
    is_fixed = has_turns or kv_cache.is_ragged(sharding.platform())
    every = scheduler.cache_lengths(spec.longest_row, sharding.platform())
    lengths = every[-1:] if is_fixed else every
    for length, longer in zip(lengths, [*lengths[1:], None]):
      state, prompts = decode_loop.empty(shape, spec, length)
      prefilled = Prefilled(prompts)
      for number, size in enumerate(prefill_lengths(spec.max_prompt)):
        prompt = np.full(size, spec.pad_id, np.int32)
        prefilled.take_in(shape, spec, params, mesh, [((number, b''), prompt)])
      state = decode(filling.insert(state, prefilled.prompts, nothing))
      if (experiment.config.rollout.carry or has_turns) and not longer:
        state = _resume(shape, spec, params, mesh, state)
      if spec.parked:
        parked = filling.empty_parking(shape, spec)
        parked = filling.park(state, parked, nothing.source_R, nothing.source_R)
        state = filling.unpark(state, parked, nothing)
      while True:
        if longer:
          state = decode_loop.resize_cache(shape, state, longer)
          state = decode_loop.resize_cache(shape, state, length)
        count = scheduler.compacted_slots(len(state.live_B))
        if not count or is_fixed:
          break
        state = decode(decode_loop.select_slots(state, np.arange(count, dtype=np.int32)))
      jax.block_until_ready(state)


def _resume(
  shape: model.Config, spec: DecodeSpec, params: model.Params, mesh: Mesh, state: State
) -> State:
  """Resumes no row in sequences of every length."""
  for passed in dict.fromkeys(packed_shapes(spec.longest_row, spec.slots, mesh)):
    segments = packing.layout(passed, [], np.zeros(0, int)).segments
    tokens_PT = np.full((passed.count, passed.length), spec.pad_id, np.int32)
    known = routes.unknown(shape, *tokens_PT.shape) if spec.keeps_routes else None
    nothing = insertion_of([], spec.slots, packed_rows(passed.count, spec.slots))
    state = filling.resume(shape, params, state, tokens_PT, segments, nothing, known)
  return state


def _score(rollout: Rollout, params: model.Params) -> None:
  """Scoring of a longest row and of a short one, and the weights of replayed tokens."""
  for row in _long_and_short(rollout):
    (logp,), _ = rollout.score(params, [row])
  selection.weights(rollout.objective, rollout.meshes.training, [logp], [logp])


def _update(
  experiment: Experiment, rollout: Rollout, state: TrainState, initial: model.Params | None
) -> TrainState:
  """An optimiser update, of the longest row and of the shortest; `state` is donated."""
  config, all_sums = experiment.config, []
  spec = update_spec(config, experiment.model, experiment.meshes.training)
  batches = [_batch(rollout, row) for row in _long_and_short(rollout)]
  for batch in batches:
    minibatch = gradients.minibatches(batch, config.optimizer.minibatches)[0]
    gradient, sums = gradients.minibatch_gradient(
      spec, state.params, minibatch, False, True, initial
    )
  state, norms = gradients.apply_gradient(spec, state, gradient)
  all_sums = [sums | norms | {'updates': np.float32(1)}] * config.optimizer.minibatches
  loss_sums.merge_sums(all_sums)
  return state


def _batch(rollout: Rollout, row: tuple[np.ndarray, np.ndarray]) -> Batch:
  """A step's rows; training on the first alone lets it decide the shape of a pass."""
  num_rows = rollout.config.questions * rollout.config.samples
  rows = [row] * num_rows
  tokens_BT, mask_BT = right_padded(rows, rollout.config.longest_row, rollout.tokenizer.pad_id)
  mask_BT[1:] = 0
  return Batch(
    tokens_BT=tokens_BT,
    response_mask_BT=mask_BT,
    behaviour_logp_BT=np.zeros_like(mask_BT),
    advantage_B=np.ones(num_rows, np.float32),
    is_replay_B=np.zeros(num_rows, bool),
    policy_step_B=np.zeros(num_rows, np.int32),
    term_weight_BT=np.ones_like(mask_BT),
    is_carried_BT=np.zeros(mask_BT.shape, bool) if rollout.config.carry else None,
    routes_BTLC=routes.unknown(rollout.model, *mask_BT.shape)
    if rollout.config.router_replay
    else None,
  )


def _long_and_short(rollout: Rollout) -> list[tuple[np.ndarray, np.ndarray]]:
  """(prompt, response) of the longest row that there can be, and of the shortest."""
  sizes = (rollout.config.max_prompt, rollout.config.max_response), (1, 1)
  pad_id = rollout.tokenizer.pad_id
  return [
    (np.full(prompt, pad_id, np.int32), np.full(response, pad_id, np.int32))
    for prompt, response in sizes
  ]
