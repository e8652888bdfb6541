"""Several runs beside each other: curves with seeds as bands, and paired differences."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.errors import counted
from exgrpo_jax.reporting import bootstrap, runs, series
from exgrpo_jax.reporting.page import charts, evaluations
from exgrpo_jax.reporting.page.charts import Line, Panel
from exgrpo_jax.reporting.page.evaluations import Benchmark
from exgrpo_jax.reporting.runs import Group
from exgrpo_jax.reporting.series import last_common_step, over_seeds

Benchmarks = Mapping[str, Sequence[Benchmark]]  # of each run, by its workdir

_SHARE = {'share': True}
# What is compared besides the evaluations: metric, title, unit, options of charts.lines.
_METRICS: Sequence[tuple[str, str, str, dict[str, bool]]] = (
  ('reward', 'Reward', 'mean over responses', {}),
  ('pass_rate/fresh', 'Pass rate of fresh questions', 'share of responses', _SHARE),
  ('entropy', 'Entropy', 'nats per token', {}),
  ('length/mean', 'Response length', 'tokens', {}),
  ('length/truncated', 'Truncated responses', 'share of responses', _SHARE),
  ('groups/solved_by_none', 'Groups that no response solved', 'share of groups', _SHARE),
  ('groups/solved_by_all', 'Groups that all responses solved', 'share of groups', _SHARE),
  ('buffer/questions', 'Questions in the buffer', 'questions', {}),
  ('buffer/retired', 'Retired questions', 'questions', {}),
  ('replay/age_mean', 'Age of what is replayed', 'steps', {}),
  (
    'replay/effective_sample_size',
    'Effective sample size of replay',
    'share of replayed tokens',
    _SHARE,
  ),
  ('gradient_norm', 'Gradient norm', 'L2 norm, log scale', {'log': True}),
  ('perf/tokens_per_second', 'Tokens generated per second', 'tokens', {}),
)
_OF_REPLAY = ('buffer/', 'replay/')  # metrics that mean nothing in a run without replay

_SHOWN_STEPS = 6  # of evaluations, in a sentence


def describe(groups: Sequence[Group], benchmarks: Benchmarks) -> dict[str, Any]:
  """Settings, curves, scores and differences of the groups; `benchmarks` of each run."""
  called = zip(groups, group_names(groups))
  groups = [dataclasses.replace(group, label=name) for group, name in called]
  scores = runs.scores(groups)
  chosen = [(name, source, 'share correct', _SHARE) for source, name in scores.items()]
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
    'panels': [panel for panel in drawn if panel],
    'scores': [row for source, name in scores.items() for row in _scores(groups, source, name)],
    **_compared(groups, benchmarks, scores),
  }


def _panel(
  groups: Sequence[Group], name: str, title: str, unit: str, options: Mapping[str, Any]
) -> Panel | None:
  """A line for each group: the mean over seeds, with a band of one standard deviation.

  Metrics of replay have lines only for groups that replay, each in its group's colour.
  """
  lines, places = [], []
  for place, group in enumerate(groups):
    found = over_seeds(group.metrics, name)
    if found is None or (name.startswith(_OF_REPLAY) and not group.runs[0].config['replay.ratio']):
      continue
    band = (found.steps, found.mean - found.std, found.mean + found.std)
    lines.append(Line(group.label, found.steps, found.mean, band if len(group.runs) > 1 else None))
    places.append(place)
  if not lines:
    return None
  described = charts.lines(title, unit, lines, **options)
  for line, place in zip(described['lines'], places):
    line['place'] = place
  return described


def _settings(groups: Sequence[Group]) -> list[list[str]]:
  """The settings other than the seed in which the groups differ, with each one's value."""
  configs = [group.runs[0].config for group in groups]
  names = sorted({name for config in configs for name in config} - {'seed'})
  table = [[name, *(str(config.get(name, '-')) for config in configs)] for name in names]
  return [row for row in table if len(set(row[1:])) > 1]


def _scores(groups: Sequence[Group], source: str, name: str) -> list[dict[str, Any]]:
  """Each group's score at the last step that all groups have, its last one, and its best.

  A score is the mean over seeds with their deviation. 'step' and the score there are None where
  the groups have no evaluation after step 0 in common.
  """
  by_group = [list(_by_seed(group, name).values()) for group in groups]
  step = last_common_step([found for seeds in by_group for found in seeds])
  return [
    {
      'evaluation': source,
      'group': group.label,
      'seeds': len(seeds),
      'step': step,
      'common': step and _mean_and_deviation([found[step] for found in seeds]),
      'last': _mean_and_deviation([found[max(found)] for found in seeds]),
      'last_steps': sorted({max(found) for found in seeds}),
      'best': _mean_and_deviation([series.best(name, found.values()) for found in seeds]),
    }
    for group, seeds in zip(groups, by_group)
    if seeds
  ]


def _mean_and_deviation(values: Sequence[float]) -> list[float | None]:
  deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
  return charts.numbers(np.array([np.mean(values), deviation]))


