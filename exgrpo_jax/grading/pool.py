"""A pool of worker processes that grade responses while others are still being generated.

Each response is judged by a worker (worker.py) under a wall-clock limit. The limit is enforced
from here: a worker that exceeds it is killed and replaced, so a response may hang or crash its
worker without harm. Each worker has a thread that waits for it. Several hosts share the work: all
submit the same responses in the same order, and all get all verdicts.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Self

from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import code_blocks, verifier
from exgrpo_jax.grading.worker_process import START_TIMEOUT, WorkerProcess
from exgrpo_jax.runtime import activity, hosts

# -P: the worker's search path is ours, without the folder that it happens to start in.
COMMAND = (sys.executable, '-P', '-m', 'exgrpo_jax.grading.worker')

_MAX_AUTO_WORKERS = 16  # where the number of cores decides; more gain nothing
_STANDBY_DELAY = 0.1  # seconds; a response that takes longer may hang, so a standby is started
_MAX_STARTS = 3  # attempts to start a worker
_MAX_DEATHS = 2  # workers that may die of a response before it is taken for the cause


@dataclasses.dataclass(frozen=True)
class Config:
  """The pool of workers, and what one response may cost them."""

  workers: int = setting(
    '[0, inf)', f'worker processes; 0 means one per core, {_MAX_AUTO_WORKERS} at most'
  )
  time_limit: float = setting('(0, inf)', 'seconds to judge a response; then its worker is killed')
  memory_limit: int = setting('[1, inf)', 'MiB of memory that a worker may use to judge responses')
  max_length: int = setting(
    '[1, inf)',
    'characters of a response that are judged: a longer one is cut at the start of its thought, '
    "and has no answer where what follows the last '</think>' is longer too",
  )
  max_failures: float = setting(
    '[0, 1]', "share of a step's responses that may time out or crash before a warning"
  )
  reward: str = setting(
    None,
    "'package.module:function' of (response, answer, outcome) that returns a finite number, e.g. "
    "'exgrpo_jax.grading.rewards:think_format'; '' means 1 for a correct response, else 0",
  )


class Grader:
  """Grades responses in a pool of workers; use it as a context manager.

  Workers start when the first responses come. If one dies while it judges a response, for
  example because it was killed from outside, another worker judges that response again.
  """

  def __init__(self, config: Config, verifier_config: verifier.Config) -> None:
    count = config.workers or min(_count_cores(), _MAX_AUTO_WORKERS)
    self._slots = [_Slot(config, verifier_config) for _ in range(count)]
    # Last in, first out: the slot used last has a running worker.
    self._free: queue.LifoQueue[_Slot] = queue.LifoQueue()
    for slot in reversed(self._slots):
      self._free.put(slot)
    self._threads = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix='grader')
    # None where another host judges the response.
    self._pending: dict[Hashable, concurrent.futures.Future[Verdict] | None] = {}

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._threads.shutdown(wait=False, cancel_futures=True)
    for slot in self._slots:
      slot.stop()  # threads that wait for a worker return now
    self._threads.shutdown()
    for slot in self._slots:
      slot.close()

  def submit(
    self,
    key: Hashable,
    response: Callable[[], str],
    answer: str,
    kind: str = 'math',
    check_steps: Callable[[str], bool] | None = None,
  ) -> None:
    """Starts judging a response; `collect` returns its verdict under `key`.

    Args:
      key: identifies the response until the next `collect`.
      response: returns the response's text. It is called in a thread, and only on the host that
        judges the response.
      answer: the ground truth.
      kind: how answers are compared, one of verifier.KINDS.
      check_steps: whether each step of a response's text is right; it decides nothing, and is
        called in the thread too. None where that cannot be checked.

    Raises:
      KeyError: `key` already awaits a verdict.
    """
    if key in self._pending:
      raise KeyError(f'a response with key {key!r} is already being graded')
    self._pending[key] = self._start(len(self._pending), response, answer, kind, check_steps)

  def progress(self) -> str:
    """How many of the responses submitted since the last `collect` this host has judged."""
    return _progress(list(self._pending.values()))

  def collect(self) -> dict[Hashable, Verdict]:
    """Waits for everything submitted since the last call; returns it in that order."""
    pending, self._pending = self._pending, {}
    return dict(zip(pending, _gather(pending.values())))

  def grade(
    self, responses: Sequence[str], answers: Sequence[str], kinds: Sequence[str] | None = None
  ) -> list[Verdict]:
    """Judges responses and waits for the verdicts; leaves alone what was submitted.

    Args:
      responses: their texts.
      answers: the ground truth of each.
      kinds: how the answers of each are compared, of verifier.KINDS; 'math' by default.

    Returns:
      A verdict for each response, in their order.

    Raises:
      ValueError: the arguments differ in length.
    """
    kinds = ['math'] * len(answers) if kinds is None else kinds
    return _gather(
      [
        self._start(number, lambda text=text: text, answer, kind)
        for number, (text, answer, kind) in enumerate(zip(responses, answers, kinds, strict=True))
      ]
    )

  def _start(
    self,
    number: int,
    response: Callable[[], str],
    answer: str,
    kind: str,
    check_steps: Callable[[str], bool] | None = None,
  ) -> concurrent.futures.Future[Verdict] | None:
    if not hosts.is_own_share(number):
      return None
    return self._threads.submit(self._judge, response, answer, kind, check_steps)

  def _judge(
    self,
    response: Callable[[], str],
    answer: str,
    kind: str,
    check_steps: Callable[[str], bool] | None,
  ) -> Verdict:
    slot = self._free.get()
    try:
      text = response()
      verdict = slot.judge(text, answer, kind)
    finally:
      self._free.put(slot)
    # Here and not by whoever reads verdicts: texts are decoded once, and by one host.
    return verdict._replace(
      has_code_block=code_blocks.has_code_block(text),
      valid_steps=check_steps(text) if check_steps else None,
    )


def check(config: Config, verifier_config: verifier.Config) -> None:
  """Starts a worker once; raises InputError where `config.reward` cannot be used."""
  with contextlib.closing(_Slot(config, verifier_config)) as slot:
    slot.start()


def refuse_all_failed(where: str, verdicts: Sequence[Verdict]) -> None:
  """Raises InputError if no response at all could be graded, with the first reason.

  Such rewards teach nothing. A few failures may be the responses' own doing, and are a warning.
  """
  if verdicts and all(verdict.outcome in FAILURES for verdict in verdicts):
    raise InputError(
      f'{where}: grading failed for all {len(verdicts)} responses, so the run stops. The first '
      f'reason: {verdicts[0].reason}. See config.grading (reward, time_limit, memory_limit); the '
      'same command resumes from the newest checkpoint.'
    )


def _gather(futures: Iterable[concurrent.futures.Future[Verdict] | None]) -> list[Verdict]:
  """Waits for this host's verdicts; returns those of all hosts."""
  own = [future for future in futures if future is not None]
  with activity.doing(lambda: _progress(own)):
    verdicts = [future.result() for future in own]
  return [Verdict._make(fields) for fields in hosts.merge_shares(verdicts)]


