"""Panels over steps, of lines, stacked areas or a heat map; drawing.py makes a picture of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

Values = Sequence[float] | np.ndarray

SMOOTHED_FROM = 40  # points; a shorter line gets a marker at each
_SMOOTHED_SHARE = 1 / 40  # of a line's points, to either side


@dataclasses.dataclass(frozen=True)
class Line:
  """Values over steps."""

  label: str  # in the legend
  steps: Values
  values: Values
  band: tuple[Values, Values, Values] | None = None  # steps, lower and upper ends
  color: str | np.ndarray | None = None  # None is the next of the cycle


@dataclasses.dataclass(frozen=True)
class Lines:
  """A panel of lines."""

  title: str
  unit: str  # of the vertical axis
  lines: tuple[Line, ...]
  log: bool = False  # logarithmic vertical axis
  share: bool = False  # values lie in [0, 1]
  smooth: bool = False  # many points become a smooth line over the faint raw one
  legend: bool = True  # also of a single line


@dataclasses.dataclass(frozen=True)
class Stack:
  """A panel of areas, one on top of the other."""

  title: str
  unit: str
  steps: Values
  layers: Mapping[str, Values]  # label -> a value for each step
  colors: Sequence[str]
  top: float  # of the vertical axis


@dataclasses.dataclass(frozen=True)
class HeatMap:
  """A panel of counts, as colours."""

  title: str
  unit: str
  steps: Values
  counts_KS: np.ndarray  # a row for each k = 0, 1, …; a column for each step
  what: str  # is counted


Panel = Lines | Stack | HeatMap


def longest(panel: Lines) -> int:
  """Points of the panel's longest line, by which all of its lines are smoothed, or none."""
  return max((len(line.values) for line in panel.lines), default=0)


def smoothed(values: Values, points: int | None = None) -> np.ndarray:
  """Each value's mean with its neighbours: to either side a fortieth of all, less at the ends.

  Args:
    values: of a line.
    points: what a fortieth is taken of, where lines are to be smoothed alike; its own by default.
  """
  array = np.asarray(values, np.float64)
  reach = max(1, int(_SMOOTHED_SHARE * (points or len(array))))
  window = np.ones(2 * reach + 1)
  # Not mode 'same', which has the length of a window that is longer than the line.
  sums, counts = np.convolve(array, window), np.convolve(np.ones_like(array), window)
  return (sums / counts)[reach : reach + len(array)]
