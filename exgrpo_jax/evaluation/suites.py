"""A policy on a suite of benchmarks: what is sampled, and the row that comes of it."""

import datetime
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from exgrpo_jax.config import overridden
from exgrpo_jax.data import suite as suite_files
from exgrpo_jax.data.suite import Part, Suite
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.experiment import Config
from exgrpo_jax.reporting import benchmark_table, comparison
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.workdir import write_json

SUITES = 'exgrpo_jax.configs.suites'

Record = Mapping[str, Any]  # of a question, see evaluation.score_policy


class Table(NamedTuple):
  """The table that a row is for."""

  suite: Suite
  name: str  # of the suite
  out: str  # its folder
  row: str  # the new row's name

  @property
  def folder(self) -> str:
    """Where its rows are."""
    return os.path.join(self.out, self.name)


def open_table(value: str, out: str | None, row: str) -> Table:
  """The table of --suite in --out; InputError where it has a row of that name."""
  if not out:
    raise InputError('--out is needed with --suite: the folder of the table and its rows.')
  if not row.strip() or not row.isprintable():
    raise InputError(f'--name={row!r} must be printable text: it is how the table calls the row.')
  path = config_files.shipped_path(value, SUITES, 'suite')
  table = Table(suite_files.load(path), suite_files.name(path), out, row)
  file = benchmark_table.row_path(table.folder, row)
  if file.exists():
    raise InputError(
      f'{file} is there already; delete it to evaluate anew, or choose another --name.'
    )
  return table


def with_settings(suite: Suite, values: ConfigDict, given: Iterable[str]) -> ConfigDict:
  """The config with the suite's settings, but for the keys `given` on the command line."""
  kept = {key: value for key, value in suite.settings.items() if key not in given}
  return overridden(values, kept)


def plan(table: Table, loaded: Sequence[QuestionSet], config: Config, may_miss: bool) -> list[Part]:
  """What must be sampled; refused, before anything is, where the row would not fit the table.

  Args:
    table: which table.
    loaded: where questions are looked for.
    config: of the evaluation.
    may_miss: whether benchmarks may be without questions.
  """
  parts = suite_files.parts(table.suite, loaded)
  missing = [benchmark.label for benchmark in suite_files.missing(table.suite, parts)]
  where = ', '.join(data.spec for data in loaded)
  if missing and (not may_miss or not parts):
    raise InputError(
      f'--suite={table.name}: {where} has no questions of {", ".join(missing)}; name the files '
      'that do in --data. A benchmark that none of those has is left blank, unless all are.'
    )
  used = {benchmark.source for part in parts for benchmark in part.benchmarks}
  others = {question.source for data in loaded for question in data.questions} - used
  if missing:
    print(f'{", ".join(missing)}: no questions in {where}; left blank', flush=True)
  if others:
    print(f'not in the suite, and left out: {", ".join(sorted(others))}', flush=True)
  planned = {
    benchmark.label: {
      'content': suite_files.content(questions),
      'responses': len(questions) * part.samples,
    }
    for part in parts
    for benchmark in part.benchmarks
    for questions in [[q for q in part.data.questions if q.source == benchmark.source]]
  }
  row = {'settings': _settings(table.suite, config), 'benchmarks': planned}
  benchmark_table.check_comparable(row, benchmark_table.read(table.folder), table.folder)
  return parts


def write_row(
  table: Table,
  config: Config,
  policy: Mapping[str, Any],
  evaluated: Sequence[tuple[Part, Sequence[Record]]],
) -> str:
  """Writes the row's file and the tables over all rows; returns the table in Markdown.

  `policy` says whose row it is, as in evaluations.jsonl: run or model, and step.
  """
  row = {
    'name': table.row,
    'evaluated': datetime.datetime.now().astimezone().isoformat(),
    **policy,
    'template': config.prompt.template,
    'seed': config.seed,
    'settings': _settings(table.suite, config),
    'benchmarks': {
      benchmark.label: _result(part, benchmark.source, records) | {'measure': benchmark.measure}
      for part, records in evaluated
      for benchmark in part.benchmarks
    },
  }
  if hosts.is_first():
    os.makedirs(table.folder, exist_ok=True)
    write_json(str(benchmark_table.row_path(table.folder, table.row)), row)
    rows = benchmark_table.read(table.folder)
    benchmark_table.write(table.out, table.name, table.suite.benchmarks, rows)
    return benchmark_table.markdown(table.suite.benchmarks, rows)
  return ''


def _result(part: Part, source: str, records: Sequence[Record]) -> dict[str, Any]:
  """A benchmark's score with its interval, and what it is of."""
  rows = [record for record in records if record['source'] == source]
  correct_QK = np.array([record['correct'] for record in rows], float)
  asked = [record['question'] for record in rows]
  value, low, high = comparison.interval_95(correct_QK, asked)
  return {
    'score': value,
    'low': low,
    'high': high,
    'questions': len(set(asked)),
    'responses': correct_QK.size,
    'truncated': float(np.mean([record['truncated'] for record in rows])),
    'content': suite_files.content([q for q in part.data.questions if q.source == source]),
    'data': part.data.spec,
  }


def _settings(suite: Suite, config: Config) -> dict[str, Any]:
  """What the suite sets, as it is in the config."""
  return {key: functools.reduce(getattr, key.split('.'), config) for key in suite.settings}
