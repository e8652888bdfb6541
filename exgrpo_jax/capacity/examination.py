"""Whether a config fits a TPU slice or a GPU and, on a slice, how fast it trains."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from exgrpo_jax.capacity import (
  arrays,
  chips,
  fitting,
  flops,
  formula,
  gpus,
  lengths,
  programs,
  report,
  schedule,
)
from exgrpo_jax.capacity.report import Speed
from exgrpo_jax.capacity.step_time import Estimator, Workload
from exgrpo_jax.errors import counted
from exgrpo_jax.experiment.experiment import model_config, update_spec
from exgrpo_jax.experiment.settings import Config
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.shape import check_meshes
from exgrpo_jax.rollout import settings
from exgrpo_jax.runtime import machine

# Assumed, for want of data.
_PROMPT = 150  # tokens
_CANDIDATES = 4  # stored responses of a replayed question
EVALUATED = 2259  # questions: the rows of the authors' valid.parquet


class Examination(NamedTuple):
  """What is found about a config on a slice or a GPU."""

  fits: bool
  peaks: dict[str, float]  # bytes of a chip by program; inf where one does not compile
  speed: Speed | None = None  # of a slice for which all programs compile


def examine(config: Config, topology: str, lengths_spec: str, evaluated: int) -> Examination:
  """Prints and returns whether a config fits a slice and, where it compiles, how fast it is.

  Args:
    config: the experiment's.
    topology: such as 'v5e:8x8'.
    lengths_spec: of the responses; see `lengths.draw`.
    evaluated: questions of all evaluations together.
  """
  chip, rollout = chips.chip_of(topology), _in_memory(config)
  work = _workload(config, lengths_spec, evaluated)  # before anything is compiled
  spec, decoding = step_spec(config, chips.slice_devices(topology))
  print(
    f'{topology}: {counted(spec.mesh.size, "chip")} of {chip.memory / chips.GIB:.2f} GiB, '
    f'training on {dict(spec.mesh.shape)}, decoding on {dict(decoding.shape)}; '
    f'{flops.parameter_count(spec.model) / 1e9:.2f} billion parameters',
    flush=True,
  )
  compiled: dict[str, programs.Program] = {}
  with jax.set_mesh(spec.mesh):
    held = arrays.step_arrays(spec, decoding)
    lowered = programs.of_step(rollout, spec, decoding, held)

    def need_of(name: str) -> programs.Need:
      compiled[name] = lowered[name]()
      return compiled[name].need

    peaks = report.print_memory(
      rollout,
      spec.model,
      decoding,
      held,
      chip.memory,
      need_of,
      config.environment.keeps_caches,
    )
    speed = None
    if peaks and len(compiled) == len(peaks):
      estimator = Estimator(config.rollout, spec, decoding, chip, compiled)
      speed = _print_time(estimator, work, config.num_steps, lengths_spec)
      if config.environment.name:
        print('  not counted: turns of episodes, the tokens and the time of their environments')
  if not peaks:
    print('take more chips, or a mesh that splits them further')
  return Examination(_print_verdict(peaks, chip.memory), peaks, speed)


def examine_gpu(config: Config, device: str, fit: bool = False) -> Examination:
  """Prints and returns by formula whether a config fits one GPU.

  Args:
    config: the experiment's.
    device: see `gpus.usable_memory`.
    fit: choose its slots and microbatches as large as they fit, and print them.
  """
  limit = gpus.usable_memory(device)
  spec, decoding = step_spec(config)
  gpus.check_dtype(device, spec.model.dtype)
  with jax.set_mesh(spec.mesh):
    if fit:
      keeps = config.environment.keeps_caches
      fitted = fitting.fit(_in_memory(config), spec, decoding, limit, keeps)
      if not fitted:
        print('does not fit, even with the fewest slots and the shortest microbatches')
        _print_advice(config, spec, may_fit=True, is_fitted=True)
        return Examination(fits=False, peaks={})
      print(fitted.flags)
      config = fitted.applied(config)
      spec, decoding = step_spec(config)
    print(
      f'{device}: {limit / chips.GIB:.2f} GiB, {100 * machine.SHARE:.0f}% of its memory; '
      f'{flops.parameter_count(spec.model) / 1e9:.2f} billion parameters'
    )
    held, platform = arrays.step_arrays(spec, decoding), formula.of_gpu(spec.model.dtype)
    rollout = _in_memory(config)
    needs = formula.of_step(rollout, spec, decoding, held, platform)
    peaks = report.print_memory(
      rollout,
      spec.model,
      decoding,
      held,
      limit,
      needs.__getitem__,
      config.environment.keeps_caches,
    )
  if not peaks or max(peaks.values()) > limit:
    _print_advice(config, spec, may_fit=bool(peaks))
  return Examination(_print_verdict(peaks, limit), peaks)


def step_spec(
  config: Config,
  devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
) -> tuple[gradients.UpdateSpec, jax.sharding.Mesh]:
  """What the updates of a run depend on, and the mesh of sampling, on `devices`, by default one."""
  shape = model_config(config, platform='accelerator')
  meshes = sharding.make_meshes(config.mesh, devices or jax.devices()[:1])
  check_meshes(shape, meshes)
  return update_spec(config, shape, meshes.training), meshes.decoding


def _in_memory(config: Config) -> settings.Config:
  """The rollout, as far as memory goes: episodes are resumed as partial rollouts are."""
  carry = config.rollout.carry or bool(config.environment.name)
  return dataclasses.replace(config.rollout, carry=carry)


def _print_verdict(peaks: dict[str, float], limit: float) -> bool:
  fits = bool(peaks) and max(peaks.values()) <= limit
  print('fits' if fits else 'does not fit')
  return fits


def _print_advice(
  config: Config, spec: gradients.UpdateSpec, may_fit: bool, is_fitted: bool = False
) -> None:
  print('what takes less, for one GPU:')
  if config.environment.keeps_caches:
    print('  no caches of episodes between their turns: config.environment.keep_caches=False')
  for line in fitting.advice(config.rollout, spec, may_fit, is_fitted):
    print(f'  {line}')


def _print_time(estimator: Estimator, work: Workload, num_steps: int, lengths_spec: str) -> Speed:
  """Prints and returns a step's time, and what partial rollouts would change where they are off."""
  rollout, estimate, other = estimator.rollout, estimator.estimate(work), None
  if not rollout.carry:
    partial = dataclasses.replace(estimator, rollout=schedule.with_partial_rollouts(rollout))
    other = partial.estimate(work)
  speed = report.print_time(estimate, work, estimator.spec.mesh.size, num_steps)
  report.print_partial_rollouts(estimate, rollout.slots, other)
  words = lengths.describe(lengths_spec, rollout.max_response)
  report.print_assumptions(estimator, work, words)
  return speed


