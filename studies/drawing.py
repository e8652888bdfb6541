"""Figures with the numbers that they show, their files, and means over a setting's records."""

import csv
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from scipy import stats

from exgrpo_jax.reporting import canvas
from exgrpo_jax.reporting.runs import Group

KINDS = ('png', 'svg', 'pdf')

Row = Mapping[str, Any]  # a row of a figure's table


class NothingToDrawError(Exception):
  """An error for runs that lack the data for a figure. The message says what is missing."""


class Drawing(NamedTuple):
  """A figure and the numbers that it shows."""

  figure: Figure
  rows: Sequence[Row]


def caption(figure: Figure, text: str) -> None:
  """Write text below the panels of a figure without a legend, wrapped to the figure's width."""
  width = int(figure.get_figwidth() / canvas.INCH)
  figure.supxlabel(canvas.wrap(text, width), fontsize=8, color=canvas.GREY)


def rows(**columns: Any) -> list[Row]:
  """Make the rows of a table. A column is an array or a single value for all rows."""
  arrays = np.broadcast_arrays(*(np.asarray(column, object) for column in columns.values()))
  return [dict(zip(columns, row)) for row in zip(*arrays)]


def write_all(figures: Mapping[str, Callable[[], Drawing]], out: pathlib.Path) -> None:
  """Draw each figure and write it under its name. Print which are left out, and why."""
  for name, draw in figures.items():
    try:
      with canvas.style():
        write(draw(), out, name)
    except NothingToDrawError as error:
      print(f'{name}: left out because {error}', flush=True)
    else:
      print(f'{name}: {out / name}.png, .svg, .pdf and .csv', flush=True)


def write(drawing: Drawing, out: pathlib.Path, name: str) -> list[pathlib.Path]:
  """Write a figure in every format and its numbers as CSV. Return the files."""
  paths = [out / f'{name}.{kind}' for kind in KINDS]
  for path in paths:
    canvas.save(drawing.figure, path)
  table = out / f'{name}.csv'
  with table.open('w', newline='') as file:
    writer = csv.DictWriter(file, list(drawing.rows[0]))
    writer.writeheader()
    writer.writerows(drawing.rows)
  return [*paths, table]


# ---- Means over records ----


class Means(NamedTuple):
  """The means of values that share a key."""

  keys: np.ndarray  # ascending
  count: np.ndarray
  mean: np.ndarray
  half: np.ndarray  # half the width of the mean's 95% t interval; 0 for a single value


def mean_by(key: np.ndarray, value: np.ndarray) -> Means:
  """Average the finite values of each key. The interval treats these values as independent."""
  kept = np.isfinite(value)
  keys, inverse = np.unique(key[kept], return_inverse=True)
  value = value[kept].astype(float)
  count = np.bincount(inverse, minlength=len(keys))
  mean = np.bincount(inverse, value, len(keys)) / count
  squares = np.bincount(inverse, (value - mean[inverse]) ** 2, len(keys))
  variance = squares / np.maximum(count - 1, 1)
  half = stats.t.ppf(0.975, np.maximum(count - 1, 1)) * np.sqrt(variance / count)
  return Means(keys, count, mean, half)


def at_least(means: Means, count: int) -> Means:
  """Keep the means of at least `count` values."""
  kept = means.count >= count
  return Means(*(column[kept] for column in means))


def num_rollouts(group: Group) -> int:
  """Return K, the number of rollouts per question."""
  return group.runs[0].config['rollout.group_size']


def responses(group: Group, *names: str) -> list[np.ndarray]:
  """Return columns of all responses in a setting's runs. Missing numbers are NaN."""
  return [_joined([run.responses[name] for run in group.runs]) for name in names]


def _joined(columns: Sequence[pa.ChunkedArray]) -> np.ndarray:
  """Concatenate columns into one array. Booleans become 0 and 1, and null becomes NaN."""
  kind = columns[0].type
  whole = pa.chunked_array([chunk for column in columns for chunk in column.chunks], kind)
  if pa.types.is_string(kind):
    return np.array(whole.to_pylist(), object)
  if pa.types.is_boolean(kind):
    whole = whole.cast(pa.int8())
  return whole.to_numpy()


def visits(group: Group) -> np.ndarray:
  """Return each response's visit as a number. A visit is one question in one step of one run."""
  step, place = responses(group, 'step', 'group')
  run = np.repeat(range(len(group.runs)), [run.responses.num_rows for run in group.runs])
  if not len(step):
    return np.zeros(0, int)
  # Sorting one number is much faster than sorting three.
  key = (run * (step.max() + 1) + step) * (place.max() + 1) + place
  return np.unique(key, return_inverse=True)[1]


def successes(group: Group) -> np.ndarray:
  """Return, for each response, how many of the K responses in its visit are correct."""
  (outcome,) = responses(group, 'outcome')
  visit = visits(group)
  return np.bincount(visit, outcome == 'correct').astype(int)[visit]
