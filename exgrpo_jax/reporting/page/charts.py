"""Panels as JSON values for browser/panels.js: panel kinds, and the panels of a run."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.reporting.runs import SMOOTHED_FROM, smoothed

_DIGITS = 6  # significant digits kept per value

Values = Sequence[float] | np.ndarray
Panel = dict[str, Any]


class Line(NamedTuple):
  """A line of values over steps, or over another axis."""

  label: str  # in the legend
  steps: Values
  values: Values
  band: tuple[Values, Values, Values] | None = None  # steps, lower ends, upper ends


def lines(
  title: str,
  unit: str,
  curves: Sequence[Line],
  *,
  x: str = 'step',
  log: bool = False,
  share: bool = False,
  smooth: bool = True,
) -> Panel:
  """Return a panel of lines. `unit` labels the vertical axis; `log` makes it logarithmic.

  `share` means that the values are in [0, 1]. With `smooth`, if the longest line has many points,
  all lines are smoothed and the raw values are shown faintly.
  """
  points = max((len(line.values) for line in curves), default=0)
  rows = []
  for line in curves:
    values = np.asarray(line.values, np.float64)
    row = {'label': line.label, 'steps': numbers(line.steps), 'values': numbers(values)}
    if smooth and points >= SMOOTHED_FROM:
      if log:  # zeros have no logarithm and are left out
        average = np.exp(smoothed(np.log(np.where(values > 0, values, np.nan)), points))
      else:
        average = smoothed(values, points)
      row['smooth'] = numbers(average)
    if line.band:
      row['band'] = dict(zip(('steps', 'low', 'high'), map(numbers, line.band)))
    rows.append(row)
  axes = {'kind': 'lines', 'title': title, 'unit': unit, 'x': x, 'log': log, 'share': share}
  return axes | {'lines': rows}


def stack(title: str, unit: str, steps: Values, layers: Mapping[str, Values], top: float) -> Panel:
  """Return a panel of stacked areas, with a vertical axis from 0 to `top`."""
  areas = [{'label': label, 'values': numbers(values)} for label, values in layers.items()]
  axes = {'kind': 'stack', 'title': title, 'unit': unit, 'x': 'step', 'steps': numbers(steps)}
  return axes | {'layers': areas, 'top': top}


def numbers(values: Values) -> list[float | None]:
  """Convert values for JSON: six significant digits, and None for non-finite values."""

  def number(value: float) -> float | None:
    if not math.isfinite(value):
      return None
    return int(value) if value == int(value) else float(f'{value:.{_DIGITS}g}')

  # In long columns most values repeat, so each distinct value is created and stored only once.
  unique_values, place = np.unique(np.asarray(values, np.float64), return_inverse=True)
  objects = np.empty(len(unique_values), object)
  objects[:] = [number(value) for value in unique_values.tolist()]
  return objects[place].tolist()


def rounded(values: Values, digits: int) -> list[float | None]:
  """Convert values for JSON like `numbers`, rounded to `digits` decimal places."""
  return numbers(np.round(np.asarray(values, np.float64), digits))


def floats(column: pa.ChunkedArray) -> np.ndarray:
  """Convert a numeric or boolean column to float64, with NaN for nulls."""
  if pa.types.is_boolean(column.type):
    column = column.cast(pa.int8())
  return column.cast(pa.float64()).to_numpy()


def flags(column: pa.ChunkedArray) -> np.ndarray:
  """Convert a boolean column without nulls to an array."""
  return column.to_numpy(zero_copy_only=False)


# ---- Panels of one run's metrics over steps ----

_SHARE, _LOG, _RAW = {'share': True}, {'log': True}, {'smooth': False}
_SOLVED = {
  'groups/zero_advantage': 'equal rewards',
  'groups/solved_by_all': 'solved by all',
  'groups/solved_by_none': 'solved by none',
}
_PASSED = {'pass_rate/fresh': 'fresh questions', 'pass_rate/replay': 'replayed questions'}
_CARRIED = {'staleness/ratio_mean': 'mean', 'staleness/ratio_max': 'max'}
_BUFFER = {'buffer/questions': 'in the buffer', 'buffer/retired': 'retired'}
_REPLAYED = {'replay/ratio_mean': 'mean', 'replay/ratio_max': 'max'}
_SKIPPED = {'optimizer/skipped': 'gradient too large', 'optimizer/skipped_by_kl': 'max_kl exceeded'}
_FRESH = {'policy/ratio_mean': 'mean', 'policy/ratio_max': 'max'}
_SIZE = {'replay/effective_sample_size': 'effective sample size'}
# Part of the overview -> its panels: title, unit, {metric: label}, options for `lines`.
_LINES: Mapping[str, Sequence[tuple[str, str, dict[str, str], dict[str, bool]]]] = {
  'score': (
    ('Reward', 'mean over responses', {'reward': 'reward'}, {}),
    ('Pass rate', 'share of responses', _PASSED, _SHARE),
  ),
  'signal': (
    ('Groups without a learning signal', 'share of groups', _SOLVED, _SHARE),
    ('Clipped tokens', 'share of fresh tokens', {'policy/clip_fraction': 'clipped'}, _SHARE),
    ('Importance ratio of fresh tokens', 'ratio, log scale', _FRESH, _LOG),
    ('KL from the old policy', 'nats per token, log scale', {'policy/approx_kl': 'mean'}, _LOG),
    ('Skipped updates', 'updates per step', _SKIPPED, _RAW),
    ('Learning rate', 'mean over updates', {'learning_rate': 'learning rate'}, _RAW),
  ),
  'training': (
    ('Gradient norm', 'L2 norm, log scale', {'gradient_norm': 'gradient norm'}, _LOG),
    ('Entropy', 'nats per token', {'entropy': 'entropy'}, {}),
    ('Response length', 'tokens', {'length/mean': 'mean'}, {}),
    ('Truncated responses', 'share of responses', {'length/truncated': 'truncated'}, _SHARE),
    ('Tokens per decode pass', 'tokens per row', {'rollout/tokens_per_pass': 'mean'}, {}),
    ('Importance ratio of carried tokens', 'ratio, log scale', _CARRIED, _LOG),
  ),
  'replay': (
    ('Replay buffer', 'questions', _BUFFER, _RAW),
    ('Importance ratio of replayed tokens', 'ratio, log scale', _REPLAYED, _LOG),
    ('Effective sample size of replay', 'share of replayed tokens', _SIZE, _SHARE),
    ('Age of replayed trajectories', 'steps', {'replay/age_mean': 'mean'}, {}),
  ),
}
_EVALUATIONS = {  # kind of score -> title, unit
  'pass@1': ('Evaluation: pass@1, 95% interval', 'share correct'),
  'valid_steps': ('Evaluation: valid steps', 'share of responses'),
}
_ABSENT_AT_ZERO = ('Skipped updates', 'Replay buffer')  # left out if always 0
OUTCOMES = ('correct', 'wrong', 'no answer', 'timed out', 'crashed')  # from bottom to top
_PHASES = 6  # the longest phases, which get separate layers
_NO_PHASES = ('time/step', 'time/device_wait', 'time/compile_total')


def overview(run: Run, replays: bool) -> dict[str, list[Panel]]:
  """Map each part of the overview to its panels. Panels without data are left out.

  Without `replays`, the part 'replay' has no panels.
  """
  panels = {part: _all_lines(run, rows) for part, rows in _LINES.items()}
  buffer = panels['replay']
  steps, *shares = _points(run, [f'grading/{outcome.replace(" ", "_")}' for outcome in OUTCOMES])
  is_long = len(steps) >= SMOOTHED_FROM
  layers = {
    outcome: smoothed(values) if is_long else values
    for outcome, values in zip(OUTCOMES, shares)
    if any(values)
  }
  outcomes = [stack('Outcomes', 'share of responses', steps, layers, 1.0)] if layers else []
  return {
    'score': [*evaluations(run, ('pass@1',)), *panels['score']],
    'signal': panels['signal'],
    'training': [
      *evaluations(run, ('valid_steps',)),
      *panels['training'],
      *outcomes,
      *_phases(run),
    ],
    'replay': [*buffer[:1], *buckets(run), *buffer[1:]] if replays else [],
  }


def evaluations(run: Run, kinds: Sequence[str] = tuple(_EVALUATIONS)) -> list[Panel]:
  """Return a panel per kind of score, with a line per data source."""
  names = sorted({name for record in run for name in record})
  panels = []
  for kind in kinds:
    curves = []
    for match in filter(None, (re.fullmatch(f'eval/(.+)/{kind}', name) for name in names)):
      steps, values = _points(run, [match[0]])
      band_steps, low, high = _points(run, [f'{match[0]}_low', f'{match[0]}_high'])
      if steps:
        curves.append(
          Line(match[1], steps, values, (band_steps, low, high) if band_steps else None)
        )
    if curves:
      panels.append(lines(*_EVALUATIONS[kind], curves, share=True, smooth=False))
  return panels


def buckets(run: Run) -> list[Panel]:
  """Return a heat map of stored questions by bucket and step, or [] if the buffer stayed empty."""
  names = []
  while any(f'buffer/bucket_{len(names)}' in record for record in run):
    names.append(f'buffer/bucket_{len(names)}')
  steps, *counts = _points(run, names)
  if not names or not np.any(counts):
    return []
  title, unit = 'Replay buffer by bucket', f'bucket: successes out of {len(names)}'
  axes = {'kind': 'heat', 'title': title, 'unit': unit, 'x': 'step', 'steps': numbers(steps)}
  return [axes | {'counts': np.array(counts, int).tolist(), 'what': 'questions'}]


def _all_lines(run: Run, rows: Sequence[tuple[str, str, dict[str, str], dict[str, Any]]]) -> list:
  panels, names = [], {name for record in run for name in record}
  for title, unit, labels, options in rows:
    epochs = {  # the same metrics for single epochs
      name: f'{label}, {name.rpartition("/")[2].replace("_", " ")}'
      for metric, label in labels.items()
      for name in sorted(names)
      if name.startswith(f'{metric}/epoch_')
    }
    points_of = {
      label: _points(run, [name], options.get('log', False))
      for name, label in (labels | epochs).items()
    }
    curves = [Line(label, steps, values) for label, (steps, values) in points_of.items() if steps]
    if curves and (title not in _ABSENT_AT_ZERO or any(any(line.values) for line in curves)):
      panels.append(lines(title, unit, curves, **options))
  return panels


def _points(run: Run, names: Sequence[str], log: bool = False) -> list[list[float]]:
  """Return lists: the steps at which all these metrics can be drawn, and each metric's values."""
  rows = [[record['step'], *(record.get(name, math.nan) for name in names)] for record in run]
  points = [
    row for row in rows if all(math.isfinite(value) and (value > 0 or not log) for value in row[1:])
  ]
  return list(map(list, zip(*points))) if points else [[] for _ in range(len(names) + 1)]


def _phases(run: Run) -> list[Panel]:
  """Plot the time per step by phase, in seconds: the longest phases, and all others combined.

  The axis ends just above the 98th percentile of all steps except the first two, which include
  compilation.
  """
  records = [record for record in run if 'time/step' in record]
  if not records:
    return []
  names = {name for record in records for name in record if name.startswith('time/')}
  seconds = {
    name: np.array([record.get(name, 0.0) for record in records])
    for name in sorted(names.difference(_NO_PHASES))
  }
  longest_phases = sorted(seconds, key=lambda name: -seconds[name].sum())[:_PHASES]
  total = np.array([record['time/step'] for record in records])
  layers = {name.removeprefix('time/').replace('_', ' '): seconds[name] for name in longest_phases}
  # Work after the clock is read counts toward the next step.
  layers['other, compiling'] = np.maximum(total - sum(layers.values()), 0.0)
  steps = [record['step'] for record in records]
  top = 1.1 * float(np.percentile(total[2:] if len(total) > 2 else total, 98))
  return [stack('Step time by phase', 'seconds', steps, layers, top)]
