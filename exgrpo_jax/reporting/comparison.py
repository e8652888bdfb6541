"""Comparisons of policies and runs: scores over seeds, paired differences, 95% intervals.

Intervals over questions are cluster-robust; intervals over seeds use SciPy's percentile bootstrap
(Efron, Annals of Statistics 7, 1979). With few seeds, these bootstrap intervals are too narrow. For
normally distributed values, they cover the true mean 95% of the time with many seeds, about 91%
with 16 seeds, 87% with 8 and 83% with 5. With two seeds, coverage would be 50%, so no interval is
computed. If all values are equal, so are all resamples, and no interval is computed either.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import numpy as np

from exgrpo_jax.reporting.metrics import Run

Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution
_ROUNDING = 1e-15  # a variance of a mean up to this value counts as 0
_Clusters = Sequence[Any] | np.ndarray


class Estimate(NamedTuple):
  """A statistic of some values and its 95% interval."""

  value: float
  low: float  # NaN if there is no interval: too few values, or all values equal
  high: float


# ---- Intervals over questions ----


def interval_95(correct_QK: np.ndarray, cluster_Q: _Clusters) -> Estimate:
  """Estimate an evaluation's mean score.

  Rows with the same prompt are not independent (AIME lists each of its 30 questions 32 times), and
  neither are samples for one question. So the standard error of the mean is cluster-robust, with
  the G / (G - 1) correction for G clusters. This standard error gives the effective sample size
  n = p(1-p) / se^2, the number of independent samples with the same error. The interval is Wilson's
  score interval (JASA 22, 1927) for n. It stays inside [0, 1] and does not collapse to a point if 0
  of 100 are correct.

  A standard error of 0 carries no information. It occurs, for example, if all or none of the
  responses are correct. In this case, n = G is used instead. n never exceeds the number of samples.

  Args:
    correct_QK: correctness [questions, samples], bool or float in [0, 1].
    cluster_Q: each row's cluster, such as the value of `question_key` [questions].
  """
  chex.assert_rank(correct_QK, 2)
  score_Q = correct_QK.mean(axis=1, dtype=np.float64)
  mean = float(score_Q.mean())
  variance, clusters = _variance_of_mean(score_Q, cluster_Q)
  n = mean * (1 - mean) / variance if variance > _ROUNDING else clusters
  n = min(float(n), np.size(correct_QK))
  shrink = 1 + Z_95**2 / n
  center = (mean + Z_95**2 / (2 * n)) / shrink
  half = Z_95 * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2)) / shrink
  return Estimate(mean, max(center - half, 0.0), min(center + half, 1.0))


def difference_95(difference_Q: np.ndarray, cluster_Q: _Clusters) -> Estimate:
  """Estimate the mean of paired differences, using the normal approximation.

  The standard error is cluster-robust, as in `interval_95`. If all differences are equal, this
  error is 0 and carries no information. The interval then depends on how likely other values are:
  if all G clusters have the same value, we can be 95% confident that the probability of another
  value is at most b = 1 - 0.05^(1/G), which is about 3 / G. The interval contains every mean that
  can result from replacing a share b of the values with values in [-1, 1].

  Args:
    difference_Q: differences between two policies' shares of correct responses [questions].
    cluster_Q: each question's cluster id [questions]; questions with the same id form a cluster.
  """
  chex.assert_rank(difference_Q, 1)
  mean = float(difference_Q.mean())
  variance, clusters = _variance_of_mean(difference_Q, cluster_Q)
  if variance <= _ROUNDING:
    other_share = 1 - 0.05 ** (1 / clusters)
    return Estimate(mean, mean - other_share * (1 + mean), mean + other_share * (1 - mean))
  half = Z_95 * math.sqrt(variance)
  return Estimate(mean, max(mean - half, -1.0), min(mean + half, 1.0))


def question_key(record: Mapping[str, Any]) -> str:
  """Return the cluster key of an evaluated question; the 32 copies of an AIME question share a key.

  The key includes the answer, because an environment's prompt may be the same for all questions.
  """
  return f'{record["question"]}\n{record["answer"]}'


def _variance_of_mean(score_Q: np.ndarray, cluster_Q: _Clusters) -> tuple[float, int]:
  """Return the cluster-robust variance of the mean score, and the number G of clusters."""
  numbers: dict[Any, int] = {}  # an array would pad every text to the length of the longest
  index_Q = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in cluster_Q])
  chex.assert_equal_shape([score_Q, index_Q])
  residual_G = np.bincount(index_Q, weights=score_Q - score_Q.mean())
  clusters = len(numbers)
  variance = clusters / max(clusters - 1, 1) * np.sum((residual_G / len(score_Q)) ** 2)
  return float(variance), clusters


# ---- Intervals over seeds ----

RESAMPLES = 10_000
FEWEST = 3  # values needed for an interval
ROUNDING = 1e-12  # an interval narrower than this counts as no interval
_SEED = 0  # fixed, so that tables are reproducible


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
  """Compute the mean over `axis`: [..., N] -> [...]."""
  return values.mean(axis=axis)


def bootstrap(values: np.ndarray, statistic: Callable[..., np.ndarray] = mean) -> Estimate:
  """Estimate a statistic of `values` [N], N >= 1, from RESAMPLES resamples.

  `statistic` reduces one axis: (values [..., N], axis=-1) -> [...].
  """
  value = float(statistic(values))
  if len(values) < FEWEST:
    return Estimate(value, np.nan, np.nan)
  from scipy import stats  # importing it takes 0.75 s, and few commands need it

  result = stats.bootstrap(
    (values,),
    statistic,
    n_resamples=RESAMPLES,
    vectorized=True,
    method='percentile',
    rng=np.random.default_rng(_SEED),
  )
  low, high = map(float, result.confidence_interval)
  if math.isclose(low, high, abs_tol=ROUNDING):
    return Estimate(value, np.nan, np.nan)
  return Estimate(value, low, high)


# ---- Two policies, or two settings ----


class Comparison(NamedTuple):
  """The difference between two policies or settings, over the seeds or questions they share."""

  difference: np.ndarray  # [N], second minus first
  pairs: int  # seeds, or distinct questions
  estimate: Estimate  # of the mean difference; NaN without pairs


def compare(
  first: Mapping[Any, float], second: Mapping[Any, float], of_questions: bool = False
) -> Comparison:
  """Compare the scores of two policies, or of two settings, pair by pair.

  Pairing cancels seed or question effects that both scores share. Keys are seeds or, with
  `of_questions`, (row, question). Rows with the same question (AIME lists each question 32 times)
  count as one pair.
  """
  keys = sorted(first.keys() & second.keys())
  difference = np.array([second[key] - first[key] for key in keys], np.float64)
  clusters = [key[1] for key in keys] if of_questions else keys
  estimate = Estimate(np.nan, np.nan, np.nan)
  if keys:
    estimate = difference_95(difference, clusters) if of_questions else bootstrap(difference)
  return Comparison(difference, len(set(clusters)), estimate)


# ---- Scores over seeds ----

Scores = Mapping[int, float]  # a run's scores, step -> score
_FALLING = re.compile(
  r'(.+/)?(truncated|wrong|no_answer|timed_out|crashed|zero_advantage|zero_variance|skipped|loss'
  r'|solved_by_none)'
)
_TABULATED = re.compile(r'eval/.+/(pass@\d+|avg@\d+|maj@\d+|valid_steps|truncated)')


class Spread(NamedTuple):
  """The mean over seeds, and the sample standard deviation (n - 1)."""

  mean: float
  deviation: float  # NaN for a single seed


class Summary(NamedTuple):
  """A summary of one setting's scores over its runs."""

  seeds: int
  last_steps: Sequence[int]  # distinct steps of the runs' last evaluations, ascending
  common: Spread | None  # at the last step that all settings share; None if they share no step
  last: Spread
  best: Spread


