"""Several runs beside each other: curves with seeds as bands, and paired differences."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.reporting import bootstrap, direction, metrics
from exgrpo_jax.reporting.figures import runs
from exgrpo_jax.reporting.figures.runs import Group
from exgrpo_jax.reporting.page import charts
from exgrpo_jax.reporting.panels import Line, Lines
from exgrpo_jax.reporting.series import over_seeds

Benchmark = Mapping[str, Any]  # see evaluations.describe
Benchmarks = Mapping[str, Sequence[Benchmark]]  # of each run, by its workdir

# What is compared besides the evaluations: metric, title, unit, and what else is true of it.
_METRICS = (
  ('reward', 'Reward', 'mean over responses', {}),
  ('pass_rate/fresh', 'Pass rate of fresh questions', 'share of responses', {'share': True}),
  ('entropy', 'Entropy', 'nats per token', {}),
  ('length/mean', 'Response length', 'tokens', {}),
  ('length/truncated', 'Truncated responses', 'share of responses', {'share': True}),
  ('groups/solved_by_none', 'Groups that no response solved', 'share of groups', {'share': True}),
  ('groups/solved_by_all', 'Groups that all responses solved', 'share of groups', {'share': True}),
  ('buffer/questions', 'Questions in the buffer', 'questions', {}),
  ('buffer/retired', 'Retired questions', 'questions', {}),
  ('replay/age_mean', 'Age of what is replayed', 'steps', {}),
  (
    'replay/effective_sample_size',
    'Effective sample size of replay',
    'share of replayed tokens',
    {'share': True},
  ),
  ('gradient_norm', 'Gradient norm', 'L2 norm, log scale', {'log': True}),
  ('speed/tokens_per_second', 'Tokens generated per second', 'tokens', {}),
)


def describe(groups: Sequence[Group], benchmarks: Benchmarks) -> dict[str, Any]:
  """Settings, curves, scores and differences of runs, by what they were configured to do.

  `benchmarks` are what `evaluations.describe` gives for each run.
  """
  scores = runs.scores(groups)
  chosen = [(name, source, 'share correct', {'share': True}) for source, name in scores.items()]
  drawn = [_panel(groups, *row) for row in (*chosen, *_METRICS)]
  return {
    'groups': [
      {
        'label': group.label,
        'runs': [{'workdir': run.workdir, 'seed': run.config['seed']} for run in group.runs],
      }
      for group in groups
    ],
    'settings': _settings(groups),
    'panels': [charts.describe(panel) for panel in drawn if panel],
    'scores': [row for source, name in scores.items() for row in _scores(groups, source, name)],
    'differences': [
      row
      for source, name in scores.items()
      for row in _differences(groups, benchmarks, source, name)
    ],
  }


def _panel(
  groups: Sequence[Group], name: str, title: str, unit: str, traits: dict[str, bool]
) -> Lines | None:
  """A line for each group: the mean over seeds, with a band of one standard deviation."""
  lines = []
  for group in groups:
    series = over_seeds(group.metrics, name)
    if series is None:
      continue
    low, high = series.mean - series.std, series.mean + series.std
    several = len(group.runs) > 1
    lines.append(
      Line(group.label, series.steps, series.mean, (series.steps, low, high) if several else None)
    )
  return Lines(title, unit, tuple(lines), **{'smooth': True} | traits) if lines else None


def _settings(groups: Sequence[Group]) -> list[list[str]]:
  """The settings in which runs differ, and what each group has; seeds are not among them."""
  configs = [group.runs[0].config for group in groups]
  names = sorted({name for config in configs for name in config} - {'seed'})
  table = [[name, *(str(config.get(name, '-')) for config in configs)] for name in names]
  return [row for row in table if len(set(row[1:])) > 1]


def _scores(groups: Sequence[Group], source: str, name: str) -> list[dict[str, Any]]:
  """Of each group the mean over seeds of the last and of the best score, and their deviation."""
  rows = []
  for group in groups:
    series = [[record[name] for record in run if name in record] for run in group.metrics]
    series = [values for values in series if values]
    if not series:
      continue
    last = [values[-1] for values in series]
    best = [direction.best(name, values) for values in series]
    rows.append(
      {
        'evaluation': source,
        'group': group.label,
        'seeds': len(series),
        'last': _mean_and_deviation(last),
        'best': _mean_and_deviation(best),
      }
    )
  return rows


def _mean_and_deviation(values: Sequence[float]) -> list[float | None]:
  deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
  return charts.numbers(np.array([np.mean(values), deviation]))


def _differences(
  groups: Sequence[Group], benchmarks: Benchmarks, source: str, name: str
) -> list[dict[str, Any]]:
  """Between any two groups the difference of their last scores, paired by what they have in common.

  That is seeds, with the interval of the paired bootstrap (see bootstrap.py), or of runs that have
  no two seeds in common the questions of one run of each.
  """
  rows = []
  for pair in itertools.combinations(groups, 2):
    scores = [_last_by_seed(group, name) for group in pair]
    seeds = sorted(set(scores[0]) & set(scores[1]))
    if len(seeds) > 1:
      paired = np.array([scores[1][seed] - scores[0][seed] for seed in seeds])
      estimate, over = bootstrap.estimate(paired, bootstrap.mean), f'{len(seeds)} seeds'
    else:
      first, second = (benchmarks[group.runs[0].workdir] for group in pair)
      paired = _by_question(first, second, source)
      if len(paired) < 2:
        continue
      estimate, over = (
        metrics.difference_95(paired, np.arange(len(paired))),
        f'{len(paired)} questions',
      )
    rows.append(
      {
        'evaluation': source,
        'from': pair[0].label,
        'to': pair[1].label,
        'estimate': charts.numbers(estimate),
        'paired': over,
      }
    )
  return rows


def _last_by_seed(group: Group, name: str) -> dict[int, float]:
  """Seed -> the last score."""
  found = {}
  for run in group.runs:
    values = [record[name] for record in run.metrics if name in record]
    if values:
      found[run.config['seed']] = values[-1]
  return found


def _by_question(
  first: Sequence[Benchmark], second: Sequence[Benchmark], source: str
) -> np.ndarray:
  """For each common question of a benchmark the difference of the shares of right responses.

  Rows of the same text (AIME lists each of its questions 32 times) count as one question.
  """
  shares = [_last_shares(benchmarks, source) for benchmarks in (first, second)]
  common = shares[0].keys() & shares[1].keys()
  by_text: dict[str, list[float]] = {}
  for row, text in sorted(common):
    difference = shares[1][row, text] - shares[0][row, text]
    by_text.setdefault(text, []).append(difference)
  return np.array([np.mean(differences) for differences in by_text.values()])


def _last_shares(benchmarks: Sequence[Benchmark], source: str) -> dict[tuple[int, str], float]:
  """(row, text) of a question -> the share of its responses that were right in the last evaluation.

  Of the run's own evaluations, not of those by hand.
  """
  for benchmark in benchmarks:
    own = [evaluation for evaluation in benchmark['evaluations'] if not evaluation['made']]
    if benchmark['name'] == source and own:
      keys = zip(benchmark['rows'], benchmark['texts'])
      return {key: count / own[-1]['samples'] for key, count in zip(keys, own[-1]['correct'])}
  return {}
