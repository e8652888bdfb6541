"""Prepared data: a dataset's records and prompt tokens, written once and then memory-mapped.

Each dataset has a folder named after a hash of everything that affects the records. It contains:

  facts.json     each split's row count, and how the rows were read
  SPLIT.arrow    a split's records
  prompts/HASH   prompt tokens; the hash covers everything that affects them

A file with the right name is therefore always up to date, and outdated files are never used.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
import re
import reprlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
from etils import epath

from exgrpo_jax.data import prompt, records
from exgrpo_jax.data.records import Fields, Record
from exgrpo_jax.data.row_files import RowFile
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Message, Question, Questions
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import verifier
from exgrpo_jax.runtime import activity, hosts
from exgrpo_jax.runtime.replacement import replacing

ROWS = 'rows'  # the only split of files

# The fields of datatypes.Question except `row`; `columns` is JSON.
SCHEMA = pa.schema(
  [
    ('messages', pa.list_(pa.struct([('role', pa.string()), ('content', pa.string())]))),
    *((name, pa.string()) for name in ('answer', 'kind', 'solution', 'source', 'columns')),
  ]
)
_VERSION = '7'  # increment this when the conversion of rows to records changes
_BATCH = 1000  # rows written, read or tokenized at a time
_FACTS = 'facts.json'
_INT = np.dtype('<i4')
_DIGEST = 32  # bytes in a SHA-256
_LIBRARIES = ('jinja2', 'sentencepiece', 'tokenizers')

Facts = dict[str, Any]  # a Store's attributes except its folder


class LeftOut(NamedTuple):
  """Rows that were left out for the same reason."""

  rows: int
  first: str  # the first row's place; for conflicting answers, places and answers of both rows


class Store:
  """A dataset's prepared splits. Rows are read on demand."""

  def __init__(self, folder: pathlib.Path) -> None:
    facts: Facts = json.loads((folder / _FACTS).read_text())
    self.folder = folder
    self.sizes: dict[str, int] = facts['sizes']  # split -> row count, including `excluded` rows
    # Lines that say how columns were read (usually one for all files) or count each task's rows.
    self.layouts: list[str] = facts.get('layouts', [])
    # Reason -> the rows whose answer cannot be checked (only for files).
    self.left_out = {why: LeftOut(*entry) for why, entry in facts.get('left_out', {}).items()}
    # Rows that are stored but not used: conflicts are known only after all rows are written.
    self.excluded: list[int] = facts.get('excluded', [])

  def reader(self, split: str) -> Callable[[Sequence[int]], list[Record]]:
    """Return a function that reads a split's rows, even after the cache has been cleared."""
    with pa.ipc.open_file(pa.memory_map(os.fspath(_file(self.folder, split)))) as file:
      batches = [file.get_batch(number) for number in range(file.num_record_batches)]
    size = batches[0].num_rows if batches else 1  # rows in every batch except the last

    def read(rows: Sequence[int]) -> list[Record]:
      record_of_row = {}
      for number, group in itertools.groupby(sorted(set(rows)), lambda row: row // size):
        batch_rows = list(group)
        batch = batches[number].take(pa.array([row % size for row in batch_rows]))
        record_of_row |= zip(batch_rows, batch.to_pylist())
      return [record_of_row[row] for row in rows]

    return read


def prepared(
  cache_dir: str, name: str, key: str, make: Callable[[Facts], Mapping[str, Iterable[Record]]]
) -> Store:
  """Return the dataset with this key, preparing it first if it is missing or damaged.

  Handles concurrent calls and killed processes: each process writes to its own folder, and the
  first to finish renames its folder. Raises InputError if the data cannot be stored.

  Args:
    cache_dir: the cache folder; '' means TFDS's folder.
    name: the dataset's name, used as a prefix of its folder's name.
    key: everything that affects the records.
    make: returns the records of each split. Its argument is a dict to which it may add facts; they
      are written after all records. Exceptions propagate.
  """
  digest = hashlib.sha256(repr((_VERSION, name, key)).encode()).hexdigest()[:24]
  readable = re.sub(r'[^\w.-]+', '_', name)
  folder = cache_folder(cache_dir) / 'questions' / f'{readable}-{digest}'
  if store := _open_store(folder):
    return store
  facts: Facts = {}
  sizes = {}
  try:
    with replacing(folder, shared=True) as unfinished:
      unfinished.mkdir()
      for split, rows in make(facts).items():
        sizes[split] = _write(_file(unfinished, split), rows)
      (unfinished / _FACTS).write_text(json.dumps(facts | {'sizes': sizes}))
  except (OSError, pa.ArrowInvalid) as error:
    raise InputError(
      f'{name}: the questions cannot be stored in {folder} ({type(error).__name__}: {error}). '
      'Set config.data.cache_dir to a writable folder with enough free space.'
    ) from error
  return Store(folder)


def _open_store(folder: pathlib.Path) -> Store | None:
  """Return the prepared data in `folder`, or None if there is none.

  A folder whose files are missing or damaged is removed.
  """
  if not folder.exists():
    return None
  try:
    store = Store(folder)
    for split in store.sizes:
      store.reader(split)
    return store
  except (OSError, ValueError) as error:
    hosts.warn(f'{folder}: the prepared data is damaged ({error}). Preparing it again.')
    shutil.rmtree(folder, ignore_errors=True)
    return None


def cache_folder(cache_dir: str) -> pathlib.Path:
  """Return the folder set in config.data.cache_dir; '' means TFDS's folder."""
  path = cache_dir or os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
  return pathlib.Path(path).expanduser()


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  return folder / f'{split}.arrow'


def _write(path: pathlib.Path, rows: Iterable[Record]) -> int:
  """Write a split's records and return how many there are."""
  row_iterator, size = iter(rows), 0
  with pa.ipc.new_file(os.fspath(path), SCHEMA) as file:
    while batch := list(itertools.islice(row_iterator, _BATCH)):
      file.write_batch(pa.RecordBatch.from_pylist(batch, SCHEMA))
      size += len(batch)
  return size


# ---- Records of tasks and files ----


def of_task(cache_dir: str, name: str, rows: Callable[[], Mapping[str, Iterable[Record]]]) -> Store:
  """Return a built-in task's splits, preparing them again if the task's code has changed."""
  code = inspect.getsource(inspect.getmodule(rows) or rows)
  return prepared(cache_dir, name, code, lambda _: rows())


def of_files(cache_dir: str, fields: Fields, files: Sequence[RowFile], source: str = '') -> Store:
  """Return the rows of one or more files in order, as the split ROWS.

  `source` is the questions' source if no column contains it; '' means the first file's name. Raises
  InputError if a file is missing, cannot be read or stored, or contains an unusable row.
  """
  source = source or epath.Path(files[0].path).stem
  digests = [(epath.Path(file.path).name, file.digest()) for file in files]

  def make(facts: Facts) -> dict[str, Iterator[Record]]:
    return {ROWS: _records(files, [digest for _, digest in digests], fields, source, facts)}

  return prepared(cache_dir, source, repr((*fields, digests)), make)


def _records(
  files: Sequence[RowFile], digests: Sequence[str], fields: Fields, source: str, facts: Facts
) -> Iterator[Record]:
  """Yield the files' records. At the end, store in `facts` how the files were read."""
  readers = [(file, *records.of_file(fields, file, source)) for file in files]
  path = files[0].path
  label = path if len(files) == 1 else f'{path} and {len(files) - 1} more'
  report = activity.reporter(lambda count: f'{label}: {counted(count, "question")} prepared')
  answers, left_out = Answers(), dict[str, LeftOut]()
  for file, _, rows in readers:
    # Places omit the folder because the file may be moved.
    folder = file.path.removesuffix(epath.Path(file.path).name)
    for place, record in rows():
      place = place.removeprefix(folder)
      if isinstance(record, str):
        entry = left_out.get(record, LeftOut(0, place))
        left_out[record] = entry._replace(rows=entry.rows + 1)
      else:
        report(len(answers.keys))
        answers.add(place, record['messages'], record['answer'], record['kind'])
        yield record
  excluded = [row for row, key in enumerate(answers.keys) if key in answers.conflicts]
  if excluded:
    left_out[CONFLICT] = LeftOut(len(excluded), answers.conflicts[answers.keys[excluded[0]]])
  for file, digest in zip(files, digests):
    if file.digest() != digest:
      raise InputError(
        f'{file.path}: the file changed while it was being read. Run the command again once the '
        'file is complete.'
      )
  if len(excluded) == len(answers.keys):
    if not left_out:
      raise InputError(f'{path}: the file contains no questions. Add at least one.')
    reason, (count, place) = next(iter(left_out.items()))
    raise InputError(
      f'{path}: no row has an answer that can be checked: {reason} ({counted(count, "row")}, the '
      f'first at {place}).'
    )
  layouts = dict.fromkeys(layout.describe() for _, layout, _ in readers if layout)
  facts.update(layouts=list(layouts), left_out=left_out, excluded=excluded)


CONFLICT = 'conflicting answers to the same question'


class Answers:
  """A dataset's answers, collected row by row to find conflicts.

  The verifier may treat answers as equal even if their texts differ, as with 1/2 and 0.5.
  """

  def __init__(self) -> None:
    self.keys: list[bytes] = []  # `question_key` of each row
    self.conflicts: dict[bytes, str] = {}  # key -> places and texts of two answers
    self._first: dict[bytes, tuple[str, str]] = {}  # key -> an answer and its place

  def add(
    self, place: str, messages: Sequence[Mapping[str, Any]], answer: str, kind: str = 'math'
  ) -> None:
    """Add a row. `kind` determines how answers are compared."""
    key = question_key(messages)
    self.keys.append(key)
    first, first_place = self._first.setdefault(key, (answer, place))
    if key in self.conflicts or first.strip() == answer.strip():
      return
    pairs = (first, answer), (answer, first)
    if all(verifier.compare(*pair, kind) != 'correct' for pair in pairs):
      self.conflicts[key] = (
        f'{first_place} ({reprlib.repr(first)}) and {place} ({reprlib.repr(answer)})'
      )


def question_key(messages: Sequence[Mapping[str, Any]]) -> bytes:
  """Return a hash of the messages, which takes less memory than their text."""
  return hashlib.sha256(repr(messages).encode()).digest()[:16]


# ---- Questions and prompts ----


class Dataset(Questions):
  """The questions of one data spec: a selection of a split's rows."""

  def __init__(self, spec: str, store: Store, split: str, rows: np.ndarray) -> None:
    self.spec, self.store, self.split = spec, store, split
    self.rows = rows  # int [questions], indices into the split
    self._read = store.reader(split)

  def __len__(self) -> int:
    return len(self.rows)

  def __iter__(self) -> Iterator[Question]:
    # Reading rows one by one would take several times as long.
    for start in range(0, len(self), _BATCH):
      yield from self[start : start + _BATCH]

  def select(self, rows: np.ndarray) -> 'Dataset':
    """Return the questions at these indices, renumbered from 0."""
    return Dataset(self.spec, self.store, self.split, self.rows[rows])

  def read(self, rows: Sequence[int]) -> list[Question]:
    """See Questions.read."""
    questions = []
    for row, record in zip(rows, self._read(self.rows[list(rows)].tolist())):
      messages = tuple(Message(**message) for message in record['messages'])
      columns = json.loads(record['columns'] or '{}')
      questions.append(Question(row, **record | {'messages': messages, 'columns': columns}))
    return questions


class Prompts(Sequence[np.ndarray]):
  """A dataset's prompts, each an int32 [T] view into a shared array. Slicing returns a list."""

  def __init__(
    self, tokens: np.ndarray, begins: np.ndarray, lengths: np.ndarray, checksum: bytes
  ) -> None:
    self._tokens, self._begins = tokens, begins
    self.lengths = lengths  # int [prompts], in tokens
    self.checksum = checksum  # covers all questions and prompts of the dataset

  def __len__(self) -> int:
    return len(self.lengths)

  @overload
  def __getitem__(self, row: int) -> np.ndarray: ...
  @overload
  def __getitem__(self, row: slice) -> list[np.ndarray]: ...
  def __getitem__(self, row: int | slice) -> np.ndarray | list[np.ndarray]:
    if isinstance(row, slice):
      return [self[index] for index in range(len(self))[row]]
    begin = self._begins[row]
    return self._tokens[begin : begin + self.lengths[row]]

  def select(self, rows: np.ndarray) -> 'Prompts':
    """Return the prompts at these indices, renumbered from 0."""
    return Prompts(self._tokens, self._begins[rows], self.lengths[rows], self.checksum)


def tokenized(data: Dataset, tokenizer: Tokenizer, prompts: prompt.PromptConfig) -> Prompts:
  """Return the tokenized prompts of `data` from the cache, or tokenize and store them.

  Like `prepared`, handles concurrent calls and killed processes. Raises InputError if a question
  cannot be rendered.
  """
  key = (
    data.split,
    hashlib.sha256(data.rows.tobytes()).hexdigest(),
    prompts,
    sorted((name, hashlib.sha256(file).hexdigest()) for name, file in tokenizer.files.items()),
    _code(),
  )
  name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
  path = data.store.folder / 'prompts' / name
  if path.exists():
    try:
      return _prompts_in(path)
    except (OSError, ValueError) as error:
      hosts.warn(f'{path}: {error}. Tokenizing the prompts of {data.spec} again.')
  content = _tokenize(data, tokenizer, prompts)
  try:
    with replacing(path, shared=True) as unfinished:
      unfinished.write_bytes(content)
    return _prompts_in(path)
  except OSError as error:
    hosts.warn(
      f'the tokenized prompts of {data.spec} cannot be saved in {path.parent} '
      f'({error.strerror or error}), so they will be tokenized again each time a run starts. '
      'Make that folder writable and free some space, or set config.data.cache_dir to a different '
      'folder.'
    )
    return _parse(np.frombuffer(memoryview(content).toreadonly(), _INT))


@functools.cache
def _code() -> tuple[str, ...]:
  """Return a digest of this folder's code, and the versions of the libraries that it uses."""
  digest = hashlib.sha256()
  for file in sorted(pathlib.Path(__file__).parent.glob('*.py')):
    digest.update(file.read_bytes())
  return digest.hexdigest(), *(importlib.metadata.version(name) for name in _LIBRARIES)


def _tokenize(data: Dataset, tokenizer: Tokenizer, prompts: prompt.PromptConfig) -> bytearray:
  """Tokenize the prompts and return the content of their cache file.

  The file starts with a SHA-256 of everything that follows, then a SHA-256 of the questions. The
  rest is little-endian int32: all prompts' tokens, each prompt's length, and the prompt count.
  """
  content, lengths, questions = bytearray(2 * _DIGEST), [], hashlib.sha256()
  report = activity.reporter(
    lambda count: f'{data.spec}: {count:,} of {counted(len(data), "prompt")} tokenized'
  )
  for start in range(0, len(data), _BATCH):
    batch = data[start : start + _BATCH]
    ids = tokenizer.encode_all([tokenizer.render(q.messages, prompts) for q in batch])
    content += np.fromiter(itertools.chain.from_iterable(ids), _INT).tobytes()
    lengths += map(len, ids)
    questions.update(repr(batch).encode())
    report(len(lengths))
  content += np.array([*lengths, len(lengths)], _INT).tobytes()
  content[_DIGEST : 2 * _DIGEST] = questions.digest()
  content[:_DIGEST] = hashlib.sha256(memoryview(content)[_DIGEST:]).digest()
  return content


def _prompts_in(path: pathlib.Path) -> Prompts:
  """Memory-map a file's prompts; raise ValueError if the file is damaged."""
  with path.open('rb') as file:
    if file.read(_DIGEST) != hashlib.file_digest(file, 'sha256').digest():
      raise ValueError('the file is damaged')
    return _parse(np.asarray(np.memmap(file, _INT, 'r')))


def _parse(content: np.ndarray) -> Prompts:
  """Parse the int32 content of a prompt file and return its prompts, as views."""
  checksum, rest = content[: _DIGEST // 4].tobytes(), content[2 * _DIGEST // 4 :]
  count = int(rest[-1])
  lengths = rest[-1 - count : -1].astype(np.int64)
  return Prompts(rest[: -1 - count], np.cumsum(lengths) - lengths, lengths, checksum)
