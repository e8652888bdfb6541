"""Report this machine's hardware, what is missing for training, and a config that fits.

exgrpo doctor

Exit status: 0 if training can start, 1 if it cannot. Lines with an exclamation mark explain why.
"""

import sys

import jax

from exgrpo_jax.capacity import diagnosis
from exgrpo_jax.commands import command_line


def main(_: command_line.Args) -> None:
  """Print the findings and a first command to run. Exits with status 1 if training cannot start."""
  findings = list(diagnosis.findings())
  for finding in findings:
    print(f'{"!" if finding.is_problem else " "} {finding.name:<12}{finding.text}')
  if any(finding.is_problem for finding in findings):
    sys.exit(1)
  print(f'\na run that fits:\n{diagnosis.suggestion(jax.devices()[0])}')


def run() -> None:
  """Run the CLI."""
  command_line.run(main, lambda: None)
