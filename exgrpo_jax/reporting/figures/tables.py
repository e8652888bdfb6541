"""Sums over the records of a setting: means by a key, and what belongs to a response's group."""

from typing import NamedTuple

import numpy as np

from exgrpo_jax.reporting.figures.runs import Group

# The 97.5% quantile of Student's t by degrees of freedom, from 1.
_T = (
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
  2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
  2.045, 2.042,
)  # fmt: skip


class Means(NamedTuple):
  """Means of values that share a key."""

  keys: np.ndarray  # ascending
  count: np.ndarray
  mean: np.ndarray
  half: np.ndarray  # of a 95% interval of the mean; 0 where there is one value


def mean_by(key: np.ndarray, value: np.ndarray) -> Means:
  """The mean of the finite values of each key; the interval takes them as independent."""
  kept = np.isfinite(value)
  keys, inverse = np.unique(key[kept], return_inverse=True)
  value = value[kept].astype(float)
  count = np.bincount(inverse, minlength=len(keys))
  mean = np.bincount(inverse, value, len(keys)) / count
  squares = np.bincount(inverse, (value - mean[inverse]) ** 2, len(keys))
  variance = squares / np.maximum(count - 1, 1)
  half = np.array([t_quantile(n - 1) for n in count.tolist()]) * np.sqrt(variance / count)
  return Means(keys, count, mean, half)


def at_least(means: Means, count: int) -> Means:
  """Those that are means of so many values or more."""
  kept = means.count >= count
  return Means(*(column[kept] for column in means))


def t_quantile(freedom: int) -> float:
  """Of Student's t, what 2.5% exceed; 0 without a degree of freedom."""
  if freedom < 1:
    return 0.0
  # Beyond the table, Fisher's expansion around the normal quantile: exact to three digits.
  return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.372 / freedom


def visits(group: Group) -> np.ndarray:
  """For each response the number of its visit, which those of one question, step and run share."""
  step, place = group.responses('step', 'group')
  run = np.repeat(range(len(group.runs)), [run.responses.num_rows for run in group.runs])
  if not len(step):
    return np.zeros(0, int)
  # One number instead of three sorts much faster.
  key = (run * (step.max() + 1) + step) * (place.max() + 1) + place
  return np.unique(key, return_inverse=True)[1]


def successes(group: Group) -> np.ndarray:
  """For each of its responses, how many of the K of its visit are right."""
  (outcome,) = group.responses('outcome')
  visit = visits(group)
  return np.bincount(visit, outcome == 'correct').astype(int)[visit]
