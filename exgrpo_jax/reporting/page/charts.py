"""Panels of lines, areas and heat maps as JSON values, which browser/panels.js draws."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from exgrpo_jax.reporting.series import SMOOTHED_FROM, smoothed

_DIGITS = 6  # significant ones that are kept of a value

Values = Sequence[float] | np.ndarray
Panel = dict[str, Any]


class Line(NamedTuple):
  """Values over steps, or over another axis."""

  label: str  # in the legend
  steps: Values
  values: Values
  band: tuple[Values, Values, Values] | None = None  # steps, lower and upper ends


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
  """A panel of lines.

  Args:
    title: of the panel.
    unit: of the vertical axis.
    drawn: the lines.
    x: what the horizontal axis is.
    log: a logarithmic vertical axis.
    share: values lie in [0, 1].
    smooth: where the longest line has many points, all become smooth ones over the faint values.
  """
  points = max((len(line.values) for line in drawn), default=0)
  reach = points if smooth and points >= SMOOTHED_FROM else 0
  described = [_line(line, reach, log) for line in drawn]
  shared = {'kind': 'lines', 'title': title, 'unit': unit, 'x': x}
  return shared | {'log': log, 'share': share, 'lines': described}


def stack(title: str, unit: str, steps: Values, layers: Mapping[str, Values], top: float) -> Panel:
  """A panel of areas, one on top of the other, on an axis that ends at `top`."""
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
  """A panel of counts as colours: a row for each k = 0, 1, …, a column for each step."""
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
  """Values as JSON holds them, with six significant digits; null where they are not finite."""
  # In long columns most values recur: each is made once, and takes memory once.
  distinct, place = np.unique(np.asarray(values, np.float64), return_inverse=True)
  made = np.empty(len(distinct), object)
  made[:] = [_number(value) for value in distinct.tolist()]
  return made[place].tolist()


def rounded(values: Values, digits: int) -> list[float | None]:
  """`numbers` rounded to `digits` places."""
  return numbers(np.round(np.asarray(values, np.float64), digits))


def known(column: pa.ChunkedArray) -> np.ndarray:
  """Numbers or booleans of a table as float64, NaN where the column is null."""
  if pa.types.is_boolean(column.type):
    column = column.cast(pa.int8())
  return column.cast(pa.float64()).to_numpy()


def flags(column: pa.ChunkedArray) -> np.ndarray:
  """Booleans of a table, none of them null."""
  return column.to_numpy(zero_copy_only=False)


def _number(value: float) -> float | None:
  if not math.isfinite(value):
    return None
  return int(value) if value == int(value) else float(f'{value:.{_DIGITS}g}')


def _line(line: Line, points: int, log: bool) -> dict[str, Any]:
  """A line, with 'smooth' as of so many points unless these are 0."""
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
