"""Learning curves of one run or of many, as a PNG with a small panel per metric over steps."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.errors import InputError

Run = Sequence[Mapping[str, float]]  # the records of its metrics.jsonl, oldest first

_COLUMNS = 3
_PANEL_INCHES = (4.6, 3.0)
_MARKERS_BELOW = 40  # a line with fewer points than this gets a marker at each
_CYCLE_COLORS = 10  # of matplotlib's default colour cycle


@dataclasses.dataclass(frozen=True)
class _Line:
  key: str  # name of the metric
  label: str  # in the legend
  band: tuple[str, str] | None = None  # metrics of the lower and upper end of its 95% interval


@dataclasses.dataclass(frozen=True)
class _Panel:
  title: str
  unit: str  # of the vertical axis
  lines: tuple[_Line, ...]
  log: bool = False  # logarithmic vertical axis


_TRAINING = (
  _Panel(
    title='Reward and pass rate',
    unit='mean over rollouts',
    lines=(
      _Line('reward', 'reward'),
      _Line('pass_rate/fresh', 'pass rate, fresh questions'),
      _Line('pass_rate/replay', 'pass rate, replayed questions'),
    ),
  ),
  _Panel(title='Entropy', unit='nats per token', lines=(_Line('entropy', 'entropy'),)),
  _Panel(title='Response length', unit='tokens', lines=(_Line('length/mean', 'mean'),)),
  _Panel(
    title='Truncated responses',
    unit='share of responses',
    lines=(_Line('length/truncated', 'truncated'),),
  ),
  _Panel(
    title='Replay buffer',
    unit='questions',
    lines=(_Line('buffer/questions', 'in the buffer'), _Line('buffer/retired', 'retired')),
  ),
  _Panel(
    title='Importance ratio of replayed tokens',
    unit='ratio, log scale',
    lines=(_Line('replay/ratio_mean', 'mean'), _Line('replay/ratio_max', 'max')),
    log=True,
  ),
  _Panel(
    title='Effective sample size of replay',
    unit='share of replayed tokens',
    lines=(_Line('replay/effective_sample_size', 'effective sample size'),),
  ),
  _Panel(
    title='Age of replayed trajectories',
    unit='steps',
    lines=(_Line('replay/age_mean', 'mean'),),
  ),
  _Panel(
    title='Gradient norm',
    unit='L2 norm, log scale',
    lines=(_Line('gradient_norm', 'gradient norm'),),
    log=True,
  ),
)


def curves(run: Run, path: str | os.PathLike) -> None:
  """Plots the metrics of a run to a PNG.

  Each line connects the records that have its metric; panels without a finite value are left out.

  Args:
    run: its records.
    path: where the PNG is written.

  Raises:
    InputError: no panel is left.
  """
  panels = [
    panel
    for panel in (_TRAINING[0], *_evaluation_panels(run), *_TRAINING[1:])
    if any(_points(run, panel, line.key)[0] for line in panel.lines)
  ]
  if not panels:
    raise InputError(
      f'{path}: nothing to draw: none of the {len(run)} records has a finite value of a metric '
      'that is plotted.'
    )
  figure, axes = _make_figure(len(panels))
  for ax, panel in zip(axes, panels):
    _draw_panel(ax, panel, run)
  figure.savefig(path, format='png', dpi=110)


def comparison(
  runs: Mapping[str, Sequence[Run]], names: Sequence[str], path: str | os.PathLike
) -> None:
  """Plots metrics of many runs to a PNG, a panel per metric and a line per setting.

  A line is the mean over the runs of a setting, at the steps where all of them have a finite
  value; the band around it is one sample standard deviation (n - 1). Metrics without any values
  are left out.

  Args:
    runs: setting -> its runs, one per seed.
    names: the metrics.
    path: where the PNG is written.

  Raises:
    InputError: no run has any of the metrics.
  """
  panels = {}
  for name in names:
    lines = {setting: _mean_over_seeds(seeds, name) for setting, seeds in runs.items()}
    lines = {setting: line for setting, line in lines.items() if len(line[0])}
    if lines:
      panels[name] = lines
  if not panels:
    raise InputError(f'{path}: nothing to draw: no run has any of {", ".join(names)}.')
  colors = dict(zip(runs, _make_colors(len(runs))))  # a setting has one colour in all panels
  figure, axes = _make_figure(len(panels))
  for ax, (name, lines) in zip(axes, panels.items()):
    for setting, (steps, mean, std) in lines.items():
      _plot_line(ax, steps, mean, setting, colors[setting])
      ax.fill_between(steps, mean - std, mean + std, color=colors[setting], alpha=0.15, linewidth=0)
    _label_axes(ax, name, 'mean over seeds, ± 1 SD')
    ax.legend(fontsize=8)
  figure.savefig(path, format='png', dpi=110)


def _mean_over_seeds(runs: Sequence[Run], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Steps, and mean and standard deviation of a metric over runs; the deviation of one run is 0."""
  series = [
    {record['step']: record[name] for record in run if math.isfinite(record.get(name, math.nan))}
    for run in runs
  ]
  steps = sorted(set.intersection(*map(set, series)))
  value_SN = np.array([[values[step] for values in series] for step in steps]).reshape(
    len(steps), len(series)
  )
  std = value_SN.std(axis=1, ddof=1) if len(series) > 1 else np.zeros(len(steps))
  return np.array(steps), value_SN.mean(axis=1), std


