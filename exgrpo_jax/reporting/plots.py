"""Pictures of one run or of many: a PNG of small panels, each over the training steps."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.errors import InputError

_COLUMNS = 3
_PANEL_INCHES = (4.6, 3.0)
_DOTTED_BELOW = 40  # points in a line, fewer than which each is marked


@dataclasses.dataclass(frozen=True)
class _Line:
  key: str
  label: str
  band: tuple[str, str] | None = None  # the keys of a 95% interval around it


@dataclasses.dataclass(frozen=True)
class _Panel:
  title: str
  unit: str  # of the vertical axis
  lines: tuple[_Line, ...]
  log: bool = False


_TRAINING = (
  _Panel(
    'Reward and pass rate',
    'mean over rollouts',
    (
      _Line('reward', 'reward'),
      _Line('pass_rate/fresh', 'pass rate, fresh questions'),
      _Line('pass_rate/replay', 'pass rate, replayed questions'),
    ),
  ),
  _Panel('Entropy', 'nats per token', (_Line('entropy', 'entropy'),)),
  _Panel('Response length', 'tokens', (_Line('length/mean', 'mean'),)),
  _Panel(
    'Cut off at the length limit', 'share of responses', (_Line('length/truncated', 'cut off'),)
  ),
  _Panel(
    'Replay buffer',
    'questions',
    (_Line('buffer/questions', 'in the buffer'), _Line('buffer/retired', 'retired')),
  ),
  _Panel(
    'Importance ratio of replayed tokens',
    'ratio, log scale',
    (_Line('replay/ratio_mean', 'mean'), _Line('replay/ratio_max', 'max')),
    log=True,
  ),
  _Panel(
    'Effective sample size of replay',
    'share of replayed tokens',
    (_Line('replay/effective_sample_size', 'effective sample size'),),
  ),
  _Panel('Age of replayed trajectories', 'steps', (_Line('replay/age_mean', 'mean'),)),
  _Panel(
    'Gradient norm', 'L2 norm, log scale', (_Line('gradient_norm', 'gradient norm'),), log=True
  ),
)


def curves(records: Sequence[Mapping[str, float]], path: str | os.PathLike) -> None:
  """Draws the metrics of a run to the PNG at `path`.

  A record need not have every metric: each line joins the records that have its
  own, and panels without a finite value are left out. Raises InputError where
  none is left.
  """
  panels = [
    panel
    for panel in (_TRAINING[0], *_evaluations(records), *_TRAINING[1:])
    if any(_points(records, panel, line.key)[0] for line in panel.lines)
  ]
  if not panels:
    raise InputError(
      f'{path}: nothing to draw, for none of the {len(records)} records has a '
      'metric that belongs into a picture.'
    )
  figure, axes = _figure(len(panels))
  for ax, panel in zip(axes, panels):
    _draw(ax, panel, records)
  figure.savefig(path, format='png', dpi=110)


def comparison(
  runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
  names: Sequence[str],
  path: str | os.PathLike,
) -> None:
  """Draws the metrics `names` of many runs to the PNG at `path`, a panel each.

  A line is the mean over the runs of one setting, at the steps where all of them have a
  finite value; the band is one standard deviation (n - 1). Metrics that nothing has are
  left out.

  Args:
    runs: by setting, the records of its runs.
    names: which metrics.
    path: where to.
  """
  drawn = {
    name: lines
    for name in names
    if (
      lines := {
        setting: points
        for setting, seeds in runs.items()
        if len((points := _over_seeds(seeds, name))[0])
      }
    )
  }
  if not drawn:
    raise InputError(f'{path}: nothing to draw, for no run has any of {", ".join(names)}.')
  # The default colours are ten.
  colors = (
    matplotlib.colormaps['turbo'](np.linspace(0.05, 0.95, len(runs)))
    if len(runs) > 10
    else ([f'C{place}' for place in range(len(runs))])
  )
  color_of = dict(zip(runs, colors))  # a setting has one, whatever the panel
  figure, axes = _figure(len(drawn))
  for ax, (name, lines) in zip(axes, drawn.items()):
    for setting, (steps, mean, deviation) in lines.items():
      ax.plot(
        steps,
        mean,
        label=setting,
        color=color_of[setting],
        linewidth=1.4,
        marker='o' if len(steps) < _DOTTED_BELOW else None,
        markersize=3,
      )
      ax.fill_between(
        steps, mean - deviation, mean + deviation, color=color_of[setting], alpha=0.15, linewidth=0
      )
    _label(ax, name, 'mean over seeds, ± 1 SD')
    ax.legend(fontsize=8)
  figure.savefig(path, format='png', dpi=110)


def _over_seeds(seeds, name) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Steps, mean and standard deviation (0 for one run) of a metric over runs."""
  series = [
    {
      record['step']: record[name]
      for record in records
      if math.isfinite(record.get(name, math.nan))
    }
    for records in seeds
  ]
  steps = sorted(set.intersection(*map(set, series)))
  value_SN = np.array([[values[step] for values in series] for step in steps]).reshape(
    len(steps), len(series)
  )
  deviation = value_SN.std(axis=1, ddof=1) if len(series) > 1 else np.zeros(len(steps))
  return np.array(steps), value_SN.mean(axis=1), deviation


