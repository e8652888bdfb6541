r"""From the rows of a file or data set to records: what a question is, whatever its columns.

A record has the fields of store.SCHEMA. Rows whose answer cannot be checked make none.
"""

import decimal
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax.data import columns, row_files
from exgrpo_jax.data.columns import Fields, Layout
from exgrpo_jax.data.row_files import Numeral
from exgrpo_jax.data.store import Record
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.answers import extraction
from exgrpo_jax.grading.verifier import KINDS

_ROLES = ('system', 'user', 'assistant')
# How answers are compared if reward_model.style is verl's 'rule'.
_MATH_SOURCES = (
  'aime aime24 aime25 amc gsm8k openai/gsm8k math lighteval/MATH HuggingFaceH4/MATH-500 '
  'DigitalLearningGmbH/MATH-lighteval math_dapo minerva olympiad_bench'
)
_KIND_OF_SOURCE = {
  **dict.fromkeys(_MATH_SOURCES.split(), 'math'),
  **dict.fromkeys(('arc_c', 'gpqa', 'gpqa_diamond', 'mmlu_pro'), 'choice'),
}
_FINAL_ANSWER = '#### '  # GSM8K: the final answer follows its last occurrence
_CALCULATOR = re.compile(r'<<.*?>>')  # GSM8K's annotations: 48/2 = <<48/2=24>>24


class Uncheckable(NamedTuple):
  """A row without an answer that a response could be compared with."""

  reason: str


Records = Iterator[tuple[str, Record | Uncheckable]]  # with the place of each row


def of_file(fields: Fields, path: str, source: str) -> tuple[Layout | None, Callable[[], Records]]:
  """How a file is read, None where it is empty, and a function that reads its records.

  Args:
    fields: what the user says of its columns.
    path: the file's, as `row_files.opened` takes it.
    source: of its questions where no column says it.

  Raises:
    InputError: now or on reading a row: the file is damaged, its columns are not understood, or one
      of them holds what it cannot.
  """
  file = row_files.opened(path)
  names = file.columns()
  if not names:
    return None, lambda: iter(())
  layout = columns.recognize(names, fields, path)
  read = {name.partition('.')[0] for name in (layout.question, layout.answer, layout.solution)}
  unread = set(layout.bulky) - read

  def rows() -> Records:
    for place, row in file.rows(unread):
      yield place, record(layout, fields, row, place, source)

  return layout, rows


def record(
  layout: Layout, fields: Fields, row: Mapping[str, Any], place: str, source: str
) -> Record | Uncheckable:
  """The record of a row; `place` and `source` as in `of_file`. Raises InputError as it does."""
  messages = _messages(_value(row, layout.question, 'question', place), layout.question, place)
  turn = ''  # that answers, where the data has one
  if messages[-1]['role'] == 'assistant':
    *messages, last = messages
    turn = last['content']
  if not any(message['role'] == 'user' for message in messages):
    raise InputError(
      f"{place}: '{layout.question}' has no message of the role 'user' that asks something. Give "
      'it one.'
    )
  solution = _optional(row.get(layout.solution), layout.solution, place) or turn
  if layout.answer:
    given = _value(row, layout.answer, 'answer', place)
    answer, worked = answer_text(given, layout.answer, place), ''
    if not _is_list(given):
      answer, worked = _split(answer)
    solution = solution or worked
  elif layout.solution or turn:
    answer, solution = _conclusion(solution, layout.worked or bool(turn))
  else:
    raise InputError(columns.no_answer(place, list(row)))
  if layout.source:
    source = _text(row.get(layout.source), layout.source, place)
  kind = _kind(layout, fields, row, source, place)
  reason = _uncheckable(layout, row, answer, kind)
  if reason:
    return Uncheckable(reason)
  return {
    'messages': messages,
    'answer': answer,
    'kind': kind,
    'solution': solution,
    'source': source,
    'columns': json.dumps(_columns(layout, row, place)),
  }


# ---- Answers ----


def answer_text(value: Any, name: str, place: str) -> str:
  """Return an answer as text: '' if there is none, and a list of accepted ones as a JSON array.

  Args:
    value: text, a number, a list of these, or nothing.
    name: the column's, for error messages.
    place: the row's, for error messages.

  Raises:
    InputError: the value, or one in the list, is something else.
  """
  if not _is_list(value):
    return _optional(value, name, place)
  texts = [_text(one, f'{name}[{number}]', place) for number, one in enumerate(value)]
  return json.dumps(texts, ensure_ascii=False) if texts else ''


def _split(text: str) -> tuple[str, str]:
  """The answer of a column of answers, and the worked solution that GSM8K has in the same text."""
  _, mark, final = text.rpartition(_FINAL_ANSWER)
  return (final.strip(), _CALCULATOR.sub('', text)) if mark else (text, '')


def _conclusion(text: str, worked: bool) -> tuple[str, str]:
  """The answer of a column of solutions, '' where it has none, and the solution.

  Unless all of them are `worked`, one without a box or '#### ' is the answer alone, as in TRL.
  """
  if '\\boxed' in text:
    return extraction.extract(text, require_think=False, require_box=True) or '', text
  if _FINAL_ANSWER in text or worked:
    answer, solution = _split(text)
    return (answer, solution) if solution else ('', text)
  return text, ''


def _uncheckable(layout: Layout, row: Mapping[str, Any], answer: str, kind: str) -> str:
  """Why an answer cannot be checked; '' where it can."""
  for name in layout.proofs:
    if str(row.get(name)).strip().lower() == 'proof':
      return f"'{name}' is 'proof'"
  if _is_nan(row.get(layout.answer)):
    return f"'{layout.answer}' is NaN"
  if not answer.strip():
    return f"'{layout.answer or layout.solution or layout.question}' has no answer"
  if kind != 'text' and answer.strip().lower() in columns.NO_ANSWERS:
    return f"the answer is '{answer.strip().lower()}'"
  return ''


