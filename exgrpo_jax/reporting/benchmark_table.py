"""A suite's results table: one row per policy, one column per benchmark, in Markdown and CSV.

Each row is a JSON file that `exgrpo evaluate --suite` writes to a folder for this suite. Every
evaluation rewrites the tables from all rows in the folder.
"""

import csv
import dataclasses
import io
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.replacement import replacing

GROUPS = {'in': 'in distribution', 'out': 'out of distribution'}  # keys as in Benchmark.group
Row = Mapping[str, Any]  # the contents of a row's file; see `suites.write_row`


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """One column of a table."""

  label: str
  data: str  # default data spec for its questions
  source: str  # the questions' source
  group: str  # key in GROUPS: the average that includes this benchmark
  samples: int  # responses per question, over all its copies: k in avg@k

  @property
  def measure(self) -> str:
    """Return the score's name: avg@k (share of correct responses), or pass@1 for one response."""
    return f'avg@{self.samples}' if self.samples > 1 else 'pass@1'


@dataclasses.dataclass(frozen=True)
class Suite:
  """A table's columns, and the settings that all its rows share."""

  benchmarks: tuple[Benchmark, ...]
  settings: Mapping[str, Any]  # dotted config key -> value

  @property
  def data(self) -> tuple[str, ...]:
    """Return the default data specs for the questions."""
    return tuple(dict.fromkeys(benchmark.data for benchmark in self.benchmarks))


class Score(NamedTuple):
  """The fraction of correct responses and its 95% confidence interval, in [0, 1]."""

  value: float
  low: float
  high: float

  @property
  def half_width(self) -> float:
    """Return half of the interval's width."""
    return (self.high - self.low) / 2


def average(scores: Sequence[Score]) -> Score:
  """Return the equally weighted mean of m benchmarks, and its 95% interval.

  The benchmarks' errors are independent, so their squares add up. If benchmark i has the value p_i
  and the interval (l_i, u_i), the mean p has the interval

    p - sqrt(Σ (p_i - l_i)²) / m  to  p + sqrt(Σ (u_i - p_i)²) / m.

  For symmetric intervals p_i ± 1.96 se_i this is p ± 1.96 sqrt(Σ se_i²) / m. If all or none of a
  benchmark's responses are correct, its standard error carries no information, but Wilson's limits
  still do. This is the method of variance estimates recovery (Zou and Donner, Statistics in
  Medicine 27, 2008), applied to a sum.
  """
  m = len(scores)
  value = sum(score.value for score in scores) / m
  below = math.sqrt(sum((score.value - score.low) ** 2 for score in scores)) / m
  above = math.sqrt(sum((score.high - score.value) ** 2 for score in scores)) / m
  return Score(value, max(value - below, 0.0), min(value + above, 1.0))  # guard against rounding


# ---- Rows ----


def row_path(folder: str, name: str) -> pathlib.Path:
  """Return the path of the file for the row `name`."""
  return pathlib.Path(folder, re.sub(r'[^\w.-]+', '_', name) + '.json')


def read(folder: str) -> list[dict[str, Any]]:
  """Read the rows in a folder, in evaluation order."""
  rows = []
  for path in sorted(pathlib.Path(folder).glob('*.json')):
    try:
      row = json.loads(path.read_text(encoding='utf-8'))
      rows.append(row | {'evaluated': row['evaluated'], 'name': row['name']})
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise InputError(
        f'{path}: this file is not a valid table row ({type(error).__name__}: {error}). Delete '
        'the file, or choose another --out.'
      ) from error
  return sorted(rows, key=lambda row: row['evaluated'])


def check_comparable(row: Row, others: Sequence[Row], folder: str) -> None:
  """Raise InputError unless a row has the same settings and questions as all other rows.

  A row that has not been evaluated yet needs only two entries: `settings`, and `benchmarks` with
  `content` and `responses`. Benchmarks missing from either row are not compared.
  """
  for other in others:
    location = f"{row_path(folder, other['name'])} ('{other['name']}')"
    for key in sorted({*row['settings'], *other['settings']}):
      here, there = row['settings'].get(key), other['settings'].get(key)
      if here != there:
        raise InputError(
          f'config.{key}={here}: the row in {location} was evaluated with {there}, and all rows '
          f'in a table need the same settings. Set config.{key}={there}, or choose another --out.'
        )
    for label in row['benchmarks'].keys() & other['benchmarks'].keys():
      here, there = row['benchmarks'][label], other['benchmarks'][label]
      for key, difference in (
        ('content', 'on different questions'),
        ('responses', 'with a different number of responses'),
      ):
        if here[key] != there[key]:
          raise InputError(
            f'{label}: the row in {location} was evaluated {difference} ({key} is {there[key]} '
            f'there, but {here[key]} here). Use the same --data, or choose another --out.'
          )


