"""Compares the runs of a sweep: mean and standard deviation over the seeds of each setting."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import direction
from exgrpo_jax.reporting.panels import Line, Lines
from exgrpo_jax.reporting.records import Run
from exgrpo_jax.reporting.series import over_seeds

_SCORES = re.compile(r'eval/.+/(pass@\d+|avg@\d+|valid_steps|truncated)')
_TRAINING_METRICS = ('reward', 'entropy', 'length/mean')


def table(runs: Mapping[str, Sequence[Run]], wanted: Mapping[str, int]) -> str:
  """Final and best score of every evaluation, mean ± standard deviation over seeds, in Markdown.

  A run's final score is its last one, at the step in the column before it. Its best is the highest
  finite one, or the lowest of a score that should fall (`direction.falls`), the evaluation before
  training included. The deviation is the sample standard deviation (n - 1); a single seed has none.

  Args:
    runs: setting -> its finished runs.
    wanted: setting -> how many runs the sweep has of it; the rows come in this order.
  """
  rows: list[tuple[str, ...]] = [('evaluation', 'setting', 'seeds', 'step', 'final', 'best')]
  for name in _score_names(runs):
    for setting, num_wanted in wanted.items():
      series = [[record for record in run if name in record] for run in runs.get(setting, ())]
      series = [scored for scored in series if scored]
      seeds = str(len(series)) if len(series) == num_wanted else f'{len(series)} of {num_wanted}'
      final = [scored[-1][name] for scored in series]
      best = [direction.best(name, [record[name] for record in scored]) for scored in series]
      means = (_mean_and_std(final), _mean_and_std(best))
      at = steps(int(scored[-1]['step']) for scored in series)
      rows.append((name.removeprefix('eval/'), setting, seeds, at, *means))
  return markdown(rows)


def steps(last: Iterable[int]) -> str:
  """The step of the last evaluation of some runs: `3`, or `2 to 3` where they ended apart."""
  found = sorted(set(last))
  return '-' if not found else ' to '.join(map(str, dict.fromkeys((found[0], found[-1]))))


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """A table, its head first, with columns of even width."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  ruled = [rows[0], ['-' * width for width in widths], *rows[1:]]
  return '\n'.join('| ' + ' | '.join(map(str.ljust, row, widths)) + ' |' for row in ruled)


def picture(runs: Mapping[str, Sequence[Run]], path: str | os.PathLike) -> None:
  """Plots every evaluation score and some training metrics to a PNG, a line per setting.

  A line is the mean over the runs of a setting, at the steps where all of them have a finite
  value; the band around it is one sample standard deviation (n - 1). Metrics without any values
  are left out.

  Args:
    runs: setting -> its finished runs.
    path: where the PNG is written.

  Raises:
    InputError: no run has any of these metrics.
  """
  from exgrpo_jax.reporting import drawing

  names = (*_score_names(runs), *_TRAINING_METRICS)
  colors = dict(zip(runs, drawing.colors(len(runs))))  # a setting has one colour in all panels
  drawn = []
  for name in names:
    lines = []
    for setting, seeds in runs.items():
      if series := over_seeds(seeds, name):
        steps, mean, std = series.steps, series.mean, series.std
        band = (steps, mean - std, mean + std)
        lines.append(Line(setting, steps, mean, band, colors[setting]))
    if lines:
      is_share = _SCORES.fullmatch(name) is not None
      drawn.append(Lines(name, 'mean over seeds, ± 1 SD', tuple(lines), share=is_share))
  if not drawn:
    raise InputError(f'{path}: nothing to draw: no run has any of {", ".join(names)}.')
  all_steps = [record['step'] for seeds in runs.values() for run in seeds for record in run]
  drawing.save(drawn, [path], '', (min(all_steps), max(all_steps)))


def _score_names(runs: Mapping[str, Sequence[Run]]) -> list[str]:
  return sorted(
    {
      name
      for seeds in runs.values()
      for run in seeds
      for record in run
      for name in record
      if _SCORES.fullmatch(name)
    }
  )


def _mean_and_std(values: Sequence[float]) -> str:
  if not values:
    return '-'
  std = f' ± {np.std(values, ddof=1):.4f}' if len(values) > 1 else ''
  return f'{np.mean(values):.4f}{std}'
