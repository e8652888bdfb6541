"""A metric over steps: of several seeds, smoothed, and which value or step of it counts."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from exgrpo_jax.reporting.metrics import Run

SMOOTHED_FROM = 40  # points; a shorter line is drawn as it is, with a marker at each
_SMOOTHED_SHARE = 1 / 40  # of a line's points, to either side
_FALLING = re.compile(
  r'(.+/)?(truncated|wrong|no_answer|timed_out|crashed|zero_advantage|zero_variance|skipped|loss'
  r'|solved_by_none)'
)


@dataclasses.dataclass(frozen=True)
class Series:
  """A metric over the steps at which every seed has a finite value."""

  steps: np.ndarray  # [S]
  value_SN: np.ndarray  # a column for each seed

  @property
  def mean(self) -> np.ndarray:
    """[S], over seeds."""
    return self.value_SN.mean(axis=1)

  @property
  def std(self) -> np.ndarray:
    """[S], the sample standard deviation over seeds (n - 1); 0 for a single one."""
    steps, seeds = self.value_SN.shape
    return self.value_SN.std(axis=1, ddof=1) if seeds > 1 else np.zeros(steps)


def over_seeds(runs: Sequence[Run], name: str) -> Series | None:
  """A metric of several runs; None where they have it at no common step."""
  series = [
    {int(row['step']): row[name] for row in run if math.isfinite(row.get(name, math.nan))}
    for run in runs
  ]
  steps = sorted(set.intersection(*map(set, series)))
  if not steps:
    return None
  return Series(np.array(steps), np.array([[values[s] for values in series] for s in steps]))


def last_common_step(evaluated: Sequence[Collection[int]]) -> int | None:
  """The last step after 0 at which all runs were evaluated; None where there is none.

  Step 0 is the policy before training, which says nothing about a run.

  Args:
    evaluated: the steps of each run's evaluations.
  """
  common = set.intersection(*map(set, evaluated)) if evaluated else set()
  return max((step for step in common if step > 0), default=None)


def best(name: str, values: Iterable[float]) -> float:
  """The highest finite value; the lowest where less is better, as for 'eval/gsm8k/truncated'.

  NaN without a finite value.
  """
  finite = filter(math.isfinite, values)
  is_falling = _FALLING.fullmatch(name) is not None
  return min(finite, default=math.nan) if is_falling else max(finite, default=math.nan)


def smoothed(values: Sequence[float] | np.ndarray, points: int | None = None) -> np.ndarray:
  """Moving average over a fortieth of all points to either side, over fewer at the ends.

  Args:
    values: of a line.
    points: take a fortieth of this many, so that several lines are smoothed alike; by default of
      the line's own.
  """
  array = np.asarray(values, np.float64)
  reach = max(1, int(_SMOOTHED_SHARE * (points or len(array))))
  window = np.ones(2 * reach + 1)
  # Not mode 'same', whose result is as long as the window where that is longer than the line.
  sums, counts = np.convolve(array, window), np.convolve(np.ones_like(array), window)
  return (sums / counts)[reach : reach + len(array)]
