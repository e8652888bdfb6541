"""Reads records from the content of a jsonl or parquet file, and the fields of a TFDS row.

A record is what embedded.record_features describes: messages, answer, kind, solution, source.
"""

import io
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from exgrpo_jax.data import json_lines
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.verifier import KINDS

_VERL = 'data_source, prompt (chat messages) and reward_model.ground_truth'
# How answers are compared if reward_model.style is verl's 'rule'.
_KIND_OF_SOURCE = {
  **dict.fromkeys(
    (
      'aime',
      'aime24',
      'aime25',
      'amc',
      'gsm8k',
      'openai/gsm8k',
      'math',
      'lighteval/MATH',
      'DigitalLearningGmbH/MATH-lighteval',
      'HuggingFaceH4/MATH-500',
      'math_dapo',
      'minerva',
      'olympiad_bench',
    ),
    'math',
  ),
  **dict.fromkeys(('arc_c', 'gpqa', 'gpqa_diamond', 'mmlu_pro'), 'choice'),
}
_FINAL_ANSWER = '#### '  # GSM8K: the final answer follows its last occurrence
_CALCULATOR = re.compile(r'<<.*?>>')  # GSM8K's annotations: 48/2 = <<48/2=24>>24


class Fields(NamedTuple):
  """Names of the fields to read. Parquet has verl's columns, and only `solution` is used."""

  question: str
  answer: str
  solution: str  # '' if there is none
  default_kind: str  # kind of the answers if a row does not specify it; '' if there is none


# ---- Files ----


def jsonl_rows(fields: Fields, path: str, content: bytes) -> Iterator[dict[str, Any]]:
  """The records of a file with one JSON object per line.

  Args:
    fields: names of the fields to read.
    path: the file's path, for error messages; its stem becomes the records' source.
    content: what the file holds.

  Raises:
    InputError: a line is not a JSON object, or one of its fields cannot be used.
  """
  source = epath.Path(path).stem
  for location, record in json_lines.objects(io.BytesIO(content), path):
    question, answer, solution = texts(fields, record, location)
    yield {
      'messages': [{'role': 'user', 'content': question}],
      'answer': answer,
      'kind': fields.default_kind or 'math',
      'solution': solution,
      'source': source,
    }


def parquet_rows(fields: Fields, path: str, content: bytes) -> Iterator[dict[str, Any]]:
  """The records of a file with verl's columns.

  Args:
    fields: of which `solution` names an optional column, and `default_kind` applies to
      rows of an unknown data_source.
    path: the file's path, for error messages.
    content: what the file holds.

  Raises:
    InputError: the file is damaged, or a column is missing or holds an unusable value.
  """
  table = _parquet_table(fields, path, content)
  rows = (row for batch in table.to_batches(max_chunksize=1024) for row in batch.to_pylist())
  for number, row in enumerate(rows):
    location = f'{path}: row {number}'
    if not isinstance(row['reward_model'], dict):
      raise InputError(
        f'{location}: reward_model is {reprlib.repr(row["reward_model"])}; it must be a '
        'struct with ground_truth, the answer to verify against.'
      )
    solution = row.get(fields.solution)
    source = _text(row['data_source'], 'data_source', location)
    truth = row['reward_model'].get('ground_truth')
    yield {
      'messages': _messages(row['prompt'], location),
      'answer': _text(truth, 'reward_model.ground_truth', location),
      'kind': _kind(row['reward_model'].get('style', 'rule'), source, fields, location),
      'solution': '' if solution is None else _text(solution, fields.solution, location),
      'source': source,
    }


def _kind(style: Any, source: str, fields: Fields, location: str) -> str:
  """One of KINDS: `style` if it names one, otherwise by the data source."""
  if style in KINDS:
    return style
  if style != 'rule':
    raise InputError(
      f"{location}: reward_model.style is {reprlib.repr(style)}; it must be 'rule', "
      f'which decides by data_source, or one of {_quote(KINDS)}, because it determines how '
      'answers are compared.'
    )
  kind = _KIND_OF_SOURCE.get(source, fields.default_kind)
  if not kind:
    raise InputError(
      f"{location}: data_source '{source}' is not a known one ({', '.join(_KIND_OF_SOURCE)}), so "
      'it is unclear how its answers should be compared; set config.data.default_kind to one of '
      f'{_quote(KINDS)}, or set reward_model.style to one of them.'
    )
  return kind


