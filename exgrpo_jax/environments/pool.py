"""Worker processes that hold environments, and answer turns while other episodes decode.

An episode stays with one worker. A worker that does not answer in time is killed: that episode has
failed, and the others that it held are played again in a new one, from their seeds and turns, when
their next turn comes. So an environment may hang, raise or end its process without harm to a run.
"""

import concurrent.futures
import dataclasses
import functools
import os
import queue
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.datatypes import Question
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.settings import Config
from exgrpo_jax.environments.worker import Beginning
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine
from exgrpo_jax.runtime.worker_process import WorkerProcess

# -P: the worker's search path is ours, without the folder that it happens to start in.
COMMAND = (sys.executable, '-P', '-m', 'exgrpo_jax.environments.worker')
_START_TIMEOUT = 60.0  # seconds until a worker must be ready: it imports the user's code
_MAX_DEATHS = 2  # workers that may die of an episode before it is taken for the cause


class Failure(NamedTuple):
  """Why an episode has no answer to its last turn."""

  outcome: str  # one of datatypes.FAILURES
  reason: str


class Answer(NamedTuple):
  """To the last turn of an episode."""

  key: str
  result: Observation | Failure
  seconds: float  # that the environment took

  def as_json(self) -> list[Any]:
    """For another host."""
    return [self.key, isinstance(self.result, Failure), list(self.result), self.seconds]

  @staticmethod
  def of_json(value: Sequence[Any]) -> 'Answer':
    """What `as_json` made into a value."""
    key, has_failed, result, seconds = value
    return Answer(key, (Failure if has_failed else Observation)(*result), seconds)


class Pool:
  """The workers of a config; they start when they are needed, and end with this process."""

  def __init__(self, config: Config) -> None:
    count = config.workers or machine.count_cores()
    self._workers = [_Worker(config) for _ in range(count)]
    self._worker_of: dict[str, _Worker] = {}  # by key, of episodes that go on
    self._answers: queue.SimpleQueue[concurrent.futures.Future[Answer]] = queue.SimpleQueue()

  def submit(self, key: str, begin: Beginning, said: Sequence[str]) -> None:
    """Asks for the answer to the last of an episode's turns; `answers` returns it under `key`."""
    if key not in self._worker_of:
      self._worker_of[key] = min(self._workers, key=lambda worker: worker.waiting)
    asked = self._worker_of[key].turn(key, begin, tuple(said))
    asked.add_done_callback(self._answers.put)

  def answers(self, wait: bool) -> list[Answer]:
    """The answers that have come since the last call; where `wait` is true, at least one."""
    found = [self._answers.get()] if wait else []
    while not self._answers.empty():
      found.append(self._answers.get())
    answers = [future.result() for future in found]
    for key, result, _ in answers:
      if isinstance(result, Failure) or result.done:
        del self._worker_of[key]
    return answers

  def leave(self, key: str) -> None:
    """Lets go of an episode that is not done and does not go on."""
    self._worker_of.pop(key).leave(key)

  def prompts(self, questions: Sequence[Question]) -> list[list[dict[str, str]]]:
    """What `reset` returns for each question; InputError where it fails."""
    requests = [{'key': '', 'begin': beginning(q, 0, False), 'said': ()} for q in questions]
    replies = self._all(questions, requests, 'reset fails on')
    return [reply['messages'] for reply in replies]

  def demonstrations(
    self, questions: Sequence[Question], seeds: Sequence[int], turns: int
  ) -> list[list[tuple[str, Observation]]]:
    """Episodes that the environment plays by itself; InputError where it cannot."""
    requests = [
      {'begin': beginning(question, seed), 'turns': turns}
      for question, seed in zip(questions, seeds, strict=True)
    ]
    remedy = '. Give the class a method demonstrate(rng), or set config.warm_start.num_updates=0.'
    replies = self._all(questions, requests, 'no episode to learn from for', remedy)
    return [[(text, Observation(*said)) for text, said in reply['episode']] for reply in replies]

  def tools(self) -> list[dict[str, Any]]:
    """What the chat template tells the model of its tools; none for most environments.

    Raises InputError where the class, or a tool, cannot be used.
    """
    self._workers[0].begin().result()
    return self._workers[0].tools

  def _all(
    self,
    questions: Sequence[Question],
    requests: Sequence[Mapping[str, Any]],
    what: str,
    remedy: str = '',
  ) -> list[Mapping[str, Any]]:
    """The replies to requests that concern no episode in flight, spread over the workers.

    InputError says `what` failed for which question, why, and the `remedy`.
    """
    asked = [
      self._workers[number % len(self._workers)].ask(request)
      for number, request in enumerate(requests)
    ]
    replies = list[Mapping[str, Any]]()
    for question, future in zip(questions, asked, strict=True):
      if isinstance(reply := future.result(), Failure):
        raise InputError(
          f'config.environment.name: {what} row {question.row}: {reply.reason}{remedy}'
        )
      replies.append(reply)
    return replies


