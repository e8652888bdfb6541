"""A pool of worker processes with time limits; processes that hang or die are replaced.

A request may hang or crash its worker without affecting other requests. Workers run server.py.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts
from exgrpo_jax.workers.process import WorkerProcess

START_TIMEOUT = 60.0  # seconds for a worker to become ready, which may include importing user code
MAX_DEATHS = 2  # workers that may die during a request before the request is blamed
_MAX_FIRST_TIMEOUTS = 3  # warn if this many first requests to a worker all time out
_SAY_EVERY = 10.0  # seconds between progress lines while a worker starts

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Program:
  """A worker's program, in the form that server.py expects, and its limits."""

  command: Sequence[str]
  setup: Mapping[str, Any]
  noun: str  # for messages: 'a grading process'
  late_reason: str  # failure reason of requests that time out: 'no verdict after 5 s (its setting)'
  memory_limit: int = 0  # MiB on top of a ready worker's memory use; 0 means no limit
  starts: int = 1  # attempts to start a worker before giving up
  timeout: float = START_TIMEOUT  # seconds until the worker must be ready
  timeout_note: str = ''  # for messages: an explanation of the timeout
  # Seconds after which a request may be hanging, so a standby process is started.
  standby_delay: float = math.inf


class Failure(NamedTuple):
  """The reason why a request got no reply."""

  outcome: str  # one of datatypes.FAILURES
  reason: str
  is_lost: bool = False  # True if the request hung or killed its worker


def command(module: str) -> tuple[str, ...]:
  """Return the command to run one of our modules. -P keeps the current folder off sys.path."""
  return sys.executable, '-P', '-m', module


