"""The CLI: `exgrpo COMMAND …`, or `python -m exgrpo_jax COMMAND …`."""

import difflib
import importlib
import os
import signal
import sys

from exgrpo_jax.runtime import machine

# Purpose -> command -> description. Each command is a module of the same name in commands/.
COMMANDS = {
  'Train': {
    'train': 'train a policy with ExGRPO, or resume a run',
    'check': 'check in seconds, without a GPU or TPU, that a run can start',
    'sweep': 'run variants of one config and compare them in a table',
  },
  'Inspect': {
    'report': 'show a run as one HTML page, down to individual tokens',
    'generate': 'print responses to a prompt',
    'data': 'show a dataset as a model sees it, or prefilter its questions',
    'verify': 'explain why a response was judged correct or wrong',
  },
  'Measure': {
    'evaluate': "measure a policy's pass@1, avg@k, pass@k and maj@k on datasets or a suite",
    'capacity': 'estimate what fits on a TPU slice or a GPU, without needing one',
    'doctor': "report this machine's hardware and problems, and a config that fits it",
  },
  'Convert': {
    'prepare': 'download a small model without access to the Hugging Face Hub',
    'export': "export a run's policy or a GGUF file to a Hugging Face folder",
  },
}
# Removed command -> its replacement in a clone of the repository.
MOVED = {
  'study': 'python -m studies run NAME --workdir=FOLDER',
  'figures': 'python -m studies figures WORKDIR … --out=FOLDER',
}


def main() -> None:
  """Run the command named by the first argument; without arguments, list all commands."""
  names = [name for group in COMMANDS.values() for name in group]
  word = sys.argv[1] if len(sys.argv) > 1 else '--help'
  if word in ('--help', '-h', 'help'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback when piped into `| head`
    lines = ['exgrpo COMMAND [FLAGS]; exgrpo COMMAND --help lists the flags of a command.']
    for purpose, commands in COMMANDS.items():
      lines += ['', purpose, *(f'  {name:<9} {text}' for name, text in commands.items())]
    print('\n'.join(lines))
    return
  if word not in names:
    matches = difflib.get_close_matches(word, names, n=1)
    hint = f'Did you mean {matches[0]}?' if matches else f'The commands are {", ".join(names)}.'
    problem = f'is not a command. {hint}'
    if word in MOVED:
      problem = (
        "is no longer a command: studies are now in the repository's studies/ folder, outside the "
        f'package. In a clone, run {MOVED[word]}.'
      )
    print(f"error: '{word}' {problem}", file=sys.stderr)
    sys.exit(2)
  prepare_process()
  sys.argv = [f'exgrpo {word}', *sys.argv[2:]]
  importlib.import_module(f'exgrpo_jax.commands.{word}').run()


def prepare_process() -> None:
  """Set up streams, heap, GPU memory share and Ctrl-C handling before any import starts threads."""
  # A closed stream's number would go to the next opened file, and XLA writes its log to number 2.
  while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
    os.set_inheritable(number, True)
  os.close(number)
  sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, 'w'), sys.stderr or os.fdopen(2, 'w')
  machine.keep_pages()
  machine.take_share()
  # Ctrl-C ends a command without a traceback, as SIGTERM does, unless the parent ignores SIGINT.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == '__main__':
  main()
