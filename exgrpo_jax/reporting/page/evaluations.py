"""Evaluation results per question: correct responses by step, and extracted answers."""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import comparison

Benchmark = Mapping[str, Any]  # see describe
# (row, digest of question and answer) -> share of correct responses
Shares = Mapping[tuple[int, str], float]

FOLDER = 'evaluation'
_FILE = re.compile(
  r'step_(?P<step>\d+)_(?P<name>.+?)'
  r'(?P<made>_temperature_(?P<temperature>[^_]+)_samples_\d+_(?P<time>\w+))?\.jsonl'
)
_MAX_TEXT = 300  # characters of a question, and of an extracted answer


class _File(NamedTuple):
  """A file with the results of one evaluation."""

  path: pathlib.Path
  step: int
  name: str  # name of the benchmark
  made: str  # temperature and time of a manual evaluation; '' for the run's own evaluation


def describe(workdir: pathlib.Path, max_characters: int) -> list[dict[str, Any]]:
  """Describe each benchmark's questions, with counts of correct responses at each evaluation.

  Response texts are kept only for evenly spaced questions (but at every evaluation), so that they
  have at most about `max_characters` characters in total. Files are read line by line.
  """
  files = []
  for path in sorted((workdir / FOLDER).glob('step_*.jsonl')):
    if match := _FILE.fullmatch(path.name):
      made = f'temperature {match["temperature"]}, {match["time"]}' if match['made'] else ''
      files.append(_File(path, int(match['step']), match['name'], made))
  share = max_characters // max(1, len({file.name for file in files}))
  benchmarks: dict[Any, dict[str, Any]] = {}
  for name in dict.fromkeys(file.name for file in files):
    benchmark_files = [file for file in files if file.name == name]
    every = -(-sum(file.path.stat().st_size for file in benchmark_files) // share)
    for file in benchmark_files:
      _add(benchmarks, file, every)
  return list(benchmarks.values())


def _add(benchmarks: dict[Any, dict[str, Any]], file: _File, every: int) -> None:
  records = list(_read(file.path, every))
  sources = dict.fromkeys(record['source'] for record in records)
  for source in sources:
    rows = [record for record in records if record['source'] == source]
    name = file.name if len(sources) == 1 else f'{file.name}/{source}'
    new_benchmark = {
      'name': name,
      'source': name,
      'rows': [record['row'] for record in rows],
      'texts': [record['question'][-_MAX_TEXT:].strip() for record in rows],
      'answers': [record['answer'] for record in rows],
      'digests': list(map(_digest, rows)),
      'evaluations': [],
    }
    key = (name, *new_benchmark['rows'], *new_benchmark['digests'])
    # The data may have changed, and a manual evaluation may use other questions.
    if key not in benchmarks and any(name == other_name for other_name, *_ in benchmarks):
      new_benchmark['name'] = f'{name} ({file.made or f"from step {file.step}"})'
    benchmark = benchmarks.setdefault(key, new_benchmark)
    responses = {
      str(i): record['responses'] for i, record in enumerate(rows) if record['responses']
    }
    benchmark['evaluations'].append(
      {
        'step': file.step,
        'made': file.made,
        'correct': [sum(record['correct']) for record in rows],
        'samples': len(rows[0]['correct']),
        'responses': responses,
      }
    )


def _digest(record: Mapping[str, Any]) -> str:
  """Return a digest of the whole question and its answer; shortened texts may not be unique."""
  question = comparison.question_key(record).encode(errors='backslashreplace')
  return hashlib.blake2b(question, digest_size=6).hexdigest()


def _read(path: pathlib.Path, every: int) -> Iterator[dict[str, Any]]:
  """Yield a file's records; only every `every`-th record keeps its responses."""
  with path.open(encoding='utf-8') as file:
    for index, line in enumerate(file):
      try:
        record = json.loads(line)
        row = {name: record[name] for name in ('row', 'source', 'question', 'answer', 'correct')}
        row['responses'] = _responses(record) if index % every == 0 else None
      except (ValueError, KeyError, TypeError) as error:
        raise InputError(
          f'{path}:{index + 1}: this line is not an evaluation record ({error!r}). Delete the '
          'line to read the other records.'
        ) from error
      yield row


def _responses(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
  """Return the responses to a question; older records contain no extracted answers."""
  names = {'text': 'responses', 'outcome': 'outcomes', 'length': 'lengths'}
  responses = [dict(zip(names, row)) for row in zip(*(record[name] for name in names.values()))]
  for response, answer in zip(responses, record.get('extracted', ())):
    response['extracted'] = answer and answer[:_MAX_TEXT]
  return responses


def by_step(benchmarks: Sequence[Benchmark], source: str) -> dict[int, Shares]:
  """Map each step to each question's share of correct responses, for one source.

  Manual evaluations are left out.
  """
  return {
    evaluation['step']: {
      key: count / evaluation['samples']
      for key, count in zip(zip(benchmark['rows'], benchmark['digests']), evaluation['correct'])
    }
    for benchmark in benchmarks
    if benchmark['source'] == source
    for evaluation in benchmark['evaluations']
    if not evaluation['made']
  }