def _figure(panels: int):
  """A figure and its axes, row by row."""
  columns = min(_COLUMNS, panels)
  rows = math.ceil(panels / columns)
  figure = Figure(
    figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout='constrained'
  )
  FigureCanvasAgg(figure)  # no pyplot: it keeps figures alive and wants a display
  return figure, [figure.add_subplot(rows, columns, place) for place in range(1, panels + 1)]


def _evaluations(records) -> list[_Panel]:
  """One panel a kind of evaluation, one line a source."""
  names = {name for record in records for name in record}

  def lines(metric, band=()):
    found = sorted(m[1] for name in names if (m := re.fullmatch(f'eval/(.+)/{metric}', name)))
    return tuple(
      _Line(
        f'eval/{source}/{metric}',
        source,
        tuple(f'eval/{source}/{metric}_{end}' for end in band) or None,
      )
      for source in found
    )

  return [
    _Panel('Evaluation: pass@1, 95% interval', 'share correct', lines('pass@1', ('low', 'high'))),
    _Panel('Evaluation: valid steps', 'share of responses', lines('valid_steps')),
  ]


def _points(records, panel, *keys) -> tuple[list[float], ...]:
  """Steps and the values of each key, where all are there and can be drawn."""

  def drawable(value):
    return math.isfinite(value) and (value > 0 or not panel.log)

  found = [
    (record['step'], *(record[key] for key in keys))
    for record in records
    if all(key in record and drawable(record[key]) for key in keys)
  ]
  return tuple(map(list, zip(*found))) if found else ([],) * (len(keys) + 1)


def _draw(ax, panel: _Panel, records) -> None:
  for line in panel.lines:
    steps, values = _points(records, panel, line.key)
    if not steps:
      continue
    (drawn,) = ax.plot(
      steps,
      values,
      label=line.label,
      linewidth=1.4,
      marker='o' if len(steps) < _DOTTED_BELOW else None,
      markersize=3,
    )
    if line.band:
      ax.fill_between(
        *_points(records, panel, *line.band), color=drawn.get_color(), alpha=0.18, linewidth=0
      )
  if panel.log:
    ax.set_yscale('log')
  _label(ax, panel.title, panel.unit)
  ax.set_xlim(_x_limits(records))  # the same in all panels
  if len(ax.lines) > 1 or panel.title.startswith('Evaluation'):
    ax.legend(fontsize=8)


def _label(ax, title: str, unit: str) -> None:
  ax.set_title(title, fontsize=11)
  ax.set_xlabel('step')
  ax.set_ylabel(unit)
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(alpha=0.25)


def _x_limits(records) -> tuple[float, float]:
  steps = [record['step'] for record in records]
  margin = max(0.03 * (max(steps) - min(steps)), 0.5)
  return min(steps) - margin, max(steps) + margin
