"""Panels of lines, areas and heat maps as the values that the page draws."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from exgrpo_jax.reporting import panels
from exgrpo_jax.reporting.panels import HeatMap, Line, Lines, Panel

_DIGITS = 6  # significant ones that are kept of a value


def describe(panel: Panel, x: str = 'step') -> dict[str, Any]:
  """A panel as JSON holds it; `x` says what its horizontal axis is."""
  shared = {'title': panel.title, 'unit': panel.unit, 'x': x}
  if isinstance(panel, Lines):
    lines = [_line(line, panel) for line in panel.lines]
    return shared | {'kind': 'lines', 'log': panel.log, 'share': panel.share, 'lines': lines}
  if isinstance(panel, HeatMap):
    counts = np.asarray(panel.counts_KS).astype(int).tolist()
    return shared | {
      'kind': 'heat',
      'steps': numbers(panel.steps),
      'counts': counts,
      'what': panel.what,
    }
  return shared | {
    'kind': 'stack',
    'steps': numbers(panel.steps),
    'layers': [
      {'label': label, 'values': numbers(values)} for label, values in panel.layers.items()
    ],
    'top': panel.top,
  }


def numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
  """As JSON holds them, with six significant digits; what is not finite becomes null."""
  # Of long columns most values come often: each is made once, and takes memory once.
  distinct, place = np.unique(np.asarray(values, np.float64), return_inverse=True)
  made = np.empty(len(distinct), object)
  made[:] = [_number(value) for value in distinct.tolist()]
  return made[place].tolist()


def _number(value: float) -> float | None:
  if not math.isfinite(value):
    return None
  if value == int(value):
    return int(value)
  return float(f'{value:.{_DIGITS}g}')


def _line(line: Line, panel: Lines) -> dict[str, Any]:
  """A line; 'smooth' is there where its panel has enough points, and is drawn before the values."""
  values = np.asarray(line.values, np.float64)
  described: dict[str, Any] = {
    'label': line.label,
    'steps': numbers(line.steps),
    'values': numbers(values),
  }
  points = panels.longest(panel)
  if panel.smooth and points >= panels.SMOOTHED_FROM:
    described['smooth'] = numbers(
      np.exp(panels.smoothed(np.log(values), points))
      if panel.log
      else panels.smoothed(values, points)
    )
  if line.band:
    steps, low, high = line.band
    described['band'] = {'steps': numbers(steps), 'low': numbers(low), 'high': numbers(high)}
  return described