def _progress(futures: Sequence[concurrent.futures.Future[Verdict] | None]) -> str:
  own = [future for future in futures if future is not None]
  return f'{sum(future.done() for future in own)} of {len(own)} graded' if own else ''


class _Slot:
  """A place for one worker, which is replaced when it dies.

  Only one thread at a time may call `judge` and `start`; another may call `stop`.
  """

  def __init__(self, config: Config, verifier_config: verifier.Config) -> None:
    self._config, self._verifier_config = config, verifier_config
    self._worker: WorkerProcess | None = None
    self._standby: WorkerProcess | None = None  # started ahead, because its imports take a while
    self._stopped = False
    self._lock = threading.Lock()  # guards these three

  def judge(self, response: str, answer: str, kind: str) -> Verdict:
    """The verdict on a response, also where it kills or blocks its worker."""
    reason = ''
    for _ in range(_MAX_DEATHS):
      worker = self._worker
      if worker is None or not worker.is_idle():
        worker = self.start()
      try:
        return self._request(worker, [response, answer, kind])
      except EOFError as error:
        reason = str(error)
        self._drop()
      except TimeoutError:
        self._drop()
        limit = f'{self._config.time_limit:g} s'
        return Verdict(reward=0.0, outcome='timed out', reason=f'no verdict after {limit}')
    reason = f'{_MAX_DEATHS} workers died of it, the last {reason}'
    return Verdict(reward=0.0, outcome='crashed', reason=reason)

  def start(self) -> WorkerProcess:
    """Replaces the worker, by the standby if there is one, and waits until it is ready."""
    reason = ''
    for _ in range(_MAX_STARTS):
      self._drop()
      self._start_standby()
      with self._lock:
        worker, self._standby = self._standby, None
        self._worker = worker
      assert worker is not None  # only this thread takes the standby
      try:
        refusal = worker.receive(time.monotonic() + START_TIMEOUT).get('refused')
      except (EOFError, TimeoutError) as error:
        reason = str(error)
        continue
      if refusal:
        raise InputError(
          f'config.grading.reward={self._config.reward!r} cannot be used ({refusal}): it must '
          "be 'package.module:function', importable where the run is started, of (response, "
          'answer, outcome), and return a finite number for any response, such as '
          'exgrpo_jax.grading.rewards:think_format.'
        )
      return worker
    raise RuntimeError(f'{_MAX_STARTS} grading workers in a row did not start: {reason}')

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

  def _request(self, worker: WorkerProcess, request: list[str]) -> Verdict:
    deadline = time.monotonic() + self._config.time_limit
    worker.send(request, deadline)
    try:
      reply = worker.receive(min(deadline, time.monotonic() + _STANDBY_DELAY))
    except TimeoutError:
      self._start_standby()
      reply = worker.receive(deadline)
    if reply['must_be_replaced']:
      self._drop()
    return Verdict(
      reward=reply['reward'],
      outcome=reply['outcome'],
      reason=reply['reason'],
      answer=reply['given'],
    )

  def _start_standby(self) -> None:
    with self._lock:
      if self._stopped:
        raise concurrent.futures.CancelledError
      if self._standby is None:
        self._standby = WorkerProcess(COMMAND, self._setup())

  def _setup(self) -> dict[str, Any]:
    """What the worker reads first: the fields of worker.Setup."""
    return {
      'parent': os.getpid(),
      'memory_limit': self._config.memory_limit,
      'max_length': self._config.max_length,
      'reward': self._config.reward,
      'verifier': dataclasses.asdict(self._verifier_config),
    }

  def _drop(self) -> None:
    with self._lock:
      worker, self._worker = self._worker, None
    if worker is not None:
      worker.close()


def _count_cores() -> int:
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
