"""The command line of the research record: `python -m studies COMMAND …`, in a clone."""

import importlib
import sys

from exgrpo_jax.__main__ import prepare_process
from studies import protocol

COMMANDS = {
  'run': 'runs or resumes a study, and reports its results',
  'figures': 'draws the figures of a measured study or of runs',
  'train': 'runs exgrpo train with gradient comparisons',
}


def main() -> None:
  """Run the command named by the first word, or list commands and studies if there is no word."""
  word = sys.argv[1] if len(sys.argv) > 1 else '--help'
  if word in ('--help', '-h', 'help'):
    print(
      'Usage: python -m studies COMMAND. For its flags, run python -m studies COMMAND --help.\n'
    )
    print('\n'.join(f'  {name:<8} {does}' for name, does in COMMANDS.items()))
    print(f'\nStudies: {", ".join(protocol.names())}')
    return
  if word not in COMMANDS:
    print(f"error: '{word}' is not a command. Use one of: {', '.join(COMMANDS)}.", file=sys.stderr)
    sys.exit(2)
  prepare_process()
  sys.argv = [f'studies {word}', *sys.argv[2:]]
  importlib.import_module('studies.commands').start(word)


if __name__ == '__main__':
  main()
