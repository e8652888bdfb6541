"""Questions generated and scored by reasoning_gym tasks.

A spec is reasoning_gym:TASKS:SPLIT. TASKS uses Python syntax but is never evaluated:

  reasoning_gym:chain_sum:train
  reasoning_gym:chain_sum(min_terms=2,max_terms=3,size=10000):train
  reasoning_gym:chain_sum(level=2)*2+gcd+products(max_digits=1):train

Arguments are fields of the task's config, or `level`, a curriculum level. `size` is the number of
distinct questions in train; validation and test each get a quarter as many. *2 doubles the size.

Each question is assigned to a split and a row by a hash of its text. So no two splits share a
question, regardless of tasks, arguments and seeds, and a slice is a random sample.

Every host must get the same questions, but some tasks draw from global random number generators
or iterate over sets in hash order. The questions are therefore generated in a separate process.
"""

import ast
import collections
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax.config import check_known
from exgrpo_jax.data import store
from exgrpo_jax.data.records import Record
from exgrpo_jax.data.store import Store
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import reasoning_gym
from exgrpo_jax.runtime import activity

PREFIX = 'reasoning_gym:'

_SIXTHS = (*['train'] * 4, 'validation', 'test')  # the split of each sixth of all questions
_SIZE = 2000  # default number of train questions
_TRIES = 1000  # a task is exhausted after this many tries in a row without a new question
_CHUNK = 500  # questions per reasoning_gym seed
_STRIDE = 1_000_000  # reasoning_gym seeds between two of ours; most tasks add the row to the seed
_FORM = 'Write it like chain_sum(min_terms=2,max_terms=3)*2+gcd, with keyword arguments'


class Task(NamedTuple):
  """A task named in a spec."""

  name: str
  config: dict[str, Any]  # values that differ from the defaults, in JSON types
  size: int  # questions in train
  seed: int

  def entries(self) -> Iterator[dict[str, Any]]:
    """Yield an endless stream of JSON-serializable questions, each with `task` and `config`."""
    origin = {'task': self.name, 'config': self.config}
    for start in itertools.count(self.seed * _STRIDE, _CHUNK):
      config = {**self.config, 'seed': start, 'size': _CHUNK}
      dataset = reasoning_gym.dataset(self.name, config)
      for index in range(_CHUNK):
        yield json.loads(json.dumps({**dataset[index], **origin}, default=str))


def prepared(cache_dir: str, spec: str, tasks: str) -> Store:
  """Return the splits of a spec's tasks; raise InputError if they cannot be generated."""
  if importlib.util.find_spec('reasoning_gym') is None:
    raise InputError(
      f'{spec}: the reasoning-gym package is not installed. Run pip install '
      "'exgrpo_jax[reasoning-gym]'."
    )
  code = inspect.getsource(sys.modules[__name__])
  key = repr((importlib.metadata.version('reasoning_gym'), tasks, code))

  def make(facts: dict[str, Any]) -> dict[str, list[Record]]:
    content = _make_in_subprocess(spec, tasks)
    facts['layouts'] = content['counts']
    return content['splits']

  return store.prepared(cache_dir, 'reasoning_gym', key, make)


def _make_in_subprocess(spec: str, tasks: str) -> dict[str, Any]:
  """Run `main` in a process with a fixed hash seed, so that set iteration is reproducible."""
  search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
  process = subprocess.run(
    [sys.executable, '-P', '-m', __name__, spec, tasks],
    env=os.environ | {'PYTHONPATH': search_path, 'PYTHONHASHSEED': '0'},
    stdout=subprocess.PIPE,
    check=True,
  )
  content = json.loads(process.stdout)
  if 'refused' in content:
    raise InputError(content['refused'])
  return content


# ---- In that process ----


def main() -> None:
  """Print JSON: each split's records and a summary line per task, or an InputError's message."""
  spec, text = sys.argv[1:]
  out, sys.stdout = sys.stdout, sys.stderr
  warnings.simplefilter('ignore')
  try:
    content = _make(parse(spec, text), spec)
  except InputError as error:
    content = {'refused': str(error)}
  json.dump(content, out)


def _make(tasks: Sequence[Task], spec: str) -> dict[str, Any]:
  splits: dict[str, dict[str, Record]] = {split: {} for split in _SIXTHS}
  counts = []
  for task in tasks:
    report = activity.reporter(
      lambda count, name=task.name: f'{name}: {counted(count, "question")} generated'
    )
    random.seed(task.seed)
    np.random.seed(task.seed % 2**32)
    # Some tasks print messages.
    with contextlib.redirect_stdout(io.StringIO()), _refusing(f'{spec}: {task.name}'):
      counts.append(_add(task, splits, report))
  return {
    'splits': {name: [records[key] for key in sorted(records)] for name, records in splits.items()},
    'counts': counts,
  }


