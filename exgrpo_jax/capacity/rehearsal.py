"""Compile all of a run's programs on its devices, without taking a step.

The rollout and the learner list their programs with arrays of the same shapes and layouts as in
training. A run therefore finds all programs in the compilation cache, and their memory is known
before the first step.
"""

import functools
import itertools

import jax
import numpy as np

from exgrpo_jax.capacity import memory
from exgrpo_jax.capacity.step import Step
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import generation, warm_start
from exgrpo_jax.experiment.experiment import Experiment, update_spec
from exgrpo_jax.learner import optimizer, storage
from exgrpo_jax.policy import lora, model
from exgrpo_jax.rollout import programs, scoring
from exgrpo_jax.runtime import activity, machine, randomness
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.training.run import first_params


def run(experiment: Experiment) -> None:
  """Compile every program that a run may call. The training mesh must be active.

  Raises InputError if a program needs more memory than a device has.
  """
  if experiment.config.warm_start.num_updates:
    with activity.doing('compiling the warm start'):
      warm_start.rehearse(experiment)
  with activity.doing('compiling the programs of a step'):
    step, config = _make_step(experiment), experiment.config
    # Training and evaluation sample with separate engines, but shared programs compile only once.
    make = functools.partial(generation.make_engine, experiment)
    engines = make(resumes=config.rollout.partial), make(config.evaluation.distribution)
    sampling = (programs.of_engine(engine, step.decode_params) for engine in engines)
    step_programs = itertools.chain(step.scoring(), *sampling, step.updating())
    # On a CPU, programs use the host's memory.
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get('bytes_limit') or machine.host_memory()
    peaks = memory.print_peaks(
      step_programs, step.held, limit, lambda program: memory.of_compiled(program.executable)
    )
  fullest = max(peaks, key=lambda name: peaks[name])
  if peaks[fullest] > limit:
    raise InputError(
      f'the program {fullest} needs {peaks[fullest] / 1e9:.1f} GB, but the device has only '
      f'{limit / 1e9:.1f} GB. Lower config.rollout.slots or config.microbatch.tokens, or use a '
      'smaller model.'
    )


def _make_step(experiment: Experiment) -> Step:
  """Make a run's initial arrays, run the small programs on them, and return a `Step` with them."""
  config, meshes = experiment.config, experiment.meshes
  key = randomness.key(config.warm_start_seed, Purpose.INIT)
  params = model.init(experiment.model, key, meshes.training)
  if config.lora.rank:
    params = model.frozen(experiment.model, params, meshes.training)
    storage.base_checksums(params)
  initial, trained_params = first_params(experiment, params)
  policy = lora.joined(config.lora, initial, trained_params)
  state = optimizer.init(config.optimizer, config.num_updates, trained_params)
  storage.bit_sums(state)
  zeros = [np.zeros(1, np.float32)]
  scoring.shaped_ratios(config.objective, meshes.training, zeros, zeros)
  spec = update_spec(config, experiment.model, meshes.training)
  decode_params = model.decode_layout(experiment.model, policy, meshes)
  return Step(config, spec, meshes, state, initial, policy, decode_params)
