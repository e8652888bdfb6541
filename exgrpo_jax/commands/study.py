"""Runs a study: arms compared in settings over seeds, by a protocol fixed before the first run.

exgrpo study --study=smoke --workdir=/tmp/smoke_study --parallel=2

Every run is `exgrpo train` in a folder of its name; runs with the same warm start share it. The
same command again skips finished runs and resumes the others. Results are computed once every run
has ended. Exit statuses are those of sweep.
"""

import functools
import sys

from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import check_given
from exgrpo_jax.experiment import config_files
from exgrpo_jax.studies import protocol, study, sweep

_STUDIES = 'exgrpo_jax.configs.studies'


def define_flags() -> None:
  """The flags of this command."""
  command_line.define_workdir()
  flags.DEFINE_string(
    'study',
    None,
    'The protocol: a file such as path/to/study.py, or by name one of '
    + ', '.join(config_files.shipped_names(_STUDIES))
    + '.',
  )
  command_line.define_launcher()


def main(args: command_line.Args) -> None:
  """Runs what is left of a study and reports it, or prints the commands for it."""
  check_given(
    {'--study': args.study, '--workdir': args.workdir},
    '--study=smoke --workdir=/tmp/smoke_study',
  )
  chosen = protocol.load(config_files.shipped_path(args.study, _STUDIES, 'study'))
  values, planned = study.plan(chosen, args.workdir)
  protocol.fix(chosen, values.to_dict(), args.workdir)
  trials = list(planned.values())
  if args.launcher == 'commands':
    sweep.print_commands(trials)
    return
  conclude = functools.partial(study.report, chosen, planned, args.workdir)
  sys.exit(sweep.run(trials, args.workdir, args.parallel, 'study', conclude))


def run() -> None:
  """Run the command line."""
  command_line.run(main, define_flags)
