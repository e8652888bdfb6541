"""The entry of every command: `exgrpo COMMAND …`, or `python -m exgrpo_jax COMMAND …`."""

import difflib
import importlib
import signal
import sys

from exgrpo_jax.runtime import machine

# Purpose -> command -> its meaning. Each command is the module of its name in commands/.
COMMANDS = {
  'Train': {
    'train': 'train a policy with ExGRPO, or resume a run',
    'check': 'check that a run could start, in seconds and without a GPU or TPU',
    'sweep': 'run variants of one config, and compare them in a table',
  },
  'Look': {
    'report': 'show a run as one HTML page, down to every token',
    'generate': 'print responses to a prompt',
    'data': 'show a data set as a model sees it, or prefilter its questions',
    'verify': 'explain why a response was judged as it was',
  },
  'Measure': {
    'evaluate': 'measure pass@1, avg@k and pass@k of a policy on data or a suite',
    'capacity': 'estimate what fits on a TPU slice or a GPU, without one',
    'doctor': 'report what this machine has and lacks, and a config that fits it',
  },
  'Convert': {
    'prepare': 'turn a public data set into a file of training questions, or get a small model',
    'export': "write a run's policy, or a GGUF, as a Hugging Face folder",
  },
}
# Commands that are gone, and their replacements in a clone.
MOVED = {
  'study': 'python -m studies run NAME --workdir=FOLDER',
  'figures': 'python -m studies figures WORKDIR … --out=FOLDER',
}


def main() -> None:
  """Run the command that the first word names; without one, list them all."""
  names = [name for group in COMMANDS.values() for name in group]
  word = sys.argv[1] if len(sys.argv) > 1 else '--help'
  if word in ('--help', '-h', 'help'):
    print(_overview())
    return
  if word in MOVED:
    print(
      f"error: '{word}' is no longer a command: studies are a folder of the repository, outside "
      f'the package. In a clone, run {MOVED[word]}.',
      file=sys.stderr,
    )
    sys.exit(2)
  if word not in names:
    near = difflib.get_close_matches(word, names, n=1)
    hint = f'Did you mean {near[0]}?' if near else f'The commands are {", ".join(names)}.'
    print(f"error: '{word}' is not a command. {hint}", file=sys.stderr)
    sys.exit(2)
  prepare_process()
  sys.argv = [f'exgrpo {word}', *sys.argv[2:]]
  importlib.import_module(f'exgrpo_jax.commands.{word}').run()


def _overview() -> str:
  lines = ['exgrpo COMMAND [FLAGS]; exgrpo COMMAND --help lists the flags of one.']
  for purpose, commands in COMMANDS.items():
    lines += ['', purpose, *(f'  {name:<9} {does}' for name, does in commands.items())]
  return '\n'.join(lines)


def prepare_process() -> None:
  """Set the heap, the share of a GPU and Ctrl-C, before imports that start threads."""
  machine.keep_pages()
  machine.take_share()
  # Ctrl-C ends a command without a traceback, as SIGTERM does; under nohup it stays ignored.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == '__main__':
  main()