def _add(task: Task, splits: dict[str, dict[str, Record]], report: Callable[[int], None]) -> str:
  """Assign a task's questions to splits by a hash of their text; return a summary line."""
  parts = collections.Counter(_SIXTHS)
  targets = {split: max(1, task.size * part // parts['train']) for split, part in parts.items()}
  counts, reasons, tries = dict.fromkeys(targets, 0), [], 0
  for entry in task.entries():
    if counts == targets or tries == _TRIES:
      break
    tries += 1
    key = hashlib.sha256(entry['question'].encode()).hexdigest()
    split = _SIXTHS[int(key[:8], 16) % 6]
    if counts[split] == targets[split] or key in splits[split]:
      continue
    if reason := _unusable(entry):
      reasons.append(reason)
      continue
    splits[split][key] = {
      'messages': [{'role': 'user', 'content': entry['question']}],
      'answer': entry['answer'] or '',  # None if any valid solution counts
      'kind': reasoning_gym.KIND,
      'solution': _solution(entry),
      'source': entry['task'],
      'columns': json.dumps({reasoning_gym.COLUMN: entry}),
    }
    counts[split] += 1
    tries = 0
    report(sum(counts.values()))
  if reasons and not any(counts.values()):
    raise InputError(f'none of the questions can be used: {reasons[0]}.')
  line = f'{task.name}: ' + ', '.join(f'{counts[split]:,} {split}' for split in counts)
  if counts != targets:
    line += f' ({task.size:,} requested for train, but {_TRIES:,} more tries found no new question)'
  return line + (f'; {len(reasons):,} left out, the first because {reasons[0]}' if reasons else '')


def _unusable(entry: dict[str, Any]) -> str:
  """Return the reason why a question cannot be used, or ''."""
  for text in ('?', 'nan'):
    if reasoning_gym.score(text, entry) >= 1:
      return f"score_answer returns 1 for the answer '{text}'"
  solution = _solution(entry)
  if solution and reasoning_gym.judge(solution, {reasoning_gym.COLUMN: entry})[0] != 'correct':
    return f"score_answer returns less than 1 for the task's own answer, {solution!r}"
  return ''


def _solution(entry: dict[str, Any]) -> str:
  return '' if entry['answer'] is None else f'\\boxed{{{entry["answer"]}}}'


@contextlib.contextmanager
def _refusing(place: str) -> Iterator[None]:
  """Turn reasoning_gym's exceptions, often failed assertions, into InputErrors."""
  try:
    yield
  except InputError as error:
    raise InputError(f'{place}: {error}') from error
  except Exception as error:
    kind = '' if isinstance(error, AssertionError) and str(error) else f'{type(error).__name__}: '
    raise InputError(f'{place}: {kind}{" ".join(str(error).split())}.') from error


# ---- The tasks of a spec ----


def parse(spec: str, text: str) -> list[Task]:
  """Parse the tasks in `text`; if it is invalid, raise an InputError that names the spec."""
  try:
    tree = ast.parse(text, mode='eval').body
  except (SyntaxError, ValueError) as error:
    raise InputError(f"{spec}: '{text}' is not a valid list of tasks. {_FORM}.") from error
  return list(_tasks(spec, tree, 1))


def _tasks(spec: str, node: ast.expr, weight: float) -> Iterator[Task]:
  match node:
    case ast.BinOp(left, ast.Add(), right):
      yield from _tasks(spec, left, weight)
      yield from _tasks(spec, right, weight)
    case ast.BinOp(left, ast.Mult(), ast.Constant(int() | float() as factor)) if factor > 0:
      yield from _tasks(spec, left, weight * factor)
    case ast.Name(name):
      yield _task(spec, name, [], weight)
    case ast.Call(ast.Name(name), [], keywords) if all(keyword.arg for keyword in keywords):
      yield _task(spec, name, keywords, weight)
    case _:
      raise InputError(f"{spec}: '{ast.unparse(node)}' is not a valid list of tasks. {_FORM}.")


def _task(spec: str, name: str, keywords: Sequence[ast.keyword], weight: float) -> Task:
  factory = importlib.import_module('reasoning_gym.factory')
  tasks = [task for task in factory.DATASETS if task != 'composite']  # combines tasks, as + does
  check_known(name, tasks, f'{spec}: reasoning_gym')
  place, settings = f'{spec}: {name}', factory.DATASETS[name][1]
  names = [field.name for field in dataclasses.fields(settings)]
  values = {}
  for keyword in keywords:
    check_known(str(keyword.arg), [*names, 'level'], place)
    if keyword.arg in values:
      raise InputError(f'{place}: {keyword.arg} is given twice. Remove one of the two.')
    values[keyword.arg] = _literal(place, keyword)
  size, seed = values.pop('size', _SIZE), values.pop('seed', 0)
  for key, value, minimum in (('size', size, 1), ('seed', seed, 0)):
    if type(value) is not int or value < minimum:
      raise InputError(f'{place}: {key}={value!r} must be an integer of at least {minimum}.')
  if 'level' in values:
    values = _of_level(place, factory, name, values.pop('level')) | values
  with _refusing(place):
    reasoning_gym.dataset(name, values)
  return Task(name, values, max(1, round(size * weight)), seed)


def _literal(place: str, keyword: ast.keyword) -> Any:
  """Parse an argument's value and convert it to JSON types."""
  try:
    return json.loads(json.dumps(ast.literal_eval(keyword.value)))
  except (TypeError, ValueError) as error:
    raise InputError(
      f'{place}: {ast.unparse(keyword)} must be a number, a quoted string, True, False, None, or '
      'a list of such values.'
    ) from error


def _of_level(place: str, factory: Any, name: str, level: Any) -> dict[str, Any]:
  """Return the config values that a curriculum level changes from the task's defaults."""
  if name not in factory.CURRICULA:
    raise InputError(
      f'{place}: level={level!r} has no effect because the task has no curriculum. Remove it.'
    )
  curriculum, settings = factory.create_curriculum(name), factory.DATASETS[name][1]
  highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
  if type(level) is not int or not 0 <= level <= highest:
    raise InputError(
      f"{place}: level={level!r} is out of range. The task's curriculum has levels 0 to {highest}."
    )
  curriculum.set_global_level(level)
  values, defaults = vars(curriculum.generate_configuration()), vars(settings())
  changes = {key: value for key, value in values.items() if value != defaults[key]}
  return json.loads(json.dumps(changes))


if __name__ == '__main__':
  main()
