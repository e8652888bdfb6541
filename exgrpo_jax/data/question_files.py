"""Prepares the questions of files and of embedded tasks: every row becomes a record, once."""

import functools
import hashlib
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from exgrpo_jax.data import records, row_files, spec_names, store
from exgrpo_jax.data.columns import Fields, Layout
from exgrpo_jax.data.store import Record, Store
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import verifier
from exgrpo_jax.runtime import activity

SPLIT = 'rows'  # the only split of files


class LeftOut(NamedTuple):
  """Rows that were left out for one reason."""

  rows: int
  first: str  # where the first of them is, and for conflicting answers the second


class Preparation(NamedTuple):
  """How a data set was read."""

  layouts: Sequence[str] = ()  # how its columns were read, mostly one line for all files
  left_out: Mapping[str, LeftOut] = {}  # by reason: rows whose answer cannot be checked
  excluded: Sequence[int] = ()  # of the rows stored those that are left out: conflicts show late


NOTHING = Preparation()  # of an embedded task


def of_task(cache_dir: str, name: str) -> Store:
  """The splits of an embedded task; prepared anew when its code changes."""
  rows = TASKS[name]
  code = inspect.getsource(inspect.getmodule(rows) or rows)
  return store.prepared(cache_dir, name, code, lambda _: rows())


def of_files(cache_dir: str, fields: Fields, paths: Sequence[str], source: str = '') -> Store:
  """The rows of some files in turn; `preparation` says how they were read.

  Args:
    cache_dir: where prepared data is kept.
    fields: what the user says of their columns.
    paths: as `row_files.opened` takes them; at least one.
    source: of the questions where no column says it; '' is the first file's name.

  Raises:
    InputError: one is not there, cannot be read or stored, or one of its rows cannot be used.
  """
  source = source or epath.Path(paths[0]).stem
  digests = [_digest(path) for path in paths]
  named = [(epath.Path(path).name, digest) for path, digest in zip(paths, digests)]

  def make(facts: dict[str, Any]) -> dict[str, Iterator[Record]]:
    return {SPLIT: _records(paths, digests, fields, source, facts)}

  return store.prepared(cache_dir, source, repr((*fields, named)), make)


def preparation(files: Store) -> Preparation:
  """How the files of `of_files` were read."""
  left_out = {reason: LeftOut(*values) for reason, values in files.facts['left_out'].items()}
  return Preparation(files.facts['layouts'], left_out, files.facts['excluded'])


def _digest(path: str) -> str:
  task = spec_names.task_file(path)
  file = row_files.existing(task[0] if task else path)
  hashed = hashlib.sha256()
  try:
    with file.open('rb') as content:
      for chunk in iter(functools.partial(content.read, 1 << 20), b''):
        hashed.update(chunk)
  except OSError as error:
    raise InputError(
      f'{path}: the file cannot be read ({error.strerror or error}); check its permissions.'
    ) from error
  return hashed.hexdigest()


def _records(
  paths: Sequence[str],
  digests: Sequence[str],
  fields: Fields,
  source: str,
  facts: dict[str, Any],
) -> Iterator[Record]:
  """The records of some files; at the end `facts` has the fields of their `Preparation`."""
  files = [(path, *records.of_file(fields, path, source)) for path in paths]
  named = paths[0] if len(paths) == 1 else f'{paths[0]} and {len(paths) - 1} more'
  report = activity.reporter(lambda done: f'{named}: {counted(done, "question")} prepared')
  answers, left_out = Answers(), {}
  for place, record in _rows(files):
    if isinstance(record, records.Uncheckable):
      so_far = left_out.get(record.reason, LeftOut(0, place))
      left_out[record.reason] = so_far._replace(rows=so_far.rows + 1)
    else:
      report(len(answers.asked))
      answers.add(place, record['messages'], record['answer'], record['kind'])
      yield record
  excluded = answers.conflicting_rows()
  if excluded:
    left_out[CONFLICT] = LeftOut(len(excluded), answers.conflicting[answers.asked[excluded[0]]])
  for path, digest in zip(paths, digests):
    if _digest(path) != digest:
      raise InputError(f'{path}: the file changed while it was read; start again when it is whole.')
  if len(excluded) == len(answers.asked):
    raise InputError(_nothing(paths[0], left_out))
  layouts = dict.fromkeys(layout.describe() for _, layout, _ in files if layout)
  facts.update(layouts=list(layouts), left_out=left_out, excluded=excluded)


def _rows(
  files: Sequence[tuple[str, Layout | None, Callable[[], records.Records]]],
) -> records.Records:
  for path, _, rows in files:
    # Places are kept without the folder, for the file may be moved.
    folder = path.removesuffix(epath.Path(path).name)
    yield from ((place.removeprefix(folder), record) for place, record in rows())


def _nothing(path: str, left_out: Mapping[str, LeftOut]) -> str:
  for reason, (rows, first) in left_out.items():
    where = f'{counted(rows, "row")}, as at {first}'
    return f'{path}: no row has an answer that can be checked: {reason} ({where}).'
  return f'{path}: the file holds no question; at least one is needed.'


# ---- Questions with different answers ----


CONFLICT = 'another answer to the same question elsewhere'


class Answers:
  """The answers to the questions of a data set, which is added row by row.

  Answers that differ as text may still be the same to the verifier: 1/2 and 0.5.
  """

  def __init__(self) -> None:
    self.asked: list[bytes] = []  # by each row: `question_key`
    self.conflicting: dict[bytes, str] = {}  # key -> the places and the text of two answers
    self._first: dict[bytes, tuple[str, str]] = {}  # key -> an answer, and its place

  def add(
    self, place: str, messages: Sequence[Mapping[str, Any]], answer: str, kind: str = 'math'
  ) -> None:
    """Add a row: where it is, what it asks, its answer, and how answers to it are compared."""
    asked = question_key(messages)
    self.asked.append(asked)
    first, first_place = self._first.setdefault(asked, (answer, place))
    if asked not in self.conflicting and not _same(first, answer, kind):
      self.conflicting[asked] = (
        f'{first_place} ({reprlib.repr(first)}) and {place} ({reprlib.repr(answer)})'
      )

  def conflicting_rows(self) -> list[int]:
    """The numbers of the rows whose question has another answer elsewhere."""
    return [row for row, asked in enumerate(self.asked) if asked in self.conflicting]


def question_key(messages: Sequence[Mapping[str, Any]]) -> bytes:
  """A hash of what is asked: the texts themselves of a large data set take much memory."""
  return hashlib.sha256(repr(messages).encode()).digest()[:16]


def _same(first: str, second: str, kind: str) -> bool:
  return first.strip() == second.strip() or any(
    verifier.compare(given, answer, kind) == 'correct'
    for given, answer in ((first, second), (second, first))
  )
