"""Read rows from any supported format: jsonl, a JSON array, csv, parquet, or a Python task.

The `datasets` library is not used. It turns an answer of 0.50 into 0.5, a 5,000-digit number into
infinity, and `nan` or a missing value into None. It also shifts the columns of an overlong csv row,
renames the second of two columns with the same name, and does not report which line is wrong.
"""

import collections
import csv
import functools
import hashlib
import io
import itertools
import json
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from exgrpo_jax import config
from exgrpo_jax.errors import InputError, counted

ENDINGS = ('.jsonl', '.json', '.csv', '.parquet')
LINES_OR_PARQUET = ('.jsonl', '.parquet')  # formats of files with stored responses

Row = dict[str, Any]  # values by column; a jsonl row may lack some columns
Rows = Iterator[tuple[str, Row]]  # place ('path:line' or 'path: row n') and row

_TASK = re.compile(r'(?P<file>.+\.py):(?P<split>[\w.-]+)')
_BATCH = 128  # parquet rows in memory at a time


class Numeral(str):
  """A number that keeps its original spelling, so that an answer of 0.50 doesn't become 0.5."""


class Table(NamedTuple):
  """Rows that can be read repeatedly.

  Only a few rows are in memory at a time, unless they come from a .json or .py file. Such a file
  is read as a whole.
  """

  columns: Callable[[], list[str]]  # the union over all rows, in order of first occurrence
  rows: Callable[[Collection[str]], Rows]  # the argument names columns to leave out


class RowFile(NamedTuple):
  """A file or a dataset's split, opened only if its content has not been prepared yet."""

  path: str  # for messages
  digest: Callable[[], str]  # returns a digest of the content
  opened: Callable[[], Table]


def row_file(path: str) -> RowFile:
  """Return a RowFile for `path`, which may be anything that `opened` accepts."""
  return RowFile(path, functools.partial(digest, path), functools.partial(opened, path))


def task_file(base: str) -> tuple[str, str] | None:
  """Return a Python task's file and split, as in 'squares.py:train', or None for other specs."""
  match = _TASK.fullmatch(base)
  return (match['file'], match['split']) if match else None


def opened(path: str, keep_spelling: bool = True) -> Table:
  """Open the file at `path` with the reader for its extension.

  The path of a Python task ends in its split, as in 'squares.py:train'. With `keep_spelling`, JSON
  numbers become Numerals, and a float16 or float32 in parquet becomes the float64 that prints the
  same: 0.1, not 0.10000000149011612.

  Raises InputError, now or when rows are read, if the file is missing, damaged or in a different
  format, if its text isn't UTF-8, or if two columns share a name.
  """
  if task := task_file(path):
    return _task(path, existing(task[0]), task[1])
  file = existing(path)
  if file.suffix == '.parquet':
    return _parquet(path, file, keep_spelling)
  if file.suffix == '.csv':
    return _csv(path, file)
  if file.suffix == '.json':
    rule = (
      'A .json file must contain an array of objects, in UTF-8; use .jsonl for one object per line'
    )
    values = _parse_json(file.read_bytes(), path, rule, keep_spelling)
    if not isinstance(values, list):
      raise InputError(
        f"{path}: the file contains {reprlib.repr(values)}, which isn't an array. {rule}."
      )
    return _of_list(path, values)

  def rows(without: Collection[str] = ()) -> Rows:
    rule = 'Every line must contain one JSON object, in UTF-8'
    with file.open('rb') as lines:
      for number, line in enumerate(lines, start=1):
        if line.strip():
          place = f'{path}:{number}'
          row = _object(_parse_json(line, place, rule, keep_spelling), place)
          yield place, _drop_columns(row, without)

  return Table(lambda: _all_columns(rows()), rows)


def existing(path: str) -> epath.Path:
  """Return the file at `path`; raise InputError if it does not exist."""
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(
      f'{path}: there is no such file. A data spec that ends in {file.suffix} must be the path of '
      'a file, absolute or relative to the current folder.'
    )
  return file


