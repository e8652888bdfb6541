"""Sums over the records of a setting: means by a key, and the visit that a response belongs to."""

from typing import NamedTuple

import numpy as np
from scipy import stats

from exgrpo_jax.reporting.runs import Group


class Means(NamedTuple):
  """Means of values that share a key."""

  keys: np.ndarray  # ascending
  count: np.ndarray
  mean: np.ndarray
  half: np.ndarray  # half a 95% interval of the mean, by Student's t; 0 for a single value


def mean_by(key: np.ndarray, value: np.ndarray) -> Means:
  """The mean of the finite values of each key; the interval takes them as independent."""
  kept = np.isfinite(value)
  keys, inverse = np.unique(key[kept], return_inverse=True)
  value = value[kept].astype(float)
  count = np.bincount(inverse, minlength=len(keys))
  mean = np.bincount(inverse, value, len(keys)) / count
  squares = np.bincount(inverse, (value - mean[inverse]) ** 2, len(keys))
  variance = squares / np.maximum(count - 1, 1)
  half = stats.t.ppf(0.975, np.maximum(count - 1, 1)) * np.sqrt(variance / count)
  return Means(keys, count, mean, half)


def at_least(means: Means, count: int) -> Means:
  """The means of at least `count` values."""
  kept = means.count >= count
  return Means(*(column[kept] for column in means))


def visits(group: Group) -> np.ndarray:
  """For each response the number of its visit: one question in one step of one run."""
  step, place = group.responses('step', 'group')
  run = np.repeat(range(len(group.runs)), [run.responses.num_rows for run in group.runs])
  if not len(step):
    return np.zeros(0, int)
  # One number instead of three sorts much faster.
  key = (run * (step.max() + 1) + step) * (place.max() + 1) + place
  return np.unique(key, return_inverse=True)[1]


def successes(group: Group) -> np.ndarray:
  """For each response, how many of the K of its visit are right."""
  (outcome,) = group.responses('outcome')
  visit = visits(group)
  return np.bincount(visit, outcome == 'correct').astype(int)[visit]
