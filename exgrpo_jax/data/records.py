"""Convert the rows of a file or dataset to records.

`recognize` finds the question, answer and other columns: the user may name them, KNOWN_SETS lists
them for public datasets, and other data may use common names. `of_file` then converts each row.
"""

import dataclasses
import decimal
import json
import re
import reprlib
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax.data.row_files import Numeral, RowFile, quote
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import reasoning_gym
from exgrpo_jax.grading.answers import extraction
from exgrpo_jax.grading.verifier import KINDS

Record = dict[str, Any]  # the fields of datatypes.Question except `row`; `columns` is JSON


def task_record(question: str, answer: int, solution: str, source: str) -> Record:
  """Return the record of a built-in task's question."""
  messages = [{'role': 'user', 'content': question}]
  fields = {'answer': str(answer), 'solution': solution, 'kind': 'math', 'source': source}
  return {'messages': messages} | fields


# Texts that mean "no answer": markers in NuminaMath-like data, or missing values as text.
NO_ANSWERS = ('proof', 'notfound', 'nan', 'null', '<na>')
# Common column names. A dataset may have at most one name from each line.
_QUESTIONS = ('question', 'problem', 'prompt', 'messages')
_ANSWERS = ('answer', 'final_answer')
_SOLUTION = 'solution'
ROLES = ('system', 'user', 'assistant')
# How answers are compared if reward_model.style is verl's 'rule'.
_MATH_SOURCES = (
  'aime aime24 aime25 amc gsm8k openai/gsm8k math lighteval/MATH HuggingFaceH4/MATH-500 '
  'DigitalLearningGmbH/MATH-lighteval math_dapo minerva olympiad_bench'
)
_KIND_OF_SOURCE = {
  **dict.fromkeys(_MATH_SOURCES.split(), 'math'),
  **dict.fromkeys(('arc_c', 'gpqa', 'gpqa_diamond', 'mmlu_pro'), 'choice'),
}
_LONG_INTEGER = 14_000  # bits; JSON with an integer of more than 4,300 digits cannot be parsed
_FINAL_ANSWER = '#### '  # GSM8K: the final answer follows its last occurrence
_LETTER = r'^[\s(*]*{}(?:[.:*]+\s|[.:*]*\))[\s*]*'  # before an option: 'A. ', '(A) ', '**A:** '
_CALCULATOR = re.compile(r'<<.*?>>')  # GSM8K's annotations: 48/2 = <<48/2=24>>24


class Fields(NamedTuple):
  """The columns chosen by the user; '' lets `recognize` choose."""

  question: str
  answer: str
  solution: str
  default_kind: str  # how answers are compared if the row does not specify it
  of_spec: bool = False  # the data spec names the columns, so they apply only to this data


@dataclasses.dataclass(frozen=True)
class Layout:
  """A dataset's columns by role; 'a.b' is field b of the structs in column a."""

  name: str  # the dataset's name in messages
  question: str  # text, or chat messages
  known_by: tuple[str, ...] = ()  # columns that identify a known set; it may have more
  answer: str = ''  # if '', extracted from the solution or the last assistant turn
  options: str = ''  # the choices to add to the question; '' if it needs none
  solution: str = ''  # a worked solution; '' if none
  worked: bool = False  # True if all solutions are worked, with the answer boxed or after ####
  source: str = ''  # if '', the file's name is used
  style: str = ''  # verl's reward_model.style
  proofs: tuple[str, ...] = ()  # columns set to 'proof' if there is no answer to check
  bulky: tuple[str, ...] = ()  # columns to drop because they are large and no reward reads them
  row: str = ''  # column with the row's other columns as JSON; '' if they are regular columns

  def describe(self) -> str:
    """Summarize in one line how rows are read."""
    solution = f"'{self.solution}'" if self.solution else "the assistant's last turn"
    box = f'the last box of {solution}' if self.worked else f'{solution}, or its last box'
    answer = f"'{self.answer}'" if self.answer else box
    columns = {'options': self.options, 'solution': self.solution, 'source': self.source}
    others = ''.join(f", {key} '{name}'" for key, name in columns.items() if name)
    return f"{self.name}: question '{self.question}', answer {answer}{others}"


