"""A metric of several runs that differ in their seeds."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.reporting.records import Run


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
    """[S], the sample standard deviation over seeds (n - 1); 0 of a single one."""
    steps, seeds = self.value_SN.shape
    return self.value_SN.std(axis=1, ddof=1) if seeds > 1 else np.zeros(steps)


def over_seeds(runs: Sequence[Run], name: str) -> Series | None:
  """A metric of several runs; None where they have it at no common step."""
  series = [
    {
      int(record['step']): record[name]
      for record in run
      if math.isfinite(record.get(name, math.nan))
    }
    for run in runs
  ]
  steps = sorted(set.intersection(*map(set, series)))
  if not steps:
    return None
  return Series(np.array(steps), np.array([[values[s] for values in series] for s in steps]))
