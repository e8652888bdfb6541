"""Evaluation of a policy on a benchmark suite. Each evaluation adds a row to a table.

Each file in configs/suites/ defines `get_suite()`, which returns a Suite.
"""

import collections
import datetime
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from exgrpo_jax.config import evaluate_file, overridden
from exgrpo_jax.datatypes import Question, QuestionSet
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.experiment import RunConfig
from exgrpo_jax.reporting import benchmark_table, comparison
from exgrpo_jax.reporting.benchmark_table import GROUPS, Benchmark, Suite
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.workdir import write_json

SUITES = 'exgrpo_jax.configs.suites'

Record = Mapping[str, Any]  # one question's record, see `scores.score_policy`


class Part(NamedTuple):
  """Questions from one data spec that all get the same number of responses."""

  data: QuestionSet
  samples: int
  benchmarks: tuple[Benchmark, ...]  # the benchmarks that the questions belong to


class Table(NamedTuple):
  """The table that gets a new row."""

  suite: Suite
  name: str  # the suite's name
  out: str  # the table's folder
  row: str  # the new row's name

  @property
  def folder(self) -> str:
    """Return the folder with the table's rows."""
    return os.path.join(self.out, self.name)


def open_table(value: str, out: str | None, row: str) -> Table:
  """Open the --suite table in --out; raises InputError if it already has a row with this name."""
  if not out:
    raise InputError('--out is required with --suite. Pass the folder for the table and its rows.')
  if not row.strip() or not row.isprintable():
    raise InputError(f"--name={row!r}: the row's name in the table must be printable text.")
  path = config_files.shipped_path(value, SUITES, 'suite')
  table = Table(load_suite(path), os.path.basename(path).removesuffix('.py'), out, row)
  file = benchmark_table.row_path(table.folder, row)
  if file.exists():
    raise InputError(
      f'--name={row}: {file} already exists. Delete the file to evaluate again, or choose another '
      '--name.'
    )
  return table


def with_settings(suite: Suite, values: ConfigDict, overrides: Iterable[str]) -> ConfigDict:
  """Apply the suite's settings, except those overridden on the command line (`overrides`)."""
  settings = {key: value for key, value in suite.settings.items() if key not in overrides}
  return overridden(values, settings)


def plan(
  table: Table, question_sets: Sequence[QuestionSet], config: RunConfig, may_miss: bool
) -> list[Part]:
  """Plan the sampling; raises InputError if the row is not comparable with the table's other rows.

  With `may_miss`, `question_sets` need not contain questions for every benchmark.
  """
  parts = _parts(table.suite, question_sets)
  sources = {benchmark.source for part in parts for benchmark in part.benchmarks}
  missing = [
    benchmark.label for benchmark in table.suite.benchmarks if benchmark.source not in sources
  ]
  specs = ', '.join(data.spec for data in question_sets)
  if missing and (not may_miss or not parts):
    raise InputError(
      f'--suite={table.name}: {specs} has no questions from {", ".join(missing)}. Use '
      '--data to pass files that contain them. With --data, benchmarks without questions are left '
      'blank, but at least one must have questions.'
    )
  other_sources = {q.source for data in question_sets for q in data.questions} - sources
  if missing:
    print(f'{", ".join(missing)}: no questions in {specs}; left blank', flush=True)
  if other_sources:
    print(f'not in the suite, so left out: {", ".join(sorted(other_sources))}', flush=True)
  benchmarks = {
    benchmark.label: {'content': _content(questions), 'responses': len(questions) * part.samples}
    for part in parts
    for benchmark in part.benchmarks
    for questions in [[q for q in part.data.questions if q.source == benchmark.source]]
  }
  row = {'settings': _settings(table.suite, config), 'benchmarks': benchmarks}
  benchmark_table.check_comparable(row, benchmark_table.read(table.folder), table.folder)
  return parts


def write_row(
  table: Table,
  config: RunConfig,
  policy: Mapping[str, Any],
  results: Sequence[tuple[Part, Sequence[Record]]],
) -> str:
  """Write the row's file, update the table's files, and return the table as Markdown.

  `policy` identifies the policy by its run or model and its step, as in evaluations.jsonl.
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
      for part, records in results
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
  """Compute a benchmark's score and interval, and describe its questions."""
  rows = [record for record in records if record['source'] == source]
  correct_QK = np.array([record['correct'] for record in rows], float)
  cluster_keys = [comparison.question_key(record) for record in rows]
  value, low, high = comparison.interval_95(correct_QK, cluster_keys)
  return {
    'score': value,
    'low': low,
    'high': high,
    'questions': len(set(cluster_keys)),
    'responses': correct_QK.size,
    'truncated': float(np.mean([record['truncated'] for record in rows])),
    'content': _content([q for q in part.data.questions if q.source == source]),
    'data': part.data.spec,
  }


