"""The rows of a file, whatever its format: jsonl, a JSON array, csv or parquet."""

import csv
import io
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_jax.data import columns, json_lines
from exgrpo_jax.errors import InputError

Row = dict[str, Any]  # by column; a row of jsonl may lack some


class RowFile(NamedTuple):
  """What a file holds."""

  columns: list[str]  # of all rows together, in the order in which they first occur
  rows: Callable[[Collection[str]], Iterator[tuple[str, Row]]]
  """Where each row is and what it holds, without the columns given."""


def opened(path: str, content: bytes) -> RowFile:
  """The file of this content; its ending says how it is read.

  Raises:
    InputError: now or on reading a row: the file is damaged, or not of its format, or a name is
      that of several columns.
  """
  return _READERS[path[path.rindex('.') :]](path, content)


def _jsonl(path: str, content: bytes) -> RowFile:
  def rows(without: Collection[str]) -> Iterator[tuple[str, Row]]:
    for place, row in json_lines.objects(io.BytesIO(content), path):
      yield place, _others(row, without)

  return RowFile(_all_columns(rows(())), rows)


def _json(path: str, content: bytes) -> RowFile:
  found = list(json_lines.array(content, path))

  def rows(without: Collection[str]) -> Iterator[tuple[str, Row]]:
    return ((place, _others(row, without)) for place, row in found)

  return RowFile(_all_columns(found), rows)


def _csv(path: str, content: bytes) -> RowFile:
  def reader() -> csv.DictReader:
    text = io.TextIOWrapper(io.BytesIO(content), encoding='utf-8-sig', newline='')
    return csv.DictReader(text, strict=True)

  def rows(without: Collection[str]) -> Iterator[tuple[str, Row]]:
    found = reader()
    for number in range(sys.maxsize):
      place = f'{path}: row {number}'  # a value may span lines
      try:
        row = next(found, None)
      except csv.Error as error:
        raise InputError(f'{place}: not valid CSV ({error}); write it again.') from error
      except UnicodeDecodeError as error:
        raise _not_utf8(path, content, error) from error
      if row is None:
        return
      if None in row or None in row.values():
        raise InputError(
          f'{place}: it has not the {len(names)} values that the first line names; a value with '
          'a comma or a line break stands in quotes.'
        )
      yield place, _others(row, without)

  csv.field_size_limit(sys.maxsize)  # 131,072 characters, less than some solutions
  try:
    names = [*(reader().fieldnames or ())]
  except csv.Error as error:
    raise InputError(f'{path}:1: not valid CSV ({error}); write it again.') from error
  except UnicodeDecodeError as error:
    raise _not_utf8(path, content, error) from error
  columns.check_distinct(names, f'{path}:1')
  return RowFile(names, rows)


def _not_utf8(path: str, content: bytes, error: UnicodeDecodeError) -> InputError:
  line = 1
  try:
    content.decode()  # for the place in the whole file; `error` has that in a part of it
  except UnicodeDecodeError as exact:
    line, error = 1 + content.count(b'\n', 0, exact.start), exact
  return not_utf8(f'{path}:{line}', error)


def _parquet(path: str, content: bytes) -> RowFile:
  def rows(without: Collection[str]) -> Iterator[tuple[str, Row]]:
    wanted = [column for column in names if column not in without]
    number = 0
    try:
      for batch in pq.ParquetFile(pa.BufferReader(content)).iter_batches(1024, columns=wanted):
        for row in values(batch, path, number):
          yield f'{path}: row {number}', row
          number += 1
    except (pa.ArrowInvalid, OSError) as error:
      raise damaged_parquet(path, error) from error

  try:
    names = pq.read_schema(pa.BufferReader(content)).names
  except (pa.ArrowInvalid, OSError) as error:
    raise damaged_parquet(path, error) from error
  columns.check_distinct(names, path)
  return RowFile(names, rows)


def values(batch: pa.RecordBatch, path: str, number: int) -> list[Row]:
  """The rows of a batch whose first is row `number` of the file."""
  try:
    return batch.to_pylist()
  except UnicodeDecodeError:  # a parquet file is not checked when it is written
    for offset in range(batch.num_rows):
      try:
        batch.slice(offset, 1).to_pylist()
      except UnicodeDecodeError as error:
        raise not_utf8(f'{path}: row {number + offset}', error) from error
    raise


_READERS: dict[str, Callable[[str, bytes], RowFile]] = {
  '.jsonl': _jsonl,
  '.json': _json,
  '.csv': _csv,
  '.parquet': _parquet,
}


def _all_columns(rows: Iterator[tuple[str, Row]] | list[tuple[str, Row]]) -> list[str]:
  return list(dict.fromkeys(name for _, row in rows for name in row))


def _others(row: Row, without: Collection[str]) -> Row:
  return {name: value for name, value in row.items() if name not in without}


def not_utf8(place: str, error: UnicodeDecodeError) -> InputError:
  """What is wrong with text in another encoding."""
  return InputError(f'{place}: a text is not UTF-8 ({error}); write it again in UTF-8.')


def damaged_parquet(path: str, error: Exception) -> InputError:
  """What is wrong with a file that pyarrow cannot read."""
  return InputError(
    f'{path}: not a complete parquet file ({error}); write it again, for example with pyarrow or '
    'pandas.'
  )
