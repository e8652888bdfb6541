"""Whole steps with and without partial rollouts, measured alternately.

A step converts the parameters to the decode layout, runs a rollout, and runs an update. Both arms
draw the same groups.
"""

import time
from typing import NamedTuple

import jax

from benchmarks.frame import Bench, Figure
from benchmarks.scripted import Rollouts, Taken
from benchmarks.update import first_state, update
from exgrpo_jax.experiment.experiment import update_spec
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import model

# Steps before measuring: with partial rollouts until staleness is steady, and without them until
# the programs are compiled.
_FIRST_STEPS = {True: 9, False: 2}


class _Step(NamedTuple):
  taken: Taken
  seconds: float

  @property
  def tokens(self) -> int:
    """Count the tokens of the responses that the step trains on."""
    return int(self.taken.lengths.sum())


def measure(bench: Bench) -> list[Figure]:
  """Measure speed, busy slots, staleness and prefill, with and without partial rollouts."""
  spec = update_spec(bench.config, bench.model, bench.meshes.training)
  state = first_state(bench, spec)
  arms = {True: Rollouts(bench, carries=True), False: Rollouts(bench, carries=False)}
  params = model.decode_layout(bench.model, state.params, bench.meshes)
  for carries, rollouts in arms.items():
    for _ in range(_FIRST_STEPS[carries]):
      rollouts.take(params)
  found: dict[bool, list[_Step]] = {True: [], False: []}
  for repeat in range(1 + bench.size.repeats):
    for carries, rollouts in arms.items():
      step, state = _take(bench, rollouts, spec, state)
      found[carries] += [step] * (repeat > 0)  # the first step compiles the update
  speeds = {
    carries: sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    for carries, steps in found.items()
  }
  ages = [age for step in found[True] for age in step.taken.ages]
  resumed, decoded = (
    sum(counts) for counts in zip(*((one.taken.resumed, one.taken.decoded) for one in found[True]))
  )
  busy = {
    carries: sum(step.taken.decoded for step in steps) / sum(step.taken.computed for step in steps)
    for carries, steps in found.items()
  }
  return [
    Figure('with', speeds[True], 'tokens/s', f'whole steps; {100 * busy[True]:.0f}% of slots busy'),
    Figure('without', speeds[False], 'tokens/s', f'{100 * busy[False]:.0f}% of slots busy'),
    Figure('gain', speeds[True] / speeds[False], 'x', 'with partial rollouts'),
    Figure('age', sum(ages) / len(ages), 'steps', f'of trained groups, at most {max(ages)}'),
    Figure('resumed', resumed / decoded, 'x', 'tokens prefilled again per decoded token'),
  ]


def _take(
  bench: Bench, rollouts: Rollouts, spec: gradients.UpdateSpec, state: optimizer.TrainState
) -> tuple[_Step, optimizer.TrainState]:
  """Run the next step of `rollouts`; return it and the state after its update."""
  start = time.perf_counter()
  taken = rollouts.take(model.decode_layout(bench.model, state.params, bench.meshes))
  rollout = time.perf_counter() - start
  batch = bench.batch(taken.lengths)
  start = time.perf_counter()
  state = jax.block_until_ready(update(spec, state, batch))
  return _Step(taken, rollout + time.perf_counter() - start), state
