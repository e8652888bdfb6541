"""Comparison of several runs: curves with bands over seeds, and paired differences."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import counted
from exgrpo_jax.reporting import comparison, runs
from exgrpo_jax.reporting.comparison import last_common_step, scores_of
from exgrpo_jax.reporting.page import charts, evaluations
from exgrpo_jax.reporting.page.charts import Line, Panel
from exgrpo_jax.reporting.page.evaluations import Benchmark
from exgrpo_jax.reporting.runs import Group, over_seeds

Benchmarks = Mapping[str, Sequence[Benchmark]]  # workdir -> the run's benchmarks

_SHARE = {'share': True}
# Curves besides the evaluations: metric, title, unit, options of charts.lines.
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
  ('replay/age_mean', 'Age of replayed trajectories', 'steps', {}),
  (
    'replay/effective_sample_size',
    'Effective sample size of replay',
    'share of replayed tokens',
    _SHARE,
  ),
  ('gradient_norm', 'Gradient norm', 'L2 norm, log scale', {'log': True}),
  ('perf/tokens_per_second', 'Tokens generated per second', 'tokens', {}),
)
_OF_REPLAY = ('buffer/', 'replay/')  # metrics that are meaningless without replay

_SHOWN_STEPS = 6  # maximum number of evaluation steps listed in a sentence


def describe(groups: Sequence[Group], benchmarks: Benchmarks) -> dict[str, Any]:
  """Return the groups, their curves, scores and differences, and the settings that differ."""
  if len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
    names = run_names([group.runs[0].workdir for group in groups])
    groups = [dataclasses.replace(group, label=name) for group, name in zip(groups, names)]
  scores = runs.score_names([metrics for group in groups for metrics in group.metrics])
  configs = [group.runs[0].config for group in groups]
  keys = sorted(set().union(*configs) - {'seed'})
  settings = {key: [str(config.get(key, '-')) for config in configs] for key in keys}
  score_rows = [(name, source, 'share correct', _SHARE) for source, name in scores.items()]
  panels = [_panel(groups, *row) for row in (*score_rows, *_METRICS)]
  differences: list[dict[str, Any]] = []
  sources_by_reason: dict[str, list[str]] = {}  # reason not to compare two groups -> evaluations
  names_by_label = {group.label: runs.score_names(group.metrics) for group in groups}
  for (source, name), pair in itertools.product(scores.items(), itertools.combinations(groups, 2)):
    if not all(source in names_by_label[group.label] for group in pair):
      continue  # visible in the table of scores
    difference = _difference(pair, benchmarks, source, name)
    if isinstance(difference, str):
      sources_by_reason.setdefault(difference, []).append(source)
    else:
      labels = {'evaluation': source, 'from': pair[0].label, 'to': pair[1].label}
      differences.append(labels | difference)
  return {
    'groups': [
      {
        'label': group.label,
        'runs': [{'workdir': run.workdir, 'seed': run.config['seed']} for run in group.runs],
      }
      for group in groups
    ],
    'settings': [[name, *values] for name, values in settings.items() if len(set(values)) > 1],
    'panels': [panel for panel in panels if panel],
    'scores': [row for source, name in scores.items() for row in _scores(groups, source, name)],
    'differences': differences,
    'not_compared': [
      f'{", ".join(sources)}: {reason}' for reason, sources in sources_by_reason.items()
    ],
  }


def _panel(
  groups: Sequence[Group], name: str, title: str, unit: str, options: Mapping[str, Any]
) -> Panel | None:
  """Plot a line for each group: the mean over seeds, with a band of one standard deviation.

  Replay metrics are drawn only for groups that use replay. A group's color is the same in all
  panels.
  """
  lines, places = [], []
  for place, group in enumerate(groups):
    series = over_seeds(group.metrics, name)
    if series is None or (name.startswith(_OF_REPLAY) and not group.runs[0].config['replay.ratio']):
      continue
    band = (series.steps, series.mean - series.std, series.mean + series.std)
    lines.append(
      Line(group.label, series.steps, series.mean, band if len(group.runs) > 1 else None)
    )
    places.append(place)
  if not lines:
    return None
  panel = charts.lines(title, unit, lines, **options)
  for line, place in zip(panel['lines'], places):
    line['place'] = place
  return panel


def _scores(groups: Sequence[Group], source: str, name: str) -> list[dict[str, Any]]:
  """Return each group's score at the last common step, its last score, and its best score.

  Scores are means over seeds, with standard deviations. 'step' and 'common' are None if the groups
  share no evaluation after step 0.
  """
  scores_by_label = {
    group.label: [scores_of(run, name) for run in group.metrics] for group in groups
  }
  step, summary_of = comparison.summaries(name, scores_by_label)
  return [
    {
      'evaluation': source,
      'group': label,
      'seeds': summary.seeds,
      'step': step,
      'common': summary.common and charts.numbers(summary.common),
      'last': charts.numbers(summary.last),
      'last_steps': summary.last_steps,
      'best': charts.numbers(summary.best),
    }
    for label, summary in summary_of.items()
  ]


def _difference(
  pair: tuple[Group, Group], benchmarks: Benchmarks, source: str, name: str
) -> dict[str, Any] | str:
  """Return the paired difference at the last common evaluation, or the reason why there is none.

  Scores are paired by seed. If the groups share fewer than two seeds, one run of each group is
  compared, and the scores are paired by question.
  """
  pair_labels = f'{pair[0].label} and {pair[1].label}'
  runs_by_seed = [{run.config['seed']: run for run in group.runs} for group in pair]
  scores_by_seed = [
    {seed: scores_of(run.metrics, name) for seed, run in by_seed.items()}
    for by_seed in runs_by_seed
  ]
  seeds = sorted(
    set.intersection(*({seed for seed in scores if scores[seed]} for scores in scores_by_seed))
  )
  of_questions = len(seeds) < 2
  scores_by_step = []  # for each group: step -> pair -> score
  for by_seed, scores in zip(runs_by_seed, scores_by_seed):
    if of_questions:
      run = by_seed[seeds[0]] if seeds else next(iter(by_seed.values()))
      scores_by_step.append(evaluations.by_step(benchmarks[run.workdir], source))
    else:
      steps = set.intersection(*(set(scores[seed]) for seed in seeds))
      scores_by_step.append({step: {seed: scores[seed][step] for seed in seeds} for step in steps})
  step = last_common_step(scores_by_step)
  if step is None:
    descriptions = []
    for group, group_scores in zip(pair, scores_by_step):
      later_steps = [str(step) for step in sorted(group_scores) if step > 0]
      step_texts = (
        later_steps
        if len(later_steps) <= _SHOWN_STEPS
        else [*later_steps[:2], '…', later_steps[-1]]
      )
      descriptions.append(
        f'{group.label} {"after " + ", ".join(step_texts) if later_steps else "never"}'
      )
    return (
      f'{pair_labels} have no evaluation in common after step 0, so they are not compared '
      f'(evaluated: {"; ".join(descriptions)}).'
    )
  difference = comparison.compare(
    *(by_step[step] for by_step in scores_by_step), of_questions=of_questions
  )
  if difference.pairs < 2:
    return f'{pair_labels} have fewer than two questions in common.'
  pairs_text = counted(difference.pairs, 'question' if of_questions else 'seed')
  return {'step': step, 'estimate': charts.numbers(difference.estimate), 'paired': pairs_text}


def run_names(workdirs: Sequence[str]) -> list[str]:
  """Name runs by their folders, with just enough of the path to distinguish them."""
  paths = [pathlib.Path(os.path.realpath(workdir)).parts for workdir in workdirs]
  names: list[str] = []
  for count in range(1, max(map(len, paths)) + 1):
    names = ['/'.join(parts[-count:]) for parts in paths]
    if len(set(names)) == len(names):
      break
  return names
