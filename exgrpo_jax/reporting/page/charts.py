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
  drawn: Sequence[Line],
  *,
  x: str = 'step',
  log: bool = False,
  share: bool = False,
  smooth: bool = True,
) -> Panel:
  """Return a panel of lines.

  Args:
    title: the panel's title.
    unit: the unit on the vertical axis.
    drawn: the lines to draw.
    x: the label of the horizontal axis.
    log: True for a logarithmic vertical axis.
    share: True if the values are in [0, 1].
    smooth: if the longest line has many points, smooth all lines and show the raw values faintly.
  """
  points = max((len(line.values) for line in drawn), default=0)
  reach = points if smooth and points >= SMOOTHED_FROM else 0
  described = [_line(line, reach, log) for line in drawn]
  shared = {'kind': 'lines', 'title': title, 'unit': unit, 'x': x}
  return shared | {'log': log, 'share': share, 'lines': described}


def stack(title: str, unit: str, steps: Values, layers: Mapping[str, Values], top: float) -> Panel:
  """Return a panel of stacked areas, with a vertical axis from 0 to `top`."""
  return {
    'kind': 'stack',
    'title': title,
    'unit': unit,
    'x': 'step',
    'steps': numbers(steps),
    'layers': [{'label': label, 'values': numbers(values)} for label, values in layers.items()],
    'top': top,
  }


def heat(title: str, unit: str, steps: Values, counts_KS: np.ndarray, what: str) -> Panel:
  """Return a heat map of counts, with a row for each k = 0, 1, … and a column for each step."""
  return {
    'kind': 'heat',
    'title': title,
    'unit': unit,
    'x': 'step',
    'steps': numbers(steps),
    'counts': np.asarray(counts_KS).astype(int).tolist(),
    'what': what,
  }


def numbers(values: Values) -> list[float | None]:
  """Convert values for JSON: six significant digits, and None for non-finite values."""
  # In long columns most values repeat, so each distinct value is created and stored only once.
  distinct, place = np.unique(np.asarray(values, np.float64), return_inverse=True)
  made = np.empty(len(distinct), object)
  made[:] = [_number(value) for value in distinct.tolist()]
  return made[place].tolist()


def rounded(values: Values, digits: int) -> list[float | None]:
  """Convert values for JSON like `numbers`, rounded to `digits` decimal places."""
  return numbers(np.round(np.asarray(values, np.float64), digits))


def known(column: pa.ChunkedArray) -> np.ndarray:
  """Convert a numeric or boolean column to float64, with NaN for nulls."""
  if pa.types.is_boolean(column.type):
    column = column.cast(pa.int8())
  return column.cast(pa.float64()).to_numpy()


def flags(column: pa.ChunkedArray) -> np.ndarray:
  """Convert a boolean column without nulls to an array."""
  return column.to_numpy(zero_copy_only=False)


def _number(value: float) -> float | None:
  if not math.isfinite(value):
    return None
  return int(value) if value == int(value) else float(f'{value:.{_DIGITS}g}')


def _line(line: Line, points: int, log: bool) -> dict[str, Any]:
  """Describe a line. Unless `points` is 0, add 'smooth', with the window for that many points."""
  values = np.asarray(line.values, np.float64)
  described: dict[str, Any] = {
    'label': line.label,
    'steps': numbers(line.steps),
    'values': numbers(values),
  }
  if points:
    smooth = np.exp(smoothed(np.log(values), points)) if log else smoothed(values, points)
    described['smooth'] = numbers(smooth)
  if line.band:
    described['band'] = dict(zip(('steps', 'low', 'high'), map(numbers, line.band)))
  return described


# ---- Panels of one run's metrics over steps ----

_SHARE, _LOG, _RAW = {'share': True}, {'log': True}, {'smooth': False}
# Part of the overview -> its panels: title, unit, {metric: label}, options for `lines`.
_LINES: Mapping[str, Sequence[tuple[str, str, dict[str, str], dict[str, bool]]]] = {
  'score': (
    ('Reward', 'mean over responses', {'reward': 'reward'}, {}),
    (
      'Pass rate',
      'share of responses',
      {'pass_rate/fresh': 'fresh questions', 'pass_rate/replay': 'replayed questions'},
      _SHARE,
    ),
  ),
  'signal': (
    (
      'Groups that teach nothing',
      'share of groups',
      {
        'groups/zero_advantage': 'equal rewards',
        'groups/solved_by_all': 'solved by all',
        'groups/solved_by_none': 'solved by none',
      },
      _SHARE,
    ),
    ('Clipped tokens', 'share of fresh tokens', {'policy/clip_fraction': 'clipped'}, _SHARE),
    ('Skipped updates', 'updates of a step', {'optimizer/skipped': 'skipped'}, _RAW),
    ('Learning rate', 'mean over updates', {'learning_rate': 'learning rate'}, _RAW),
  ),
  'training': (
    ('Gradient norm', 'L2 norm, log scale', {'gradient_norm': 'gradient norm'}, _LOG),
    ('Entropy', 'nats per token', {'entropy': 'entropy'}, {}),
    ('Response length', 'tokens', {'length/mean': 'mean'}, {}),
    ('Truncated responses', 'share of responses', {'length/truncated': 'truncated'}, _SHARE),
    ('Tokens per decode pass', 'tokens of a row', {'rollout/tokens_per_pass': 'mean'}, {}),
    (
      'Importance ratio of carried tokens',
      'ratio, log scale',
      {'staleness/ratio_mean': 'mean', 'staleness/ratio_max': 'max'},
      _LOG,
    ),
  ),
  'replay': (
    (
      'Replay buffer',
      'questions',
      {'buffer/questions': 'in the buffer', 'buffer/retired': 'retired'},
      _RAW,
    ),
    (
      'Importance ratio of replayed tokens',
      'ratio, log scale',
      {'replay/ratio_mean': 'mean', 'replay/ratio_max': 'max'},
      _LOG,
    ),
    (
      'Effective sample size of replay',
      'share of replayed tokens',
      {'replay/effective_sample_size': 'effective sample size'},
      _SHARE,
    ),
    ('Age of replayed trajectories', 'steps', {'replay/age_mean': 'mean'}, {}),
  ),
}
_EVALUATIONS = {  # kind of score -> title, unit
  'pass@1': ('Evaluation: pass@1, 95% interval', 'share correct'),
  'valid_steps': ('Evaluation: valid steps', 'share of responses'),
}
_ABSENT_AT_ZERO = ('Skipped updates', 'Replay buffer')  # left out if always 0
OUTCOMES = ('correct', 'wrong', 'no answer', 'timed out', 'crashed')  # from bottom to top
_PHASES = 6  # number of longest phases with a separate layer
_NO_PHASES = ('time/step', 'time/device_wait', 'time/compile_total')


