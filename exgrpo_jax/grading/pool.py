"""Grading of responses in worker processes while others are still being generated.

Several hosts share the work: each submits the same responses in the same order, and gets all
verdicts.
"""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import reasoning_gym, rewards, verifier, workers
from exgrpo_jax.grading.batches import Batches, BatchItem
from exgrpo_jax.grading.settings import MAX_AUTO_WORKERS, GradingConfig
from exgrpo_jax.runtime import activity, hosts, machine
from exgrpo_jax.workers.pool import START_TIMEOUT, Failure, Pool, Worker


@dataclasses.dataclass(frozen=True)
class Submission:
  """A response to judge. Its functions are called in a thread, on the host that judges it."""

  text: Callable[[], str]
  answer: str  # the ground truth
  kind: str = 'math'  # how answers are compared, one of verifier.KINDS
  # True if each step of the text is right; the verdict ignores it. None if steps cannot be checked.
  check_steps: Callable[[str], bool] | None = None
  # Values that rewards may ask for besides text, answer and outcome: `stages.response_facts`.
  facts: Callable[[], Mapping[str, Any]] = dict


class Grader:
  """A pool of workers that grades responses; use it as a context manager.

  If a worker dies while it judges a response, for example because it was killed from outside,
  another worker judges that response again.
  """

  def __init__(self, config: GradingConfig, required: verifier.VerifierConfig) -> None:
    count = config.workers or min(machine.count_cores(), MAX_AUTO_WORKERS)
    self._config = config
    self._pool = Pool(workers.program(config, required), count)
    self._scorer = (
      Pool(workers.program(config, required, is_batched=True)) if config.batched else None
    )
    self._keys: dict[Hashable, None] = {}  # the keys that `collect` will return
    self._round = self._new_round()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._pool.close()  # first: the scorer's thread may wait for its verdicts
    if self._scorer:
      self._scorer.close()

  def submit(self, key: Hashable, submission: Submission) -> None:
    """Start judging a response; `collect` returns its verdict under `key`.

    Raises:
      KeyError: `key` already awaits a verdict.
    """
    if key in self._keys:
      raise KeyError(f'a response with key {key!r} is already being graded')
    self._keys[key] = None
    self._round.add(submission)

  def progress(self) -> str:
    """Return how many of this host's responses since the last `collect` are graded; '' if none."""
    return self._round.progress()

  def collect(self) -> dict[Hashable, Verdict]:
    """Wait for all responses submitted since the last call; return verdicts in that order."""
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
    """Return the verdict on each response, in order, without touching submitted responses.

    `answers` are the ground truths. `kinds` are of verifier.KINDS, 'math' by default; `facts` are
    as in Submission, none by default.

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
      lambda submission: self._pool.submit(lambda worker: self._judge(worker, submission)),
      Batches(self._config, self._scorer) if self._scorer else None,
    )

  def _judge(self, worker: Worker, submission: Submission) -> BatchItem:
    text, facts = submission.text(), submission.facts()

    def request() -> tuple[Any, float]:
      if submission.kind == reasoning_gym.KIND:  # the import is not part of its time limit
        worker.ask([submission.kind], START_TIMEOUT)
      known = workers.asked(worker, facts)
      return [text, submission.answer, submission.kind, known], self._config.time_limit

    reply = worker.call(request)
    if isinstance(reply, Failure):
      verdict = Verdict(0.0, reply.outcome, reply.reason)
    else:
      verdict = Verdict(reward=0.0, **reply)  # `_Round` weighs its components
    # Computed here, not where verdicts are read, because one host decodes each text, and only once.
    verdict = verdict._replace(
      has_code_block=rewards.has_code_block(text),
      valid_steps=submission.check_steps(text) if submission.check_steps else None,
    )
    own = {'response': text, 'answer': submission.answer, 'outcome': verdict.outcome}
    return BatchItem(verdict, {**facts, **own} if self._scorer else {})


class _Round:
  """Responses whose verdicts are collected together; this host judges its share of them."""

  def __init__(
    self,
    weight_of: Mapping[str, float],
    start: Callable[[Submission], concurrent.futures.Future[BatchItem]],
    batches: Batches | None,
  ) -> None:
    self._weight_of, self._start, self._batches = weight_of, start, batches
    self._count = 0  # responses of all hosts
    self._own: list[concurrent.futures.Future[BatchItem]] = []

  def add(self, submission: Submission) -> None:
    """Start judging a response if it belongs to this host's share."""
    if hosts.is_own_share(self._count):
      self._own.append(self._start(submission))
      if self._batches:
        self._batches.add(self._own[-1])
    self._count += 1

  def progress(self) -> str:
    done = sum(future.done() for future in self._own)
    return f'{done} of {len(self._own)} graded' if self._own else ''

  def verdicts(self) -> list[Verdict]:
    """Wait for this host's verdicts; return all hosts' verdicts in the order of submission."""
    with activity.doing(self.progress):
      if self._batches:
        found = self._batches.verdicts()
      else:
        found = [future.result().verdict for future in self._own]
    weighed = [self._weighed(verdict) for verdict in found]
    return [Verdict._make(fields) for fields in hosts.merge_shares(weighed)]

  def _weighed(self, verdict: Verdict) -> Verdict:
    """Set a verdict's reward: the weighted sum of its components, 0 if grading failed."""
    if verdict.components is None:
      return verdict
    components = {name: verdict.components[name] for name in self._weight_of}
    reward = sum(weight * components[name] for name, weight in self._weight_of.items())
    return verdict._replace(reward=reward, components=components)


def check(
  config: GradingConfig, required: verifier.VerifierConfig, row: Mapping[str, Any] | None = None
) -> None:
  """Start each kind of worker once; raise InputError if verifier or rewards cannot be used.

  Without `row`, this tries the rewards that read no row. With a row of the data
  (`stages.question_facts`), it tries the others.
  """
  for is_batched in (False, True) if config.batched else (False,):
    program = workers.program(config, required, row, is_batched)
    with contextlib.closing(Worker(dataclasses.replace(program, starts=1))) as worker:
      worker.start()


def refuse_all_failed(where: str, verdicts: Sequence[Verdict]) -> None:
  """Raise InputError with the first reason if no response at all could be graded.

  Such rewards teach nothing. The responses may cause a few failures; these are only a warning.
  """
  if verdicts and all(verdict.outcome in FAILURES for verdict in verdicts):
    raise InputError(
      f'{where}: grading failed for all of {counted(len(verdicts), "response")}, so the run stops. '
      f'The first reason: {verdicts[0].reason}. Correct config.grading (rewards, time_limit, '
      'memory_limit, batch_timeout). The same command then resumes from the newest checkpoint.'
    )