def _kind(layout: Layout, fields: Fields, row: Mapping[str, Any], source: str, place: str) -> str:
  """One of KINDS: verl's style if it names one, otherwise by verl's data source."""
  if not layout.style:
    return fields.default_kind or 'math'
  style = _value(row, layout.style, 'answer', place) or 'rule'
  if style in KINDS:
    return style
  # DAPO-Math-17k has 'rule-lighteval/MATH_v2'.
  if not isinstance(style, str) or style.partition('-')[0] != 'rule':
    raise InputError(
      f"{place}: reward_model.style is {reprlib.repr(style)}; it must be 'rule', which decides by "
      f'data_source, or one of {columns.quote(KINDS)}, because it determines how answers are '
      'compared.'
    )
  kind = _KIND_OF_SOURCE.get(source, '') if layout.source else 'math'
  kind = kind or fields.default_kind
  if not kind:
    raise InputError(
      f"{place}: data_source '{source}' is not a known one ({', '.join(_KIND_OF_SOURCE)}), so it "
      'is unclear how its answers should be compared; set config.data.default_kind to one of '
      f'{columns.quote(KINDS)}, or set reward_model.style to one of them.'
    )
  return kind


# ---- Values ----


def _columns(layout: Layout, row: Mapping[str, Any], place: str) -> dict[str, Any]:
  """The row's values by column, for rewards that ask for them."""
  if not layout.row:
    return {name: _plain(value) for name, value in row.items() if name not in layout.bulky}
  text = row.get(layout.row)
  try:
    own = json.loads(text) if isinstance(text, str) else None
  except ValueError:
    own = None
  if not isinstance(own, dict):
    raise InputError(
      f"{place}: field '{layout.row}' is {reprlib.repr(text)}; it must be the columns of the row "
      'that was filtered, an object as JSON.'
    )
  return own | {'pass_rate': _plain(row.get('pass_rate'))}


def _value(row: Mapping[str, Any], name: str, key: str, place: str) -> Any:
  """The value of a column; 'a.b' is a field of a struct unless there is a column of that name.

  InputError where the row lacks the column; `key` is of its setting.
  """
  column, _, field = name.partition('.')
  if name in row:
    return row[name]
  if column not in row:
    raise InputError(columns.no_field(place, name, list(row), key))
  struct = row[column]
  if not isinstance(struct, Mapping):
    raise InputError(
      f'{place}: {column} is {reprlib.repr(struct)}; it must be a struct with {field}.'
    )
  return struct.get(field)


def _messages(value: Any, name: str, place: str) -> list[dict[str, str]]:
  """The chat messages of a question; a text is what the user says."""
  if not _is_list(value):
    return [{'role': 'user', 'content': _text(value, name, place)}]
  turns = list(value)
  if not turns or not all(
    isinstance(turn, Mapping) and turn.get('role') in _ROLES for turn in turns
  ):
    raise InputError(
      f'{place}: {name} is {reprlib.repr(turns)}; it must be text or a list of chat messages, each '
      "with a role ('system', 'user' or 'assistant') and a content."
    )
  return [
    {'role': turn['role'], 'content': _text(turn.get('content'), 'content', place)}
    for turn in turns
  ]


def _optional(value: Any, name: str, place: str) -> str:
  """`_text`, or '' where there is nothing but white space, or NaN."""
  if value is None or _is_nan(value) or (isinstance(value, (str, bytes)) and not value.strip()):
    return ''
  return _text(value, name, place)


def _text(value: Any, name: str, place: str) -> str:
  """Return `value` as text; numbers are written as Python does, decimals with all their digits."""
  if isinstance(value, bytes):
    try:
      value = value.decode()
    except UnicodeDecodeError as error:
      raise InputError(
        f"{place}: field '{name}' is {reprlib.repr(value)}, which is not UTF-8 ({error}); write it "
        'again as text in UTF-8.'
      ) from error
  is_number = isinstance(value, (int, float, np.integer, np.floating))
  if is_number and not isinstance(value, bool) and not _is_nan(value):
    value = str(value)
  if isinstance(value, decimal.Decimal):
    value = f'{value:f}'
  if not isinstance(value, str) or not value.strip():
    shown = 'null' if value is None else reprlib.repr(value)
    raise InputError(f"{place}: field '{name}' is {shown}; it must be non-empty text or a number.")
  try:
    value.encode()
  except UnicodeEncodeError as error:  # JSON allows lone surrogates: "\ud83d"
    raise InputError(
      f"{place}: field '{name}' is not valid Unicode ({error}); it cannot be stored as UTF-8."
    ) from error
  return str(value)


def _is_list(value: Any) -> bool:
  return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_nan(value: Any) -> bool:
  return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


def _plain(value: Any) -> Any:
  """`value` as JSON has it: what JSON does not know becomes text, and so do integers too long."""
  if value is None or type(value) in (str, int, float, bool):
    return value
  if isinstance(value, Numeral):
    try:
      return json.loads(value)
    except ValueError:  # Python makes no integer of more than 4,300 digits
      return str(value)
  if isinstance(value, Mapping):
    return {str(name): _plain(inner) for name, inner in value.items()}
  if _is_list(value):
    return [_plain(inner) for inner in value]
  if isinstance(value, np.floating):
    return float(str(value))  # of float32's own precision
  if isinstance(value, (np.ndarray, np.generic)):
    return _plain(value.tolist())
  if isinstance(value, bytes):
    return value.decode(errors='replace')
  return str(value)
