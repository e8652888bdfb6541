"""Command lines, each in a fork of one process that has imported what the commands import.

Starting Python and importing JAX takes seconds, a fork none; and it leaves exit status, flags and
output what they are in a process of its own. It comes before JAX has a backend, and so no threads
to lose. `python -m tests.helpers.forked` is that process; the first `run` starts it.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from typing import NamedTuple

from tests.helpers.paths import REPOSITORY

TIMEOUT = 60  # seconds, of a command
_CHANGING = ('PYTEST_CURRENT_TEST',)  # set by pytest for each test


class Outcome(NamedTuple):
  """How a command ended."""

  status: int
  out: str
  err: str
  seconds: float  # without imports
  used_device: bool  # whether JAX was asked for devices, as all that computes does


def run(commands):
  """The Outcome of each of `commands`, lists such as ['train', '--config=smoke']."""
  return [run_one(command) for command in commands]


def run_one(command):
  """The Outcome of a command, in the environment that the caller has at the moment."""
  process = _server()
  process.stdin.write(f'{json.dumps(list(map(str, command)))}\n')
  process.stdin.flush()
  line = process.stdout.readline()
  assert line, f'the process that forks ended with status {process.wait()}'
  return Outcome(*json.loads(line))


_running = []  # at most one: (its environment, the process)


def _server():
  """The process that forks: the tests of a worker share it, as long as they share an environment.

  Packages read theirs when they are imported, so another one needs another process.
  """
  environment = {name: value for name, value in os.environ.items() if name not in _CHANGING}
  if not _running or _running[0][0] != environment:
    _end()
    process = subprocess.Popen(
      [sys.executable, '-m', 'tests.helpers.forked'],
      cwd=REPOSITORY,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    _running.append((environment, process))
  return _running[0][1]


@atexit.register
def _end():
  while _running:
    with _running.pop()[1]:  # closes its input, which ends it, and waits
      pass


def _outcome(command):
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
    reader, writer = os.pipe()
    started = time.monotonic()
    if not (pid := os.fork()):
      _become(command, out, err, writer)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.monotonic() - started
    with os.fdopen(reader) as file:
      used_device = bool(file.read())
    out.seek(0)
    err.seek(0)
    return Outcome(status, out.read(), err.read(), seconds, used_device)


def _become(command, out, err, writer):
  """Runs a command as `python -m` does, and ends this process."""
  import signal

  from jax._src import xla_bridge

  signal.alarm(TIMEOUT)
  os.dup2(out.fileno(), 1)
  os.dup2(err.fileno(), 2)
  name, *arguments = command
  sys.argv = [f'exgrpo_jax/{name}.py', *arguments]
  status = 0
  try:
    runpy.run_module(f'exgrpo_jax.{name}', run_name='__main__', alter_sys=True)
  except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if isinstance(ended.code, str):
      print(ended.code, file=sys.stderr)
  except BaseException:
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  if xla_bridge.backends_are_initialized():
    os.write(writer, b'1')
  os._exit(status)


if __name__ == '__main__':
  warnings.filterwarnings('ignore', message='os.fork|.*found in sys.modules')
  for name in ('train', 'sweep', 'benchmark', 'capacity'):  # these import the others
    __import__(f'exgrpo_jax.{name}')
  for line in sys.stdin:
    print(json.dumps(_outcome(json.loads(line))), flush=True)