def scores_of(run: Run, name: str) -> dict[int, float]:
  """Map steps to a metric's values. Records without the metric are skipped."""
  return {int(record['step']): record[name] for record in run if name in record}


def summaries(
  name: str, settings: Mapping[str, Sequence[Scores]]
) -> tuple[int | None, dict[str, Summary]]:
  """Return the last step at which all runs were evaluated, and a summary of each setting.

  Runs without the score are left out, and so are settings in which no run has the score.
  """
  scores_by_label = {label: list(filter(None, seeds)) for label, seeds in settings.items()}
  step = last_common_step([scores for seeds in scores_by_label.values() for scores in seeds])
  return step, {
    label: Summary(
      seeds=len(seeds),
      last_steps=sorted({max(scores) for scores in seeds}),
      common=None if step is None else _spread([scores[step] for scores in seeds]),
      last=_spread([scores[max(scores)] for scores in seeds]),
      best=_spread([best(name, scores.values()) for scores in seeds]),
    )
    for label, seeds in scores_by_label.items()
    if seeds
  }


def _spread(values: Sequence[float]) -> Spread:
  deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
  return Spread(float(np.mean(values)), float(deviation))


def last_common_step(steps_by_run: Sequence[Collection[int]]) -> int | None:
  """Return the last step after 0 at which all runs were evaluated; None if no step qualifies.

  Step 0 is excluded, because its evaluation takes place before training.
  """
  common_steps = set.intersection(*map(set, steps_by_run)) if steps_by_run else set()
  return max((step for step in common_steps if step > 0), default=None)