_VERL: Any = dict(
  question='prompt', answer='reward_model.ground_truth',
  source='data_source', style='reward_model.style',
)  # fmt: skip
_NUMINA: Any = dict(
  question='problem', answer='answer', solution='solution', source='source',
  proofs=('problem_type', 'question_type'),
)  # fmt: skip
# The first set whose `known_by` columns are all present wins, so more specific sets come first.
KNOWN_SETS = (
  PREFILTERED := Layout(
    'prefiltered',  # written by `data prefilter`
    known_by=('prompt', 'reward_model', 'solution', 'columns', 'pass_rate'),
    **_VERL, solution='solution', row='columns',
  ),
  Layout(
    'DAPO-Math-17k, processed',
    known_by=('prompt', 'solution', 'source_prompt'),
    question='prompt', answer='solution', source='data_source', bulky=('source_prompt',),
  ),
  Layout(
    "verl's columns",
    known_by=('prompt', 'reward_model'),
    **_VERL, bulky=('target',),  # OpenR1-Math-46k's solutions by R1
  ),
  Layout(
    'OpenR1-Math-220k',
    known_by=('problem', 'solution', 'answer', 'generations'),
    **_NUMINA, bulky=('generations', 'messages'),
  ),
  Layout('NuminaMath-1.5', known_by=('problem', 'solution', 'answer', 'problem_type'), **_NUMINA),
  Layout(
    'MATH-500',
    known_by=('problem', 'solution', 'answer', 'unique_id'),
    question='problem', answer='answer', solution='solution',
  ),
  Layout(
    'DeepMath-103K',
    known_by=('question', 'final_answer', 'r1_solution_1'),
    question='question', answer='final_answer', solution='r1_solution_1',
    bulky=('r1_solution_1', 'r1_solution_2', 'r1_solution_3'),
  ),
  Layout(
    'MMLU-Pro',
    known_by=('question', 'options', 'answer', 'answer_index'),
    question='question', answer='answer', options='options',
  ),
  Layout(
    'MMLU',
    known_by=('question', 'subject', 'choices', 'answer'),
    question='question', answer='answer', options='choices',
  ),
  Layout(
    'MATH',
    known_by=('problem', 'solution', 'level', 'type'),
    question='problem', solution='solution', worked=True,
  ),
  Layout(
    'NuminaMath-CoT',
    known_by=('source', 'problem', 'solution', 'messages'),
    question='problem', solution='solution', worked=True, source='source', bulky=('messages',),
  ),
  Layout(
    'NuminaMath-TIR',
    known_by=('problem', 'solution', 'messages'),
    question='problem', solution='solution', worked=True,
  ),
)  # fmt: skip


def recognize(columns: Sequence[str], fields: Fields, place: str) -> Layout:
  """Return the layout of data with these columns. Columns named in `fields` take precedence.

  Raises InputError if a column named by the user is missing, or if no column is recognized as the
  question or the answer. The message starts with `place`, the file or data spec.
  """
  known_set = next((each for each in KNOWN_SETS if set(each.known_by) <= set(columns)), None)
  if known_set is PREFILTERED and not fields.of_spec:
    return PREFILTERED  # `fields` describe the original file, before filtering
  # Settings apply to all data, so some data may lack the configured solution column.
  for key in ('question', 'answer', 'solution') if fields.of_spec else ('question', 'answer'):
    column = getattr(fields, key)
    if column and not {column, column.partition('.')[0]} & set(columns):
      if fields.of_spec:
        raise InputError(
          f"{place}: the data spec names the field '{column}', but the data has only "
          f'{quote(columns)}. Name one of these fields.'
        )
      # The same settings apply to benchmarks in verl's format and training data in other formats.
      if not (known_set and known_set.style):
        raise InputError(no_field(place, column, columns, key))
      fields = fields._replace(**{key: ''})
  layout = known_set or _by_common_names(columns, fields, place)
  answer = fields.answer or layout.answer or ('answer' if 'answer' in columns else '')
  # A data spec that names the question column adds no options.
  is_same = fields.question == layout.question and not fields.of_spec
  return dataclasses.replace(
    layout,
    question=fields.question or layout.question,
    answer=answer,
    options=layout.options if not fields.question or is_same else '',
    solution=fields.solution or (layout.solution if layout.solution != answer else ''),
    worked=layout.worked and not answer,
    source=layout.source if layout.source in columns else '',
  )


