"""Rewards that take batches: a small model, or a service, in a process of its own.

A host makes batches of what it judges, in the order of submission, so that a run of the same seed
makes the same ones. Each is sent as soon as its responses are judged, while others still decode.
"""

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import reward_functions, verifier, workers
from exgrpo_jax.grading.settings import Config

_TRIES = 2  # per batch


class Judged(NamedTuple):
  """A response after the verifier and the rewards that take one at a time."""

  verdict: Verdict
  facts: Mapping[str, Any]  # what a batched reward may ask for, by name


class _Failure(NamedTuple):
  outcome: str  # one of FAILURES
  reason: str
  is_lasting: bool  # the process hung or died twice, so other batches would fare no better


class Scorer:
  """The process that calls the batched rewards, and the thread that waits for it."""

  def __init__(self, config: Config, required: verifier.Config) -> None:
    self._config = config
    self._slot = workers.of_batches(config, required)
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='rewards')
    self.batch_size = config.batch_size

  def submit(self, score: Callable[[], list[Verdict]]) -> concurrent.futures.Future[list[Verdict]]:
    """Calls `score` in the thread, after what was submitted before."""
    return self._thread.submit(score)

  def rewards(self, facts: Sequence[Mapping[str, Any]]) -> list[dict[str, float]] | _Failure:
    """The batched rewards of each response by name; to be called in the thread."""
    found: list[dict[str, float]] = [{} for _ in facts]
    for index, spec in enumerate(self._config.batched if facts else ()):
      scored = self._call(index, facts)
      if isinstance(scored, _Failure):
        return scored
      for components, reward in zip(found, scored, strict=True):
        components[reward_functions.name_of(spec)] = reward
    return found

  def stop(self) -> None:
    """Ends what runs and cancels what waits."""
    self._thread.shutdown(wait=False, cancel_futures=True)
    self._slot.stop()

  def close(self) -> None:
    """After `stop`: waits for the thread, and frees the socket."""
    self._thread.shutdown()
    self._slot.close()

  def _call(self, index: int, facts: Sequence[Mapping[str, Any]]) -> list[float] | _Failure:
    """The rewards by function number `index`; if it fails, it is called once more.

    After an exception that is done in the same process, after a timeout or a death in a new one.
    """
    spec, timeout = self._config.batched[index], self._config.batch_timeout
    failure = None
    for _ in range(_TRIES):
      try:
        worker = self._slot.ready()
      except (InputError, RuntimeError) as error:
        outcome = 'timed out' if isinstance(error.__cause__, TimeoutError) else 'crashed'
        return failure or _Failure(outcome, str(error).rstrip('.'), is_lasting=True)
      try:
        request = [index, [workers.asked(self._slot, known) for known in facts]]
        reply = self._slot.ask(worker, request, time.monotonic() + timeout)
      except TimeoutError:
        self._slot.drop()
        failure = _Failure('timed out', f'{spec}: no rewards after {timeout:g} s', is_lasting=True)
      except EOFError as error:
        self._slot.drop()
        failure = _Failure('crashed', f'{spec}: it ended {error}', is_lasting=True)
      else:
        if 'rewards' in reply:
          return reply['rewards']
        failure = _Failure('crashed', reply['reason'], is_lasting=False)
    assert failure
    return failure


class Batches:
  """The batches of responses that are collected together."""

  def __init__(self, scorer: Scorer) -> None:
    self._scorer = scorer
    self._open: list[concurrent.futures.Future[Judged]] = []  # the batch that is not full
    self._scored: list[concurrent.futures.Future[list[Verdict]]] = []
    self._failure: _Failure | None = None  # one that lasts

  def add(self, judged: concurrent.futures.Future[Judged]) -> None:
    """Takes the next response, and sends its batch once that is full."""
    self._open.append(judged)
    if len(self._open) == self._scorer.batch_size:
      self._send()

  def verdicts(self) -> list[Verdict]:
    """Waits for the verdicts on all that were added, in their order, with all components."""
    if self._open:
      self._send()
    return [verdict for scored in self._scored for verdict in scored.result()]

  def _send(self) -> None:
    batch, self._open = self._open, []
    self._scored.append(self._scorer.submit(lambda: self._score(batch)))

  def _score(self, batch: Sequence[concurrent.futures.Future[Judged]]) -> list[Verdict]:
    judged = [future.result() for future in batch]
    graded = [one.facts for one in judged if one.verdict.components is not None]
    scored = self._failure or self._scorer.rewards(graded)
    if isinstance(scored, _Failure):
      self._failure = scored if scored.is_lasting else None
      scored = [scored] * len(graded)
    rewards = iter(scored)
    return [
      verdict if verdict.components is None else _completed(verdict, next(rewards))
      for verdict, _ in judged
    ]


def _completed(verdict: Verdict, rewards: Mapping[str, float] | _Failure) -> Verdict:
  if isinstance(rewards, _Failure):
    return verdict._replace(outcome=rewards.outcome, reason=rewards.reason, components=None)
  return verdict._replace(components={**(verdict.components or {}), **rewards})
