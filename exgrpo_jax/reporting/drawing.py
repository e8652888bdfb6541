"""A picture of panels. Importing matplotlib takes half a second: only what draws imports this."""

import math
import os
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.reporting.panels import (
  SMOOTHED_FROM,
  HeatMap,
  Line,
  Lines,
  Panel,
  Stack,
  longest,
  smoothed,
)

_COLUMNS = 3
# In inches. A layout computed by matplotlib takes as long as all the rest, and its columns are not
# equally wide.
_PANEL = (4.7, 3.1)
_MARGINS = (0.75, 0.15, 0.5, 0.35)  # of a panel: left, right, below, above
_COLOR_BAR = (0.12, 0.12, 0.55)  # gap, bar, its labels
_TITLE = 0.4
_DOTS_PER_INCH = 110
_CYCLE_COLORS = 10  # of matplotlib's default colour cycle


def save(
  panels: Sequence[Panel],
  paths: Sequence[str | os.PathLike],
  title: str,
  limits: tuple[float, float],
) -> None:
  """Draws the panels, and writes them to each of `paths`, atomically; the suffix is the format.

  Args:
    panels: at least one.
    paths: the files, such as curves.png and curves.svg.
    title: of the whole picture; '' is none.
    limits: the first and the last step, the same for all panels.
  """
  columns = min(_COLUMNS, len(panels))
  rows = math.ceil(len(panels) / columns)
  figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows + _TITLE * bool(title)))
  # Not through pyplot, which keeps every figure alive and may look for a display.
  FigureCanvasAgg(figure)
  if title:
    figure.text(0.5, 1 - 0.6 * _TITLE / figure.get_figheight(), title, fontsize=13, ha='center')
  for index, panel in enumerate(panels):
    column, row = index % columns, rows - 1 - index // columns
    ax = _axes(figure, _PANEL[0] * column, _PANEL[1] * row, isinstance(panel, HeatMap))
    _draw(ax, panel)
    _label(ax, panel.title, panel.unit, limits)
  for file in paths:
    path = os.fspath(file)
    kind = path.rpartition('.')[2]
    # Text stays text in an SVG, and there is no date in it, so that equal runs have equal pictures.
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'exgrpo_jax'}):
      metadata = {'Date': None} if kind == 'svg' else None
      figure.savefig(path + '.new', format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
    os.replace(path + '.new', path)


def colors(count: int) -> Sequence[str] | np.ndarray:
  """Distinct colours: matplotlib's default cycle or, for more than it has, a colour map."""
  if count > _CYCLE_COLORS:
    return matplotlib.colormaps['turbo'](np.linspace(0.05, 0.95, count))
  return [f'C{index}' for index in range(count)]


def _axes(figure: Figure, x: float, y: float, has_color_bar: bool) -> Axes:
  """The axes of the panel whose lower left corner is at (x, y), in inches."""
  left, right, below, above = _MARGINS
  width = _PANEL[0] - left - right - sum(_COLOR_BAR) * has_color_bar
  return _at(figure, x + left, y + below, width, _PANEL[1] - below - above)


def _at(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
  """Axes at a place in inches."""
  across, up = figure.get_size_inches()
  return figure.add_axes((x / across, y / up, width / across, height / up))


def _draw(ax: Axes, panel: Panel) -> None:
  if isinstance(panel, Lines):
    _draw_lines(ax, panel)
  elif isinstance(panel, Stack):
    _draw_stack(ax, panel)
  else:
    _draw_heat_map(ax, panel)


def _draw_lines(ax: Axes, panel: Lines) -> None:
  for line in panel.lines:
    _draw_line(ax, line, panel)
  if panel.log:
    ax.set_yscale('log')
    ax.tick_params(axis='y', which='minor', labelsize=7)
  else:
    low, high = ax.get_ylim()
    is_negative = any(min(line.values) < 0 for line in panel.lines)
    ax.set_ylim(low if is_negative else max(low, 0.0), min(high, 1.0) if panel.share else high)
  if panel.legend or len(panel.lines) > 1:
    ax.legend(fontsize=8)


def _draw_line(ax: Axes, line: Line, panel: Lines) -> None:
  values = np.asarray(line.values, np.float64)
  points = longest(panel)
  is_long = points >= SMOOTHED_FROM
  style: dict[str, Any] = dict(linewidth=1.4, marker=None if is_long else 'o', markersize=3)
  if not (is_long and panel.smooth):
    (drawn,) = ax.plot(line.steps, values, label=line.label, color=line.color, **style)
  else:
    (raw,) = ax.plot(line.steps, values, color=line.color, linewidth=0.8, alpha=0.3)
    middle = np.exp(smoothed(np.log(values), points)) if panel.log else smoothed(values, points)
    (drawn,) = ax.plot(line.steps, middle, label=line.label, color=raw.get_color(), **style)
  if line.band:
    steps, low, high = line.band
    ax.fill_between(steps, low, high, color=drawn.get_color(), alpha=0.16, linewidth=0)


def _draw_stack(ax: Axes, panel: Stack) -> None:
  ax.stackplot(
    panel.steps, *panel.layers.values(), labels=panel.layers, colors=panel.colors, linewidth=0
  )
  ax.set_ylim(0, panel.top)
  # From the top of the stack downwards.
  handles, labels = ax.get_legend_handles_labels()
  ax.legend(handles[::-1], labels[::-1], fontsize=8, loc='upper left', framealpha=0.7)


def _draw_heat_map(ax: Axes, panel: HeatMap) -> None:
  steps, num_rows = np.asarray(panel.steps, np.float64), len(panel.counts_KS)
  middles = (steps[1:] + steps[:-1]) / 2
  step_edges = np.concatenate([[steps[0] - 0.5], middles, [steps[-1] + 0.5]])
  mesh = ax.pcolormesh(
    step_edges,
    np.arange(num_rows + 1) - 0.5,
    np.ma.masked_equal(panel.counts_KS, 0),  # an empty bucket stays white
    norm=PowerNorm(0.5, vmin=0, vmax=max(1, panel.counts_KS.max())),  # small counts show too
    cmap='viridis',
    rasterized=True,
  )
  figure, box = ax.figure, ax.get_position()
  assert isinstance(figure, Figure)
  (across, up), (gap, bar, _) = figure.get_size_inches(), _COLOR_BAR
  beside = _at(figure, box.x1 * across + gap, box.y0 * up, bar, box.height * up)
  figure.colorbar(mesh, cax=beside, label=panel.what, ticks=MaxNLocator(nbins=6, integer=True))
  ax.yaxis.set_major_locator(MaxNLocator(integer=True))


def _label(ax: Axes, title: str, unit: str, limits: tuple[float, float]) -> None:
  ax.set_title(title, fontsize=11)
  ax.set_xlabel('step')
  ax.set_ylabel(unit)
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(alpha=0.25)
  first, last = limits
  margin = max(0.02 * (last - first), 0.5)
  ax.set_xlim(first - margin, last + margin)