def overview(run: Run, replays: bool) -> dict[str, list[Panel]]:
  """Return part -> its panels with data; 'replay' is empty for a run without replay."""
  made = {part: _all_lines(run, rows) for part, rows in _LINES.items()}
  buffer = made['replay']
  return {
    'score': [*evaluations(run, ('pass@1',)), *made['score']],
    'signal': made['signal'],
    'training': [
      *evaluations(run, ('valid_steps',)),
      *made['training'],
      *_outcomes(run),
      *_phases(run),
    ],
    'replay': [*buffer[:1], *buckets(run), *buffer[1:]] if replays else [],
  }


def evaluations(run: Run, kinds: Sequence[str] = tuple(_EVALUATIONS)) -> list[Panel]:
  """Return a panel per kind of score, with a line per data source."""
  names = sorted({name for record in run for name in record})
  made = []
  for kind in kinds:
    shown = []
    for match in filter(None, (re.fullmatch(f'eval/(.+)/{kind}', name) for name in names)):
      steps, values = _points(run, [match[0]])
      at, low, high = _points(run, [f'{match[0]}_low', f'{match[0]}_high'])
      if steps:
        shown.append(Line(match[1], steps, values, (at, low, high) if at else None))
    if shown:
      made.append(lines(*_EVALUATIONS[kind], shown, share=True, smooth=False))
  return made


def buckets(run: Run) -> list[Panel]:
  """Return a panel of the buffer's questions by bucket, or [] if it was always empty."""
  names = []
  while any(f'buffer/bucket_{len(names)}' in record for record in run):
    names.append(f'buffer/bucket_{len(names)}')
  steps, *counts = _points(run, names)
  if not names or not np.any(counts):
    return []
  unit = f'bucket: successes of {len(names)}'
  return [heat('Replay buffer by bucket', unit, steps, np.array(counts), 'questions')]


def _all_lines(run: Run, rows: Sequence[tuple[str, str, dict[str, str], dict[str, Any]]]) -> list:
  made = []
  for title, unit, labels, options in rows:
    found = {
      label: _points(run, [name], options.get('log', False)) for name, label in labels.items()
    }
    shown = [Line(label, steps, values) for label, (steps, values) in found.items() if steps]
    if shown and (title not in _ABSENT_AT_ZERO or any(any(line.values) for line in shown)):
      made.append(lines(title, unit, shown, **options))
  return made


def _points(run: Run, names: Sequence[str], log: bool = False) -> list[list[float]]:
  """Return the steps where all these metrics can be drawn, followed by each metric's values."""

  def can_be_drawn(value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not log)

  rows = [
    (record['step'], *(record[name] for name in names))
    for record in run
    if all(name in record and can_be_drawn(record[name]) for name in names)
  ]
  return list(map(list, zip(*rows))) if rows else [[] for _ in range(len(names) + 1)]


def _outcomes(run: Run) -> list[Panel]:
  """Plot the share of each outcome that occurs."""
  steps, *shares = _points(run, [f'grading/{outcome.replace(" ", "_")}' for outcome in OUTCOMES])
  is_long = len(steps) >= SMOOTHED_FROM
  layers = {
    outcome: smoothed(values) if is_long else values
    for outcome, values in zip(OUTCOMES, shares)
    if any(values)
  }
  return [stack('Outcomes', 'share of responses', steps, layers, 1.0)] if layers else []


def _phases(run: Run) -> list[Panel]:
  """Plot each step's seconds by phase: the longest phases, and all other phases combined.

  The axis covers only 98% of the steps, because the first steps compile and take far longer.
  """
  timed = [record for record in run if 'time/step' in record]
  if not timed:
    return []
  names = {name for record in timed for name in record if name.startswith('time/')}
  seconds = {
    name: np.array([record.get(name, 0.0) for record in timed])
    for name in sorted(names.difference(_NO_PHASES))
  }
  longest = sorted(seconds, key=lambda name: -seconds[name].sum())[:_PHASES]
  total = np.array([record['time/step'] for record in timed])
  layers = {name.removeprefix('time/').replace('_', ' '): seconds[name] for name in longest}
  # A phase's time after the clock was read counts towards the next step.
  layers['other, compiling'] = np.maximum(total - sum(layers.values()), 0.0)
  steps, top = [record['step'] for record in timed], 1.1 * float(np.percentile(total, 98))
  return [stack('Time of a step by phase', 'seconds', steps, layers, top)]