def _settings(suite: Suite, config: RunConfig) -> dict[str, Any]:
  """Return the config's values for the keys that the suite sets, converted to JSON types."""
  values = {key: functools.reduce(getattr, key.split('.'), config) for key in suite.settings}
  return json.loads(json.dumps(values))


# ---- Suites and their questions ----


def load_suite(path: str) -> Suite:
  """Load a suite. Raises InputError if its file fails, or if benchmarks share a label or source."""
  return evaluate_file(path, 'suite', 'a Suite, as configs/suites/paper.py does', _check)[0]


def _check(suite: Any) -> None:
  if not isinstance(suite, Suite) or not suite.benchmarks:
    raise InputError(f'get_suite() must return a Suite with benchmarks, not {suite!r}')
  labels: dict[str, str] = {}  # label or source -> the benchmark's label
  for benchmark in suite.benchmarks:
    label = benchmark.label
    if benchmark.group not in GROUPS or benchmark.samples < 1:
      raise InputError(
        f"benchmark '{label}': group={benchmark.group!r} must be one of "
        f'{", ".join(GROUPS)}, and samples={benchmark.samples} must be at least 1'
      )
    for key in (f'label {label}', f'source {benchmark.source}'):
      if key in labels:
        raise InputError(
          f"benchmarks '{label}' and '{labels[key]}' share a label or a source, but labels "
          'and sources must be unique'
        )
      labels[key] = label


def _parts(suite: Suite, question_sets: Sequence[QuestionSet]) -> list[Part]:
  """Divide the questions into parts; benchmarks without questions in `question_sets` are skipped.

  For a benchmark with k > 1 samples per question and c copies of each question, each row gets k / c
  responses. Raises InputError if two data specs contain questions of the same benchmark, the number
  of copies varies, or c does not divide k.
  """
  specs: dict[str, str] = {}  # source -> the data spec that contains it
  parts = []
  for data in question_sets:
    source_rows = collections.defaultdict(list)
    questions = list(data.questions)
    for row, question in enumerate(questions):
      source_rows[question.source].append(row)
    by_samples = collections.defaultdict(list)
    for benchmark in suite.benchmarks:
      rows = source_rows.get(benchmark.source)
      if not rows:
        continue
      if benchmark.source in specs:
        raise InputError(
          f"'{specs[benchmark.source]}' and '{data.spec}' both contain questions from source "
          f"'{benchmark.source}' ({benchmark.label}). Pass only one of the two specs to --data, or "
          'slice one of them so that it leaves these questions out.'
        )
      specs[benchmark.source] = data.spec
      samples = _samples(benchmark, [questions[row] for row in rows], data.spec)
      by_samples[samples].append(benchmark)
    for samples, benchmarks in by_samples.items():
      rows = sorted(row for benchmark in benchmarks for row in source_rows[benchmark.source])
      question_set = QuestionSet(
        spec=data.spec,
        questions=data.questions.select(np.array(rows)),
        prompts=[data.prompts[row] for row in rows],
      )
      parts.append(Part(question_set, samples, tuple(benchmarks)))
  return parts


def _content(questions: Sequence[Question]) -> str:
  """Compute a digest of the questions and answers, regardless of their order and duplicates."""
  texts = sorted({repr((question.messages, question.answer)) for question in questions})
  return hashlib.sha256('\n'.join(texts).encode()).hexdigest()[:16]


def _samples(benchmark: Benchmark, questions: Sequence[Question], spec: str) -> int:
  """Return the number of responses per row."""
  if benchmark.samples == 1:
    return 1  # each row counts as a question
  copies = collections.Counter((question.messages, question.answer) for question in questions)
  min_copies, max_copies = min(copies.values()), max(copies.values())
  if min_copies != max_copies or benchmark.samples % max_copies:
    times = f'{max_copies}' if min_copies == max_copies else f'{min_copies} to {max_copies}'
    raise InputError(
      f"{spec}: each question from source '{benchmark.source}' is listed {times} times, but "
      f'{benchmark.label} is scored by {benchmark.measure}. List every question the same number '
      f'of times. This number must divide {benchmark.samples}.'
    )
  return benchmark.samples // max_copies