def _workload(config: Config, spec: str, evaluated: int) -> Workload:
  """A step in which replay takes its full share."""
  rollout, replay = config.rollout, config.replay
  replayed = int(replay.ratio * rollout.questions)
  counts = (
    rollout.questions * rollout.samples - replayed,
    replayed,
    replayed * _CANDIDATES,
    evaluated * config.evaluation.samples * bool(config.data.evaluated),
  )
  drawn = lengths.draw(spec, sum(counts), rollout.max_response)
  fresh, of_replayed, candidates, of_evaluation = np.split(drawn, np.cumsum(counts)[:-1])
  return Workload(
    prompt=min(_PROMPT, rollout.max_prompt),
    fresh=fresh,
    groups=_groups(config, spec, replayed),
    replayed=of_replayed,
    candidates=candidates,
    evaluated=of_evaluation,
    evaluation_every=config.evaluation.every,
  )


def _groups(config: Config, spec: str, replayed: int) -> list[np.ndarray]:
  """Lengths of many steps' responses by group; `replayed` groups of a step have one less."""
  rollout = config.rollout
  count = schedule.num_groups(schedule.with_partial_rollouts(rollout))
  replays = np.arange(count + 1) * replayed // rollout.questions  # before each group
  sizes = rollout.samples - np.diff(replays)
  drawn = lengths.draw(spec, int(sizes.sum()), rollout.max_response)
  return np.split(drawn, np.cumsum(sizes)[:-1])