def _compared(
  groups: Sequence[Group], benchmarks: Benchmarks, scores: Mapping[str, str]
) -> dict[str, list[Any]]:
  """'differences' between any two groups on each evaluation, and 'not_compared' in words."""
  differences: list[dict[str, Any]] = []
  without: dict[str, list[str]] = {}  # why two groups are not compared -> on which evaluations
  for source, name in scores.items():
    for pair in itertools.combinations(groups, 2):
      found = _difference(pair, benchmarks, source, name)
      if isinstance(found, str):
        without.setdefault(found, []).append(source)
      else:
        labels = {'evaluation': source, 'from': pair[0].label, 'to': pair[1].label}
        differences.append(labels | found)
  not_compared = [f'{", ".join(sources)}: {why}' for why, sources in without.items()]
  return {'differences': differences, 'not_compared': not_compared}


def _difference(
  pair: tuple[Group, Group], benchmarks: Benchmarks, source: str, name: str
) -> dict[str, Any] | str:
  """The paired difference at the last evaluation that both groups have; or why there is none.

  Pairs are seeds, with the interval of the paired bootstrap (see bootstrap.py); where the groups
  have no two seeds in common, they are the questions of one run of each.
  """
  found = [_by_seed(group, name) for group in pair]
  seeds = sorted(set(found[0]) & set(found[1]))
  if len(seeds) > 1:
    step = last_common_step([scores[seed] for scores in found for seed in seeds])
    if step is None:
      return _nothing_common(pair, [scores[seeds[0]] for scores in found])
    paired = np.array([found[1][seed][step] - found[0][seed][step] for seed in seeds])
    estimate, over = bootstrap.estimate(paired, bootstrap.mean), counted(len(seeds), 'seed')
  else:
    made = [evaluations.by_step(benchmarks[_run_of(group, seeds)], source) for group in pair]
    step = last_common_step(made)
    if step is None:
      return _nothing_common(pair, made)
    estimate, questions = evaluations.difference(*(by_step[step] for by_step in made))
    if questions < 2:
      return f'{pair[0].label} and {pair[1].label} have fewer than two questions in common.'
    over = counted(questions, 'question')
  return {'step': step, 'estimate': charts.numbers(estimate), 'paired': over}


def _run_of(group: Group, seeds: Sequence[int]) -> str:
  """The workdir of the group's run with the common seed, if there is one; else of its first."""
  by_seed = {run.config['seed']: run.workdir for run in group.runs}
  return by_seed[seeds[0]] if seeds else group.runs[0].workdir


def _nothing_common(pair: tuple[Group, Group], evaluated: Sequence[Collection[int]]) -> str:
  """Why two groups are not compared, by the steps of their evaluations."""
  shown = []
  for group, steps in zip(pair, evaluated):
    after = [str(step) for step in sorted(steps) if step > 0]
    several = after if len(after) <= _SHOWN_STEPS else [*after[:2], '…', after[-1]]
    shown.append(f'{group.label} {"after " + ", ".join(several) if after else "never"}')
  return (
    f'{pair[0].label} and {pair[1].label} have no evaluation in common after step 0, so they are '
    f'not compared (evaluated: {"; ".join(shown)}).'
  )


def _by_seed(group: Group, name: str) -> dict[int, dict[int, float]]:
  """Seed -> step -> score, of the runs that have any."""
  found = {
    run.config['seed']: {int(row['step']): row[name] for row in run.metrics if name in row}
    for run in group.runs
  }
  return {seed: scores for seed, scores in found.items() if scores}


# ---- Names ----


def run_names(workdirs: Sequence[str]) -> list[str]:
  """The names of the runs' folders, with as much of their paths as tells them apart."""
  paths = [pathlib.Path(os.path.realpath(workdir)).parts for workdir in workdirs]
  names: list[str] = []
  for count in range(1, max(map(len, paths)) + 1):
    names = ['/'.join(parts[-count:]) for parts in paths]
    if len(set(names)) == len(names):
      break
  return names


def group_names(groups: Sequence[Group]) -> list[str]:
  """The folders' names where each group is one run, else what tells the settings apart."""
  if len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
    return run_names([group.runs[0].workdir for group in groups])
  return [group.label for group in groups] if len(groups) == 1 else _setting_names(groups)


def _setting_names(groups: Sequence[Group]) -> list[str]:
  """Values of as few settings as tell the groups apart: how much they replay, then short ones."""
  configs = [runs.setting(group.runs[0]) for group in groups]
  values = {
    name: [f'{name}={config.get(name, "-")}' for config in configs]
    for name in sorted({name for config in configs for name in config})
  }
  by_length = sorted(values, key=lambda name: (name != 'replay.ratio', sum(map(len, values[name]))))
  names = [''] * len(groups)
  for name in by_length:
    longer = [', '.join(filter(None, pair)) for pair in zip(names, values[name])]
    if len(set(longer)) > len(set(names)):
      names = longer
  return names
