r"""Estimate whether a run fits on a TPU slice or GPU, and how fast it trains on a slice.

exgrpo capacity --config=qwen2_5_math_7b --topology=v5e:8x8
exgrpo capacity --config=qwen2_5_math_7b --topology=v5e:8x8 \
    --lengths=lognormal:1000,8192
exgrpo capacity --config=one_gpu --device=l4 --fit

The device itself is not needed. For a slice, the command compiles the programs of a step and prints
their memory and time, which requires libtpu (pip install -e '.[tpu]'). For a GPU, it computes the
memory from a formula. Exit status: 0 if everything fits, 1 if not, 2 if the command cannot run.
"""

import sys

from absl import flags

from exgrpo_jax.capacity import devices, examination, step
from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError, check_given
from exgrpo_jax.experiment.experiment import with_counted_length, with_folders
from exgrpo_jax.experiment.settings import parse_config


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_config()
  flags.DEFINE_string('topology', None, 'The TPU generation and slice, e.g. v5e:4x4.')
  flags.DEFINE_string(
    'device',
    None,
    'The GPU to use instead of --topology: its memory, such as 24gb, or one of these names '
    f'(any spelling works): {", ".join(devices.GPUS)}.',
  )
  flags.DEFINE_bool(
    'fit',
    False,
    'With --device: choose the largest rollout.slots and microbatch.tokens that fit. They affect '
    'only memory and time.',
  )
  flags.DEFINE_string(
    'lengths',
    '',
    'With --topology: the distribution of response lengths. lognormal:MEDIAN or '
    'lognormal:MEDIAN,LIMIT, in tokens, is a log-normal distribution whose 99th percentile is 8 '
    'times the median. To use the response lengths of a run, pass its workdir. The default is '
    'lognormal with a median of config.rollout.max_response / 8.',
  )
  flags.DEFINE_integer(
    'evaluated',
    step.EVALUATED,
    "With --topology: the total number of questions in config.data's evaluations; by default the "
    "number of rows in the authors' valid.parquet.",
    lower_bound=0,
  )


def main(args: command_line.Args) -> None:
  """Print how much memory a config needs per chip. Exits with status 1 if the run does not fit."""
  if args.topology and args.device:
    raise InputError(
      f'--topology={args.topology} and --device={args.device}: only one of these flags can be '
      'given. Choose a slice or a GPU.'
    )
  check_given(
    {'--config': args.config, '--topology or --device': args.topology or args.device},
    '--config=qwen2_5_math_7b --topology=v5e:8x8, or --config=one_gpu --device=l4',
  )
  if args.fit and not args.device:
    raise InputError(
      '--fit: this flag requires --device, because with --topology, every trial would have to be '
      'compiled. Replace --topology with --device, or remove --fit.'
    )
  config = with_counted_length(parse_config(args.config))
  config = with_folders(config, config.model.path)  # in case the config does not set the shape
  if args.topology:
    estimate = examination.examine(config, args.topology, args.lengths, args.evaluated)
  else:
    estimate = examination.examine_gpu(config, args.device, args.fit)
  if not estimate.fits:
    sys.exit(1)


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags)
