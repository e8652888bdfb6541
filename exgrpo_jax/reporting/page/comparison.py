"""Several runs beside each other: curves with seeds as bands, and paired differences."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.reporting import bootstrap, direction, metrics
from exgrpo_jax.reporting.common_step import last_common_step
from exgrpo_jax.reporting.figures import runs
from exgrpo_jax.reporting.figures.runs import Group
from exgrpo_jax.reporting.page import charts, names
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
_OF_REPLAY = ('buffer/', 'replay/')  # how metrics begin that say nothing of a run without replay

_SHOWN_STEPS = 6  # of evaluations, in a sentence


def describe(groups: Sequence[Group], benchmarks: Benchmarks) -> dict[str, Any]:
  """Settings, curves, scores and differences of runs, by what they were configured to do.

  `benchmarks` are what `evaluations.describe` gives for each run.
  """
  called = zip(groups, names.of_groups(groups))
  groups = [dataclasses.replace(group, label=name) for group, name in called]
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
    'panels': [panel for panel in drawn if panel],
    'scores': [row for source, name in scores.items() for row in _scores(groups, source, name)],
    **_compared(groups, benchmarks, scores),
  }


def _panel(
  groups: Sequence[Group], name: str, title: str, unit: str, traits: dict[str, bool]
) -> dict[str, Any] | None:
  """A line for each group: the mean over seeds, with a band of one standard deviation.

  What belongs to replay has lines only of groups that replay, each in its group's colour.
  """
  lines, places = [], []
  for place, group in enumerate(groups):
    series = over_seeds(group.metrics, name)
    if series is None or (name.startswith(_OF_REPLAY) and not group.runs[0].config['replay.ratio']):
      continue
    low, high = series.mean - series.std, series.mean + series.std
    several = len(group.runs) > 1
    lines.append(
      Line(group.label, series.steps, series.mean, (series.steps, low, high) if several else None)
    )
    places.append(place)
  if not lines:
    return None
  described = charts.describe(Lines(title, unit, tuple(lines), **{'smooth': True} | traits))
  for line, place in zip(described['lines'], places):
    line['place'] = place
  return described


def _settings(groups: Sequence[Group]) -> list[list[str]]:
  """The settings in which runs differ, and what each group has; seeds are not among them."""
  configs = [group.runs[0].config for group in groups]
  names = sorted({name for config in configs for name in config} - {'seed'})
  table = [[name, *(str(config.get(name, '-')) for config in configs)] for name in names]
  return [row for row in table if len(set(row[1:])) > 1]


def _scores(groups: Sequence[Group], source: str, name: str) -> list[dict[str, Any]]:
  """Scores of each group: at the last step that all groups have, its own last, and its best.

  Each is the mean over seeds, with their deviation. 'step' is None, and so is the score there,
  where the groups have no evaluation after step 0 in common.
  """
  by_group = [list(_by_seed(group, name).values()) for group in groups]
  step = last_common_step([found for series in by_group for found in series])
  rows = []
  for group, series in zip(groups, by_group):
    if not series:
      continue
    best = [direction.best(name, found.values()) for found in series]
    rows.append(
      {
        'evaluation': source,
        'group': group.label,
        'seeds': len(series),
        'step': step,
        'common': step and _mean_and_deviation([found[step] for found in series]),
        'last': _mean_and_deviation([found[max(found)] for found in series]),
        'last_steps': sorted({max(found) for found in series}),
        'best': _mean_and_deviation(best),
      }
    )
  return rows


def _mean_and_deviation(values: Sequence[float]) -> list[float | None]:
  deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
  return charts.numbers(np.array([np.mean(values), deviation]))


def _compared(
  groups: Sequence[Group], benchmarks: Benchmarks, scores: Mapping[str, str]
) -> dict[str, list[Any]]:
  """'differences' between any two groups on each evaluation, and in words those that have none."""
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
  """The difference at the last evaluation that both have, by what they have in common; or why not.

  That is seeds, with the interval of the paired bootstrap (see bootstrap.py), or of groups that
  have no two seeds in common the questions of one run of each.
  """
  found = [_by_seed(group, name) for group in pair]
  seeds = sorted(set(found[0]) & set(found[1]))
  if len(seeds) > 1:
    step = last_common_step([scores[seed] for scores in found for seed in seeds])
    if step is None:
      return _nothing_common(pair, [scores[seeds[0]] for scores in found])
    paired = np.array([found[1][seed][step] - found[0][seed][step] for seed in seeds])
    estimate, over = bootstrap.estimate(paired, bootstrap.mean), f'{len(seeds)} seeds'
  else:
    made = [_evaluations(benchmarks[_run_of(group, seeds)], source) for group in pair]
    step = last_common_step(made)
    if step is None:
      return _nothing_common(pair, made)
    paired = _by_question(*(_shares(*by_step[step]) for by_step in made))
    if len(paired) < 2:
      return f'{pair[0].label} and {pair[1].label} have fewer than two questions in common.'
    groups_Q = np.arange(len(paired))
    estimate, over = metrics.difference_95(paired, groups_Q), f'{len(paired)} questions'
  return {'step': step, 'estimate': charts.numbers(estimate), 'paired': over}


def _run_of(group: Group, seeds: Sequence[int]) -> str:
  """The workdir of the group's run with the only common seed; of its first one without any."""
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


_Shares = Mapping[tuple[int, str], float]  # (row, text) of a question -> share of right responses


def _by_question(first: _Shares, second: _Shares) -> np.ndarray:
  """For each common question of a benchmark the difference of the shares of right responses.

  Rows of the same text (AIME lists each of its questions 32 times) count as one question.
  """
  by_text: dict[str, list[float]] = {}
  for row, text in sorted(first.keys() & second.keys()):
    by_text.setdefault(text, []).append(second[row, text] - first[row, text])
  return np.array([np.mean(differences) for differences in by_text.values()])


def _evaluations(
  benchmarks: Sequence[Benchmark], source: str
) -> dict[int, tuple[Benchmark, Mapping[str, Any]]]:
  """A run's own evaluations by step, without those by hand, and the benchmark of each."""
  return {
    evaluation['step']: (benchmark, evaluation)
    for benchmark in benchmarks
    if benchmark['name'] == source
    for evaluation in benchmark['evaluations']
    if not evaluation['made']
  }


def _shares(benchmark: Benchmark, evaluation: Mapping[str, Any]) -> _Shares:
  keys = zip(benchmark['rows'], benchmark['texts'])
  return {key: count / evaluation['samples'] for key, count in zip(keys, evaluation['correct'])}
