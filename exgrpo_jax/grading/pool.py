"""Grading in worker processes, while other responses are still being generated.

Hosts share the work: every host submits the same responses in the same order and receives all
verdicts.
"""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from exgrpo_jax.datatypes import FAILURES, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import programs, reasoning_gym, reward_functions, rewards, verifier
from exgrpo_jax.grading.settings import MAX_AUTO_WORKERS, GradingConfig
from exgrpo_jax.runtime import activity, hosts, machine
from exgrpo_jax.workers.pool import START_TIMEOUT, Failure, Pool, Worker


@dataclasses.dataclass(frozen=True)
class Submission:
  """A response to judge. Its callables run in a thread on the host that judges the response."""

  text: Callable[[], str]
  answer: str  # the ground truth
  kind: str = 'math'  # how answers are compared, one of verifier.KINDS
  # Returns True if every step in a text is right; does not affect the verdict. None if steps cannot
  # be checked.
  check_steps: Callable[[str], bool] | None = None
  # Returns the values that rewards may ask for besides text, answer and outcome, as
  # `stages.response_facts` does.
  facts: Callable[[], Mapping[str, Any]] = dict


# ---- Batched rewards ----

# A separate process computes them, for example with a model or a service. Each host batches the
# responses that it judges, in submission order, so runs with the same seed form the same batches. A
# batch is sent as soon as its responses are judged, while other responses are still being decoded.

_TRIES = 2  # per batch


class BatchItem(NamedTuple):
  """A response that the verifier and the unbatched rewards have already judged."""

  verdict: Verdict
  facts: Mapping[str, Any]  # values that batched rewards may ask for, by name


def _rewards(
  worker: Worker, config: GradingConfig, facts: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]] | Failure:
  """Return each response's batched rewards by name."""
  all_components: list[dict[str, float]] = [{} for _ in facts]
  for index, spec in enumerate(config.batched if facts else ()):
    values = _call(worker, config, index, facts)
    if isinstance(values, Failure):
      return values
    for components, reward in zip(all_components, values, strict=True):
      components[reward_functions.name_of(spec)] = reward
  return all_components


def _call(
  worker: Worker, config: GradingConfig, index: int, facts: Sequence[Mapping[str, Any]]
) -> list[float] | Failure:
  """Call batched reward number `index`; retry once if it fails.

  The retry uses the same process after an exception, and a new process after a timeout or crash.
  """
  failure = None
  for _ in range(_TRIES):
    try:
      reply = worker.call(
        lambda: (
          [index, [programs.requested_facts(worker, row) for row in facts]],
          config.batch_timeout,
        ),
        deaths=1,
      )
    except (InputError, RuntimeError) as error:
      outcome = 'timed out' if isinstance(error.__cause__, TimeoutError) else 'crashed'
      return failure or Failure(outcome, str(error).rstrip('.'), is_lost=True)
    if not isinstance(reply, Failure):
      return reply['rewards']
    failure = reply._replace(reason=f'{config.batched[index]}: {reply.reason}')
  assert failure
  return failure


def _add_rewards(verdict: Verdict, result: Mapping[str, float] | Failure) -> Verdict:
  if isinstance(result, Failure):
    return verdict._replace(outcome=result.outcome, reason=result.reason, components=None)
  return verdict._replace(components={**(verdict.components or {}), **result})


# ---- Grading ----


