"""Grading beside the rollout, in processes that may hang, crash or be killed without harm.

Every response is judged by a worker process (worker.py) under a wall-clock limit that
is kept from here: a worker over it is killed, and another goes on. A thread for each
worker waits for it, so that responses are judged while others still decode. Several hosts
share the work: all submit the same responses in the same order, and get all verdicts.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier
from exgrpo_jax.runtime import hosts

# -P: the worker's search path is ours, without the folder that it happens to start in.
COMMAND = (sys.executable, '-P', '-m', 'exgrpo_jax.grading.worker')

_MOST_WORKERS = 16  # where the cores decide; a host of hundreds needs no more
_SLOW = 0.1  # seconds after which a response may be one that hangs, and a standby is started
_START_LIMIT = 60.0  # seconds until a worker must be ready: it may import the user's reward
_STARTS = 3  # attempts to start a worker
_DEATHS = 2  # of workers that hold a response, until it is taken for the cause
_REPLY = 65536  # bytes, at most


@dataclasses.dataclass(frozen=True)
class Config:
  """The pool of workers, and what they pay for a response."""

  workers: int = setting('[0, inf)', f'worker processes; 0 is one a core, {_MOST_WORKERS} at most')
  time_limit: float = setting('(0, inf)', 'seconds for a response, then its worker is killed')
  memory_limit: int = setting('[1, inf)', 'MiB that judging may take in a worker')
  max_length: int = setting(
    '[1, inf)',
    'characters of a response that are judged: of a longer one '
    "what follows the last '</think>', and no answer where that too is "
    'longer',
  )
  max_failures: float = setting(
    '[0, 1]', "share of a step's responses that may time out or crash before it is said loudly"
  )
  reward: str = setting(
    None,
    "'package.module:function' of (response, answer, outcome) that gives "
    "a finite number, e.g. 'exgrpo_jax.grading.rewards:think_format'; '' is 1 for a "
    'correct response, else 0',
  )


class Grader:
  """A pool of workers around the verifier; use it as a context manager.

  Workers start when responses come. One that dies in the middle of a response, as
  when it is killed from outside, has it judged once more by another.
  """

  def __init__(self, config: Config, verifier_config: verifier.Config):
    count = config.workers or min(_cores(), _MOST_WORKERS)
    self._slots = [_Slot(config, verifier_config) for _ in range(count)]
    self._free = queue.LifoQueue()  # the last one used has its worker already
    for slot in reversed(self._slots):
      self._free.put(slot)
    self._pool = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix='grader')
    # None where another host judges it.
    self._pending: dict[Hashable, concurrent.futures.Future[Verdict] | None] = {}

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._pool.shutdown(wait=False, cancel_futures=True)
    for slot in self._slots:
      slot.stop()  # who waits for a worker now sees it end
    self._pool.shutdown()
    for slot in self._slots:
      slot.close()

  def submit(
    self, key: Hashable, response: Callable[[], str], answer: str, kind: str = 'math'
  ) -> None:
    """Starts judging one response; `collect` gives its verdict under `key`.

    `response()` is its text; it is made here, in a thread, and of several hosts only on the one
    that judges it. `kind` is one of verifier.KINDS: how the answer is compared. Raises KeyError
    where `key` awaits a verdict already.
    """
    if key in self._pending:
      raise KeyError(f'a response with key {key!r} is being graded already')
    self._pending[key] = self._begun(len(self._pending), response, answer, kind)

  def collect(self) -> dict[Hashable, Verdict]:
    """Waits for everything submitted since the last call; in order of submission."""
    pending, self._pending = self._pending, {}
    return dict(zip(pending, _everywhere(pending.values())))

  def grade(
    self, responses: Sequence[str], answers: Sequence[str], kinds: Sequence[str] | None = None
  ) -> list[Verdict]:
    """Verdicts of responses against the answers at the same places.

    `kinds` as in `submit`, for each. Leaves alone what was submitted and not collected.
    Raises ValueError where they are not equally long.
    """
    kinds = ['math'] * len(answers) if kinds is None else kinds
    return _everywhere(
      [
        self._begun(number, lambda text=text: text, answer, kind)
        for number, (text, answer, kind) in enumerate(zip(responses, answers, kinds, strict=True))
      ]
    )

  def _begun(self, number, response, answer, kind):
    if not hosts.is_own_share(number):
      return None
    return self._pool.submit(self._verdict, response, answer, kind)

  def _verdict(self, response, answer, kind):
    slot = self._free.get()
    try:
      return slot.verdict(response(), answer, kind)
    finally:
      self._free.put(slot)


def check(config: Config, verifier_config: verifier.Config) -> None:
  """Starts a worker once; InputError where `config.reward` cannot be used."""
  with contextlib.closing(_Slot(config, verifier_config)) as slot:
    slot.start()


def _everywhere(futures) -> list[Verdict]:
  """All verdicts, on every host."""
  own = [future.result() for future in futures if future is not None]
  return [Verdict(*verdict) for verdict in hosts.merge_shares(own)]


class _Slot:
  """The place of one worker: who is in it changes, what is asked of it is answered.

  One thread at a time asks; `stop` may be called from another.
  """

  def __init__(self, config: Config, verifier_config: verifier.Config):
    self._config, self._verifier = config, verifier_config
    self._worker: _Worker | None = None
    self._standby: _Worker | None = None  # started ahead, for it takes a while to import
    self._stopped = False
    self._lock = threading.Lock()  # over the three

  def verdict(self, response: str, answer: str, kind: str) -> Verdict:
    for _ in range(_DEATHS):
      if self._worker is None or not self._worker.is_idle():
        self.start()
      try:
        return self._asked([response, answer, kind])
      except EOFError as error:
        reason = str(error)
        self._drop()
      except TimeoutError:
        self._drop()
        return Verdict(0.0, 'timed out', f'no verdict after {self._config.time_limit:g} s')
    return Verdict(0.0, 'crashed', f'{_DEATHS} workers died of it, the last {reason}')

  def start(self) -> None:
    """Puts a fresh worker in place and waits until it is ready; the standby where there is one."""
    for _ in range(_STARTS):
      self._drop()
      self._start_standby()
      with self._lock:
        self._worker, self._standby = self._standby, None
      try:
        refused = self._worker.receive(time.monotonic() + _START_LIMIT).get('refused')
      except (EOFError, TimeoutError) as error:
        reason = str(error)
        continue
      if refused:
        raise InputError(
          f'config.grading.reward={self._config.reward!r} cannot be used ({refused}): it must '
          "be 'package.module:function', importable where the run is started, of (response, "
          'answer, outcome), such as exgrpo_jax.grading.rewards:think_format.'
        )
      return
    raise RuntimeError(f'{_STARTS} grading workers in a row did not start: {reason}')

  def stop(self) -> None:
    """Kills the workers and starts no others."""
    with self._lock:
      self._stopped = True
      for worker in filter(None, (self._worker, self._standby)):
        worker.kill()

  def close(self) -> None:
    self.stop()
    for worker in filter(None, (self._worker, self._standby)):
      worker.close()

  def _asked(self, request):
    deadline = time.monotonic() + self._config.time_limit
    self._worker.send(request, deadline)
    try:
      found = self._worker.receive(min(deadline, time.monotonic() + _SLOW))
    except TimeoutError:
      self._start_standby()
      found = self._worker.receive(deadline)
    if found['spent']:
      self._drop()
    return Verdict(found['reward'], found['outcome'], found['reason'])

  def _start_standby(self):
    with self._lock:
      if self._stopped:
        raise concurrent.futures.CancelledError
      if self._standby is None:
        self._standby = _Worker(self._setup())

  def _setup(self):
    config = self._config
    return {
      'parent': os.getpid(),
      'memory_limit': config.memory_limit,
      'max_length': config.max_length,
      'reward': config.reward,
      'verifier': dataclasses.asdict(self._verifier),
    }

  def _drop(self):
    with self._lock:
      worker, self._worker = self._worker, None
    if worker is not None:
      worker.close()


class _Worker:
  """A process of COMMAND and the socket to it; lines of JSON, which nothing can be run from."""

  def __init__(self, setup):
    self._socket, theirs = socket.socketpair()
    self._read = b''
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with theirs:
      # A session of its own: Ctrl-C is the parent's, and a kill takes children along. Standard
      # output is our standard error, for ours may be somebody's result.
      self._process = subprocess.Popen(
        COMMAND,
        stdin=theirs,
        stdout=2,
        start_new_session=True,
        env=os.environ | {'PYTHONPATH': search_path},
      )
    with contextlib.suppress(EOFError):  # which `receive` will tell
      self.send(setup, time.monotonic() + _START_LIMIT)

  def is_idle(self) -> bool:
    """Whether it lives and has nothing more to say, as between two responses."""
    self._socket.setblocking(False)
    try:
      self._socket.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
      return True
    except OSError:
      pass
    return False

  def send(self, value, deadline: float) -> None:
    """Raises TimeoutError at the deadline (time.monotonic), EOFError where the worker is dead."""
    with self._told(deadline):
      self._socket.sendall(json.dumps(value).encode() + b'\n')

  def receive(self, deadline: float):
    """The next reply; raises as `send` does, and may be called again after TimeoutError."""
    while b'\n' not in self._read:
      with self._told(deadline):
        found = self._socket.recv(_REPLY)
      if not found or len(self._read) > _REPLY:
        self.kill()
        raise EOFError(f'with exit status {self._process.returncode}')
      self._read += found
    line, _, self._read = self._read.partition(b'\n')
    return json.loads(line)

  def kill(self) -> None:
    """Ends the process and all that it started; harmless where it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is a zombie
      if self._process.returncode is None:
        os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()

  def close(self) -> None:
    self.kill()
    self._socket.close()

  @contextlib.contextmanager
  def _told(self, deadline):
    """Gives the socket the time that is left, and its errors two names."""
    self._socket.settimeout(max(1e-6, deadline - time.monotonic()))  # 0 would mean another thing
    try:
      yield
    except TimeoutError:
      raise
    except OSError as error:
      self.kill()
      raise EOFError(f'with exit status {self._process.returncode}') from error


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