def digest(path: str) -> str:
  """Return the SHA-256 of a file's content. `path` may be anything that `opened` accepts."""
  task = task_file(path)
  try:
    with existing(task[0] if task else path).open('rb') as content:
      return hashlib.file_digest(content, 'sha256').hexdigest()  # pyright: ignore[reportArgumentType]  # epath's type of a file
  except OSError as error:
    raise InputError(
      f'{path}: the file cannot be read ({error.strerror or error}). Check its permissions.'
    ) from error


def _of_list(path: str, values: Iterable[Any]) -> Table:
  rows = []
  for number, value in enumerate(values):
    place = f'{path}: row {number}'
    rows.append((place, _object(value, place)))
  return Table(
    lambda: _all_columns(rows),
    lambda without: ((place, _drop_columns(row, without)) for place, row in rows),
  )


def _all_columns(rows: Iterable[tuple[str, Row]]) -> list[str]:
  return list(dict.fromkeys(name for _, row in rows for name in row))


def _drop_columns(row: Row, omitted: Collection[str]) -> Row:
  return {name: value for name, value in row.items() if name not in omitted}


# ---- JSON ----


def _parse_json(text: bytes, place: str, rule: str, keep_spelling: bool) -> Any:
  parse_number = Numeral if keep_spelling else None

  def make_object(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    json_object = dict(fields)
    if len(json_object) < len(fields):
      check_distinct([name for name, _ in fields], place)
    return json_object

  try:
    return json.loads(
      text, parse_int=parse_number, parse_float=parse_number, object_pairs_hook=make_object
    )
  except InputError:
    raise
  except (ValueError, RecursionError) as error:
    raise InputError(f'{place}: not valid JSON ({error}). {rule}.') from error


def _object(value: Any, place: str) -> Row:
  if not isinstance(value, dict):
    raise InputError(
      f'{place}: {reprlib.repr(value)} is not an object. Every row must be an object.'
    )
  return value


# ---- CSV ----


def _csv(path: str, file: epath.Path) -> Table:
  csv.field_size_limit(sys.maxsize)  # the default is 131,072 characters, less than some solutions

  def values() -> Iterator[list[str]]:
    with file.open('rb') as opened_file:
      text = io.TextIOWrapper(opened_file, encoding='utf-8-sig', newline='')  # pyright: ignore[reportArgumentType]  # epath's type of a file
      yield from filter(None, csv.reader(text, strict=True))  # skip blank lines

  def rows(without: Collection[str]) -> Rows:
    csv_rows = values()
    next(csv_rows, None)  # skip the names
    for number in itertools.count():
      place = f'{path}: row {number}'  # not the line, because a value may span lines
      row = _next_row(csv_rows, place, file)
      if row is None:
        return
      if len(row) != len(names):
        raise InputError(
          f'{place}: the row has {counted(len(row), "value")}, but the first line names '
          f'{counted(len(names), "column")}. Quote values that contain a comma or a line break.'
        )
      yield place, _drop_columns(dict(zip(names, row)), without)

  with file.open('rb') as opened_file:
    header = opened_file.readline().decode(errors='replace').strip()
  if ',' not in header and any(separator in header for separator in ';\t|'):
    raise InputError(
      f'{path}:1: {reprlib.repr(header)} has no comma, so the file seems to use a different '
      'separator. Save the file with commas as separators.'
    )
  names = _next_row(values(), f'{path}:1', file) or []
  check_distinct(names, f'{path}:1')
  return Table(lambda: names, rows)


def _next_row(csv_rows: Iterator[list[str]], place: str, file: epath.Path) -> list[str] | None:
  try:
    return next(csv_rows, None)
  except csv.Error as error:
    raise InputError(f'{place}: not valid CSV ({error}). Save the file again.') from error
  except UnicodeDecodeError as error:  # reports a position within one chunk of the file
    for number, line in enumerate(file.read_bytes().split(b'\n'), start=1):
      try:
        line.decode()
      except UnicodeDecodeError as exact:
        raise _not_utf8(f'{file}:{number}', exact) from error
    raise


# ---- Parquet ----


def _parquet(path: str, file: epath.Path, keep_spelling: bool) -> Table:
  def rows(without: Collection[str]) -> Rows:
    columns, number = [name for name in names if name not in without], 0
    try:
      with file.open('rb') as content:
        for batch in pq.ParquetFile(content).iter_batches(_BATCH, columns=columns):
          short_floats = filter(lambda field: _has_short_floats(field.type), batch.schema)
          kinds = {field.name: field.type for field in short_floats} if keep_spelling else {}
          for row in _values(batch, path, number):
            floats = {name: _respell(row[name], kind) for name, kind in kinds.items()}
            yield f'{path}: row {number}', row | floats
            number += 1
    except (pa.ArrowInvalid, OSError) as error:
      raise _damaged(path, error) from error

  try:
    with file.open('rb') as content:
      names = pq.read_schema(content).names
  except (pa.ArrowInvalid, OSError) as error:
    raise _damaged(path, error) from error
  check_distinct(names, path)
  return Table(lambda: names, rows)


def _values(batch: pa.RecordBatch, path: str, number: int) -> list[Row]:
  """Return the rows of a batch that starts at row `number` of the file."""
  try:
    return batch.to_pylist()
  except (UnicodeDecodeError, OverflowError):  # the file's writer may not have validated its values
    for offset, (name, column) in itertools.product(
      range(batch.num_rows), zip(batch.schema.names, batch.columns)
    ):
      place = f'{path}: row {number + offset}'
      try:
        column[offset].as_py()
      except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from error
      except OverflowError as error:
        raise InputError(
          f"{place}: the date or duration in field '{name}' is out of range ({error}). Correct it, "
          'or remove the column.'
        ) from error
    raise


def _has_short_floats(kind: pa.DataType) -> bool:
  return re.search(r'\b(half)?float\b', str(kind)) is not None


def _respell(value: Any, kind: pa.DataType) -> Any:
  """Replace each float16 or float32 in a value with the float64 that prints the same."""
  if value is None or not _has_short_floats(kind):
    return value
  if pa.types.is_floating(kind):
    return float(str(kind.to_pandas_dtype()(value)))
  if pa.types.is_struct(kind):
    return {field.name: _respell(value[field.name], field.type) for field in kind}
  if pa.types.is_map(kind):
    return [(key, _respell(inner, kind.item_type)) for key, inner in value]
  if pa.types.is_dictionary(kind):
    return _respell(value, kind.value_type)
  return [_respell(inner, kind.value_type) for inner in value]


# ---- Python tasks ----


def _task(path: str, file: epath.Path, split: str) -> Table:
  rows = []

  def check(splits: Any) -> None:
    if split not in splits:
      raise InputError(f"the task has no split '{split}' (has: {', '.join(splits)})")
    rows.extend(splits[split])

  description = 'a dict that maps split names to rows, each a dict keyed by column'
  config.evaluate_file(str(file), 'task', description, check, is_flag=False)
  return _of_list(path, rows)


# ---- Checks and messages ----


def check_distinct(names: Sequence[str], place: str) -> None:
  """Raise InputError if a name occurs more than once, but allow several unnamed columns."""
  for name, count in collections.Counter(names).items():
    if name and count > 1:
      raise InputError(
        f"{place}: '{name}' occurs {count} times (names: {quote(names)}), but only the last would "
        'be read. Rename or delete the others.'
      )


def quote(names: Sequence[str]) -> str:
  """Quote the names and join them with commas, for a message."""
  return ', '.join(f"'{name}'" for name in names) or 'nothing'


def _not_utf8(place: str, error: UnicodeDecodeError) -> InputError:
  return InputError(f'{place}: the text is not valid UTF-8 ({error}). Save the file as UTF-8.')


def _damaged(path: str, error: Exception) -> InputError:
  return InputError(f'{path}: not a complete parquet file ({error}). Save the file again.')
