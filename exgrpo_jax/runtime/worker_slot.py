"""A place for one worker process, which is replaced when it dies."""

import concurrent.futures
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.worker_process import WorkerProcess

START_TIMEOUT = 60.0  # seconds until a worker must be ready: it may import the user's code
_SAY_EVERY = 10.0  # seconds, while a worker gets ready


class UnusableError(RuntimeError):
  """A user's code that hangs, or ends its process, as it is imported or tried."""


@dataclasses.dataclass(frozen=True)
class Program:
  """What a worker runs.

  It is sent `setup`. Before it imports or tries a user's code it says {'trying': a setting, 'how':
  …}, and then {'refused': what is wrong with it} or whatever else, and is ready.
  """

  command: Sequence[str]
  noun: str  # for messages: 'a grading process'
  setup: Mapping[str, Any]
  timeout: float = START_TIMEOUT  # seconds until it must be ready
  timeout_note: str = ''  # what the timeout contains, for messages


def command(module: str) -> tuple[str, ...]:
  """What runs a module of ours; -P: it does not search the folder that it happens to start in."""
  return sys.executable, '-P', '-m', module


class WorkerSlot:
  """Asks a worker, which it starts where there is none.

  Only one thread at a time may call `ask` and `start`; another may call `stop`.
  """

  def __init__(self, program: Program, starts: int, standby_delay: float = math.inf) -> None:
    """Starts nothing yet.

    Args:
      program: what each worker runs.
      starts: how many attempts to start one may fail in a row.
      standby_delay: seconds after which a request makes the slot start another worker ahead.
    """
    self._program, self._starts = program, starts
    self._standby_delay = standby_delay
    self.greeting: Mapping[str, Any] = {}  # what the worker said when it was ready
    self._trying: dict[str, Any] = {}  # what the starting worker said last
    self._worker: WorkerProcess | None = None
    self._standby: WorkerProcess | None = None  # started ahead, because its imports take a while
    self._stopped = False
    self._lock = threading.Lock()  # guards these three

  def ready(self) -> WorkerProcess:
    """A worker that waits for a request; raises as `start` does."""
    worker = self._worker
    return worker if worker is not None and worker.is_idle() else self.start()

  def start(self) -> WorkerProcess:
    """Replaces the worker, by the standby if there is one, and waits until it is ready.

    Raises:
      InputError: the worker refuses what it imported.
      RuntimeError: no worker got ready; an UnusableError where that is the doing of what it
        imported. Its cause is a TimeoutError where the time was over.
    """
    failure = None
    for _ in range(self._starts):
      self.drop()
      self._start_standby()
      with self._lock:
        worker, self._standby = self._standby, None
        self._worker = worker
      assert worker is not None  # only this thread takes the standby
      try:
        reply = self._first_reply(worker)
      except (EOFError, TimeoutError) as error:
        failure = error
      else:
        if 'refused' in reply:
          raise InputError(reply['refused'])
        self.greeting = reply
        return worker
    raise self._explained(failure) from failure

  def ask(self, worker: WorkerProcess, request: Any, deadline: float) -> dict[str, Any]:
    """What the worker replies; raises as WorkerProcess.receive does, in time.monotonic()."""
    worker.send(request, deadline)
    try:
      return worker.receive(min(deadline, time.monotonic() + self._standby_delay))
    except TimeoutError:
      if time.monotonic() >= deadline:
        raise
    self._start_standby()
    return worker.receive(deadline)

  def drop(self) -> None:
    """Kills the worker; the next request starts another."""
    with self._lock:
      worker, self._worker = self._worker, None
    if worker is not None:
      worker.close()

  def stop(self) -> None:
    """Kills the workers for good."""
    with self._lock:
      self._stopped = True
      for worker in filter(None, (self._worker, self._standby)):
        worker.kill()

  def close(self) -> None:
    """Kills the workers for good and frees their sockets."""
    self.stop()
    for worker in filter(None, (self._worker, self._standby)):
      worker.close()

  def _first_reply(self, worker: WorkerProcess) -> dict[str, Any]:
    """The worker's reply once it is ready; meanwhile says now and then what it waits for."""
    started, self._trying = time.monotonic(), {}
    while True:
      try:
        reply = worker.receive(min(started + self._program.timeout, time.monotonic() + _SAY_EVERY))
      except TimeoutError:
        waited = time.monotonic() - started
        if waited >= self._program.timeout:
          raise
        if self._trying and hosts.is_first():
          doing = f'{self._trying["trying"]}: still {self._trying["how"]}'
          print(f'{doing} ({waited:.0f} s of {self._program.timeout:g})', flush=True)
      else:
        if 'trying' not in reply:
          return reply
        self._trying = reply

  def _explained(self, failure: BaseException | None) -> RuntimeError:
    """Why no worker got ready."""
    noun, timeout = self._program.noun, self._program.timeout
    late = f'not ready after {timeout:g} s'
    reason = late if isinstance(failure, TimeoutError) else f'its process ended {failure}'
    if not self._trying:
      return RuntimeError(f'{noun} did not start (attempts: {self._starts}): {reason}')
    return UnusableError(
      f'{self._trying["trying"]} cannot be used ({reason}, while {self._trying["how"]}): {noun} '
      f'has {timeout:g} s{self._program.timeout_note} to import what it calls and to try it.'
    )

  def _start_standby(self) -> None:
    with self._lock:
      if self._stopped:
        raise concurrent.futures.CancelledError
      if self._standby is None:
        self._standby = WorkerProcess(self._program.command, self._program.setup, START_TIMEOUT)