def _by_common_names(columns: Sequence[str], fields: Fields, place: str) -> Layout:
  question = fields.question or _only_match(_QUESTIONS, columns, 'question', place)
  answer = fields.answer or _only_match(_ANSWERS, columns, 'answer', place)
  solution = _SOLUTION if _SOLUTION in columns else ''
  if not question:
    raise InputError(_no_column(place, columns, 'question', _QUESTIONS))
  if not (answer or solution or fields.solution or fields.question or question == 'messages'):
    raise InputError(no_answer(place, columns))
  names = [name for name in (question, answer, fields.solution or solution) if name]
  return Layout(
    f'columns {" and ".join(dict.fromkeys(names))}',
    question=question,
    answer=answer,
    solution=solution,
    # TRL's `solution` to a prompt may be just the answer; a problem's solution is worked out.
    worked=not answer and question in ('problem', 'messages'),
  )


def _only_match(names: Sequence[str], columns: Sequence[str], key: str, place: str) -> str:
  """Return the name that is also a column, or '' if none is. Raise InputError if several are."""
  matches = [name for name in names if name in columns]
  if len(matches) > 1:
    raise InputError(
      f'{place}: any of {quote(matches)} could be the {key} (columns: {quote(columns)}). Set '
      f'config.data.{key}_field to one of them, or end the data spec with {{{key}=COLUMN}}.'
    )
  return matches[0] if matches else ''


def _no_column(place: str, columns: Sequence[str], key: str, names: Sequence[str]) -> str:
  return (
    f'{place}: no column is recognized as the {key} (has: {quote(columns)}). Set '
    f'config.data.{key}_field, or end the data spec with {{{key}=COLUMN}}. Recognized names are '
    f'{quote(names)} and the columns of these sets: '
    f'{", ".join(layout.name for layout in KNOWN_SETS)}.'
  )


def no_field(place: str, field: str, columns: Sequence[str], key: str) -> str:
  """Build the error message for a missing `field`, with advice to set config.data.<key>_field."""
  return (
    f"{place}: no field '{field}' (has: {quote(columns)}). Set config.data.{key}_field, or end the "
    f'data spec with {{{key}=COLUMN}}.'
  )


def no_answer(place: str, columns: Sequence[str]) -> str:
  """Build the error message for data without an answer column."""
  return _no_column(place, columns, 'answer', (*_ANSWERS, _SOLUTION))


# ---- Records ----


# Each row's place, and its record or the reason why its answer cannot be checked.
Records = Iterator[tuple[str, Record | str]]


def of_file(
  fields: Fields, file: RowFile, source: str
) -> tuple[Layout | None, Callable[[], Records]]:
  """Return a file's layout (None if the file is empty) and a function that reads its records.

  `source` is the source of the questions if no column contains it. Both this function and the
  returned function raise InputError if the file is damaged, its columns are not recognized, or a
  column contains an invalid value.
  """
  table = file.opened()
  names = table.columns()
  if not names:
    return None, lambda: iter(())
  layout = recognize(names, fields, file.path)
  columns = {name.partition('.')[0] for name in (layout.question, layout.answer, layout.solution)}
  unread_columns = set(layout.bulky) - columns

  def rows() -> Records:
    for place, row in table.rows(unread_columns):
      yield place, record(layout, fields, row, place, source)

  return layout, rows


