"""Trains one run after another in one process: what is compiled for one serves the next.

echo '{"arguments": ["--config=smoke", "--workdir=/tmp/smoke"], "log": "/tmp/smoke.txt"}' |
    exgrpo train_server

Each line of standard input is a request: the flags of exgrpo_jax.train, and the file that the run's
output is appended to. A line on standard output says that the run has finished. A run that does not
finish ends the process, with the exit status that it would have had by itself, for nobody knows
what it leaves behind.
"""

import json
import os
import sys
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import config_flags

from exgrpo_jax.commands import command_line, train
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files


def main() -> None:
  """Serves requests until standard input ends."""
  logging.set_verbosity(logging.ERROR)  # as command_line.run does
  answers = os.dup(sys.stdout.fileno())  # standard output becomes the run's
  for line in sys.stdin:
    request = json.loads(line)
    log = os.open(request['log'], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    _train(request['arguments'])
    sys.stdout.flush()
    os.write(answers, b'finished\n')


def _train(arguments: Sequence[str]) -> None:
  """What `exgrpo train` does with these arguments."""
  sys.argv = [train.__file__, *arguments]
  sys.orig_argv = [sys.executable, '-m', 'exgrpo_jax', 'train', *arguments]  # which runs record
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values)
  flags.DEFINE_string('workdir', None, '', flag_values=values)
  flags.DEFINE_bool('compile_only', False, '', flag_values=values)
  try:
    values(config_files.resolved(sys.argv))
    train.main(values)
  except InputError as error:
    command_line.refuse(error)


if __name__ == '__main__':
  main()