class Worker:
  """A slot for one process, which starts when needed and is replaced when it dies.

  Only one thread at a time may use a worker; another thread may call `stop`.
  """

  def __init__(self, program: Program) -> None:
    self._program = program
    self.greeting: Mapping[str, Any] = {}  # the process's first reply once ready
    self.starts = 0  # processes that became ready
    self._timeouts = 0.0  # timeouts, or -inf after the first reply
    self._progress: dict[str, Any] = {}  # the starting process's last 'trying' message
    self._process: WorkerProcess | None = None
    self._standby: WorkerProcess | None = None  # started in advance, because imports are slow
    self._stopped = False
    self._lock = threading.Lock()  # guards `_process`, `_standby` and `_stopped`

  def call(
    self, request: Callable[[], tuple[Any, float]], deaths: int = MAX_DEATHS
  ) -> dict[str, Any] | Failure:
    """Return the reply to a request, or a Failure. Raises the same errors as `ready`.

    `request` returns the request and its time limit in seconds. If a process dies, `request` is
    called again for the next process, until `deaths` processes have died.
    """
    reason = ''
    for _ in range(deaths):
      self.ready()
      try:
        reply = self.ask(*request())
      except TimeoutError:
        self.drop()
        self._timeouts += 1
        if self._timeouts == _MAX_FIRST_TIMEOUTS:
          _warn_once(
            f'the first {_MAX_FIRST_TIMEOUTS} requests to {self._program.noun} all timed out: '
            f'{self._program.late_reason}. Raise this limit, or use faster code.'
          )
        return Failure('timed out', self._program.late_reason, is_lost=True)
      except EOFError as error:
        self.drop()
        prefix = f'{deaths} workers died during this request, the last'
        reason = f'{prefix if deaths > 1 else "its process ended"} {error}'
      else:
        self._timeouts = -math.inf
        if reply.pop('must_be_replaced', False):
          self.drop()
        return Failure('crashed', reply['reason']) if 'reason' in reply else reply
    return Failure('crashed', reason, is_lost=True)

  def ready(self) -> None:
    """Ensure that a process is ready for a request. Raises the same errors as `start`."""
    if self._process is None or not self._process.is_idle():
      self.start()

  def start(self) -> None:
    """Replace the process, with the standby if there is one, and wait until it is ready.

    Raises InputError if the user's code is rejected, hangs or ends the process, and RuntimeError if
    no process becomes ready and the cause is something else. After a timeout, the error's cause is
    a TimeoutError.
    """
    failure = None
    for _ in range(self._program.starts):
      self.drop()
      self._start_standby()
      with self._lock:
        process, self._standby = self._standby, None
        self._process = process
      assert process is not None  # only this thread takes the standby
      try:
        reply = self._first_reply(process)
      except (EOFError, TimeoutError) as error:
        failure = error
        continue
      if 'refused' in reply:
        raise InputError(reply['refused'])
      self.greeting = reply
      self.starts += 1
      return
    raise self._start_error(failure) from failure

  def ask(self, request: Any, seconds: float) -> dict[str, Any]:
    """Send a request to the ready process and return its reply.

    Raises TimeoutError after `seconds`, and EOFError with the exit status if the process dies.
    """
    assert self._process is not None
    now = time.monotonic()
    self._process.send(request, now + seconds)
    if seconds > self._program.standby_delay:
      try:
        return self._process.receive(now + self._program.standby_delay)
      except TimeoutError:
        self._start_standby()
    return self._process.receive(now + seconds)

  def drop(self) -> None:
    """Kill the process. The next request starts a new one."""
    with self._lock:
      process, self._process = self._process, None
    if process is not None:
      process.close()

  def stop(self) -> None:
    """Kill the processes and prevent new ones from starting."""
    with self._lock:
      self._stopped = True
      for process in filter(None, (self._process, self._standby)):
        process.kill()

  def close(self) -> None:
    """Kill the processes, as `stop` does, and free their sockets."""
    self.stop()
    for process in filter(None, (self._process, self._standby)):
      process.close()

  def _first_reply(self, process: WorkerProcess) -> dict[str, Any]:
    """Wait for a process's first reply, printing progress in the meantime."""
    start_time, self._progress, timeout = time.monotonic(), {}, self._program.timeout
    while True:
      try:
        reply = process.receive(min(start_time + timeout, time.monotonic() + _SAY_EVERY))
      except TimeoutError:
        seconds = time.monotonic() - start_time
        if seconds >= timeout:
          raise
        if self._progress and hosts.is_first():
          status = f'{self._progress["trying"]}: still {self._progress["how"]}'
          print(f'{status} ({seconds:.0f} s of {timeout:g})', flush=True)
        continue
      if 'trying' not in reply:
        return reply
      self._progress = reply

  def _start_error(self, failure: BaseException | None) -> Exception:
    """Return the error that explains why no process became ready."""
    program, is_late = self._program, isinstance(failure, TimeoutError)
    event = f'was not ready after {program.timeout:g} s' if is_late else f'ended {failure}'
    if not self._progress:
      return RuntimeError(
        f'{program.noun} did not start (attempts: {program.starts}): the last process {event}'
      )
    return InputError(
      f'{self._progress["trying"]} cannot be used (the process {event} while '
      f'{self._progress["how"]}). {program.noun.capitalize()} has {program.timeout:g} s'
      f'{program.timeout_note} to import the code it calls and run it once.'
    )

  def _start_standby(self) -> None:
    with self._lock:
      if self._stopped:
        raise concurrent.futures.CancelledError
      if self._standby is None:
        limit, setup = self._program.memory_limit, self._program.setup
        first_line = {'parent': os.getpid(), 'memory_limit': limit, 'setup': setup}
        self._standby = WorkerProcess(self._program.command, first_line, START_TIMEOUT)


@functools.cache  # several workers have the same warning
def _warn_once(message: str) -> None:
  hosts.warn(message)


class Pool:
  """A program's workers, with one thread per worker.

  A process starts when a call first needs it. It ends when `close` is called or when the thread
  that started it ends, so it never outlives its parent process.
  """

  def __init__(self, program: Program, count: int = 1) -> None:
    self._workers = [Worker(program) for _ in range(count)]
    # Last in, first out: the worker used last has a running process.
    self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
    for worker in reversed(self._workers):
      self._free.put(worker)
    self._threads = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix='worker')

  def submit(self, use: Callable[[Worker], _T]) -> concurrent.futures.Future[_T]:
    """Call `use` in a thread with exclusive access to a worker. Calls start in submission order."""

    def lend() -> _T:
      worker = self._free.get()
      try:
        return use(worker)
      finally:
        self._free.put(worker)

    return self._threads.submit(lend)

  def close(self) -> None:
    """Cancel all calls and kill the processes immediately."""
    self._threads.shutdown(wait=False, cancel_futures=True)
    for worker in self._workers:
      worker.stop()  # threads that wait for a process return now
    self._threads.shutdown()
    for worker in self._workers:
      worker.close()