def record(
  layout: Layout, fields: Fields, row: Mapping[str, Any], place: str, source: str
) -> Record | str:
  """Convert a row to a record, or return the reason why its answer cannot be checked.

  See `of_file` for `source` and errors. Error messages start with `place`.
  """
  original, row = row, _with_options(layout, row, place)
  messages = _messages(_value(row, layout.question, 'question', place), layout.question, place)
  turn = ''  # the last assistant turn, if any
  if messages[-1]['role'] == 'assistant':
    *messages, last = messages
    turn = last['content']
  if not any(message['role'] == 'user' for message in messages):
    raise InputError(
      f"{place}: '{layout.question}' has no message with the 'user' role, so there is no question. "
      'Add a user message.'
    )
  raw_solution = _value_if_present(row, layout.solution, place)
  if layout.answer and _is_list(raw_solution):  # several texts, or OpenR1-Math-46k's chat messages
    texts = [part.get('content') if isinstance(part, Mapping) else part for part in raw_solution]
    raw_solution = '\n\n'.join(_text_or_empty(text, layout.solution, place) for text in texts)
  solution = _text_or_empty(raw_solution, layout.solution, place) or turn
  if layout.answer:
    value = _value(row, layout.answer, 'answer', place)
    answer, worked_solution = answer_text(value, layout.answer, place), ''
    if not _is_list(value):
      answer, worked_solution = _split(answer)
    solution = solution or worked_solution
  elif layout.solution or turn:
    answer, solution = _conclusion(solution, layout.worked or bool(turn))
  else:
    raise InputError(no_answer(place, list(row)))
  if layout.source:
    source = _text(row.get(layout.source), layout.source, place)
  kind = _kind(layout, fields, row, source, place)
  if reason := _uncheckable(layout, row, answer, kind, place):
    return reason
  return {
    'messages': messages,
    'answer': answer,
    'kind': kind,
    'solution': solution,
    'source': source,
    'columns': json.dumps(_columns(layout, original, place)),
  }


def _options(layout: Layout, row: Mapping[str, Any], place: str) -> list[str]:
  """Return the options to add to a row's question; [] for a chat or a row without options."""
  value: Any = row.get(layout.options) if layout.options else None
  if value is None or (_is_list(value) and not len(value)) or _is_list(row.get(layout.question)):
    return []
  try:
    options = (
      [_text(option, layout.options, place).strip() for option in value] if _is_list(value) else []
    )
  except InputError:
    options = []
  if not 1 < len(options) <= len(string.ascii_uppercase):
    raise InputError(
      f"{place}: field '{layout.options}' is {reprlib.repr(value)}. It must be a list of 2 to 26 "
      'options to choose from, each text or a number. Correct it, or end the data spec with '
      f'{{question={layout.question}}} to leave the options out.'
    )
  return options


def _with_options(layout: Layout, row: Mapping[str, Any], place: str) -> Mapping[str, Any]:
  """Return the row with lettered options added to its question, and a letter as its answer.

  Options that the question already shows are not repeated.
  """
  if not (options := _options(layout, row, place)):
    return row
  letters = [*string.ascii_uppercase[: len(options)]]
  marks = [_LETTER.format(letter) for letter in letters]
  are_lettered = all(re.match(rf'{mark}\S', text) for mark, text in zip(marks, options))
  texts = (
    [re.sub(mark, '', text) for mark, text in zip(marks, options)] if are_lettered else options
  )
  lines = [f'{letter}. {text}' for letter, text in zip(letters, texts)]
  question = _text(row.get(layout.question), layout.question, place)
  are_shown = (
    text in question and re.search(rf'(?m){mark}{re.escape(text)}[\s*.,;]*$', question)
    for mark, text in zip(marks, texts)
  )
  changes = {} if all(are_shown) else {layout.question: '\n'.join([question, '', *lines])}
  answer = answer_text(row.get(layout.answer), layout.answer, place).strip()
  for names in ([*map(str, range(len(options)))], letters, texts, options, lines):  # 0 is the first
    if names.count(answer) == 1:
      return {**row, **changes, layout.answer: letters[names.index(answer)]}
  return {**row, **changes}


# ---- Answers ----


def answer_text(value: Any, name: str, place: str) -> str:
  """Convert an answer to text: '' if missing, a JSON array for a list of accepted answers.

  Raises InputError if the value or a list element is neither text nor a number. The message
  contains `place` (the row) and `name` (the column).
  """
  if not _is_list(value):
    return _text_or_empty(value, name, place)
  texts = [_text(element, f'{name}[{number}]', place) for number, element in enumerate(value)]
  return json.dumps(texts, ensure_ascii=False) if texts else ''