def _parquet_table(fields: Fields, path: str, content: bytes) -> pa.Table:
  try:
    columns = pq.read_schema(pa.BufferReader(content)).names
    needed = ['data_source', 'prompt', 'reward_model']
    for column in needed:
      if column not in columns:
        raise InputError(
          f"{path}: no column '{column}' (has: {_quote(columns)}); a parquet "
          f"file must have verl's columns {_VERL}."
        )
    optional = [column for column in columns if column == fields.solution]
    return pq.read_table(pa.BufferReader(content), columns=needed + optional)
  except (pa.ArrowInvalid, OSError) as error:
    raise InputError(
      f'{path}: not a complete parquet file ({error}); write it again, for example '
      'with pyarrow or pandas.'
    ) from error


def _messages(prompt: Any, location: str) -> list[dict[str, str]]:
  turns = prompt if isinstance(prompt, list) else []
  if not turns or not all(
    isinstance(turn, dict) and turn.get('role') in ('system', 'user', 'assistant') for turn in turns
  ):
    raise InputError(
      f'{location}: prompt is {reprlib.repr(prompt)}; it must be a list of chat '
      "messages, each with a role ('system', 'user' or 'assistant') and a content."
    )
  return [
    {'role': turn['role'], 'content': _text(turn.get('content'), 'content', location)}
    for turn in turns
  ]


def non_empty(rows: Iterable[dict[str, Any]], path: str) -> Iterator[dict[str, Any]]:
  """Yields `rows`, of which there must be at least one.

  TFDS only asserts this, without naming the file.

  Raises:
    InputError: there are none.
  """
  empty = True
  for row in rows:
    empty = False
    yield row
  if empty:
    raise InputError(f'{path}: the file holds no question; at least one is needed.')


# ---- One row's fields ----


def texts(fields: Fields, record: Mapping[str, Any], location: str) -> tuple[str, str, str]:
  """The question, ground truth and worked solution ('' if none) of a row with named fields.

  A field in GSM8K's format, which ends in '#### ' and the final answer, is both the worked
  solution and the ground truth. `location` says where the row is, for error messages.

  Raises:
    InputError: a field is missing, empty or not text, or no answer follows '#### '.
  """
  question = _field(record, fields.question, 'question', location)
  full_answer = _field(record, fields.answer, 'answer', location)
  _, mark, final = full_answer.rpartition(_FINAL_ANSWER)
  if mark and not final.strip():
    raise InputError(
      f"{location}: nothing follows the last '{_FINAL_ANSWER}' of field "
      f"'{fields.answer}'; the final answer belongs there."
    )
  solution = _CALCULATOR.sub('', full_answer) if mark else ''
  if record.get(fields.solution) is not None:
    solution = _field(record, fields.solution, 'solution', location)
  return question, final.strip() if mark else full_answer, solution


def _field(record: Mapping[str, Any], field: str, key: str, location: str) -> str:
  if field not in record:
    raise InputError(no_field(location, field, record, key))
  return _text(record[field], field, location)


def no_field(location: str, field: str, present: Iterable[str], key: str) -> str:
  """The error message if `field`, set by config.data.<key>_field, is not among `present`."""
  return f"{location}: no field '{field}' (has: {_quote(present)}); set config.data.{key}_field."


def _quote(names: Iterable[str]) -> str:
  return ', '.join(f"'{name}'" for name in names) or 'nothing'


def _text(value: Any, name: str, location: str) -> str:
  """`value` as text; numbers are accepted and written as Python does."""
  if isinstance(value, bytes):
    value = value.decode(errors='replace')
  if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
    value = str(value)
  if not isinstance(value, str) or not value.strip():
    shown = 'null' if value is None else reprlib.repr(value)
    raise InputError(
      f"{location}: field '{name}' is {shown}; it must be non-empty text or a number."
    )
  try:
    value.encode()
  except UnicodeEncodeError as error:  # JSON allows lone surrogates: "\ud83d"
    raise InputError(
      f"{location}: field '{name}' is not valid Unicode ({error}); it cannot be stored as UTF-8."
    ) from error
  return value
