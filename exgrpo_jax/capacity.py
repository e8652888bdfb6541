r"""What fits on which TPU slice, and how fast, without a TPU: compiles a step's programs for it.

python -m exgrpo_jax.capacity --config=qwen2_5_math_7b --topology=v5e:8x8
python -m exgrpo_jax.capacity --config=qwen2_5_math_7b --topology=v5e:8x8 \
    --lengths=lognormal:1000,8192

Needs libtpu (pip install -e '.[tpu]'). Exit status: 0 when everything fits, 1 when it does not,
2 for what cannot be run.
"""

import sys
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from exgrpo_jax import cli
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Config, model_config, parse_config, update_spec, with_folders
from exgrpo_jax.performance import capacity_report, chips, lengths, roofline, time_report
from exgrpo_jax.performance.step_time import Estimator, Workload
from exgrpo_jax.performance.time_report import Speed
from exgrpo_jax.policy import model, sharding

# Assumed, for want of data.
_PROMPT = 150  # tokens
_CANDIDATES = 4  # stored responses of a replayed question
EVALUATED = 2259  # questions: the rows of the authors' valid.parquet


class Examination(NamedTuple):
  """What is found about a config on a slice."""

  fits: bool
  peaks: dict[str, float]  # bytes of a chip by program; inf where one does not compile
  speed: Speed | None  # where all programs compile


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  flags.DEFINE_string('topology', None, 'The TPU generation and slice, e.g. v5e:4x4.')
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


def main(args: cli.Args) -> None:
  """Prints what a config needs of each chip of a slice; exits with status 1 if it does not fit."""
  if not args.config or not args.topology:
    raise InputError(
      '--config and --topology are both needed, e.g. --config=qwen2_5_math_7b --topology=v5e:8x8.'
    )
  config = parse_config(args.config)
  config = with_folders(config, config.model.path)  # else it says the shape itself
  if not examine(config, args.topology, args.lengths, args.evaluated).fits:
    sys.exit(1)


def examine(config: Config, topology: str, lengths_spec: str, evaluated: int) -> Examination:
  """Prints and returns whether a config fits on a slice and, where it compiles, how fast it is.

  Args:
    config: the experiment's.
    topology: such as 'v5e:8x8'.
    lengths_spec: of the responses; see `lengths.draw`.
    evaluated: questions of all evaluations together.
  """
  shape, chip = model_config(config), chips.chip_of(topology)
  work = _workload(config, lengths_spec, evaluated)  # before anything is compiled
  meshes = sharding.make_meshes(config.mesh, chips.slice_devices(topology))
  model.check_meshes(shape, meshes)
  print(
    f'{topology}: {meshes.training.size} chips of {chip.memory / chips.GIB:.2f} GiB, '
    f'training on {dict(meshes.training.shape)}, decoding on {dict(meshes.decoding.shape)}; '
    f'{roofline.parameter_count(shape) / 1e9:.2f} billion parameters',
    flush=True,
  )
  spec = update_spec(config, shape, meshes.training)
  with jax.set_mesh(meshes.training):
    found = capacity_report.print_memory(config.rollout, spec, meshes.decoding, chip)
    speed = None
    if found.peaks and len(found.programs) == len(found.peaks):
      estimator = Estimator(config.rollout, spec, meshes.decoding, chip, found.programs)
      words = lengths.describe(lengths_spec, config.rollout.max_response)
      speed = time_report.print_time(estimator, work, words)
  print('fits' if found.fits else 'does not fit')
  return Examination(found.fits, found.peaks, speed)


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
  return Workload(
    prompt=min(_PROMPT, rollout.max_prompt),
    fresh=fresh,
    replayed=of_replayed,
    candidates=candidates,
    evaluated=of_evaluation,
    evaluation_every=config.evaluation.every,
  )


if __name__ == '__main__':
  cli.run(main, define_flags)