def _split(text: str) -> tuple[str, str]:
  """Split an answer column's text into the answer and, for GSM8K, the solution that ends in it."""
  _, mark, final = text.rpartition(_FINAL_ANSWER)
  return (final.strip(), _CALCULATOR.sub('', text)) if mark else (text, '')


def _conclusion(text: str, worked: bool) -> tuple[str, str]:
  """Split a solution column's text into the answer ('' if missing) and the solution.

  Text without a box or '#### ' is treated as the answer, as in TRL, unless `worked` is True.
  """
  if '\\boxed' in text:
    return extraction.extract(text, ('box',)) or '', text
  if _FINAL_ANSWER in text or worked:
    answer, solution = _split(text)
    return (answer, solution) if solution else ('', text)
  return text, ''


def _uncheckable(layout: Layout, row: Mapping[str, Any], answer: str, kind: str, place: str) -> str:
  """Return the reason why an answer cannot be checked, or ''."""
  if kind == reasoning_gym.KIND:
    return ''  # the task's score_answer checks responses, with or without an answer
  for name in layout.proofs:
    if str(row.get(name)).strip().lower() == 'proof':
      return f"'{name}' is 'proof'"
  if _is_nan(_value_if_present(row, layout.answer, place)):
    return f"'{layout.answer}' is NaN"
  if not answer.strip():
    return f"'{layout.answer or layout.solution or layout.question}' has no answer"
  if kind != 'text' and answer.strip().lower() in NO_ANSWERS:
    return f"the answer is '{answer.strip().lower()}'"
  return ''


def _kind(layout: Layout, fields: Fields, row: Mapping[str, Any], source: str, place: str) -> str:
  """Return one of KINDS: the row's verl style, the kind for its data source, or the default."""
  if not layout.style:
    return fields.default_kind or 'math'
  style = _value(row, layout.style, 'answer', place) or 'rule'
  if style in KINDS:
    return style
  # DAPO-Math-17k uses 'rule-lighteval/MATH_v2'.
  if not isinstance(style, str) or style.partition('-')[0] != 'rule':
    raise InputError(
      f'{place}: reward_model.style={reprlib.repr(style)} is not a known way to compare answers. '
      f"Set it to 'rule' to let data_source decide, or to one of {quote(KINDS)}."
    )
  kind = _KIND_OF_SOURCE.get(source) if layout.source else 'math'
  if not (kind := kind or fields.default_kind):
    raise InputError(
      f"{place}: data_source='{source}' does not determine how to compare answers because it isn't "
      f'a known source ({", ".join(_KIND_OF_SOURCE)}). Set config.data.default_kind or '
      f'reward_model.style to one of {quote(KINDS)}.'
    )
  return kind


# ---- Values ----


def _columns(layout: Layout, row: Mapping[str, Any], place: str) -> dict[str, Any]:
  """Return the row's values by column, for reward functions that use them."""
  if not layout.row:
    return {name: _json_value(value) for name, value in row.items() if name not in layout.bulky}
  text = row.get(layout.row)
  try:
    columns = json.loads(text) if isinstance(text, str) else None
  except ValueError:
    columns = None
  if not isinstance(columns, dict):
    raise InputError(
      f"{place}: field '{layout.row}' is {reprlib.repr(text)}. It must be a JSON object with the "
      "original row's columns."
    )
  return columns | {'pass_rate': _json_value(row.get('pass_rate'))}


def _value(row: Mapping[str, Any], name: str, key: str, place: str) -> Any:
  """Return a column's value; 'a.b' is a struct field unless a column has exactly that name."""
  column, _, field = name.partition('.')
  if name in row:
    return row[name]
  if column not in row:
    raise InputError(no_field(place, name, list(row), key))
  struct = row[column]
  if not isinstance(struct, Mapping):
    raise InputError(
      f'{place}: {column} is {reprlib.repr(struct)}. It must be a struct with the field {field}.'
    )
  return struct.get(field)


def _value_if_present(row: Mapping[str, Any], name: str, place: str) -> Any:
  """Return the same value as `_value`, or None if `name` is '' or the row lacks the column."""
  column = name if name in row else name.partition('.')[0]
  return _value(row, name, 'solution', place) if name and row.get(column) is not None else None


