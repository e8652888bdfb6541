"""Intervals over seeds: the percentile bootstrap (Efron, Annals of Statistics 7, 1979).

Seeds are resampled with replacement. For a difference between two arms that share their seeds,
resample the differences: that is the paired bootstrap, and what a seed does to both cancels.

Of few seeds the intervals are too narrow. Of normal values the interval of the mean holds the true
one in 95% of cases in the limit, in about 91% with 16 seeds, 87% with 8 and 83% with 5. Two
seeds, of which it would be 50%, have none; nor have equal values, whose resamples are all the same.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
FEWEST = 3  # values that have an interval
_ROUNDING = 1e-12  # below which an interval has no width
_SEED = 0  # the same resamples each time, so that a table can be made again

Statistic = Callable[[np.ndarray], np.ndarray]  # [..., N] -> [...]


class Estimate(NamedTuple):
  """A statistic of some values and its 95% interval."""

  value: float
  low: float  # NaN where an interval cannot be told: of too few values, or of equal ones
  high: float


def mean(values: np.ndarray) -> np.ndarray:
  """[..., N] -> [...]."""
  return values.mean(axis=-1)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
  """The mean without the lowest and the highest N // 4 values, [..., N] -> [...].

  As in Agarwal et al. (arXiv:2108.13264): an outlier does not move it, and it wastes fewer values
  than the median.
  """
  cut = values.shape[-1] // 4
  return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)


def estimate(values: np.ndarray, statistic: Statistic) -> Estimate:
  """The statistic of `values` [N], at least one, and its interval from RESAMPLES resamples.

  Equal N get equal resamples, so results do not depend on what else is computed.
  """
  count = len(values)
  value = float(statistic(values))
  if count < FEWEST:
    return Estimate(value, np.nan, np.nan)
  index = np.random.default_rng(_SEED).integers(count, size=(RESAMPLES, count))
  low, high = np.quantile(statistic(values[index]), [0.025, 0.975]).tolist()
  if math.isclose(low, high, abs_tol=_ROUNDING):
    return Estimate(value, np.nan, np.nan)
  return Estimate(value, low, high)
