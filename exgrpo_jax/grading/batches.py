"""Batched rewards, computed in a separate process, for example by a model or a service.

Each host batches the responses that it judges, in submission order, so runs with the same seed form
the same batches. A batch is sent as soon as its responses are judged, while other responses are
still being decoded.
"""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import programs, reward_functions
from exgrpo_jax.grading.settings import GradingConfig
from exgrpo_jax.workers.pool import Failure, Pool, Worker

_TRIES = 2  # per batch


class BatchItem(NamedTuple):
  """A response that the verifier and the unbatched rewards have already judged."""

  verdict: Verdict
  facts: Mapping[str, Any]  # values that batched rewards may ask for, by name


class Batches:
  """The batches of one round: responses whose verdicts are collected together."""

  def __init__(self, config: GradingConfig, scorer: Pool) -> None:
    """Create an empty round. `scorer` is a one-process pool that calls rewards (programs.py)."""
    self._config, self._scorer = config, scorer
    self._open: list[concurrent.futures.Future[BatchItem]] = []  # the batch being filled
    self._scored: list[concurrent.futures.Future[list[Verdict]]] = []
    # Set once the process has hung or died twice, because later batches would fail too.
    self._failure: Failure | None = None

  def add(self, judged: concurrent.futures.Future[BatchItem]) -> None:
    """Add the next response; send the batch if it is now full."""
    self._open.append(judged)
    if len(self._open) == self._config.batch_size:
      self._send()

  def verdicts(self) -> list[Verdict]:
    """Wait until all added responses are scored; return verdicts with all rewards, in order."""
    if self._open:
      self._send()
    return [verdict for scored in self._scored for verdict in scored.result()]

  def _send(self) -> None:
    batch, self._open = self._open, []
    self._scored.append(self._scorer.submit(lambda worker: self._score(worker, batch)))

  def _score(
    self, worker: Worker, batch: Sequence[concurrent.futures.Future[BatchItem]]
  ) -> list[Verdict]:
    judged = [future.result() for future in batch]
    graded = [one.facts for one in judged if one.verdict.components is not None]
    scored = self._failure or _rewards(worker, self._config, graded)
    if isinstance(scored, Failure):
      self._failure = scored if scored.is_lost else None
      scored = [scored] * len(graded)
    rewards = iter(scored)
    return [
      verdict if verdict.components is None else _completed(verdict, next(rewards))
      for verdict, _ in judged
    ]


def _rewards(
  worker: Worker, config: GradingConfig, facts: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]] | Failure:
  """Return each response's batched rewards by name."""
  found: list[dict[str, float]] = [{} for _ in facts]
  for index, spec in enumerate(config.batched if facts else ()):
    scored = _call(worker, config, index, facts)
    if isinstance(scored, Failure):
      return scored
    for components, reward in zip(found, scored, strict=True):
      components[reward_functions.name_of(spec)] = reward
  return found


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
        lambda: ([index, [programs.asked(worker, known) for known in facts]], config.batch_timeout),
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


def _completed(verdict: Verdict, rewards: Mapping[str, float] | Failure) -> Verdict:
  if isinstance(rewards, Failure):
    return verdict._replace(outcome=rewards.outcome, reason=rewards.reason, components=None)
  return verdict._replace(components={**(verdict.components or {}), **rewards})
