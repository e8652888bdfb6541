"""Run the trials of a sweep and compare them in one table.

exgrpo sweep --sweep=ratio --config=arithmetic --workdir=/tmp/ratio --parallel=2

Each trial runs `exgrpo train` in a folder named after it. Run the same command again to resume
unfinished trials. Exit status: 0 if all trials have finished, 1 if some have failed, 2 if the
command cannot run, 130 if it was interrupted. With --launcher=slurm, 0 means that all unfinished
trials are in the queue.
"""

import functools
import sys

from absl import flags
from ml_collections import config_flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError, check_given
from exgrpo_jax.experiment import config_files
from exgrpo_jax.runtime import console
from exgrpo_jax.runtime.workdir import check_local
from exgrpo_jax.sweeps import slurm, sweep, trials

_SWEEPS = 'exgrpo_jax.configs.sweeps'


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_config()
  command_line.define_path('workdir', 'The folder for the trials and the table.')
  flags.DEFINE_string(
    'sweep',
    None,
    'The trials: a file such as path/to/sweep.py, or one of these names: '
    + ', '.join(config_files.shipped_names(_SWEEPS))
    + '.',
  )
  command_line.define_launcher(slurm=True)


def main(args: command_line.Args) -> None:
  """Run a sweep's unfinished trials, print their commands, or submit them to Slurm."""
  check_given(
    {'--sweep': args.sweep, '--config': args.config, '--workdir': args.workdir},
    '--sweep=ratio --config=arithmetic --workdir=/tmp/ratio',
  )
  check_local(f'--workdir={args.workdir}')
  if args.sbatch and args.launcher != 'slurm':
    raise InputError(
      f'--sbatch={args.sbatch}: this flag needs --launcher=slurm. Add --launcher=slurm, or remove '
      '--sbatch.'
    )
  options = slurm.check_options(args.sbatch)
  path = config_files.shipped_path(args.sweep, _SWEEPS, 'sweep')
  plan = sweep.plan_trials(
    trials.load(path),
    path,
    args.config,
    config_files.portable_config(config_flags.get_config_filename(args['config'])),
    config_flags.get_override_values(args['config']),
    args.workdir,
  )
  if args.launcher == 'commands':
    sweep.print_commands(plan)
    return
  if args.launcher == 'slurm':
    max_parallel = args.parallel if args['parallel'].present else None
    sweep.report(plan, args.workdir, slurm.submit(plan, args.workdir, options, max_parallel))
    return
  conclude = functools.partial(sweep.report, plan, args.workdir)
  command = [*console.program(), 'sweep']
  sys.exit(sweep.run(plan, args.workdir, args.parallel, command, conclude))


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags)
