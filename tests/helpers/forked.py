"""Command lines, each in a fork of one process that has imported what the commands import.

Starting Python and importing JAX takes seconds, a fork none; and it leaves exit status, flags and
output what they are in a process of its own. It comes before JAX has a backend, and so no threads
to lose. `python -m tests.helpers.forked` is that process; the first command starts it.
"""

import atexit
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from typing import NamedTuple

from tests.helpers.paths import REPOSITORY

TIMEOUT = 240  # seconds, of a command
_POLL_SECONDS = 0.02
# Set by pytest for each test, and read by the processes that commands start.
_CHANGING = ('PYTEST_CURRENT_TEST', 'PYTHONPATH')


def is_running(pid):
  """Whether a process does anything; one that nobody has waited for does not."""
  try:
    place = pathlib.Path(f'/proc/{pid}')
    state = (place / 'stat').read_text().rpartition(')')[2].split()[0]
    # The first thread is a zombie while others, which hold the same sockets, still end.
    return state != 'Z' or len(os.listdir(place / 'task')) > 1
  except (FileNotFoundError, ProcessLookupError):
    return False


class Outcome(NamedTuple):
  """How a command ended."""

  status: int
  out: str
  err: str
  used_device: bool  # whether JAX was asked for devices, as all that computes does


class Command:
  """A command that runs; at the end of a `with` block it is killed, if nobody waited for it."""

  def __init__(self, pid, out):
    self.pid = pid
    self._out = out  # the file of its output, which is there until somebody has waited
    self._position = 0  # behind what has been read of it
    self._has_ended = False

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if not self._has_ended:
      self.send_signal(signal.SIGKILL)
      self.wait()

  def readline(self):
    """The next line that it prints, as soon as that is whole; what is left if it has ended."""
    while True:
      is_over = not is_running(self.pid)
      with open(self._out) as file:
        file.seek(self._position)
        line = file.readline()
        if line.endswith('\n') or is_over:
          self._position = file.tell()
          return line
      time.sleep(_POLL_SECONDS)

  def is_running(self):
    return is_running(self.pid)

  def send_signal(self, number):
    os.kill(self.pid, number)

  def wait(self):
    """Its Outcome, once it has ended."""
    self._has_ended = True
    return Outcome(*_ask(wait_for=self.pid))


def run(commands):
  """The Outcome of each of `commands`, lists such as ['train', '--config=smoke']."""
  return [run_one(command) for command in commands]


def run_one(command, **more):
  """The Outcome of a command; for `more` see `start`."""
  return start(command, **more).wait()


def start(command, has_reader=True, log=None, **environment):
  """A Command that has started, in the environment that the caller has at the moment.

  Args:
    command: a module and its arguments; a module of exgrpo_jax may be named without the package.
      Or '-c' and a program.
    has_reader: whether somebody reads what it prints, unlike before `| head` once that has ended.
    log: a file for all that it prints, which its Outcome then lacks.
    **environment: added to its environment. Of JAX's settings those count that are texts or floats.
  """
  pid, out = _ask(
    command=list(map(str, command)),
    has_reader=has_reader,
    log=log and str(log),
    environment={**os.environ, **environment},
    jax={name.lower(): value for name, value in environment.items() if name.startswith('JAX_')},
  )
  return Command(pid, out)


_running = []  # at most one: (its environment, the process)


def _ask(**request):
  process = _server()
  process.stdin.write(f'{json.dumps(request)}\n')
  process.stdin.flush()
  line = process.stdout.readline()
  assert line, f'the process that forks ended with status {process.wait()}'
  return json.loads(line)


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


# ---- In the process that forks ----

_started = {}  # process id -> (the folder of its files, what says that it used a device)


def _start(request, folder):
  """Forks a process for a command: its id, and the file of its output."""
  place = pathlib.Path(tempfile.mkdtemp(dir=folder))
  for name in ('out', 'err'):
    (place / name).touch()
  reader, writer = os.pipe()
  if not (pid := os.fork()):
    signal.alarm(TIMEOUT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(place / 'out', os.O_WRONLY), 1)
    os.dup2(os.open(place / 'err', os.O_WRONLY), 2)
    if request['log']:
      log = os.open(request['log'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(log, 1)
      os.dup2(log, 2)
    if not request['has_reader']:
      gone, output = os.pipe()
      os.close(gone)
      os.dup2(output, 1)
    os.environ.clear()
    os.environ.update(request['environment'])
    _configure_jax(request['jax'])
    _become(request['command'], writer)
  os.close(writer)
  _started[pid] = (place, reader)
  return pid, str(place / 'out')


def _outcome(pid):
  place, reader = _started.pop(pid)
  status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  with os.fdopen(reader) as file:
    used_device = bool(file.read())
  out, err = ((place / name).read_text() for name in ('out', 'err'))
  shutil.rmtree(place)
  return Outcome(status, out, err, used_device)


def _configure_jax(texts):
  """Does what JAX does with its variables when it is imported."""
  import jax

  for name, text in texts.items():
    is_number = isinstance(getattr(jax.config, name), float)
    jax.config.update(name, float(text) if is_number else text)


def _become(command, writer):
  """Runs a command as `python -m` does, and ends this process."""
  name, *arguments = command
  module, words = (name, arguments) if '.' in name else ('exgrpo_jax', command)
  sys.argv = [f'{module.replace(".", "/")}.py', *words]
  sys.orig_argv = [sys.executable, '-m', module, *words]
  status = 0
  try:
    if name == '-c':
      exec(arguments[0], {'__name__': '__main__'})
      sys.modules['jax'].distributed.shutdown()  # as at the end of a process of its own
    else:
      runpy.run_module(module, run_name='__main__', alter_sys=True)
  except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if isinstance(ended.code, str):
      print(ended.code, file=sys.stderr)
  except BaseException:
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  if _used_device():
    os.write(writer, b'1')
  os._exit(status)


def _used_device():
  """Whether JAX has looked for devices; after that it refuses to change how many a CPU has."""
  import jax

  try:
    jax.config.update('jax_num_cpu_devices', 1)
  except RuntimeError:
    return True
  return False


if __name__ == '__main__':
  warnings.filterwarnings('ignore', message='os.fork|.*found in sys.modules')
  for name in ('train', 'sweep', 'evaluate', 'capacity'):  # these import the others
    __import__(f'exgrpo_jax.commands.{name}')
  with tempfile.TemporaryDirectory() as folder:
    for line in sys.stdin:
      request = json.loads(line)
      pid = request.get('wait_for')
      print(json.dumps(_outcome(pid) if pid else _start(request, folder)), flush=True)
