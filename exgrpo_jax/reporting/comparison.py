"""Compares the runs of a sweep: mean and standard deviation over the seeds of each setting."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.reporting.series import best, over_seeds

_SCORES = re.compile(r'eval/.+/(pass@\d+|avg@\d+|valid_steps|truncated)')
_TRAINING_METRICS = ('reward', 'entropy', 'length/mean')
_COLUMNS = 3  # of the picture


def table(runs: Mapping[str, Sequence[Run]], wanted: Mapping[str, int]) -> str:
  """Final and best score of every evaluation, mean ± standard deviation over seeds, in Markdown.

  A run's final score is its last one, at the step in the column before it; its best is
  `series.best`, the evaluation before training included. The deviation is the sample standard
  deviation (n - 1); a single seed has none.

  Args:
    runs: setting -> its finished runs.
    wanted: setting -> how many runs the sweep has of it; the rows come in this order.
  """
  rows: list[tuple[str, ...]] = [('evaluation', 'setting', 'seeds', 'step', 'final', 'best')]
  for name in _score_names(runs):
    for setting, num_wanted in wanted.items():
      found = [[record for record in run if name in record] for run in runs.get(setting, ())]
      found = [scored for scored in found if scored]
      seeds = str(len(found)) if len(found) == num_wanted else f'{len(found)} of {num_wanted}'
      means = (
        _mean_and_std([scored[-1][name] for scored in found]),
        _mean_and_std([best(name, [record[name] for record in scored]) for scored in found]),
      )
      at = steps(int(scored[-1]['step']) for scored in found)
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
  are left out; raises InputError where none is left.
  """
  from exgrpo_jax.reporting import canvas  # matplotlib takes half a second

  names = (*_score_names(runs), *_TRAINING_METRICS)
  found = {
    name: {
      setting: series for setting, seeds in runs.items() if (series := over_seeds(seeds, name))
    }
    for name in names
  }
  shown = {name: lines for name, lines in found.items() if lines}
  if not shown:
    raise InputError(f'{path}: nothing to draw: no run has any of {", ".join(names)}.')
  styles = dict(zip(runs, canvas.styles()))  # the same for a setting in all panels
  with canvas.style():
    figure, axes = canvas.wrapped(len(shown), _COLUMNS)
    for ax, (name, lines) in zip(axes, shown.items()):
      for setting, series in lines.items():
        low, high = series.mean - series.std, series.mean + series.std
        color = styles[setting]['color']
        ax.fill_between(series.steps, low, high, color=color, alpha=0.15, linewidth=0)
        canvas.line(ax, series.steps, series.mean, setting, **styles[setting])
      canvas.label(ax, name, 'mean over seeds, ± 1 SD')
    canvas.legend(figure, axes)
    canvas.save(figure, pathlib.Path(path))


def _score_names(runs: Mapping[str, Sequence[Run]]) -> list[str]:
  names = {name for seeds in runs.values() for run in seeds for record in run for name in record}
  return sorted(filter(_SCORES.fullmatch, names))


def _mean_and_std(values: Sequence[float]) -> str:
  if not values:
    return '-'
  std = f' ± {np.std(values, ddof=1):.4f}' if len(values) > 1 else ''
  return f'{np.mean(values):.4f}{std}'
