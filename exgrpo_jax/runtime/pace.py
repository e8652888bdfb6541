"""How long the rest of a run will take."""

import collections
import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping

from exgrpo_jax.runtime import compilations

RECENT = 20  # steps that tell the pace


class Pace:
  """The pace of a run's recent steps and of its evaluations.

  Compiling is no part of it: it belongs to the first steps, and to the first evaluation.
  """

  def __init__(
    self, compiled: compilations.Counter, records: Iterable[Mapping[str, float]] = ()
  ) -> None:
    """`records` are the metrics of the steps before, of a run that is resumed."""
    self._compiled = compiled
    seconds = (
      record['time/evaluate'] + record.get('time/export', 0.0)
      for record in records
      if 'time/evaluate' in record
    )
    self._steps: collections.deque[float] = collections.deque(maxlen=RECENT)  # seconds
    self._evaluations: collections.deque[float] = collections.deque(seconds, maxlen=RECENT)
    self._begin()

  def _begin(self) -> None:
    self._started, self._programs = time.monotonic(), self._compiled.count
    self._apart = 0.0  # seconds of the step that were not the step's own

  @contextlib.contextmanager
  def evaluation(self) -> Iterator[None]:
    """Times a block as an evaluation, which not every step has."""
    started, compiling = time.monotonic(), self._compiled.seconds
    programs = self._compiled.count
    yield
    seconds = time.monotonic() - started
    self._evaluations.append(max(0.0, seconds - (self._compiled.seconds - compiling)))
    self._apart += seconds
    self._programs += self._compiled.count - programs

  def finish_step(self) -> None:
    """Ends a step and starts the next."""
    if self._compiled.count == self._programs:
      self._steps.append(time.monotonic() - self._started - self._apart)
    self._begin()

  def seconds_left(self, steps: int, evaluations: int) -> float | None:
    """For so many steps and evaluations; None until there is something to go by."""
    if not steps:
      return 0.0
    if not self._steps or (evaluations and not self._evaluations):
      return None
    left = steps * statistics.median(self._steps)
    return left + (evaluations * statistics.median(self._evaluations) if evaluations else 0.0)
