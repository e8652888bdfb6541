"""Intervals over seeds, by SciPy: the percentile bootstrap (Efron, Annals of Statistics 7, 1979).

Seeds are resampled with replacement. For a difference between two arms that share their seeds,
resample the differences: that is the paired bootstrap, and what a seed does to both cancels.

With few seeds the intervals are too narrow. For normal values the interval of the mean covers the
true one in 95% of cases in the limit, in about 91% with 16 seeds, 87% with 8 and 83% with 5. Two
seeds, with which it would be 50%, have none; nor have equal values, whose resamples are all alike.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
FEWEST = 3  # values that have an interval
ROUNDING = 1e-12  # an interval narrower than this has no width
_SEED = 0  # the same resamples each time, so that a table can be made again

Statistic = Callable[..., np.ndarray]  # (values [..., N], axis=-1) -> [...]


class Estimate(NamedTuple):
  """A statistic of some values and its 95% interval."""

  value: float
  low: float  # NaN where there is no interval: of too few values, or of equal ones
  high: float


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
  """[..., N] -> [...]."""
  return values.mean(axis=axis)


def estimate(values: np.ndarray, statistic: Statistic) -> Estimate:
  """The statistic of `values` [N], at least one, and its interval from RESAMPLES resamples."""
  value = float(statistic(values))
  if len(values) < FEWEST:
    return Estimate(value, np.nan, np.nan)
  from scipy import stats  # three quarters of a second, which few commands need

  found = stats.bootstrap(
    (values,),
    statistic,
    n_resamples=RESAMPLES,
    vectorized=True,
    method='percentile',
    rng=np.random.default_rng(_SEED),
  )
  low, high = map(float, found.confidence_interval)
  if math.isclose(low, high, abs_tol=ROUNDING):
    return Estimate(value, np.nan, np.nan)
  return Estimate(value, low, high)
