"""Convert a public dataset's files to rows with verl's columns.

Reads parquet and jsonl files that have verl's columns, like Elliott/Openr1-Math-46k-8192, or the
columns `problem` and `answer`, like open-r1/OpenR1-Math-220k.
"""

import collections
import itertools
import pathlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_jax.data import named_sets, records, row_files, store
from exgrpo_jax.data.records import NO_ANSWERS, ROLES
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.runtime import activity

_TARGET = 'target'  # column with another model's worked solutions
_SCHEMA = pa.schema(
  [
    ('data_source', pa.string()),
    ('prompt', pa.list_(pa.struct([('role', pa.string()), ('content', pa.string())]))),
    ('ability', pa.string()),
    ('reward_model', pa.struct([('ground_truth', pa.string()), ('style', pa.string())])),
    ('extra_info', pa.struct([('index', pa.int64()), ('split', pa.string())])),
  ]
)
_VERL = _SCHEMA.names
_GROUP = 1024  # rows per write
_INT64_DIGITS = 18  # for the index in _SCHEMA; any number with this many digits fits


class Shard(NamedTuple):
  """A data file and its columns."""

  path: str
  file: row_files.Table
  columns: Sequence[str]

  @property
  def is_verl(self) -> bool:
    """Return True for verl's columns, False for `problem` and `answer`."""
    return {'prompt', 'reward_model'} <= set(self.columns)


class FileCounts(NamedTuple):
  """Row counts of a written file of training questions."""

  rows: int
  different: int  # unique questions
  left_out: Mapping[str, int]  # rows by reason


# ---- Files ----


def shards(places: Sequence[str]) -> list[Shard]:
  """Return the data files from these sources (files, folders or Hub splits), in order.

  Raises InputError if a source does not exist or contains no suitable file, or if a file cannot be
  read or lacks the columns.
  """
  found = []
  for path in itertools.chain.from_iterable(map(_files, places)):
    file = row_files.opened(path)
    found.append(shard := Shard(path, file, file.columns()))
    if not shard.is_verl and not {'problem', 'answer'} <= set(shard.columns):
      raise InputError(
        f'{path}: no question column found (has: {", ".join(shard.columns) or "no rows"}). The '
        "file must have verl's columns 'prompt' and 'reward_model', or the columns 'problem' and "
        "'answer'."
      )
  return found


def _files(place: str) -> list[str]:
  path, endings = pathlib.Path(place).expanduser(), ' or '.join(row_files.LINES_OR_PARQUET)
  if path.is_file():
    if path.name.endswith(row_files.LINES_OR_PARQUET):
      return [str(path)]
    raise InputError(f'--data={place} must be a folder, or a file that ends in {endings}.')
  if not path.is_dir():
    if split := named_sets.parse(place):
      return named_sets.files(split)
    raise InputError(
      f'--data={place}: there is no such file or folder. Write a Hub split as owner/name:train.'
    )
  inside = [
    str(file)
    for file in sorted(path.rglob('*'))
    if file.name.endswith(row_files.LINES_OR_PARQUET)
    and not any(part.startswith('.') for part in file.relative_to(path).parts)
  ]
  if not inside:
    raise InputError(
      f'--data={place}: no file in this folder ends in {endings}. Choose a folder with such a file.'
    )
  return inside


def unused(found: Sequence[Shard], keep_target: bool) -> list[str]:
  """Return the columns that won't be written."""
  used = {*_VERL, 'problem', 'answer', *([_TARGET, 'solution'] if keep_target else [])}
  return sorted({column for shard in found for column in shard.columns} - used)


# ---- Writing ----


def write(path: pathlib.Path, found: Sequence[Shard], keep_target: bool) -> FileCounts:
  """Write the rows of all files as parquet. Each file is read twice.

  A row with problem and answer becomes a prompt with a single user message. It gets no system
  message because the config's template provides one. Rows are skipped if they have no prompt or
  ground truth, or if another row gives the same question a different ground truth. `keep_target`
  keeps the worked solutions, as text. Raises InputError if a value has the wrong type.
  """
  schema = _SCHEMA.append(pa.field(_TARGET, pa.string())) if keep_target else _SCHEMA
  answers = store.Answers()
  for shard in found:
    for place, row in _rows(shard, keep_target=False):
      if isinstance(row, dict):
        answers.add(place, row['prompt'], row['reward_model']['ground_truth'])
  conflicting = answers.conflicting
  read, kept, asked, left_out = 0, 0, set(), collections.Counter()
  report = activity.reporter(lambda done: f'{counted(done, "row")} read')

  def rows(shard: Shard) -> Iterator[dict[str, Any]]:
    nonlocal read, kept
    before = read
    for _, row in _rows(shard, keep_target):
      read += 1
      report(read)
      if isinstance(row, str):
        left_out[row] += 1
      elif (question := store.question_key(row['prompt'])) in conflicting:
        left_out[f'{store.CONFLICT}, such as {next(iter(conflicting.values()))}'] += 1
      else:
        asked.add(question)
        if row['extra_info']['index'] is None:
          row['extra_info']['index'] = kept
        kept += 1
        yield row
    kind = "verl's columns" if shard.is_verl else 'problem and answer'
    print(f'{shard.path}: {counted(read - before, "row")}, {kind}', flush=True)

  every = itertools.chain.from_iterable(map(rows, found))
  with pq.ParquetWriter(path, schema) as writer:
    while group := list(itertools.islice(every, _GROUP)):
      writer.write_table(pa.Table.from_pylist(group, schema))
  return FileCounts(kept, len(asked), left_out)