def _messages(value: Any, name: str, place: str) -> list[dict[str, str]]:
  """Return a question's chat messages; plain text becomes one user message."""
  if not _is_list(value):
    return [{'role': 'user', 'content': _text(value, name, place)}]
  turns = list(value)
  are_messages = (isinstance(turn, Mapping) and turn.get('role') in ROLES for turn in turns)
  if not turns or not all(are_messages):
    raise InputError(
      f'{place}: {name} is {reprlib.repr(turns)}. It must be text or a list of chat messages, each '
      "with a role ('system', 'user' or 'assistant') and content."
    )
  return [
    {'role': turn['role'], 'content': content_text(turn.get('content'), place)} for turn in turns
  ]


def content_text(content: Any, place: str) -> str:
  """Return a message's content as text. If it is a list of parts, their texts are joined.

  Parts look like {'type': 'text', 'text': '...'}. Raises InputError if a part is not text, for
  example an image. The message contains `place` (the row) and the part's type.
  """
  if not _is_list(content):
    return _text(content, 'content', place)
  for part in content:
    kind = part.get('type') if isinstance(part, Mapping) else type(part).__name__
    if kind != 'text' or not isinstance(part.get('text'), str):
      raise InputError(
        f'{place}: a content part has type {kind!r}: {reprlib.repr(part)}. Only text '
        "is supported. Remove the part, or use {'type': 'text', 'text': …}."
      )
  return _text(''.join(part['text'] for part in content), 'content', place)


def _text_or_empty(value: Any, name: str, place: str) -> str:
  """Convert `value` with `_text`, but return '' for None, NaN and whitespace."""
  if value is None or _is_nan(value) or (isinstance(value, (str, bytes)) and not value.strip()):
    return ''
  return _text(value, name, place)


def _text(value: Any, name: str, place: str) -> str:
  """Convert `value` to text. Numbers are formatted as in Python; decimals keep all digits."""
  if isinstance(value, bytes):
    try:
      value = value.decode()
    except UnicodeDecodeError as error:
      raise InputError(
        f"{place}: field '{name}' is {reprlib.repr(value)}, which is not UTF-8 ({error}). Save the "
        'file as UTF-8.'
      ) from error
  if isinstance(value, int) and not isinstance(value, bool):
    value = decimal.Decimal(value)  # str() refuses integers of more than 4,300 digits
  if isinstance(value, (float, np.integer, np.floating)) and not _is_nan(value):
    value = str(value)
  if isinstance(value, decimal.Decimal):
    value = f'{value:f}'
  if not isinstance(value, str) or not value.strip():
    text = 'null' if value is None else reprlib.repr(value)
    raise InputError(f"{place}: field '{name}' is {text}. It must be non-empty text or a number.")
  return storable(value, name, place)


def storable(text: str, name: str, place: str) -> str:
  """Return `text`; raise an InputError that names `place` and `name` if it is not valid Unicode."""
  try:
    text.encode()
  except UnicodeEncodeError as error:  # JSON allows lone surrogates: "\ud83d"
    raise InputError(
      f"{place}: field '{name}' is not valid Unicode ({error}), so it cannot be stored as UTF-8. "
      'Correct the text.'
    ) from error
  return str(text)


def _is_list(value: Any) -> bool:
  return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_nan(value: Any) -> bool:
  return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


def _json_value(value: Any) -> Any:
  """Convert `value` to JSON types. Very long integers and values of other types become text."""
  if value is None or type(value) in (str, int, float, bool):
    if isinstance(value, int) and value.bit_length() > _LONG_INTEGER:
      return f'{decimal.Decimal(value):f}'
    return value
  if isinstance(value, Numeral):
    try:
      return json.loads(value)
    except ValueError:  # Python does not parse integers of more than 4,300 digits
      return str(value)
  if isinstance(value, Mapping):
    return {str(name): _json_value(inner) for name, inner in value.items()}
  if _is_list(value):
    return [_json_value(inner) for inner in value]
  if isinstance(value, np.floating):
    return float(str(value))  # the shortest decimal at the value's precision
  if isinstance(value, (np.ndarray, np.generic)):
    return _json_value(value.tolist())
  if isinstance(value, bytes):
    return value.decode(errors='replace')
  return str(value)
