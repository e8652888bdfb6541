"""A pool of worker processes that grade responses while others are still being generated.

Each response is judged by a worker (worker.py) under a wall-clock limit. The limit is enforced
from here: a worker that exceeds it is killed and replaced, so a response may hang or crash its
worker without harm. Each worker has a thread that waits for it. Several hosts share the work: all
submit the same responses in the same order, and all get all verdicts.
"""

import concurrent.futures
import contextlib
import dataclasses
import queue
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import reasoning_gym, rewards, verifier, workers
from exgrpo_jax.grading.batches import Batches, Judged, Scorer
from exgrpo_jax.grading.settings import MAX_AUTO_WORKERS, Config
from exgrpo_jax.runtime import activity, hosts, machine
from exgrpo_jax.runtime.worker_slot import START_TIMEOUT, UnusableError, WorkerSlot

_MAX_DEATHS = 2  # workers that may die of a response before it is taken for the cause


@dataclasses.dataclass(frozen=True)
class Submission:
  """A response to be judged; its functions are called in a thread, on the host that judges it."""

  text: Callable[[], str]
  answer: str  # the ground truth
  kind: str = 'math'  # how answers are compared, one of verifier.KINDS
  # Whether each step of the text is right; it decides nothing. None where that cannot be checked.
  check_steps: Callable[[str], bool] | None = None
  # What rewards may ask for besides text, answer and outcome, by name: `facts.of_response`.
  facts: Callable[[], Mapping[str, Any]] = dict


class Grader:
  """Grades responses in a pool of workers; use it as a context manager.

  Workers start when the first responses come. If one dies while it judges a response, for
  example because it was killed from outside, another worker judges that response again.
  """

  def __init__(self, config: Config, required: verifier.Config) -> None:
    count = config.workers or min(machine.count_cores(), MAX_AUTO_WORKERS)
    self._config = config
    self._slots = [workers.of_responses(config, required) for _ in range(count)]
    # Last in, first out: the slot used last has a running worker.
    self._free: queue.LifoQueue[WorkerSlot] = queue.LifoQueue()
    for slot in reversed(self._slots):
      self._free.put(slot)
    self._threads = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix='grader')
    self._scorer = Scorer(config, required) if config.batched else None
    self._keys: dict[Hashable, None] = {}  # of what `collect` will return
    self._round = self._new_round()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    parts = [*self._slots, *filter(None, [self._scorer])]
    self._threads.shutdown(wait=False, cancel_futures=True)
    for part in parts:
      part.stop()  # threads that wait for a worker return now
    self._threads.shutdown()
    for part in parts:
      part.close()

  def submit(self, key: Hashable, submission: Submission) -> None:
    """Starts judging a response; `collect` returns its verdict under `key`.

    Raises:
      KeyError: `key` already awaits a verdict.
    """
    if key in self._keys:
      raise KeyError(f'a response with key {key!r} is already being graded')
    self._keys[key] = None
    self._round.add(submission)

  def progress(self) -> str:
    """How many of the responses submitted since the last `collect` this host has judged."""
    return self._round.progress()

  def collect(self) -> dict[Hashable, Verdict]:
    """Waits for everything submitted since the last call; returns it in that order."""
    keys, self._keys = self._keys, {}
    submitted, self._round = self._round, self._new_round()
    return dict(zip(keys, submitted.verdicts(), strict=True))

  def grade(
    self,
    responses: Sequence[str],
    answers: Sequence[str],
    kinds: Sequence[str] | None = None,
    facts: Sequence[Callable[[], Mapping[str, Any]]] | None = None,
  ) -> list[Verdict]:
    """The verdict on each response, in their order; leaves alone what was submitted.

    Args:
      responses: their texts.
      answers: the ground truth of each.
      kinds: how the answers of each are compared, of verifier.KINDS; 'math' by default.
      facts: of each, as in Submission; none by default.

    Raises:
      ValueError: the arguments differ in length.
    """
    kinds = ['math'] * len(answers) if kinds is None else kinds
    facts = [dict] * len(answers) if facts is None else facts
    graded = self._new_round()
    for text, answer, kind, known in zip(responses, answers, kinds, facts, strict=True):
      graded.add(Submission(lambda text=text: text, answer, kind, facts=known))
    return graded.verdicts()

  def _new_round(self) -> '_Round':
    return _Round(
      self._config.weight_of,
      lambda submission: self._threads.submit(self._judge, submission),
      Batches(self._scorer) if self._scorer else None,
    )

  def _judge(self, submission: Submission) -> Judged:
    slot = self._free.get()
    try:
      text, facts = submission.text(), submission.facts()
      verdict = _verdict(slot, self._config.time_limit, text, submission, facts)
    finally:
      self._free.put(slot)
    # Here and not by whoever reads verdicts: texts are decoded once, and by one host.
    verdict = verdict._replace(
      has_code_block=rewards.has_code_block(text),
      valid_steps=submission.check_steps(text) if submission.check_steps else None,
    )
    own = {'response': text, 'answer': submission.answer, 'outcome': verdict.outcome}
    return Judged(verdict, {**facts, **own} if self._scorer else {})


