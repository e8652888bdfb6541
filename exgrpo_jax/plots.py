"""Pictures of a run: one PNG of small panels, each over the training steps."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence

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
    _Panel('Reward and pass rate', 'mean over rollouts', (
        _Line('reward', 'reward'),
        _Line('pass_rate/fresh', 'pass rate, fresh questions'),
        _Line('pass_rate/replay', 'pass rate, replayed questions'))),
    _Panel('Entropy', 'nats per token', (_Line('entropy', 'entropy'),)),
    _Panel('Response length', 'tokens', (_Line('length/mean', 'mean'),)),
    _Panel('Cut off at the length limit', 'share of responses', (
        _Line('length/truncated', 'cut off'),)),
    _Panel('Replay buffer', 'questions', (
        _Line('buffer/questions', 'in the buffer'), _Line('buffer/retired', 'retired'))),
    _Panel('Importance ratio of replayed tokens', 'ratio, log scale', (
        _Line('replay/ratio_mean', 'mean'), _Line('replay/ratio_max', 'max')), log=True),
    _Panel('Effective sample size of replay', 'share of replayed tokens', (
        _Line('replay/effective_sample_size', 'effective sample size'),)),
    _Panel('Age of replayed trajectories', 'steps', (_Line('replay/age_mean', 'mean'),)),
    _Panel('Gradient norm', 'L2 norm, log scale', (
        _Line('gradient_norm', 'gradient norm'),), log=True),
)


def curves(records: Sequence[Mapping[str, float]], path: str | os.PathLike) -> None:
  """Draws the metrics of a run to the PNG at `path`.

  A record need not have every metric: each line joins the records that have its
  own, and panels without a finite value are left out. Raises InputError where
  none is left.
  """
  panels = [panel for panel in (_TRAINING[0], *_evaluations(records), *_TRAINING[1:])
            if any(_points(records, panel, line.key)[0] for line in panel.lines)]
  if not panels:
    raise InputError(f'{path}: nothing to draw, for none of the {len(records)} records has a '
                     'metric that belongs into a picture.')
  columns = min(_COLUMNS, len(panels))
  rows = math.ceil(len(panels) / columns)
  figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows),
                  layout='constrained')
  FigureCanvasAgg(figure)  # no pyplot: it keeps figures alive and wants a display
  for place, panel in enumerate(panels, 1):
    _draw(figure.add_subplot(rows, columns, place), panel, records)
  figure.savefig(path, format='png', dpi=110)


def _evaluations(records) -> list[_Panel]:
  """One panel a kind of evaluation, one line a source."""
  names = {name for record in records for name in record}
  def lines(metric, band=()):
    found = sorted(m[1] for name in names if (m := re.fullmatch(f'eval/(.+)/{metric}', name)))
    return tuple(_Line(f'eval/{source}/{metric}', source,
                       tuple(f'eval/{source}/{metric}_{end}' for end in band) or None)
                 for source in found)
  return [_Panel('Evaluation: pass@1, 95% interval', 'share correct',
                 lines('pass@1', ('low', 'high'))),
          _Panel('Evaluation: valid steps', 'share of responses', lines('valid_steps'))]


def _points(records, panel, *keys) -> tuple[list[float], ...]:
  """Steps and the values of each key, where all are there and can be drawn."""
  def drawable(value):
    return math.isfinite(value) and (value > 0 or not panel.log)
  found = [(record['step'], *(record[key] for key in keys)) for record in records
           if all(key in record and drawable(record[key]) for key in keys)]
  return tuple(map(list, zip(*found))) if found else ([],) * (len(keys) + 1)


def _draw(ax, panel: _Panel, records) -> None:
  for line in panel.lines:
    steps, values = _points(records, panel, line.key)
    if not steps:
      continue
    drawn, = ax.plot(steps, values, label=line.label, linewidth=1.4,
                     marker='o' if len(steps) < _DOTTED_BELOW else None, markersize=3)
    if line.band:
      ax.fill_between(*_points(records, panel, *line.band), color=drawn.get_color(), alpha=.18,
                      linewidth=0)
  if panel.log:
    ax.set_yscale('log')
  ax.set_title(panel.title, fontsize=11)
  ax.set_xlabel('step')
  ax.set_ylabel(panel.unit)
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.set_xlim(_x_limits(records))  # the same in all panels
  ax.grid(alpha=.25)
  if len(ax.lines) > 1 or panel.title.startswith('Evaluation'):
    ax.legend(fontsize=8)


def _x_limits(records) -> tuple[float, float]:
  steps = [record['step'] for record in records]
  margin = max(.03 * (max(steps) - min(steps)), .5)
  return min(steps) - margin, max(steps) + margin
