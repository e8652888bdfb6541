"""Worker processes that run environments and answer turns while other episodes are being decoded.

An episode stays with one worker. A worker that does not answer in time is killed, and the episode
fails. The worker's other episodes are replayed in a new process, from their seeds and turns, when
their next turn is submitted. An environment can therefore hang, raise an error or kill its process
without affecting the rest of the run.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax.data import prompt
from exgrpo_jax.data.questions import check_prompts
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Message, Question, Questions, QuestionSet
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.settings import EnvironmentConfig
from exgrpo_jax.environments.worker import Beginning
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts, machine
from exgrpo_jax.workers import pool as workers
from exgrpo_jax.workers.pool import Failure, Worker

COMMAND = workers.command('exgrpo_jax.environments.worker')

_TRIAL = 'So it is 1.'  # a turn that a policy could write in any environment

Values = Mapping[str, Any]  # a request or reply; worker.py describes them


class Answer(NamedTuple):
  """The environment's answer to the last turn of an episode."""

  key: str
  result: Observation | Failure
  seconds: float  # time that the environment took

  def as_json(self) -> list[Any]:
    """Convert to JSON values for sending to another host."""
    return [self.key, isinstance(self.result, Failure), list(self.result), self.seconds]

  @staticmethod
  def of_json(value: Sequence[Any]) -> 'Answer':
    """Rebuild an answer from the output of `as_json`."""
    key, has_failed, result, seconds = value
    return Answer(key, (Failure if has_failed else Observation)(*result), seconds)


class Pool:
  """The workers for a config. They start on demand and exit with this process."""

  def __init__(self, config: EnvironmentConfig) -> None:
    self._name = config.name
    count = config.workers or machine.count_cores()
    self._holders = [_Holder(config) for _ in range(count)]
    self._holder_of: dict[str, _Holder] = {}  # unfinished episodes by key
    self._answers: queue.SimpleQueue[concurrent.futures.Future[Answer]] = queue.SimpleQueue()

  def submit(self, key: str, begin: Beginning, texts: Sequence[str]) -> None:
    """Request the answer to an episode's last turn; `answers` will return it under `key`."""
    if key not in self._holder_of:
      self._holder_of[key] = min(self._holders, key=lambda holder: holder.waiting)
    holder, turns = self._holder_of[key], tuple(texts)
    holder.waiting += 1
    future = holder.pool.submit(lambda worker: holder.turn(worker, key, begin, turns))
    future.add_done_callback(self._answers.put)

  def answers(self, wait: bool) -> list[Answer]:
    """Return the answers received since the last call. If `wait`, first wait for at least one."""
    futures = [self._answers.get()] if wait else []
    while not self._answers.empty():
      futures.append(self._answers.get())
    answers = [future.result() for future in futures]
    for key, result, _ in answers:
      if isinstance(result, Failure) or result.done:
        del self._holder_of[key]
    return answers

  def leave(self, key: str) -> None:
    """Drop an episode that stops early."""
    holder = self._holder_of.pop(key)
    holder.pool.submit(lambda worker: holder.leave(worker, key))

  def prompts(self, questions: Sequence[Question], spec: str) -> list[list[dict[str, str]]]:
    """Return each question's prompt from `reset`.

    Raises InputError, naming `spec`, if `reset` fails.
    """
    requests = [
      {'key': '', 'begin': dataclasses.asdict(beginning(question, 0, False)), 'texts': ()}
      for question in questions
    ]
    replies = self._send_all(questions, requests, f'reset failed for {spec},')
    return [reply['messages'] for reply in replies]

  def try_step(self, question: Question, spec: str) -> None:
    """Play one turn and drop the episode. If `step` fails, warn, because a run may tolerate it."""
    begin = dataclasses.asdict(beginning(question, 0, False))
    request = {'key': '', 'begin': begin, 'texts': [_TRIAL]}
    try:
      self._send_all([question], [request], f'step({_TRIAL!r}) failed for {spec},')
    except InputError as error:
      hosts.warn(f'{error} Such an episode counts as failed, with reward 0.')
    self._holders[0].ask({'key': '', 'begin': None, 'texts': ()})

  def demonstrations(
    self, questions: Sequence[Question], seeds: Sequence[int], turns: int
  ) -> list[list[tuple[str, Observation]]]:
    """Return one episode per question, played by `demonstrate`. Raises InputError if one fails."""
    requests = [
      {'begin': dataclasses.asdict(beginning(question, seed)), 'turns': turns}
      for question, seed in zip(questions, seeds, strict=True)
    ]
    replies = self._send_all(questions, requests, 'playing an episode failed for')
    return [
      [(text, Observation(*fields)) for text, fields in reply['episode']] for reply in replies
    ]

  def tools(self) -> list[dict[str, Any]]:
    """Return the tool descriptions for the chat template. Most environments have no tools.

    Raises InputError if the class or a tool cannot be used.
    """

    def read_tools(worker: Worker) -> list[dict[str, Any]]:
      worker.ready()
      return worker.greeting['tools']

    return self._holders[0].pool.submit(read_tools).result()

  def _send_all(
    self, questions: Sequence[Question], requests: Sequence[Values], what: str
  ) -> list[Values]:
    """Distribute requests that are not part of an episode among all workers; return the replies.

    If a request fails, raises InputError; its message contains `what`, the question's row and the
    reason.
    """
    holders = itertools.cycle(self._holders)
    futures = [holder.ask(request) for holder, request in zip(holders, requests)]
    replies = list[Values]()
    for question, future in zip(questions, futures, strict=True):
      if isinstance(reply := future.result(), Failure):
        raise InputError(
          f'config.environment.name={self._name}: {what} row {question.row} ({reply.reason}). '
          'Correct the environment or the row.'
        )
      replies.append(reply)
    return replies


