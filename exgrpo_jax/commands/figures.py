"""Figures of one or several runs: training, buffer, entropies, code blocks, evaluations.

exgrpo figures /tmp/first /tmp/second --out=/tmp/figures

Runs that differ in their seed alone are one setting; settings are named after what differs between
them. Each figure is written as PNG, SVG and PDF, with the numbers that it shows as CSV.
"""

import pathlib

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import runs
from exgrpo_jax.reporting.figures import (
  ablation,
  buffer,
  canvas,
  code_share,
  correctness_entropy,
  dynamics,
  evaluations,
  reasoning_entropy,
)

FIGURES = {
  'dynamics': dynamics.draw,
  'buffer': buffer.draw,
  'reasoning_entropy': reasoning_entropy.draw,
  'correctness_entropy': correctness_entropy.draw,
  'code_share': code_share.draw,
  'evaluations': evaluations.draw,
  'ablation': ablation.draw,
}


def define_flags() -> None:
  """Flags of this command."""
  command_line.define_out('The folder for the figures; made where it is missing.')


def main(args: command_line.Args, *workdirs: str) -> None:
  """Draws every figure for which the runs have data, and says which it left out and why."""
  if not args.out:
    raise InputError('--out is needed: the folder for the figures, e.g. --out=/tmp/figures.')
  groups = runs.read(workdirs)
  out = pathlib.Path(args.out).expanduser()
  try:
    out.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(f'--out={args.out} cannot be made ({error}); name another folder.') from error
  for group in groups:
    print(f'{group.label}: {", ".join(run.workdir for run in group.runs)}', flush=True)
  for name, draw in FIGURES.items():
    try:
      with canvas.style():
        canvas.write(draw(groups), out, name)
    except canvas.NothingToDrawError as error:
      print(f'{name}: left out, for {error}', flush=True)
      continue
    print(f'{name}: {out / name}.png, .svg, .pdf and .csv', flush=True)


def run() -> None:
  """Run the command line."""
  command_line.run(main, define_flags, several='WORKDIR')
