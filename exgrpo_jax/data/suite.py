"""Suites: which benchmarks a table of results has, and where their questions are found.

A file in configs/suites/ defines a `get_suite()` that returns a Suite.
"""

import collections
import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax import config
from exgrpo_jax.datatypes import Question, QuestionSet
from exgrpo_jax.errors import InputError

GROUPS = {'in': 'in distribution', 'out': 'out of distribution'}  # as in Benchmark.group


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """One column of a table."""

  label: str
  data: str  # the data spec that has its questions, unless the user names others
  source: str  # of its questions
  group: str  # of GROUPS: over which it is averaged
  samples: int  # responses to each question, those to its copies included: k of avg@k

  @property
  def measure(self) -> str:
    """The score of a question: the share of right responses, or whether its only one is right."""
    return f'avg@{self.samples}' if self.samples > 1 else 'pass@1'


@dataclasses.dataclass(frozen=True)
class Suite:
  """The columns of a table, and what all of its rows have in common."""

  benchmarks: tuple[Benchmark, ...]
  settings: Mapping[str, Any]  # dotted config key -> value

  @property
  def data(self) -> tuple[str, ...]:
    """The data specs that have the questions, unless the user names others."""
    return tuple(dict.fromkeys(benchmark.data for benchmark in self.benchmarks))


class Part(NamedTuple):
  """Questions of one data spec that get equally many responses each."""

  data: QuestionSet
  samples: int
  benchmarks: tuple[Benchmark, ...]  # whose questions these are


def load(path: str) -> Suite:
  """The suite of a file; InputError where the file fails or its benchmarks cannot be told apart."""
  return config.evaluate_file(path, 'suite', 'a Suite, as configs/suites/paper.py does', _check)[0]


def name(path: str) -> str:
  """The name of the suite in a file, after which its tables are called."""
  return os.path.basename(path).removesuffix('.py')


def _check(suite: Any) -> None:
  if not isinstance(suite, Suite) or not suite.benchmarks:
    raise InputError(f'get_suite() must return a Suite with benchmarks, not {suite!r}')
  seen: dict[str, str] = {}  # label or source -> label
  for benchmark in suite.benchmarks:
    label = benchmark.label
    if benchmark.group not in GROUPS or benchmark.samples < 1:
      raise InputError(
        f"benchmark '{label}' has group={benchmark.group!r} and samples={benchmark.samples}; a "
        f'group is one of {", ".join(GROUPS)}, samples are at least 1'
      )
    for key in (f'label {label}', f'source {benchmark.source}'):
      if key in seen:
        raise InputError(
          f"benchmarks '{label}' and '{seen[key]}' share a label or a source, by which they "
          'are told apart'
        )
      seen[key] = label


def parts(suite: Suite, loaded: Sequence[QuestionSet]) -> list[Part]:
  """The questions to sample for the benchmarks that have any in `loaded`.

  A benchmark with k samples of which each question has c copies takes k / c responses to each row.

  Raises:
    InputError: questions of a benchmark are in two data specs, their copies are not equally many,
      or c does not divide k.
  """
  found: dict[str, str] = {}  # source -> the data spec that has it
  planned = []
  for data in loaded:
    rows_of = collections.defaultdict(list)
    questions = list(data.questions)
    for row, question in enumerate(questions):
      rows_of[question.source].append(row)
    by_samples = collections.defaultdict(list)
    for benchmark in suite.benchmarks:
      rows = rows_of.get(benchmark.source)
      if not rows:
        continue
      if benchmark.source in found:
        raise InputError(
          f"'{found[benchmark.source]}' and '{data.spec}' both have questions of source "
          f"'{benchmark.source}' ({benchmark.label}); name one of them in --data, or a slice."
        )
      found[benchmark.source] = data.spec
      samples = _samples(benchmark, [questions[row] for row in rows], data.spec)
      by_samples[samples].append(benchmark)
    for samples, benchmarks in by_samples.items():
      rows = sorted(row for benchmark in benchmarks for row in rows_of[benchmark.source])
      chosen = QuestionSet(
        spec=data.spec,
        questions=data.questions.select(np.array(rows)),
        prompts=[data.prompts[row] for row in rows],
      )
      planned.append(Part(chosen, samples, tuple(benchmarks)))
  return planned


def missing(suite: Suite, planned: Sequence[Part]) -> list[Benchmark]:
  """The benchmarks without questions."""
  found = {benchmark.source for part in planned for benchmark in part.benchmarks}
  return [benchmark for benchmark in suite.benchmarks if benchmark.source not in found]


def content(questions: Sequence[Question]) -> str:
  """A digest of what is asked and of its answers, which neither order nor copies change."""
  asked = sorted({repr((question.messages, question.answer)) for question in questions})
  return hashlib.sha256('\n'.join(asked).encode()).hexdigest()[:16]


def _samples(benchmark: Benchmark, questions: Sequence[Question], spec: str) -> int:
  """Responses to each row."""
  if benchmark.samples == 1:
    return 1  # a row is a question
  copies = collections.Counter((question.messages, question.answer) for question in questions)
  fewest, most = min(copies.values()), max(copies.values())
  if fewest != most or benchmark.samples % most:
    times = f'{most}' if fewest == most else f'{fewest} to {most}'
    raise InputError(
      f"{spec}: each question of source '{benchmark.source}' is listed {times} times, and "
      f'{benchmark.label} is {benchmark.measure}: all must be listed equally often, and '
      f'{benchmark.samples} must be divisible by it.'
    )
  return benchmark.samples // most
