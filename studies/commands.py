"""Commands that run studies, draw figures, and train with gradient comparisons, in a clone.

python -m studies run smoke --workdir=/tmp/smoke_study --parallel=2
python -m studies figures weak_start --out=/tmp/figures
python -m studies figures /tmp/first /tmp/second --out=/tmp/figures
python -m studies train --config=smoke --workdir=/tmp/smoke --align_every=10

run compares arms in settings over seeds, following a protocol that is fixed before the first run.
Every run is an `exgrpo train` run in a folder with the run's name. Runs with the same warm start
share it. If you run the same command again, it skips finished runs and resumes the others. Results
are computed once every run has ended. Exit statuses are the same as for sweep.

figures recreates a study's tables, curves and differences from its CSV, or draws the figures of
runs. Runs that differ only in their seed form one setting, which is named after the values that
distinguish it. Each figure is written as PNG, SVG and PDF, and its numbers are written as CSV.

train runs `exgrpo train` and adds the metrics alignment/… to metrics.jsonl at regular intervals.
studies/README.md explains these metrics.
"""

import functools
import pathlib
import sys

from absl import flags

from exgrpo_jax.commands import command_line, train
from exgrpo_jax.errors import InputError, check_given
from exgrpo_jax.reporting import runs
from exgrpo_jax.sweeps import sweep
from studies import drawing, protocol, response_figures, study, training_figures
from studies.alignment import Alignment

FIGURES = {
  'dynamics': training_figures.dynamics,
  'buffer': training_figures.buffer,
  'reasoning_entropy': response_figures.reasoning_entropy,
  'correctness_entropy': response_figures.correctness_entropy,
  'code_share': response_figures.code_share,
  'evaluations': training_figures.evaluations,
  'ablation': training_figures.ablation,
}


def start(word: str) -> None:
  """Run the command line of 'run', 'figures' or 'train'."""
  if word == 'run':
    command_line.run(run, _define_run, metavar='STUDY')
  elif word == 'figures':
    command_line.run(figures, _define_figures, metavar='STUDY or WORKDIR')
  else:
    command_line.run(train_aligned, _define_train, on_all_hosts=True)


def _define_run() -> None:
  command_line.define_workdir()
  command_line.define_launcher()


def run(args: command_line.Args, *names: str) -> None:
  """Run the unfinished trials of a study and report it, or print their commands."""
  if len(names) != 1:
    raise InputError(
      f"'{' '.join(names)}': run one study at a time. Each study needs its own --workdir."
    )
  check_given({'--workdir': args.workdir}, '--workdir=/tmp/smoke_study')
  chosen = protocol.load(names[0])
  values, planned = study.plan(chosen, args.workdir)
  protocol.fix(chosen, values.to_dict(), args.workdir)
  trials = list(planned.values())
  if args.launcher == 'commands':
    sweep.print_commands(trials)
    return
  conclude = functools.partial(study.report, chosen, planned, args.workdir)
  command = [sys.orig_argv[0], '-m', 'studies', 'run']
  sys.exit(sweep.run(trials, args.workdir, args.parallel, command, conclude))


def _define_figures() -> None:
  command_line.define_path('out', 'Folder for the figures. It is created if it does not exist.')


def figures(args: command_line.Args, *names: str) -> None:
  """Draw all figures for which there is data. Print which figures are left out, and why."""
  if not args.out:
    raise InputError('--out is missing. Pass a folder for the figures, such as --out=/tmp/figures.')
  out = pathlib.Path(args.out)
  if len(names) == 1 and names[0].partition(':')[0] in protocol.names():
    chosen = protocol.load(names[0])
    found = study.read(chosen.name)
    _make(out)
    study.write(chosen, found, out)
    return
  groups = runs.read(names)
  _make(out)
  for group in groups:
    print(f'{group.label}: {", ".join(run.workdir for run in group.runs)}', flush=True)
  drawing.write_all({name: functools.partial(draw, groups) for name, draw in FIGURES.items()}, out)


def _make(out: pathlib.Path) -> None:
  try:
    out.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(
      f'--out={out}: cannot create this folder ({error}). Choose another folder.'
    ) from error


def _define_train() -> None:
  train.define_flags()
  flags.DEFINE_integer(
    'align_every', 10, 'Number of steps between two gradient comparisons.', lower_bound=1
  )


def train_aligned(args: command_line.Args) -> None:
  """Train with a callback that compares gradients."""
  train.main(args, [Alignment(args.align_every)])
