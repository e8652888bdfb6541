"""From a jsonl or parquet file's content, or a TFDS row, to the fields of a record.

A record is what tasks.record_features describes: messages, answer, kind, solution, source.
"""

import io
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.verifier import KINDS

_VERL = 'data_source, prompt (chat messages) and reward_model.ground_truth'
# How answers compare, where reward_model.style is verl's 'rule'.
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
_FINAL_ANSWER = '#### '  # GSM8K: the answer follows the last one
_CALCULATOR = re.compile(r'<<.*?>>')  # GSM8K's annotations: 48/2 = <<48/2=24>>24


class Fields(NamedTuple):
  """Names of the fields that are read; parquet has verl's columns, and of these `solution`."""

  question: str
  answer: str
  solution: str  # '' for none
  default_kind: str  # of answers, where a row does not say; '' for none


# ---- Files ----


def jsonl_rows(fields: Fields, path, content: bytes) -> Iterator[dict]:
  """The records of a file of one JSON object a line; `path` is for messages and the source."""
  source = epath.Path(path).stem
  for number, line in enumerate(io.BytesIO(content), start=1):
    if line.strip():
      place = f'{path}:{number}'
      question, answer, solution = texts(fields, _parsed(line, place), place)
      yield {
        'messages': [{'role': 'user', 'content': question}],
        'answer': answer,
        'kind': fields.default_kind or 'math',
        'solution': solution,
        'source': source,
      }


def _parsed(line: bytes, place: str) -> dict:
  try:
    # Numbers stay as they are written: an answer of 0.50 does not become 0.5.
    record = json.loads(line.decode('utf-8'), parse_int=str, parse_float=str)
  except ValueError as error:
    raise InputError(
      f'{place}: not valid JSON ({error}); every line must hold one object, in UTF-8.'
    ) from error
  if not isinstance(record, dict):
    raise InputError(
      f'{place}: {reprlib.repr(record)} is not an object; every line must hold '
      'one, for its fields are found by name.'
    )
  return record


def parquet_rows(fields: Fields, path, content: bytes) -> Iterator[dict]:
  """The records of a file with verl's columns; `path` is for messages."""
  table = _parquet_table(fields, path, content)
  rows = (row for batch in table.to_batches(max_chunksize=1024) for row in batch.to_pylist())
  for number, row in enumerate(rows):
    place = f'{path}: row {number}'
    if not isinstance(row['reward_model'], dict):
      raise InputError(
        f'{place}: reward_model is {reprlib.repr(row["reward_model"])}; it must '
        'hold ground_truth, the answer to verify against.'
      )
    solution = row.get(fields.solution)
    source = _text(row['data_source'], 'data_source', place)
    yield {
      'messages': _chat(row['prompt'], place),
      'answer': _text(row['reward_model'].get('ground_truth'), 'reward_model.ground_truth', place),
      'kind': _kind(row['reward_model'].get('style', 'rule'), source, fields, place),
      'solution': '' if solution is None else _text(solution, fields.solution, place),
      'source': source,
    }


def _kind(style, source, fields, place) -> str:
  """One of KINDS: by name, or by what is known of the data's source."""
  if style in KINDS:
    return style
  if style != 'rule':
    raise InputError(
      f"{place}: reward_model.style is {reprlib.repr(style)}; it must be 'rule', "
      f'which goes by data_source, or one of {_quoted(KINDS)}: it says how answers '
      'are compared.'
    )
  kind = _KIND_OF_SOURCE.get(source, fields.default_kind)
  if not kind:
    raise InputError(
      f"{place}: data_source '{source}' is not one of those whose answers we know how to compare "
      f'({", ".join(_KIND_OF_SOURCE)}); set config.data.default_kind to one of {_quoted(KINDS)}, '
      'or write that as reward_model.style.'
    )
  return kind


def _parquet_table(fields, path, content) -> pa.Table:
  try:
    columns = pq.read_schema(pa.BufferReader(content)).names
    needed = ['data_source', 'prompt', 'reward_model']
    for column in needed:
      if column not in columns:
        raise InputError(
          f"{path}: no column '{column}' (has: {_quoted(columns)}); a parquet "
          f"file must have verl's columns {_VERL}."
        )
    optional = [column for column in columns if column == fields.solution]
    return pq.read_table(pa.BufferReader(content), columns=needed + optional)
  except (pa.ArrowInvalid, OSError) as error:
    raise InputError(
      f'{path}: not a whole parquet file ({error}); write it again, for example '
      'with pyarrow or pandas.'
    ) from error


def _chat(prompt, place) -> list[dict]:
  turns = prompt if isinstance(prompt, list) else []
  if not turns or not all(
    isinstance(turn, dict) and turn.get('role') in ('system', 'user', 'assistant') for turn in turns
  ):
    raise InputError(
      f'{place}: prompt is {reprlib.repr(prompt)}; it must be a list of chat '
      "messages, each with a role ('system', 'user' or 'assistant') and a content."
    )
  return [
    {'role': turn['role'], 'content': _text(turn.get('content'), 'content', place)}
    for turn in turns
  ]


def non_empty(rows: Iterable[dict], path) -> Iterator[dict]:
  """`rows`, of which there must be one: TFDS asserts it without naming the file."""
  empty = True
  for row in rows:
    empty = False
    yield row
  if empty:
    raise InputError(f'{path}: the file holds no question; at least one is needed.')


# ---- One row's fields ----


def texts(fields: Fields, record: Mapping[str, Any], place: str) -> tuple[str, str, str]:
  """Question, ground truth and written solution ('' for none) of a row with named fields."""
  question = _field(record, fields.question, 'question', place)
  whole = _field(record, fields.answer, 'answer', place)
  _, mark, final = whole.rpartition(_FINAL_ANSWER)
  if mark and not final.strip():
    raise InputError(
      f"{place}: nothing follows the last '{_FINAL_ANSWER}' of field "
      f"'{fields.answer}'; it must be the final answer."
    )
  solution = _CALCULATOR.sub('', whole) if mark else ''
  if record.get(fields.solution) is not None:
    solution = _field(record, fields.solution, 'solution', place)
  return question, final.strip() if mark else whole, solution


def _field(record, field, key, place) -> str:
  if field not in record:
    raise InputError(no_field(place, field, record, key))
  return _text(record[field], field, place)


def no_field(place: str, field: str, present: Iterable[str], key: str) -> str:
  """The message that `field`, which config.data.<key>_field names, is not among `present`."""
  return f"{place}: no field '{field}' (has: {_quoted(present)}); set config.data.{key}_field."


def _quoted(names):
  return ', '.join(f"'{name}'" for name in names) or 'nothing'


def _text(value, name, place) -> str:
  """`value` as text: a number is one too, for it has one way to be written."""
  if isinstance(value, bytes):
    value = value.decode(errors='replace')
  if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
    value = str(value)
  if not isinstance(value, str) or not value.strip():
    shown = 'null' if value is None else reprlib.repr(value)
    raise InputError(
      f"{place}: field '{name}' is {shown}; it must be a text that is not empty, or a number."
    )
  try:
    value.encode()
  except UnicodeEncodeError as error:  # JSON can spell half of a character: "\ud83d"
    raise InputError(
      f"{place}: field '{name}' is not valid Unicode ({error}); it must be, to be written as UTF-8."
    ) from error
  return value
