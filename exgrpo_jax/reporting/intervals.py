"""95% confidence intervals of an evaluation, and of the difference between two."""

import math
from collections.abc import Sequence
from typing import Any

import chex
import numpy as np

Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution
_ROUNDING = 1e-15  # a variance of a mean up to here is 0
_Clusters = Sequence[Any] | np.ndarray


def interval_95(correct_QK: np.ndarray, cluster_Q: _Clusters) -> tuple[float, float, float]:
  """(mean, low, high) of an evaluation.

  Rows with the same prompt are not independent (AIME lists each of its 30 questions 32 times), and
  neither are samples of one question. So this takes the cluster-robust standard error of the mean,
  with the G / (G - 1) correction for G clusters; from it the effective sample size
  n = p(1-p) / se^2, the number of independent samples that would have this error; and Wilson's
  score interval (JASA 22, 1927) for n, which stays inside [0, 1] and does not collapse to a point
  when 0 of 100 are correct.

  A standard error of 0, for example when all or none are correct, carries no information, and n
  is G. n never exceeds the number of samples.

  Args:
    correct_QK: [questions, samples], bool or float in [0, 1].
    cluster_Q: [questions], the prompt of each row, as text or id: equal ones form a cluster.
  """
  chex.assert_rank(correct_QK, 2)
  score_Q = correct_QK.mean(axis=1, dtype=np.float64)
  mean = float(score_Q.mean())
  variance, clusters = _variance_of_mean(score_Q, cluster_Q)
  n = mean * (1 - mean) / variance if variance > _ROUNDING else clusters
  return mean, *_wilson_interval(mean, min(float(n), np.size(correct_QK)))


def difference_95(difference_Q: np.ndarray, cluster_Q: _Clusters) -> tuple[float, float, float]:
  """(mean, low, high) of paired differences, by the normal approximation.

  The standard error is cluster-robust, as in `interval_95`. It is 0, and says nothing, where all
  differences are equal: G clusters have not shown a different one, so its probability is at most
  b = 1 - 0.05^(1/G), about 3 / G, and the interval is what such ones in [-1, 1] leave open.

  Args:
    difference_Q: [questions], between two policies' shares of right responses.
    cluster_Q: [questions]: equal ones form a cluster.
  """
  chex.assert_rank(difference_Q, 1)
  mean = float(difference_Q.mean())
  variance, clusters = _variance_of_mean(difference_Q, cluster_Q)
  if variance <= _ROUNDING:
    unlike = 1 - 0.05 ** (1 / clusters)
    return mean, mean - unlike * (1 + mean), mean + unlike * (1 - mean)
  half = Z_95 * math.sqrt(variance)
  return mean, max(mean - half, -1.0), min(mean + half, 1.0)


def _variance_of_mean(score_Q: np.ndarray, cluster_Q: _Clusters) -> tuple[float, int]:
  """The cluster-robust variance of the mean of scores, and the number G of clusters."""
  _, index_Q = np.unique(np.asarray(cluster_Q), return_inverse=True)
  chex.assert_equal_shape([score_Q, index_Q])
  residual_G = np.bincount(index_Q, weights=score_Q - score_Q.mean())
  clusters = len(residual_G)
  variance = clusters / max(clusters - 1, 1) * np.sum((residual_G / len(score_Q)) ** 2)
  return float(variance), clusters


def _wilson_interval(mean: float, n: float) -> tuple[float, float]:
  shrink = 1 + Z_95**2 / n
  center = (mean + Z_95**2 / (2 * n)) / shrink
  half = Z_95 * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2)) / shrink
  return max(center - half, 0.0), min(center + half, 1.0)
