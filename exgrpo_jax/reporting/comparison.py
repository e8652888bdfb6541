"""Comparisons of policies and of runs: scores over seeds, paired differences, 95% intervals.

Intervals over questions are cluster-robust; intervals over seeds are percentile bootstraps by SciPy
(Efron, Annals of Statistics 7, 1979). With few seeds these bootstraps are too narrow. For normal
values they cover the true mean in 95% of cases in the limit, in about 91% with 16 seeds, 87% with 8
and 83% with 5. With two seeds it would be 50%, so two seeds have no interval. Equal values have
none either, because all resamples would be equal.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import numpy as np

from exgrpo_jax.reporting.metrics import Run

Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution
_ROUNDING = 1e-15  # a variance of a mean up to here is 0
_Clusters = Sequence[Any] | np.ndarray


class Estimate(NamedTuple):
  """A statistic of some values and its 95% interval."""

  value: float
  low: float  # NaN without an interval: too few values, or equal ones
  high: float


# ---- Intervals over questions ----


def interval_95(correct_QK: np.ndarray, cluster_Q: _Clusters) -> Estimate:
  """Estimate the mean of an evaluation.

  Rows with the same prompt are not independent (AIME lists each of its 30 questions 32 times), and
  neither are samples of one question. So the standard error of the mean is cluster-robust, with the
  G / (G - 1) correction for G clusters. It gives the effective sample size n = p(1-p) / se^2: the
  number of independent samples with the same error. The interval is Wilson's score interval (JASA
  22, 1927) for n. It stays inside [0, 1] and does not collapse to a point if 0 of 100 are correct.

  A standard error of 0, for example if all or none are correct, carries no information; then n is
  G. n never exceeds the number of samples.

  Args:
    correct_QK: [questions, samples], bool or float in [0, 1].
    cluster_Q: [questions], the prompt of each row, as text or id: equal ones form a cluster.
  """
  chex.assert_rank(correct_QK, 2)
  score_Q = correct_QK.mean(axis=1, dtype=np.float64)
  mean = float(score_Q.mean())
  variance, clusters = _variance_of_mean(score_Q, cluster_Q)
  n = mean * (1 - mean) / variance if variance > _ROUNDING else clusters
  return Estimate(mean, *_wilson_interval(mean, min(float(n), np.size(correct_QK))))


def difference_95(difference_Q: np.ndarray, cluster_Q: _Clusters) -> Estimate:
  """Estimate the mean of paired differences, by the normal approximation.

  The standard error is cluster-robust, as in `interval_95`. If all differences are equal it is 0
  and carries no information. None of G clusters has shown another value, so another value has at
  most the probability b = 1 - 0.05^(1/G), about 3 / G. The interval holds every mean that is
  possible if a share b of the differences lies anywhere in [-1, 1].

  Args:
    difference_Q: [questions], between two policies' shares of correct responses.
    cluster_Q: [questions]; equal ones form a cluster.
  """
  chex.assert_rank(difference_Q, 1)
  mean = float(difference_Q.mean())
  variance, clusters = _variance_of_mean(difference_Q, cluster_Q)
  if variance <= _ROUNDING:
    unlike = 1 - 0.05 ** (1 / clusters)
    return Estimate(mean, mean - unlike * (1 + mean), mean + unlike * (1 - mean))
  half = Z_95 * math.sqrt(variance)
  return Estimate(mean, max(mean - half, -1.0), min(mean + half, 1.0))


def _variance_of_mean(score_Q: np.ndarray, cluster_Q: _Clusters) -> tuple[float, int]:
  """Return the cluster-robust variance of the mean of scores, and the number G of clusters."""
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


# ---- Intervals over seeds ----

RESAMPLES = 10_000
FEWEST = 3  # values for which there is an interval
ROUNDING = 1e-12  # an interval narrower than this has no width
_SEED = 0  # the same resamples each time, so that a table can be reproduced

Statistic = Callable[..., np.ndarray]  # (values [..., N], axis=-1) -> [...]


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
  """Return the mean over `axis`: [..., N] -> [...]."""
  return values.mean(axis=axis)


def bootstrap(values: np.ndarray, statistic: Statistic = mean) -> Estimate:
  """Estimate a statistic of `values` [N], at least one, from RESAMPLES resamples."""
  value = float(statistic(values))
  if len(values) < FEWEST:
    return Estimate(value, np.nan, np.nan)
  from scipy import stats  # takes three quarters of a second, and few commands need it

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


# ---- Two policies, or two settings ----


class Comparison(NamedTuple):
  """The difference between two policies or settings over their common pairs."""

  difference: np.ndarray  # [N], second minus first
  pairs: int  # seeds, or different questions
  estimate: Estimate  # of the mean difference; NaN without any pair


def compare(
  first: Mapping[Any, float], second: Mapping[Any, float], of_questions: bool = False
) -> Comparison:
  """Compare the scores of two policies, or of two settings, pair by pair.

  The effect of a seed or a question on both cancels. Keys are seeds; with `of_questions` they are
  (row, question), and rows of the same question (AIME lists each question 32 times) are one pair.
  """
  keys = sorted(first.keys() & second.keys())
  difference = np.array([second[key] - first[key] for key in keys], np.float64)
  clusters = [key[1] for key in keys] if of_questions else keys
  if not keys:
    estimate = Estimate(np.nan, np.nan, np.nan)
  else:
    estimate = difference_95(difference, clusters) if of_questions else bootstrap(difference)
  return Comparison(difference, len(set(clusters)), estimate)


# ---- Scores over seeds ----

Scores = Mapping[int, float]  # step -> score, of a run
_FALLING = re.compile(
  r'(.+/)?(truncated|wrong|no_answer|timed_out|crashed|zero_advantage|zero_variance|skipped|loss'
  r'|solved_by_none)'
)
_TABULATED = re.compile(r'eval/.+/(pass@\d+|avg@\d+|valid_steps|truncated)')


class Spread(NamedTuple):
  """The mean over seeds and their sample standard deviation (n - 1)."""

  mean: float
  deviation: float  # NaN of a single seed


class Summary(NamedTuple):
  """The scores of a setting's runs."""

  seeds: int
  last_steps: Sequence[int]  # steps of the runs' last evaluations, without repeats, ascending
  common: Spread | None  # at the last step that all settings have; None if there is none
  last: Spread
  best: Spread