class _Round:
  """Responses whose verdicts are collected together; this host judges its share of them."""

  def __init__(
    self,
    weight_of: Mapping[str, float],
    start: Callable[[Submission], concurrent.futures.Future[Judged]],
    batches: Batches | None,
  ) -> None:
    self._weight_of, self._start, self._batches = weight_of, start, batches
    self._count = 0  # of all hosts
    self._own: list[concurrent.futures.Future[Judged]] = []

  def add(self, submission: Submission) -> None:
    """Starts judging it, where it belongs to this host's share."""
    if hosts.is_own_share(self._count):
      self._own.append(self._start(submission))
      if self._batches:
        self._batches.add(self._own[-1])
    self._count += 1

  def progress(self) -> str:
    """How many of this host's have been judged; '' where it has none."""
    done = sum(future.done() for future in self._own)
    return f'{done} of {len(self._own)} graded' if self._own else ''

  def verdicts(self) -> list[Verdict]:
    """Waits for this host's; returns those of all hosts, in the order of submission."""
    with activity.doing(self.progress):
      if self._batches:
        found = self._batches.verdicts()
      else:
        found = [future.result().verdict for future in self._own]
    weighed = [self._weighed(verdict) for verdict in found]
    return [Verdict._make(fields) for fields in hosts.merge_shares(weighed)]

  def _weighed(self, verdict: Verdict) -> Verdict:
    """With its reward: the weighted sum of its components, 0 where grading failed."""
    if verdict.components is None:
      return verdict
    components = {name: verdict.components[name] for name in self._weight_of}
    reward = sum(weight * components[name] for name, weight in self._weight_of.items())
    return verdict._replace(reward=reward, components=components)


def _verdict(
  slot: WorkerSlot,
  time_limit: float,
  text: str,
  submission: Submission,
  facts: Mapping[str, Any],
) -> Verdict:
  """The verdict on a response that may kill or block its worker; its reward is still 0."""
  reason = ''
  for _ in range(_MAX_DEATHS):
    worker = slot.ready()
    request = [text, submission.answer, submission.kind, workers.asked(slot, facts)]
    try:
      if submission.kind == reasoning_gym.KIND:  # its package's import is not the response's time
        slot.ask(worker, [submission.kind], time.monotonic() + START_TIMEOUT)
      reply = slot.ask(worker, request, time.monotonic() + time_limit)
    except EOFError as error:
      slot.drop()
      reason = f'{_MAX_DEATHS} workers died of it, the last {error}'
    except TimeoutError:
      slot.drop()
      return Verdict(0.0, 'timed out', f'no verdict after {time_limit:g} s')
    else:
      if reply.pop('must_be_replaced', False):
        slot.drop()
      return Verdict(reward=0.0, **reply)
  return Verdict(0.0, 'crashed', reason)


def check(config: Config, required: verifier.Config, row: Mapping[str, Any] | None = None) -> None:
  """Starts each kind of worker once; InputError where verifier or rewards cannot be used.

  Without `row` the rewards are tried that read none; with one of the data (`facts.of_question`),
  the others.
  """
  slots = [workers.of_responses(config, required, row, starts=1)]
  if config.batched:
    slots.append(workers.of_batches(config, required, row))
  for slot in slots:
    with contextlib.closing(slot):
      try:
        slot.start()
      except UnusableError as error:
        raise InputError(str(error)) from error


def refuse_all_failed(where: str, verdicts: Sequence[Verdict]) -> None:
  """Raises InputError if no response at all could be graded, with the first reason.

  Such rewards teach nothing. A few failures may be the responses' own doing, and are a warning.
  """
  if verdicts and all(verdict.outcome in FAILURES for verdict in verdicts):
    raise InputError(
      f'{where}: grading failed for all of {counted(len(verdicts), "response")}, so the run stops. '
      f'The first reason: {verdicts[0].reason}. See config.grading (rewards, time_limit, '
      'memory_limit, batch_timeout); the same command resumes from the newest checkpoint.'
    )