def _make_colors(count: int) -> Sequence[str] | np.ndarray:
  """Distinct colours: matplotlib's default cycle or, for more than it has, a colour map."""
  if count > _CYCLE_COLORS:
    return matplotlib.colormaps['turbo'](np.linspace(0.05, 0.95, count))
  return [f'C{index}' for index in range(count)]


def _make_figure(num_panels: int) -> tuple[Figure, list[Axes]]:
  """A figure and its axes, row by row."""
  columns = min(_COLUMNS, num_panels)
  rows = math.ceil(num_panels / columns)
  figure = Figure(
    figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout='constrained'
  )
  # Not through pyplot, which keeps every figure alive and may look for a display.
  FigureCanvasAgg(figure)
  return figure, [figure.add_subplot(rows, columns, index) for index in range(1, num_panels + 1)]


def _evaluation_panels(run: Run) -> list[_Panel]:
  """A panel per kind of evaluation, with a line per data source."""
  names = {name for record in run for name in record}

  def sources(metric: str) -> list[str]:
    matches = (re.fullmatch(f'eval/(.+)/{metric}', name) for name in names)
    return sorted(match[1] for match in matches if match)

  return [
    _Panel(
      title='Evaluation: pass@1, 95% interval',
      unit='share correct',
      lines=tuple(
        _Line(
          key=f'eval/{source}/pass@1',
          label=source,
          band=(f'eval/{source}/pass@1_low', f'eval/{source}/pass@1_high'),
        )
        for source in sources('pass@1')
      ),
    ),
    _Panel(
      title='Evaluation: valid steps',
      unit='share of responses',
      lines=tuple(
        _Line(key=f'eval/{source}/valid_steps', label=source) for source in sources('valid_steps')
      ),
    ),
  ]


def _points(run: Run, panel: _Panel, *keys: str) -> tuple[list[float], ...]:
  """Steps, and the values of each key, of the records where all of them can be drawn."""

  def can_be_drawn(value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not panel.log)

  rows = [
    (record['step'], *(record[key] for key in keys))
    for record in run
    if all(key in record and can_be_drawn(record[key]) for key in keys)
  ]
  return tuple(map(list, zip(*rows))) if rows else ([],) * (len(keys) + 1)


def _draw_panel(ax: Axes, panel: _Panel, run: Run) -> None:
  for line in panel.lines:
    steps, values = _points(run, panel, line.key)
    if not steps:
      continue
    color = _plot_line(ax, steps, values, line.label)
    if line.band:
      steps, low, high = _points(run, panel, *line.band)
      ax.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
  if panel.log:
    ax.set_yscale('log')
  _label_axes(ax, panel.title, panel.unit)
  ax.set_xlim(_x_limits(run))  # the same in all panels
  if len(ax.lines) > 1 or panel.title.startswith('Evaluation'):
    ax.legend(fontsize=8)


def _plot_line(
  ax: Axes,
  steps: Sequence[float] | np.ndarray,
  values: Sequence[float] | np.ndarray,
  label: str,
  color: str | np.ndarray | None = None,
) -> Any:
  """Plots a line, by default in the next colour of the cycle; returns its colour."""
  (line,) = ax.plot(
    steps,
    values,
    label=label,
    color=color,
    linewidth=1.4,
    marker='o' if len(steps) < _MARKERS_BELOW else None,
    markersize=3,
  )
  return line.get_color()


def _label_axes(ax: Axes, title: str, unit: str) -> None:
  ax.set_title(title, fontsize=11)
  ax.set_xlabel('step')
  ax.set_ylabel(unit)
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(alpha=0.25)


def _x_limits(run: Run) -> tuple[float, float]:
  steps = [record['step'] for record in run]
  margin = max(0.03 * (max(steps) - min(steps)), 0.5)
  return min(steps) - margin, max(steps) + margin