# ---- Rows ----


def _rows(shard: Shard, keep_target: bool) -> Iterator[tuple[str, dict[str, Any] | str]]:
  """Yield each row's place and either its columns in verl's format or the reason to skip it."""
  solution = _TARGET if shard.is_verl else 'solution'
  wanted = {*(_VERL if shard.is_verl else ('problem', 'answer')), *([solution] * keep_target)}
  for place, record in shard.file.rows(set(shard.columns) - wanted):
    row = _row(record if shard.is_verl else _as_verl(record, place), place)
    if isinstance(row, dict) and keep_target:
      row[_TARGET] = _solution(record.get(solution), place)
    yield place, row


def _as_verl(record: Mapping[str, Any], place: str) -> dict[str, Any]:
  """Convert a row with `problem` and `answer` to verl's columns."""
  problem = record.get('problem')
  if not isinstance(problem, str | None):
    raise InputError(f'{place}: problem is {reprlib.repr(problem)}. It must be text.')
  return {
    'prompt': [{'role': 'user', 'content': problem}],
    'reward_model': {'ground_truth': records.answer_text(record.get('answer'), 'answer', place)},
  }


def _row(record: Mapping[str, Any], place: str) -> dict[str, Any] | str:
  """Return the row with all of verl's columns filled, or the reason to skip it."""
  prompt, model = record.get('prompt') or [], record.get('reward_model') or {}
  if not isinstance(model, Mapping) or isinstance(model.get('ground_truth'), bytes):
    raise InputError(
      f'{place}: reward_model is {reprlib.repr(model)}. It must be a struct whose ground_truth is '
      'text.'
    )
  if not isinstance(prompt, list) or not all(
    isinstance(turn, Mapping)
    and turn.get('role') in ROLES
    and isinstance(turn.get('content'), str | None)
    for turn in prompt
  ):
    raise InputError(
      f'{place}: prompt is {reprlib.repr(prompt)}. It must be a list of chat messages, each with a '
      f'role ({", ".join(ROLES)}) and text content.'
    )
  messages = [
    {'role': turn['role'], 'content': _text(turn.get('content'), 'content', place)}
    for turn in prompt
  ]
  has_user = any(turn['role'] == 'user' for turn in messages)
  if not has_user or not all(turn['content'] for turn in messages):
    return 'no prompt'
  answer = records.answer_text(model.get('ground_truth'), 'reward_model.ground_truth', place)
  if not answer:
    return 'no ground truth'
  if answer.strip().lower() in NO_ANSWERS:
    return f'{answer.strip()} instead of a ground truth'
  extra = record.get('extra_info')
  extra = extra if isinstance(extra, Mapping) else {}
  index = _text(extra.get('index'), 'extra_info.index', place)
  fits = index.isdecimal() and len(index) <= _INT64_DIGITS
  return {
    'data_source': _text(record.get('data_source'), 'data_source', place) or 'math',
    'prompt': messages,
    'ability': _text(record.get('ability'), 'ability', place) or 'math',
    'reward_model': {
      'ground_truth': answer,
      'style': _text(model.get('style'), 'reward_model.style', place) or 'rule',
    },
    'extra_info': {
      'index': int(index) if fits else None,
      'split': _text(extra.get('split'), 'extra_info.split', place) or 'train',
    },
  }


def _solution(value: Any, place: str) -> str | None:
  """Return a worked solution as text; if it is a list of messages, return the first one's text."""
  if isinstance(value, list):
    value = value[0] if value else None
  if isinstance(value, Mapping):
    value = value.get('content')
  if value is not None and not isinstance(value, str):
    raise InputError(f'{place}: {_TARGET} is {reprlib.repr(value)}. It must be text or messages.')
  return records.storable(value, _TARGET, place) if value else None


def _text(value: Any, name: str, place: str) -> str:
  """Convert `value` to text; None and whitespace become ''."""
  text = '' if value is None else str(value)
  return records.storable(text, name, place) if text.strip() else ''