@functools.cache
def of(config: Config) -> Pool:
  """The pool of a config: one for a run's steps and its evaluations."""
  return Pool(config)


def beginning(question: Question, seed: int, is_known: bool = True) -> Beginning:
  """What an episode on a question begins with, whose prompt may be known already."""
  messages = [message._asdict() for message in question.messages]
  task = Task(question.row, messages, question.answer, question.columns, question.kind)
  return Beginning(tuple(task), seed, messages if is_known else None)


class _Worker:
  """A process, replaced when it dies, and the thread that waits for it."""

  def __init__(self, config: Config) -> None:
    self._config = config
    # The thread lives as long as this process: a worker ends with the thread that started it.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='environment')
    self._process: WorkerProcess | None = None
    self.tools: list[dict[str, Any]] = []  # described, once it has begun
    self._held: set[str] = set()  # the episodes that the process holds
    self.waiting = 0  # turns and more that wait for the thread

  def begin(self) -> concurrent.futures.Future[WorkerProcess]:
    """Starts the process; the future raises InputError where the class cannot be used."""
    return self._thread.submit(self._ready)

  def ask(
    self, request: Mapping[str, Any]
  ) -> concurrent.futures.Future[Mapping[str, Any] | Failure]:
    """The reply to a request as worker.py takes it."""
    turns = 1 + request.get('turns', len(request.get('said', ())))
    return self._thread.submit(self._reply, lambda: request, turns)

  def turn(
    self, key: str, begin: Beginning, said: tuple[str, ...]
  ) -> concurrent.futures.Future[Answer]:
    """The answer to the last of the turns."""
    self.waiting += 1
    return self._thread.submit(self._turn, key, begin, said)

  def leave(self, key: str) -> None:
    """Lets go of an episode."""
    self._thread.submit(self._leave, key)

  def _turn(self, key: str, begin: Beginning, said: tuple[str, ...]) -> Answer:
    started = time.monotonic()

    def request() -> Mapping[str, Any]:
      if key in self._held:
        return {'key': key, 'begin': None, 'said': said[-1:]}
      return {'key': key, 'begin': begin, 'said': said}

    reply = self._reply(request, 1 if key in self._held else 1 + len(said))
    self.waiting -= 1
    seconds = time.monotonic() - started
    if isinstance(reply, Failure):
      self._held.discard(key)
      return Answer(key, reply, seconds)
    observation = Observation(**reply)
    (self._held.discard if observation.done else self._held.add)(key)
    return Answer(key, observation, seconds)

  def _leave(self, key: str) -> None:
    if key in self._held:  # else it went with its process
      self._held.discard(key)
      self._reply(lambda: {'key': key, 'begin': None, 'said': ()}, 1)

  def _reply(self, request: Any, turns: int) -> Mapping[str, Any] | Failure:
    """What the process says to `request()`, made anew where the process was lost."""
    limit, failure = self._config.time_limit, Failure('crashed', '')
    for _ in range(_MAX_DEATHS):
      process = self._ready()
      deadline = time.monotonic() + limit * turns
      try:
        process.send(_as_json(request()), deadline)
        reply = process.receive(deadline)
      except TimeoutError:
        self._drop()
        return Failure('timed out', f'no answer after {limit:g} s')
      except EOFError as error:
        self._drop()
        failure = Failure('crashed', f'{_MAX_DEATHS} workers died of it, the last {error}')
      else:
        if reply.pop('must_be_replaced', False):
          self._drop()
        return Failure('crashed', reply['reason']) if 'reason' in reply else reply
    return failure

  def _ready(self) -> WorkerProcess:
    """The process, waiting for a request; raises InputError where it cannot be used."""
    if self._process is not None and self._process.is_idle():
      return self._process
    self._drop()
    spec = self._config.spec
    setup = {
      'parent': os.getpid(),
      'memory_limit': self._config.memory_limit,
      'spec': spec,
      'tools': self._config.tools,
    }
    process = WorkerProcess(COMMAND, setup, _START_TIMEOUT)
    try:
      reply = process.receive(time.monotonic() + _START_TIMEOUT)
    except (EOFError, TimeoutError) as error:
      process.close()
      late = f'it was not ready after {_START_TIMEOUT:g} s'
      why = late if isinstance(error, TimeoutError) else f'its process ended {error}'
      raise InputError(f'config.environment.name: {spec!r} cannot be used: {why}.') from error
    if 'refused' in reply:
      process.close()
      raise InputError(
        f'config.environment.name: {spec!r} cannot be used ({reply["refused"]}): it must be '
        "'package.module:Class', importable where the run is started, and a class that is made "
        'without arguments, such as exgrpo_jax.environments.guess:Guess.'
      )
    self._process, self.tools = process, reply['tools']
    return process

  def _drop(self) -> None:
    process, self._process = self._process, None
    self._held.clear()
    if process is not None:
      process.close()


def _as_json(request: Mapping[str, Any]) -> Mapping[str, Any]:
  begin = request['begin']
  return request if begin is None else {**request, 'begin': dataclasses.asdict(begin)}
