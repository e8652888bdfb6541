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
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.datatypes import Question
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.settings import Config
from exgrpo_jax.environments.worker import Beginning
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine, worker_slot
from exgrpo_jax.runtime.worker_process import WorkerProcess
from exgrpo_jax.runtime.worker_slot import Program, UnusableError, WorkerSlot

COMMAND = worker_slot.command('exgrpo_jax.environments.worker')

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
    requests = [
      {'key': '', 'begin': dataclasses.asdict(beginning(question, 0, False)), 'said': ()}
      for question in questions
    ]
    replies = self._all(questions, requests, 'reset fails on')
    return [reply['messages'] for reply in replies]

  def demonstrations(
    self, questions: Sequence[Question], seeds: Sequence[int], turns: int
  ) -> list[list[tuple[str, Observation]]]:
    """Episodes that the environment plays by itself; InputError where it cannot."""
    requests = [
      {'begin': dataclasses.asdict(beginning(question, seed)), 'turns': turns}
      for question, seed in zip(questions, seeds, strict=True)
    ]
    replies = self._all(questions, requests, 'no episode is played on')
    return [[(text, Observation(*said)) for text, said in reply['episode']] for reply in replies]

  def tools(self) -> list[dict[str, Any]]:
    """What the chat template tells the model of its tools; none for most environments.

    Raises InputError where the class, or a tool, cannot be used.
    """
    return self._workers[0].tools().result()

  def _all(
    self,
    questions: Sequence[Question],
    requests: Sequence[Mapping[str, Any]],
    what: str,
  ) -> list[Mapping[str, Any]]:
    """The replies to requests that concern no episode in flight, spread over the workers.

    InputError says `what` failed for which question and why.
    """
    asked = [
      self._workers[number % len(self._workers)].ask(request)
      for number, request in enumerate(requests)
    ]
    replies = list[Mapping[str, Any]]()
    for question, future in zip(questions, asked, strict=True):
      if isinstance(reply := future.result(), Failure):
        raise InputError(f'config.environment.name: {what} row {question.row}: {reply.reason}')
      replies.append(reply)
    return replies


@functools.cache
def of(config: Config) -> Pool:
  """The pool of a config: one for a run's steps and its evaluations."""
  return Pool(config)


def beginning(question: Question, seed: int, is_known: bool = True) -> Beginning:
  """What an episode on a question begins with, whose prompt may be known already."""
  prompt = [message._asdict() for message in question.messages]
  told = [message._asdict() for message in question.told] or prompt
  task = Task(question.row, told, question.answer, question.columns, question.kind)
  return Beginning(tuple(task), seed, prompt if is_known else None)


class _Worker:
  """A process, replaced when it dies, and the thread that waits for it."""

  def __init__(self, config: Config) -> None:
    self._time_limit = config.time_limit
    setup = {
      'parent': os.getpid(),
      'memory_limit': config.memory_limit,
      'spec': config.spec,
      'tools': config.tools,
    }
    self._slot = WorkerSlot(Program(COMMAND, 'an environment process', setup), starts=1)
    self._process: WorkerProcess | None = None  # the one that holds the episodes
    self._held: set[str] = set()  # these
    # The thread lives as long as this process: a worker ends with the thread that started it.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='environment')
    self.waiting = 0  # turns that wait for the thread

  def tools(self) -> concurrent.futures.Future[list[dict[str, Any]]]:
    """The tools, described; the future raises InputError where they or the class are of no use."""

    def described() -> list[dict[str, Any]]:
      self._ready()
      return self._slot.greeting['tools']

    return self._thread.submit(described)

  def ask(
    self, request: Mapping[str, Any]
  ) -> concurrent.futures.Future[Mapping[str, Any] | Failure]:
    """The reply to a request as worker.py takes it."""
    return self._thread.submit(self._reply, lambda: request)

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
      return {'key': key, 'begin': dataclasses.asdict(begin), 'said': said}

    reply = self._reply(request)
    self.waiting -= 1
    seconds = time.monotonic() - started
    if isinstance(reply, Failure):
      self._held.discard(key)
      return Answer(key, reply, seconds)
    observation = Observation(**reply)
    (self._held.discard if observation.done else self._held.add)(key)
    return Answer(key, observation, seconds)

  def _leave(self, key: str) -> None:
    if key in self._held:
      self._held.discard(key)
      self._reply(lambda: {'key': key, 'begin': None, 'said': ()})

  def _reply(self, make_request: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | Failure:
    """The reply to a request, which is made anew for each process that is asked."""
    failure = Failure('crashed', '')
    for _ in range(_MAX_DEATHS):
      process = self._ready()
      request = make_request()
      turns = 1 + request.get('turns', len(request.get('said', ())))
      try:
        reply = self._slot.ask(process, request, time.monotonic() + self._time_limit * turns)
      except TimeoutError:
        self._slot.drop()
        return Failure('timed out', f'no answer after {self._time_limit:g} s')
      except EOFError as error:
        self._slot.drop()
        failure = Failure('crashed', f'{_MAX_DEATHS} workers died of it, the last {error}')
      else:
        if reply.pop('must_be_replaced', False):
          self._slot.drop()
        return Failure('crashed', reply['reason']) if 'reason' in reply else reply
    return failure

  def _ready(self) -> WorkerProcess:
    """The process, waiting for a request; raises InputError where it cannot be used."""
    try:
      process = self._slot.ready()
    except UnusableError as error:
      raise InputError(str(error)) from error
    if process is not self._process:
      self._process = process
      self._held.clear()
    return process
