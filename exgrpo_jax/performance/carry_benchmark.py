"""What responses that span steps bring: whole steps with and without `rollout.carry`, in turns.

A step is the conversion to the decode layout, a rollout and an update. With and without, the same
groups are drawn.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.performance import update_benchmark
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.scripted_rollouts import Rollouts, Taken
from exgrpo_jax.performance.workload import OPTIMIZER, Workload, random_batch, random_params
from exgrpo_jax.policy import kv_cache, model, sharding

# Not measured: with carry until the state is steady, without until programs are compiled.
_FIRST_STEPS = {True: 9, False: 3}


def measure(workload: Workload, meshes: sharding.Meshes) -> list[Measurement]:
  """Tokens per second with and without, of rollouts and of whole steps; busy slots; ages.

  Each of `workload.repeats` measurements is a step with carry and one without. Where the scheduler
  closes up the last rows, there is one more, which leaves them in their slots, as on a TPU.
  """
  arms = {'carry': Rollouts(workload, meshes.decoding, carries=True, closes_up=False)}
  if not kv_cache.is_ragged(sharding.platform()):
    arms['closing up'] = Rollouts(workload, meshes.decoding, carries=False, closes_up=True)
  arms['waiting'] = Rollouts(workload, meshes.decoding, carries=False, closes_up=False)
  longest_row = arms['carry'].config.longest_row
  spec = update_benchmark.update_spec(workload, meshes.training, longest_row)
  with jax.set_mesh(meshes.training):
    state = optimizer.init(OPTIMIZER, 1, random_params(workload, meshes.training))
    params = model.decode_layout(workload.model, state.params, meshes)
  for rollouts in arms.values():
    for _ in range(_FIRST_STEPS[rollouts.carries]):
      rollouts.take(params)
  found: dict[str, list[_Step]] = {name: [] for name in arms}
  for repeat in range(1 + workload.repeats):
    for name, rollouts in arms.items():
      step, state = _take(rollouts, spec, state, meshes)
      found[name] += [step] * (repeat > 0)  # the first compiles the update
  carried = found['carry']
  return [
    *(one for name, steps in found.items() for one in _of_arm(name, steps, workload)),
    *(_gain(name, carried, steps) for name, steps in found.items() if steps is not carried),
    *_of_carrying(carried),
  ]


class _Step(NamedTuple):
  """A step, and the seconds that it took."""

  taken: Taken
  rollout: float  # seconds, the conversion to the decode layout included
  update: float

  @property
  def tokens(self) -> int:
    """Of the responses that it trains."""
    return int(self.taken.lengths.sum())

  @property
  def decoded(self) -> int:
    """Tokens."""
    return sum(sync.tokens for sync in self.taken.syncs)


def _take(
  rollouts: Rollouts,
  spec: gradients.UpdateSpec,
  state: optimizer.TrainState,
  meshes: sharding.Meshes,
) -> tuple[_Step, optimizer.TrainState]:
  """The next step of some rollouts, and the state after its update."""
  start = time.perf_counter()
  with jax.set_mesh(meshes.training):
    params = model.decode_layout(spec.model, state.params, meshes)
  taken = rollouts.take(params)
  rollout = time.perf_counter() - start
  batch = random_batch(rollouts.workload, taken.lengths)
  start = time.perf_counter()
  with jax.set_mesh(meshes.training):
    state = update_benchmark.update(spec, state, batch)
  return _Step(taken, rollout, time.perf_counter() - start), state


def _of_arm(name: str, steps: Sequence[_Step], workload: Workload) -> list[Measurement]:
  rollout, update = (sum(seconds) for seconds in zip(*((one.rollout, one.update) for one in steps)))
  decode_steps = sum(sync.steps for one in steps for sync in one.taken.syncs)
  decoded, tokens = sum(one.decoded for one in steps), sum(one.tokens for one in steps)
  return [
    Measurement(
      f'{name}: rollout', decoded / rollout, 'tokens/s', f'{rollout / len(steps):.2f} s a step'
    ),
    Measurement(
      f'{name}: step',
      tokens / (rollout + update),
      'tokens/s',
      f'{(rollout + update) / len(steps):.2f} s, {update / len(steps):.2f} of these the update, '
      f'for {tokens / len(steps):,.0f} response tokens',
    ),
    Measurement(
      f'{name}: busy',
      100 * decoded / decode_steps / workload.slots,
      '%',
      f'of {workload.slots} slots in {decode_steps / len(steps):,.0f} decode steps',
    ),
  ]


def _gain(name: str, carried: Sequence[_Step], steps: Sequence[_Step]) -> Measurement:
  """Of carry in tokens per second of whole steps, which train different numbers of tokens."""

  def seconds(of: Sequence[_Step]) -> float:
    return sum(one.rollout + one.update for one in of) / sum(one.tokens for one in of)

  pairs = [seconds([other]) / seconds([one]) for one, other in zip(carried, steps)]
  meaning = f'whole steps are faster with carry; single pairs {min(pairs):.2f} to {max(pairs):.2f}'
  return Measurement(f'{name}: gain', seconds(steps) / seconds(carried), 'x', meaning)


def _of_carrying(carried: Sequence[_Step]) -> list[Measurement]:
  ages = np.concatenate([one.taken.ages for one in carried])
  resumed = sum(one.taken.resumed for one in carried) / sum(one.decoded for one in carried)
  return [
    Measurement('age', float(ages.mean()), 'steps', f'of trained groups, at most {ages.max()}'),
    Measurement('resumed', resumed, 'x', 'tokens prefilled anew for each that is decoded'),
  ]
