"""A place for one worker process, which is replaced when it dies."""

import concurrent.futures
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.settings import Config
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.worker_process import WorkerProcess

# -P: the worker's search path is ours, without the folder that it happens to start in.
COMMAND = (sys.executable, '-P', '-m', 'exgrpo_jax.grading.worker')

START_TIMEOUT = 60.0  # seconds until a worker must be ready: it may import the user's code
_SAY_EVERY = 10.0  # seconds, while a worker gets ready
_STANDBY_DELAY = 0.1  # seconds; a response that takes longer may hang, so a standby is started
_MAX_STARTS = 3  # attempts to start a worker


class UnusableError(RuntimeError):
  """A reward or a verifier that hangs, or ends its process, as it is imported or tried."""


class WorkerSlot:
  """Asks a worker, which it starts where there is none.

  Only one thread at a time may call `ask` and `start`; another may call `stop`.
  """

  def __init__(
    self, setup: Mapping[str, Any], timeout: float, starts: int, standby_delay: float
  ) -> None:
    """Starts nothing yet.

    Args:
      setup: the fields of worker.Setup.
      timeout: seconds until a worker must be ready.
      starts: how many attempts to start one may fail in a row.
      standby_delay: seconds after which a request makes the slot start another worker ahead.
    """
    self._setup, self._timeout, self._starts = dict(setup), timeout, starts
    self._standby_delay = standby_delay
    self._asks: frozenset[str] = frozenset()  # names of facts, once a worker is ready
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
      InputError: a reward or the verifier cannot be used.
      RuntimeError: no worker got ready; an UnusableError where that is a reward's or a verifier's
        doing. Its cause is a TimeoutError where the time was over.
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
        self._asks = frozenset(reply['asks'])
        return worker
    raise self._explained(failure) from failure

  def ask(self, worker: WorkerProcess, request: Sequence[Any], deadline: float) -> dict[str, Any]:
    """What the worker replies; raises as WorkerProcess.receive does, in time.monotonic()."""
    worker.send(request, deadline)
    try:
      return worker.receive(min(deadline, time.monotonic() + self._standby_delay))
    except TimeoutError:
      if time.monotonic() >= deadline:
        raise
    self._start_standby()
    return worker.receive(deadline)

  def asked(self, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that the worker's rewards ask for, as JSON can hold them; after `ready`."""
    return {
      name: value.tolist() if isinstance(value, np.ndarray) else value
      for name, value in facts.items()
      if name in self._asks
    }

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
        reply = worker.receive(min(started + self._timeout, time.monotonic() + _SAY_EVERY))
      except TimeoutError:
        waited = time.monotonic() - started
        if waited >= self._timeout:
          raise
        if self._trying and hosts.is_first():
          doing = f'{self._trying["trying"]}: still {self._trying["how"]}'
          print(f'{doing} ({waited:.0f} s of {self._timeout:g})', flush=True)
      else:
        if 'trying' not in reply:
          return reply
        self._trying = reply

  def _explained(self, failure: BaseException | None) -> RuntimeError:
    """Why no worker got ready."""
    late = f'not ready after {self._timeout:g} s'
    reason = late if isinstance(failure, TimeoutError) else f'its process ended {failure}'
    if not self._trying:
      return RuntimeError(f'a grading process did not start (attempts: {self._starts}): {reason}')
    more = ' (config.grading.batch_timeout included)' if self._setup['is_batched'] else ''
    return UnusableError(
      f'{self._trying["trying"]} cannot be used ({reason}, while {self._trying["how"]}): a grading '
      f'process has {self._timeout:g} s{more} to import what it calls and to try it.'
    )

  def _start_standby(self) -> None:
    with self._lock:
      if self._stopped:
        raise concurrent.futures.CancelledError
      if self._standby is None:
        self._standby = WorkerProcess(COMMAND, self._setup, START_TIMEOUT)


def of_responses(
  config: Config,
  required: verifier.Config,
  row: Mapping[str, Any] | None = None,
  starts: int = _MAX_STARTS,
) -> WorkerSlot:
  """A slot whose worker judges responses, one at a time, under the limits of `config`.

  `row` is one of the data, to try the rewards that read it; None tries the others. `starts` as in
  WorkerSlot.
  """
  specs = [spec for spec in config.rewards if spec not in config.batched]
  setup = _setup(config, required, specs, row) | {'memory_limit': config.memory_limit}
  return WorkerSlot(setup, START_TIMEOUT, starts, _STANDBY_DELAY)


def of_batches(
  config: Config, required: verifier.Config, row: Mapping[str, Any] | None = None
) -> WorkerSlot:
  """A slot whose process calls `config.batched`; `row` as for `of_responses`.

  It may load a model: no limit on its memory, no second process beside it, more time to start.
  """
  setup = _setup(config, required, config.batched, row) | {'is_batched': True}
  return WorkerSlot(setup, START_TIMEOUT + config.batch_timeout, 1, math.inf)


def _setup(
  config: Config,
  required: verifier.Config,
  specs: Sequence[str],
  row: Mapping[str, Any] | None,
) -> dict[str, Any]:
  """What the worker reads first: the fields of worker.Setup."""
  return {
    'parent': os.getpid(),
    'memory_limit': 0,
    'max_length': config.max_length,
    'verifier': config.verifier,
    'rewards': specs,
    'is_batched': False,
    'overlong_buffer': config.overlong_buffer,
    'row': row,
    'required': dataclasses.asdict(required),
  }