def best(name: str, values: Iterable[float]) -> float:
  """Return the highest finite value, or the lowest if lower is better (as for truncated responses).

  Returns NaN if no value is finite.
  """
  finite = filter(math.isfinite, values)
  is_falling = _FALLING.fullmatch(name) is not None
  return min(finite, default=math.nan) if is_falling else max(finite, default=math.nan)


def at_best(name: str, points: Run) -> Mapping[str, float]:
  """Return the first record with the best score, or the last record if no score is finite."""
  value = best(name, (record[name] for record in points))
  return next((record for record in points if record[name] == value), points[-1])


def scores_by_column(run: Run) -> dict[str, float]:
  """Return a run's final and best evaluation scores, with their intervals, by column name.

  Examples: 'final/gsm8k/pass@1', 'final/gsm8k/pass@1_low' and 'final/gsm8k/pass@1_high'.
  """
  columns = {}
  for name in tabulated({'': [run]}):
    points = [record for record in run if name in record]
    for end, record in {'final': points[-1], 'best': at_best(name, points)}.items():
      for column in (name, f'{name}_low', f'{name}_high'):
        if column in record:
          columns[f'{end}/{column.removeprefix("eval/")}'] = record[column]
  return columns


# ---- Tables ----


def table(runs: Mapping[str, Sequence[Run]], num_planned: Mapping[str, int]) -> str:
  """Return a Markdown table of a sweep's final and best evaluation scores, aggregated over seeds.

  A run's final score comes from its last evaluation; the 'step' column shows when that was. The
  best score is chosen by `best` and may come from the evaluation before training.

  `runs` maps each setting to its finished runs. `num_planned` maps each setting to its number of
  planned runs, in row order.
  """
  rows: list[tuple[str, ...]] = [('evaluation', 'setting', 'seeds', 'step', 'final', 'best')]
  for name in tabulated(runs):
    scores = {setting: [scores_of(run, name) for run in seeds] for setting, seeds in runs.items()}
    summary_of = summaries(name, scores)[1]
    for setting, total in num_planned.items():
      summary = summary_of.get(setting)
      count = summary.seeds if summary else 0
      seeds = str(count) if count == total else f'{count} of {total}'
      cells = (
        (steps(summary.last_steps), _text(summary.last), _text(summary.best))
        if summary
        else ('-',) * 3
      )
      rows.append((name.removeprefix('eval/'), setting, seeds, *cells))
  return markdown(rows)


def tabulated(runs: Mapping[str, Sequence[Run]]) -> list[str]:
  """Return the names of all evaluation scores among the runs' metrics."""
  names = {name for seeds in runs.values() for run in seeds for record in run for name in record}
  return sorted(filter(_TABULATED.fullmatch, names))


def steps(last_steps: Iterable[int]) -> str:
  """Format the steps at which runs were last evaluated: `3`, or `2 to 3` if the steps differ."""
  distinct = sorted(set(last_steps))
  return '-' if not distinct else ' to '.join(map(str, dict.fromkeys((distinct[0], distinct[-1]))))


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Format a Markdown table with aligned columns; the first row is the header."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [rows[0], ['-' * width for width in widths], *rows[1:]]
  return '\n'.join('| ' + ' | '.join(map(str.ljust, row, widths)) + ' |' for row in lines)


def _text(spread: Spread) -> str:
  deviation = '' if math.isnan(spread.deviation) else f' ± {spread.deviation:.4f}'
  return f'{spread.mean:.4f}{deviation}'
