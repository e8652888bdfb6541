"""Grading beside the rollout: finished responses are judged while others still decode."""

import concurrent.futures
from collections.abc import Hashable, Sequence

from exgrpo_jax import verifier
from exgrpo_jax.types import Verdict


class Grader:
  """One thread around the verifier; use it as a context manager.

  A single thread is enough: a verdict takes microseconds and a step of decoding
  seconds, and the verifier is linear in the length of what it reads.
  """

  def __init__(self, config: verifier.Config):
    self._config = config
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='grader')
    self._pending: dict[Hashable, concurrent.futures.Future[Verdict]] = {}

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._pool.shutdown(cancel_futures=True)

  def submit(self, key: Hashable, response: str, answer: str) -> None:
    """Starts judging one response; `collect` gives its verdict under `key`.

    Raises KeyError where `key` awaits a verdict already.
    """
    if key in self._pending:
      raise KeyError(f'a response with key {key!r} is being graded already')
    self._pending[key] = self._pool.submit(_verdict, response, answer, self._config)

  def collect(self) -> dict[Hashable, Verdict]:
    """Waits for everything submitted since the last call; in order of submission."""
    pending, self._pending = self._pending, {}
    return {key: future.result() for key, future in pending.items()}

  def grade(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
    """Verdicts of responses against the answers at the same places.

    Leaves alone what was submitted and not collected. Raises ValueError where the
    two are not equally long.
    """
    futures = [self._pool.submit(_verdict, response, answer, self._config)
               for response, answer in zip(responses, answers, strict=True)]
    return [future.result() for future in futures]


def _verdict(response: str, answer: str, config: verifier.Config) -> Verdict:
  correct = verifier.is_correct(response, answer, config)
  return Verdict(reward=1.0 if correct else 0.0, correct=correct)