class Grader:
  """A pool of workers that grades responses; use it as a context manager.

  If a worker dies while judging a response, for example because it was killed externally, another
  worker retries that response.
  """

  def __init__(self, config: GradingConfig, requirements: verifier.VerifierConfig) -> None:
    count = config.workers or min(machine.count_cores(), MAX_AUTO_WORKERS)
    self._config = config
    self._pool = Pool(programs.program(config, requirements), count)
    scorer = programs.program(config, requirements, is_batched=True)
    self._scorer = Pool(scorer) if config.batched else None  # for the batched rewards
    self._keys: dict[Hashable, None] = {}  # the keys that `collect` will return
    self._round = self._new_round()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._pool.close()  # first, because the scorer's thread may be waiting for verdicts
    if self._scorer:
      self._scorer.close()

  def submit(self, key: Hashable, submission: Submission) -> None:
    """Start judging a response; `collect` returns its verdict under `key`.

    Raises KeyError if a response with this key is already being graded.
    """
    if key in self._keys:
      raise KeyError(f'a response with key {key!r} is already being graded')
    self._keys[key] = None
    self._round.add(submission)

  def progress(self) -> str:
    """Return this host's progress since the last `collect`: '3 of 8 graded', or '' if idle."""
    return self._round.progress()

  def collect(self) -> dict[Hashable, Verdict]:
    """Wait for all submissions since the last call; return their verdicts by key, in order."""
    keys, self._keys = self._keys, {}
    last_round, self._round = self._round, self._new_round()
    return dict(zip(keys, last_round.verdicts(), strict=True))

  def grade(
    self,
    responses: Sequence[str],
    answers: Sequence[str],
    kinds: Sequence[str] | None = None,
    facts: Sequence[Callable[[], Mapping[str, Any]]] | None = None,
  ) -> list[Verdict]:
    """Grade these responses and return their verdicts in order; earlier submissions are unaffected.

    `answers` are the ground truths. `kinds` are values from verifier.KINDS; by default, all are
    'math'. `facts` are as in Submission; by default, there are none. Raises ValueError if the
    arguments differ in length.
    """
    kinds = ['math'] * len(answers) if kinds is None else kinds
    facts = [dict] * len(answers) if facts is None else facts
    new_round = self._new_round()
    for text, answer, kind, get_facts in zip(responses, answers, kinds, facts, strict=True):
      new_round.add(Submission(lambda text=text: text, answer, kind, facts=get_facts))
    return new_round.verdicts()

  def _new_round(self) -> '_Round':
    def start(submission: Submission) -> concurrent.futures.Future[BatchItem]:
      return self._pool.submit(lambda worker: self._judge(worker, submission))

    return _Round(self._config, start, self._scorer)

  def _judge(self, worker: Worker, submission: Submission) -> BatchItem:
    text, facts = submission.text(), submission.facts()

    def request() -> tuple[Any, float]:
      if submission.kind == reasoning_gym.KIND:  # the time limit excludes this import
        try:
          worker.ask([submission.kind], START_TIMEOUT)
        except TimeoutError as error:
          raise InputError(
            f'reasoning_gym: importing this package in a worker took longer than {START_TIMEOUT:g} '
            's. The disk may be slow. Run the same command again.'
          ) from error
      request_facts = programs.requested_facts(worker, facts)
      return [text, submission.answer, submission.kind, request_facts], self._config.time_limit

    reply = worker.call(request)
    if isinstance(reply, Failure):
      verdict = Verdict(0.0, reply.outcome, reply.reason)
    else:
      verdict = Verdict(reward=0.0, **reply)  # `_Round` computes the reward
    # Computed here because each text is decoded only once, on a single host.
    verdict = verdict._replace(
      has_code_block=rewards.has_code_block(text),
      valid_steps=submission.check_steps(text) if submission.check_steps else None,
    )
    basic_facts = {'response': text, 'answer': submission.answer, 'outcome': verdict.outcome}
    return BatchItem(verdict, {**facts, **basic_facts} if self._scorer else {})