def scores_of(run: Run, name: str) -> dict[int, float]:
  """Return step -> value of a metric for the records that have it."""
  return {int(record['step']): record[name] for record in run if name in record}


def summaries(
  name: str, settings: Mapping[str, Sequence[Scores]]
) -> tuple[int | None, dict[str, Summary]]:
  """Return the last step that the runs of all settings have, and a summary of each setting.

  Runs without the score are left out, and so are settings without such runs.
  """
  scored = {label: list(filter(None, seeds)) for label, seeds in settings.items()}
  step = last_common_step([scores for seeds in scored.values() for scores in seeds])
  return step, {
    label: Summary(
      seeds=len(seeds),
      last_steps=sorted({max(scores) for scores in seeds}),
      common=None if step is None else _spread([scores[step] for scores in seeds]),
      last=_spread([scores[max(scores)] for scores in seeds]),
      best=_spread([best(name, scores.values()) for scores in seeds]),
    )
    for label, seeds in scored.items()
    if seeds
  }


def _spread(values: Sequence[float]) -> Spread:
  deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
  return Spread(float(np.mean(values)), float(deviation))


def last_common_step(evaluated: Sequence[Collection[int]]) -> int | None:
  """Return the last step after 0 at which all runs were evaluated; None if there is none.

  Step 0 is the policy before training, which says nothing about a run.
  """
  common = set.intersection(*map(set, evaluated)) if evaluated else set()
  return max((step for step in common if step > 0), default=None)


def best(name: str, values: Iterable[float]) -> float:
  """Return the highest finite value; the lowest if less is better ('eval/gsm8k/truncated').

  Returns NaN without a finite value.
  """
  finite = filter(math.isfinite, values)
  is_falling = _FALLING.fullmatch(name) is not None
  return min(finite, default=math.nan) if is_falling else max(finite, default=math.nan)


# ---- Tables ----


def table(runs: Mapping[str, Sequence[Run]], wanted: Mapping[str, int]) -> str:
  """Return the final and best score of every evaluation of a sweep, over seeds, in Markdown.

  A run's final score is its last one, at the step in the column before. Its best score is `best`,
  which includes the evaluation before training.

  Args:
    runs: setting -> its finished runs.
    wanted: setting -> number of runs that the sweep plans; the rows come in this order.
  """
  rows: list[tuple[str, ...]] = [('evaluation', 'setting', 'seeds', 'step', 'final', 'best')]
  for name in tabulated(runs):
    scored = {setting: [scores_of(run, name) for run in seeds] for setting, seeds in runs.items()}
    found = summaries(name, scored)[1]
    for setting, num_wanted in wanted.items():
      own = found.get(setting)
      count = own.seeds if own else 0
      seeds = str(count) if count == num_wanted else f'{count} of {num_wanted}'
      cells = (steps(own.last_steps), _text(own.last), _text(own.best)) if own else ('-',) * 3
      rows.append((name.removeprefix('eval/'), setting, seeds, *cells))
  return markdown(rows)


def tabulated(runs: Mapping[str, Sequence[Run]]) -> list[str]:
  """Return the names of these runs' metrics that are scores of evaluations."""
  names = {name for seeds in runs.values() for run in seeds for record in run for name in record}
  return sorted(filter(_TABULATED.fullmatch, names))


def steps(last: Iterable[int]) -> str:
  """Return the step of the last evaluation of some runs: `3`, or `2 to 3` if they differ."""
  found = sorted(set(last))
  return '-' if not found else ' to '.join(map(str, dict.fromkeys((found[0], found[-1]))))


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Return a Markdown table with columns of even width; the first row is the head."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  ruled = [rows[0], ['-' * width for width in widths], *rows[1:]]
  return '\n'.join('| ' + ' | '.join(map(str.ljust, row, widths)) + ' |' for row in ruled)


def _text(spread: Spread) -> str:
  deviation = '' if math.isnan(spread.deviation) else f' ± {spread.deviation:.4f}'
  return f'{spread.mean:.4f}{deviation}'
