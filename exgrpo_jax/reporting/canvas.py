"""Matplotlib figures: style, panels of values against steps, saving, and the curves of a sweep.

The palette is by Okabe and Ito: readers with any type of color vision can tell its colors apart.
Lines also use different dash patterns.
"""

import contextlib
import itertools
import pathlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting.comparison import tabulated
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.reporting.runs import SMOOTHED_FROM, over_seeds, smoothed
from exgrpo_jax.runtime.replacement import replacing

BLUE, ORANGE, GREEN, PURPLE = '#0072B2', '#D55E00', '#009E73', '#CC79A7'
GREY = '#666666'
_COLORS = (BLUE, ORANGE, GREEN, PURPLE, '#E69F00', '#56B4E9', '#000000')
_DASHES = ('-', '--', '-.', ':')
_PANEL = (3.3, 2.5)  # inches
_INCHES_OF_HANDLE, INCH = 0.65, 0.07  # widths of a legend's line sample and of a small character
_TITLE = 38  # characters per line of a panel's title; the axis labels shift the title right
_SPARSE = 20  # points; a line with fewer points is never smoothed, however many steps it spans
_DOTS_PER_INCH = 150
_TRAINING_METRICS = ('reward', 'entropy', 'length/mean')  # plotted for a sweep
_COLUMNS = 3
_STYLE: Any = {
  'font.size': 9,
  'axes.titlesize': 10,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.labelsize': 9,
  'xtick.labelsize': 8,
  'ytick.labelsize': 8,
  'legend.fontsize': 8.5,
  'legend.frameon': False,
  'svg.fonttype': 'none',  # write text as text, not as paths
  'pdf.fonttype': 42,
  'svg.hashsalt': 'exgrpo_jax',
}
# No date, so that the same data always produces identical files.
_METADATA = {'png': None, 'svg': {'Date': None}, 'pdf': {'CreationDate': None}}


@contextlib.contextmanager
def style() -> Iterator[None]:
  """Apply the shared figure style within the block."""
  with matplotlib.rc_context(_STYLE):
    yield


def grid(rows: int, columns: int, **options: Any) -> tuple[Figure, np.ndarray]:
  """Create a figure with a grid of panels; return it and its axes [rows, columns].

  `options` are passed to Figure.subplots.
  """
  figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows + 0.4), layout='constrained')
  FigureCanvasAgg(figure)  # not through pyplot, which keeps every figure alive
  return figure, figure.subplots(rows, columns, squeeze=False, **options)


def wrapped(count: int, columns: int) -> tuple[Figure, list[Axes]]:
  """Create a figure with a grid of `count` panels; unused cells stay empty."""
  columns = min(columns, count)
  figure, axes = grid(-(-count // columns), columns)
  for ax in axes.flat[count:]:
    ax.remove()
  return figure, list(axes.flat[:count])


def styles() -> Iterator[dict[str, Any]]:
  """Yield the color and dashes of each line; the first 28 combinations are all different."""
  for color, dashes in zip(itertools.cycle(_COLORS), itertools.cycle(_DASHES)):
    yield {'color': color, 'linestyle': dashes}


def label(ax: Axes, title: str, unit: str, x: str = 'training step') -> None:
  """Set a panel's title and axis labels, and draw a faint grid."""
  ax.set_title('\n'.join(wrap(line, _TITLE) for line in title.splitlines()))
  ax.set_xlabel(x)
  ax.set_ylabel(unit)
  ax.grid(alpha=0.25, linewidth=0.6)
  ax.set_axisbelow(True)
  if x == 'training step':
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def wrap(text: str, width: int) -> str:
  """Wrap text at spaces to at most `width` characters per line."""
  return '\n'.join(textwrap.wrap(text, width, break_long_words=False))


def line(ax: Axes, steps: np.ndarray, values: np.ndarray, text: str, **style: Any) -> np.ndarray:
  """Plot values against steps, smoothed if there are many; return the plotted values."""
  is_long = steps[-1] >= SMOOTHED_FROM and len(steps) >= _SPARSE
  drawn_values = smoothed(values) if is_long else np.asarray(values, float)
  marker = None if is_long else 'o'
  ax.plot(steps, drawn_values, label=text, linewidth=1.5, marker=marker, markersize=3, **style)
  return drawn_values


def legend(figure: Figure, axes: Sequence[Axes], note: str = '', at_right: bool = False) -> None:
  """Draw a single legend for all panels, below them or to their right; each label appears once.

  `note` appears above the legend and explains bands and whiskers.
  """
  handle_by_label: dict[str, Any] = {}
  for ax in axes:
    handles, texts = ax.get_legend_handles_labels()
    for handle, text in list(zip(handles, texts))[:: -1 if at_right else 1]:
      handle_by_label.setdefault(text, handle)
  if at_right:
    figure.legend(list(handle_by_label.values()), list(handle_by_label), loc='outside right center')
    return
  columns = int(figure.get_figwidth() / (_INCHES_OF_HANDLE + INCH * max(map(len, handle_by_label))))
  figure.legend(
    list(handle_by_label.values()),
    list(handle_by_label),
    title=note,
    title_fontproperties={'size': 8},
    loc='outside lower center',
    ncols=max(1, columns),
  )


def save(figure: Figure, path: pathlib.Path) -> None:
  """Write a figure in the format given by the suffix of `path`."""
  kind = path.suffix[1:]
  with replacing(path) as unfinished:
    figure.savefig(unfinished, format=kind, dpi=_DOTS_PER_INCH, metadata=_METADATA[kind])


def picture(runs: Mapping[str, Sequence[Run]], path: pathlib.Path) -> None:
  """Plot every evaluation score and some training metrics of a sweep, one line per setting.

  Each line is the mean over a setting's runs, at the steps where every run has a finite value. The
  band extends one sample standard deviation (n - 1) to either side. Metrics without values are left
  out. Raises InputError if no metric has values.
  """
  names = (*tabulated(runs), *_TRAINING_METRICS)
  lines_by_name = {
    name: {
      setting: series for setting, seeds in runs.items() if (series := over_seeds(seeds, name))
    }
    for name in names
  }
  panels = {name: lines for name, lines in lines_by_name.items() if lines}
  if not panels:
    raise InputError(
      f'{path}: there is nothing to draw, because no run has any of these metrics: '
      f'{", ".join(names)}. Check the metrics.jsonl files of the runs.'
    )
  looks = dict(zip(runs, styles()))  # a setting looks the same in all panels
  with style():
    figure, axes = wrapped(len(panels), _COLUMNS)
    for ax, (name, lines) in zip(axes, panels.items()):
      for setting, series in lines.items():
        low, high = series.mean - series.std, series.mean + series.std
        ax.fill_between(
          series.steps, low, high, color=looks[setting]['color'], alpha=0.15, linewidth=0
        )
        line(ax, series.steps, series.mean, setting, **looks[setting])
      label(ax, name, 'mean over seeds, ± 1 SD')
    legend(figure, axes)
    save(figure, path)