class _Round:
  """Responses whose verdicts are collected together; this host judges its share of them."""

  def __init__(
    self,
    config: GradingConfig,
    start: Callable[[Submission], concurrent.futures.Future[BatchItem]],
    scorer: Pool | None,
  ) -> None:
    self._config, self._start, self._scorer = config, start, scorer
    self._count = 0  # all responses, including other hosts' shares
    self._futures: list[concurrent.futures.Future[BatchItem]] = []
    self._batches: list[concurrent.futures.Future[list[Verdict]]] = []
    # Set once the scorer's process has hung or died twice, because later batches would fail too.
    self._failure: Failure | None = None

  def add(self, submission: Submission) -> None:
    """Start judging a response if it belongs to this host's share."""
    if hosts.is_own_share(self._count):
      self._futures.append(self._start(submission))
      if len(self._futures) % self._config.batch_size == 0:
        self._send()
    self._count += 1

  def _send(self) -> None:
    """Send the responses that are not in a batch yet, if there are batched rewards."""
    batch = self._futures[len(self._batches) * self._config.batch_size :]
    if batch and self._scorer:
      self._batches.append(self._scorer.submit(lambda worker: self._score(worker, batch)))

  def _score(
    self, worker: Worker, batch: Sequence[concurrent.futures.Future[BatchItem]]
  ) -> list[Verdict]:
    items = [future.result() for future in batch]
    rows = [item.facts for item in items if item.verdict.components is not None]
    results = self._failure or _rewards(worker, self._config, rows)
    if isinstance(results, Failure):
      self._failure = results if results.is_lost else None
      results = [results] * len(rows)
    remaining = iter(results)
    return [
      verdict if verdict.components is None else _add_rewards(verdict, next(remaining))
      for verdict, _ in items
    ]

  def progress(self) -> str:
    done = sum(future.done() for future in self._futures)
    return f'{done} of {len(self._futures)} graded' if self._futures else ''

  def verdicts(self) -> list[Verdict]:
    """Wait for this host's verdicts; return all hosts' verdicts in submission order."""
    with activity.doing(self.progress):
      if self._scorer:
        self._send()
        verdicts = [verdict for batch in self._batches for verdict in batch.result()]
      else:
        verdicts = [future.result().verdict for future in self._futures]
    weight_of = self._config.weight_of
    for index, verdict in enumerate(verdicts):
      if verdict.components is not None:  # otherwise, grading failed and the reward stays 0
        components = {name: verdict.components[name] for name in weight_of}
        reward = sum(weight * components[name] for name, weight in weight_of.items())
        verdicts[index] = verdict._replace(reward=reward, components=components)
    return [Verdict._make(fields) for fields in hosts.merge_shares(verdicts)]


def check(
  config: GradingConfig, requirements: verifier.VerifierConfig, row: Mapping[str, Any] | None = None
) -> None:
  """Start each kind of worker once; raise InputError if the verifier or a reward is unusable.

  They also count as unusable if grading a short response times out three times in a row, each time
  in a process that has already imported and tried the code. Every verdict would then time out.

  Without `row`, only rewards that do not read a data row are tried. With a row (from
  `stages.question_facts`), only rewards that read one are tried.
  """
  for is_batched in (False, True) if config.batched else (False,):
    program = programs.program(config, requirements, row, is_batched)
    with contextlib.closing(Worker(dataclasses.replace(program, starts=1))) as worker:
      worker.start()
      if is_batched:
        continue
      trial = reward_functions.TRIALS[0]
      request_facts = programs.requested_facts(worker, {**(row or {}), **trial})
      request = [trial['response'], trial['answer'], 'math', request_facts], config.time_limit
      replies = (worker.call(lambda request=request: request) for _ in range(3))
      if all(isinstance(reply, Failure) and reply.outcome == 'timed out' for reply in replies):
        raise InputError(
          f'config.grading.time_limit={config.time_limit:g}: the verifier and the rewards together '
          f'take longer than this, even for the short response {trial["response"]!r}. Raise the '
          'limit, or use faster functions.'
        )


def refuse_all_failed(where: str, verdicts: Sequence[Verdict]) -> None:
  """Raise InputError with the first reason if grading failed for every response.

  The policy would learn nothing from such rewards. A few failures only cause a warning, because
  the responses themselves may be to blame.
  """
  if verdicts and all(verdict.outcome in FAILURES for verdict in verdicts):
    raise InputError(
      f'{where}: grading failed for all {len(verdicts):,} responses. First reason: '
      f'{verdicts[0].reason}. Fix config.grading (rewards, time_limit, memory_limit, '
      'batch_timeout) or, with an environment, config.environment (name, time_limit, '
      'memory_limit). Then run the same command again.'
    )