@functools.cache
def shared_pool(config: EnvironmentConfig) -> Pool:
  """Return the pool for a config. A run's steps and evaluations share it."""
  return Pool(config)


def beginning(question: Question, seed: int, has_prompt: bool = True) -> Beginning:
  """Return the start of an episode. If `has_prompt`, `question` already contains the prompt."""
  messages = [message._asdict() for message in question.messages]
  original = [message._asdict() for message in question.original_messages] or messages
  task = Task(question.row, original, question.answer, question.columns, question.kind)
  return Beginning(tuple(task), seed, messages if has_prompt else None)


class _Holder:
  """A worker and the episodes in its process."""

  def __init__(self, config: EnvironmentConfig) -> None:
    program = workers.Program(
      COMMAND,
      {'spec': config.spec, 'tools': config.tools},
      'an environment process',
      late_reason=f'no answer after {config.time_limit:g} s (config.environment.time_limit)',
      memory_limit=config.memory_limit,
    )
    self.pool = workers.Pool(program)  # one worker
    self.waiting = 0  # submitted turns without an answer
    self._time_limit = config.time_limit
    self._starts_of: dict[str, int] = {}  # episode key -> `starts` of the process that runs it

  def ask(self, request: Values) -> concurrent.futures.Future[Values | Failure]:
    """Submit a request that is not part of an episode."""
    return self.pool.submit(lambda worker: self._reply(worker, lambda: request))

  def turn(self, worker: Worker, key: str, begin: Beginning, texts: tuple[str, ...]) -> Answer:
    """Return the answer to the last turn in `texts`."""
    start_time = time.monotonic()

    def request() -> Values:
      if self._starts_of.get(key) == worker.starts:
        return {'key': key, 'begin': None, 'texts': texts[-1:]}
      return {'key': key, 'begin': dataclasses.asdict(begin), 'texts': texts}

    reply = self._reply(worker, request)
    self.waiting -= 1
    result = reply if isinstance(reply, Failure) else Observation(**reply)
    if isinstance(result, Failure) or result.done:
      self._starts_of.pop(key, None)
    else:
      self._starts_of[key] = worker.starts
    return Answer(key, result, time.monotonic() - start_time)

  def leave(self, worker: Worker, key: str) -> None:
    """Drop an episode."""
    if self._starts_of.pop(key, None) == worker.starts:
      self._reply(worker, lambda: {'key': key, 'begin': None, 'texts': ()})

  def _reply(self, worker: Worker, make: Callable[[], Values]) -> Values | Failure:
    """Send the request from `make` and return the reply; call `make` again for each new process."""

    def request() -> tuple[Any, float]:
      values = make()
      calls_reset = values['begin'] is not None
      calls = values.get('turns', len(values.get('texts', ()))) + calls_reset
      return values, self._time_limit * max(1, calls)

    return worker.call(request)


# ---- Questions ----


class PromptedQuestions(Questions):
  """Questions whose messages come from an environment."""

  def __init__(self, questions: Questions, messages: Sequence[tuple[Message, ...]]) -> None:
    self._questions, self._messages = questions, messages

  def __len__(self) -> int:
    return len(self._messages)

  def read(self, rows: Sequence[int]) -> list[Question]:
    """See Questions.read."""
    return [
      _with_messages(self._messages[row], question)
      for row, question in zip(rows, self._questions.read(rows))
    ]

  def select(self, rows: np.ndarray) -> 'PromptedQuestions':
    """See Questions.select."""
    return PromptedQuestions(self._questions.select(rows), [self._messages[row] for row in rows])


def begin(questions: Sequence[Question], spec: str, pool: Pool) -> list[Question]:
  """Return the questions with the environment's prompts as messages; see `Pool.prompts`."""
  return [
    _with_messages(tuple(Message(**message) for message in messages), question)
    for messages, question in zip(pool.prompts(questions, spec), questions)
  ]


def _with_messages(messages: tuple[Message, ...], question: Question) -> Question:
  return dataclasses.replace(question, messages=messages, original_messages=question.messages)


def with_prompts(
  data: QuestionSet,
  pool: Pool,
  tokenizer: Tokenizer,
  prompts: prompt.PromptConfig,
  max_prompt: int,
  overlong: str,
) -> QuestionSet:
  """Replace the prompts in `data` with the environment's.

  Raises InputError if `reset` fails, and warns if `step` fails for the first question.
  If `overlong` (DataConfig.on_overlong) is 'drop', questions with prompts longer than `max_prompt`
  tokens are dropped. Otherwise, raises InputError if there are any such questions.
  """
  questions, tools = list(data.questions), pool.tools()
  messages = [question.messages for question in begin(questions, data.spec, pool)]
  pool.try_step(questions[0], data.spec)
  if messages == [question.messages for question in questions] and not tools:
    return data  # its prompts are tokenized already
  texts = [tokenizer.render(conversation, prompts, tools) for conversation in messages]
  tokens = [np.array(ids, np.int32) for ids in tokenizer.encode_all(texts)]
  rows = check_prompts(data.spec, np.array([len(ids) for ids in tokens]), max_prompt, overlong)
  selection = PromptedQuestions(data.questions, messages).select(rows)
  return QuestionSet(data.spec, selection, [tokens[row] for row in rows])
