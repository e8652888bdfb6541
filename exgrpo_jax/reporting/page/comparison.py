"""Several runs beside each other: curves with seeds as bands, and paired differences."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from exgrpo_jax.reporting import bootstrap, direction
from exgrpo_jax.reporting.figures import runs
from exgrpo_jax.reporting.figures.runs import Group
from exgrpo_jax.reporting.page import charts
from exgrpo_jax.reporting.panels import Line, Lines
from exgrpo_jax.reporting.series import over_seeds

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


def describe(groups: Sequence[Group]) -> dict[str, Any]:
  """Settings, curves, scores and differences of runs, by what they were configured to do."""
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
      row for source, name in scores.items() for row in _differences(groups, source, name)
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
        'last': charts.numbers([np.mean(last), np.std(last, ddof=1) if last[1:] else np.nan]),
        'best': charts.numbers([np.mean(best), np.std(best, ddof=1) if best[1:] else np.nan]),
      }
    )
  return rows


def _differences(groups: Sequence[Group], source: str, name: str) -> list[dict[str, Any]]:
  """Between any two groups the mean over common seeds of the difference of their last scores.

  The interval is of the paired bootstrap over seeds, see bootstrap.py; fewer than two common seeds
  have none.
  """
  rows = []
  for first, second in itertools.combinations(groups, 2):
    scores = [_last_by_seed(group, name) for group in (first, second)]
    seeds = sorted(set(scores[0]) & set(scores[1]))
    steps = {scores[side][seed][0] for side in (0, 1) for seed in seeds}
    if not seeds:
      continue
    paired = np.array([scores[1][seed][1] - scores[0][seed][1] for seed in seeds])
    rows.append(
      {
        'evaluation': source,
        'from': first.label,
        'to': second.label,
        'seeds': len(seeds),
        'step': int(steps.pop()) if len(steps) == 1 else None,
        'estimate': charts.numbers(bootstrap.estimate(paired, bootstrap.mean)),
      }
    )
  return rows


def _last_by_seed(group: Group, name: str) -> dict[int, tuple[float, float]]:
  """Seed -> the step and the value of the last score."""
  found = {}
  for run in group.runs:
    points = [(record['step'], record[name]) for record in run.metrics if name in record]
    if points:
      found[run.config['seed']] = points[-1]
  return found