# ---- Tables ----


def write(out: str, suite: str, benchmarks: Sequence[Benchmark], rows: Sequence[Row]) -> list[str]:
  """Write these rows to out/{suite}.md and .csv, and return the two paths."""
  texts = {'md': markdown(benchmarks, rows), 'csv': comma_separated(benchmarks, rows)}
  paths = []
  for ending, text in texts.items():
    path = pathlib.Path(out, f'{suite}.{ending}')
    with replacing(path) as unfinished:
      unfinished.write_text(text, encoding='utf-8')
    paths.append(str(path))
  return paths


def markdown(benchmarks: Sequence[Benchmark], rows: Sequence[Row]) -> str:
  """Return a Markdown table of percentages ± half the width of their intervals, with a legend."""
  header = ['']
  for group, members in _by_group(benchmarks).items():
    header += [*(benchmark.label for benchmark in members), f'average {GROUPS[group]}']
  lines = [header, ['---', *['---:'] * (len(header) - 1)]]
  for row in rows:
    line = [row['name']]
    for score, count, total in _cells(benchmarks, row):
      incomplete = f' ({count} of {total})' if count < total else ''
      line.append(
        f'{100 * score.value:.1f} ± {100 * score.half_width:.1f}{incomplete}' if score else '–'
      )
    lines.append(line)
  lines = [[cell.replace('|', r'\|') for cell in line] for line in lines]
  table = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  return f'{table}\n\n{_legend(benchmarks, rows)}\n'


def comma_separated(benchmarks: Sequence[Benchmark], rows: Sequence[Row]) -> str:
  """Return a CSV table of percentages, their intervals, and the benchmark count of each average."""
  header, text = ['name'], io.StringIO(newline='')
  for group, members in _by_group(benchmarks).items():
    for column in (*(benchmark.label for benchmark in members), f'average {GROUPS[group]}'):
      header += [column, f'{column} low', f'{column} high']
    header.append(f'average {GROUPS[group]} over')
  table = csv.writer(text, lineterminator='\n')
  table.writerow(header)
  for row in rows:
    fields = [row['name']]
    for score, count, total in _cells(benchmarks, row):
      fields += [f'{100 * value:.4f}' for value in score] if score else [''] * 3
      fields += [str(count)] if total else []
    table.writerow(fields)
  return text.getvalue()


def _by_group(benchmarks: Sequence[Benchmark]) -> dict[str, list[Benchmark]]:
  """Map each non-empty group to its benchmarks, in column order."""
  by_group = {
    group: [benchmark for benchmark in benchmarks if benchmark.group == group] for group in GROUPS
  }
  return {group: members for group, members in by_group.items() if members}


def _cells(benchmarks: Sequence[Benchmark], row: Row) -> list[tuple[Score | None, int, int]]:
  """Return the cells of a row: for each group, its benchmarks and then their average.

  Each cell is a score (None if not evaluated) and two counts: how many benchmarks an average covers
  and how many its group contains. For an individual benchmark, both counts are 0.
  """
  cells: list[tuple[Score | None, int, int]] = []
  for members in _by_group(benchmarks).values():
    entries = [row['benchmarks'].get(benchmark.label) for benchmark in members]
    scores = [
      Score(entry['score'], entry['low'], entry['high']) if entry else None for entry in entries
    ]
    group_scores = [score for score in scores if score]
    cells += [(score, 0, 0) for score in scores]
    cells.append((average(group_scores) if group_scores else None, len(group_scores), len(members)))
  return cells


def _legend(benchmarks: Sequence[Benchmark], rows: Sequence[Row]) -> str:
  """Explain the table's numbers, and list the benchmarks that each row lacks."""
  measures: dict[str, list[str]] = {}
  for benchmark in benchmarks:
    measures.setdefault(benchmark.measure, []).append(benchmark.label)
  settings = rows[0]['settings'] if rows else {}
  measure_text = '; '.join(
    f'{measure}: {", ".join(labels)}' for measure, labels in measures.items()
  )
  lines = [
    f'Percent ± half the width of the 95% interval. {measure_text}.',
    ', '.join(f'{key}={value}' for key, value in settings.items()),
  ]
  names_by_missing: dict[str, list[str]] = {}
  for row in rows:
    missing_labels = [
      benchmark.label for benchmark in benchmarks if benchmark.label not in row['benchmarks']
    ]
    names_by_missing.setdefault(', '.join(missing_labels), []).append(row['name'])
  lines += [
    f'Not evaluated on {missing_labels} (no questions): {", ".join(names)}.'
    for missing_labels, names in names_by_missing.items()
    if missing_labels
  ]
  return '\n'.join(filter(None, lines))
