r"""What fits on which TPU slice or GPU, and how fast, without one.

exgrpo capacity --config=qwen2_5_math_7b --topology=v5e:8x8
exgrpo capacity --config=qwen2_5_math_7b --topology=v5e:8x8 \
    --lengths=lognormal:1000,8192
exgrpo capacity --config=one_gpu --device=l4 --fit

For a slice it compiles a step's programs, which needs libtpu (pip install -e '.[tpu]'); for a GPU
it goes by formula, in an instant. Exit status: 0 when everything fits, 1 when it does not, 2 for
what cannot be run.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import (
  Config,
  model_config,
  parse_config,
  update_spec,
  with_folders,
)
from exgrpo_jax.learner import gradients
from exgrpo_jax.performance import (
  capacity_report,
  carried_schedule,
  chips,
  fitting,
  gpu_time,
  gpus,
  lengths,
  memory,
  memory_formula,
  programs,
  roofline,
  time_report,
)
from exgrpo_jax.performance.step_time import Estimator, Workload
from exgrpo_jax.performance.time_report import Speed
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.runtime import machine

# Assumed, for want of data.
_PROMPT = 150  # tokens
_CANDIDATES = 4  # stored responses of a replayed question
EVALUATED = 2259  # questions: the rows of the authors' valid.parquet


class Examination(NamedTuple):
  """What is found about a config on a slice or a GPU."""

  fits: bool
  peaks: dict[str, float]  # bytes of a chip by program; inf where one does not compile
  speed: Speed | None  # where all programs compile, or fit a GPU


def define_flags() -> None:
  """Of this command."""
  command_line.define_config()
  flags.DEFINE_string('topology', None, 'The TPU generation and slice, e.g. v5e:4x4.')
  flags.DEFINE_string(
    'device',
    None,
    f'In its place one GPU: one of {", ".join(gpus.GPUS)}, in any spelling, such as "RTX 4090" or '
    'A100-80GB; or a memory, such as 24gb.',
  )
  flags.DEFINE_bool(
    'fit',
    False,
    'With --device: choose slots and tokens_per_microbatch, which change nothing but memory and '
    'time, as large as they fit.',
  )
  flags.DEFINE_string(
    'lengths',
    '',
    'How long responses are: lognormal:MEDIAN or lognormal:MEDIAN,LIMIT in tokens, whose 99th '
    "percentile is 8 medians; or a run's workdir, whose responses are taken. By default the median "
    'is an eighth of config.rollout.max_response.',
  )
  flags.DEFINE_integer(
    'evaluated',
    EVALUATED,
    "Questions of config.data's evaluations together; by default the rows of the authors' "
    'valid.parquet.',
    lower_bound=0,
  )


def main(args: command_line.Args) -> None:
  """Prints what a config needs of each chip; exits with status 1 if it does not fit."""
  if args.topology and args.device:
    raise InputError(
      f'--topology={args.topology} and --device={args.device} are both given; name a slice or '
      'a GPU.'
    )
  if not args.config or not (args.topology or args.device):
    raise InputError(
      '--config is needed, and --topology or --device, e.g. --config=qwen2_5_math_7b '
      '--topology=v5e:8x8, or --config=one_gpu --device=l4.'
    )
  if args.fit and not args.device:
    raise InputError('--fit needs --device: for a slice every trial would be compiled.')
  config = parse_config(args.config)
  config = with_folders(config, config.model.path)  # else it says the shape itself
  if args.device:
    gpu = gpus.gpu_named(args.device)
    _check_dtype(args.device, gpu, model_config(config).dtype)
    config = fitted_config(config, gpu) if args.fit else config
    found = config and examine_gpu(config, args.device, args.lengths, args.evaluated)
  else:
    found = examine(config, args.topology, args.lengths, args.evaluated)
  if not found or not found.fits:
    sys.exit(1)


def examine(config: Config, topology: str, lengths_spec: str, evaluated: int) -> Examination:
  """Prints and returns whether a config fits on a slice and, where it compiles, how fast it is.

  Args:
    config: the experiment's.
    topology: such as 'v5e:8x8'.
    lengths_spec: of the responses; see `lengths.draw`.
    evaluated: questions of all evaluations together.
  """
  chip, compiled = chips.chip_of(topology), {}
  work = _workload(config, lengths_spec, evaluated)  # before anything is compiled
  spec, decoding = step_spec(config, chips.slice_devices(topology))
  print(
    f'{topology}: {spec.mesh.size} chips of {chip.memory / chips.GIB:.2f} GiB, '
    f'training on {dict(spec.mesh.shape)}, decoding on {dict(decoding.shape)}; '
    f'{roofline.parameter_count(spec.model) / 1e9:.2f} billion parameters',
    flush=True,
  )
  with jax.set_mesh(spec.mesh):
    arrays = memory.step_arrays(spec, decoding)
    lowered = programs.of_step(config.rollout, spec, decoding, arrays)

    def need_of(name: str) -> memory.Need:
      compiled[name] = lowered[name]()
      return compiled[name].need

    found = capacity_report.print_memory(
      config.rollout, spec.model, decoding, arrays, chip.memory, need_of
    )
    speed = None
    if found.peaks and len(compiled) == len(found.peaks):
      estimator = Estimator(config.rollout, spec, decoding, chip, compiled)
      words = f'{time_report.of_compiler(estimator)}\n{_assumed(config, work, lengths_spec)}'
      speed = _print_time(estimator, config, work, spec.mesh.size, words)
  if not found.peaks:
    print('take more chips, or a mesh that splits them further')
  print('fits' if found.fits else 'does not fit')
  return Examination(found.fits, found.peaks, speed)


def examine_gpu(config: Config, device: str, lengths_spec: str, evaluated: int) -> Examination:
  """Prints and returns by formula whether a config fits on one GPU, and how fast it is.

  `device` is what `gpus.gpu_named` understands; the rest as in `examine`.
  """
  gpu, rollout = gpus.gpu_named(device), config.rollout
  work = _workload(config, lengths_spec, evaluated)
  spec, decoding = step_spec(config)
  print(
    f'{device}: {gpu.usable / chips.GIB:.2f} GiB, {100 * machine.SHARE:.0f}% of its memory; '
    f'{roofline.parameter_count(spec.model) / 1e9:.2f} billion parameters',
    flush=True,
  )
  with jax.set_mesh(spec.mesh):
    arrays = memory.step_arrays(spec, decoding)
    platform, speed = memory_formula.of_gpu(spec.model.dtype), None
    needs = memory_formula.of_step(rollout, spec, decoding, arrays, platform)
    found = capacity_report.print_memory(
      rollout, spec.model, decoding, arrays, gpu.usable, needs.__getitem__
    )
    if found.fits and not gpu.flops:
      print(
        'how long a step takes depends on the GPU: --device=l4, for example, instead of a memory'
      )
    elif found.fits:
      estimator = gpu_time.Roofline(rollout, spec, decoding, arrays, gpu)
      if spec.model.dtype != gpu.dtype:
        print(
          f'  the peak is that of {gpu.dtype}: {spec.model.dtype} takes longer than is said here'
        )
      words = f'{gpu_time.ASSUMPTIONS}\n{_assumed(config, work, lengths_spec)}'
      speed = _print_time(estimator, config, work, 1, words)
    else:
      _print_advice(config, spec, may_fit=bool(found.peaks))
  print('fits' if found.fits else 'does not fit')
  return Examination(found.fits, found.peaks, speed)


def fitted_config(config: Config, gpu: gpus.Gpu) -> Config | None:
  """The config with the slots and microbatches that fit a GPU, also in print; None if none do."""
  spec, decoding = step_spec(config)
  with jax.set_mesh(spec.mesh):
    fitted = fitting.fit(config.rollout, spec, decoding, gpu.usable)
  if not fitted:
    print('does not fit, even with the fewest slots and the shortest microbatches')
    _print_advice(config, spec, may_fit=True, is_fitted=True)
    return None
  print(fitted.flags)
  return dataclasses.replace(
    config,
    rollout=dataclasses.replace(config.rollout, slots=fitted.slots),
    gradient=dataclasses.replace(
      config.gradient, tokens_per_microbatch=fitted.tokens_per_microbatch
    ),
  )


def _check_dtype(device: str, gpu: gpus.Gpu, dtype: str) -> None:
  """Refuses bfloat16 on a GPU that does not have it."""
  if gpu.dtype == 'float32' and dtype == 'bfloat16':
    raise InputError(
      f'--device={device} has no bfloat16, which config.model.dtype asks for: take a GPU from '
      'Ampere on (A100, A10G, RTX 3090), or set --config.model.dtype=float32, with which '
      'activations, cache and weights for sampling take twice the memory.'
    )


def _print_advice(
  config: Config, spec: gradients.UpdateSpec, may_fit: bool, is_fitted: bool = False
) -> None:
  print('what takes less, for one GPU:')
  for line in fitting.advice(config.rollout, spec, may_fit, is_fitted):
    print(f'  {line}')


def step_spec(
  config: Config,
  devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
) -> tuple[gradients.UpdateSpec, jax.sharding.Mesh]:
  """What the updates of a run depend on, and the mesh of sampling, on `devices`, by default one."""
  shape = model_config(config)
  meshes = sharding.make_meshes(config.mesh, devices or jax.devices()[:1])
  model.check_meshes(shape, meshes)
  return update_spec(config, shape, meshes.training), meshes.decoding


def _print_time(
  estimator: Estimator | gpu_time.Roofline,
  config: Config,
  work: Workload,
  num_chips: int,
  assumptions: str,
) -> Speed:
  """Prints and returns how long a step takes, and what carrying would bring where it is off."""
  rollout, estimate, carried = config.rollout, estimator.estimate(work), None
  if not rollout.carry:
    other = dataclasses.replace(estimator, rollout=carried_schedule.with_carry(rollout))
    carried = other.estimate(work)
  line = time_report.carry_line(estimate, rollout.slots, carried)
  return time_report.print_time(estimate, work, num_chips, config.num_steps, line, assumptions)


def _assumed(config: Config, work: Workload, lengths_spec: str) -> str:
  words = lengths.describe(lengths_spec, config.rollout.max_response)
  return time_report.of_workload(work, words)


def _workload(config: Config, spec: str, evaluated: int) -> Workload:
  """Of a step with replay in full."""
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
  groups = _groups(config, spec, replayed)
  return Workload(
    prompt=min(_PROMPT, rollout.max_prompt),
    fresh=fresh,
    groups=groups,
    replayed=of_replayed,
    candidates=candidates,
    evaluated=of_evaluation,
    evaluation_every=config.evaluation.every,
  )


def _groups(config: Config, spec: str, replayed: int) -> list[np.ndarray]:
  """The lengths of many steps' responses by group; in each step so many have one response less."""
  rollout = config.rollout
  count = carried_schedule.num_groups(carried_schedule.with_carry(rollout))
  replays = np.arange(count + 1) * replayed // rollout.questions  # before each group
  sizes = rollout.samples - np.diff(replays)
  drawn = lengths.draw(spec, int(sizes.sum()), rollout.max_response)
  return np.split(drawn, np.cumsum(sizes)[:-1])


def run() -> None:
  """Run the command line."""
  command_line.run(main, define_flags)
