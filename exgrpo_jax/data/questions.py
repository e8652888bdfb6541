"""Loads the Questions that a data spec names.

A spec is one of
  arithmetic:train      an embedded task and its split
  path/to/x.jsonl       one JSON object per line, with GSM8K's fields unless configured
  path/to/x.parquet     verl's columns: data_source, prompt, reward_model.ground_truth
  tfds_name:split       any dataset that TFDS can prepare, such as math_dataset:train
and may end in a slice in TFDS syntax: [:640], [100:200], [:10%].
TFDS converts the data to array_record once; after that, rows are read by index, when needed.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2

from exgrpo_jax.config import setting
from exgrpo_jax.data import builders, records, spec_names
from exgrpo_jax.data.tasks.catalogue import STEP_CHECKERS, STYLES, TASKS
from exgrpo_jax.datatypes import Message, Question, Questions
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.verifier import KINDS

_BATCH = 1000  # rows that are read together: one at a time takes several times as long


@dataclasses.dataclass(frozen=True)
class Config:
  """Where questions come from, and which of their fields are read."""

  train: str = setting(None, 'the data spec of the questions to train on')
  validation: tuple[str, ...] = setting(
    None, 'the data specs to evaluate on that choose the best policy, see config.export.best'
  )
  evaluation: tuple[str, ...] = setting(
    None, 'the data specs to evaluate on that are reported alone'
  )
  question_field: str = setting(
    None, "the field of jsonl and TFDS rows that holds the question; '' means 'question'"
  )
  answer_field: str = setting(
    None, "the field of jsonl and TFDS rows that holds the answer; '' means 'answer'"
  )
  solution_field: str = setting(
    None,
    'the field or parquet column that holds a worked solution (rows may lack it); '
    "'' takes the text before GSM8K's '#### ', if there is one",
  )
  default_kind: str = setting(
    ('', *KINDS),
    "how answers are compared if a row does not specify it: '' means math, and rejects "
    'parquet rows with an unknown data_source',
  )
  overlong: str = setting(
    ('refuse', 'drop'), 'what to do with questions whose prompt exceeds the limit'
  )
  cache_dir: str = setting(
    None,
    'the folder for prepared data; '
    "'' means TFDS's default, $TFDS_DATA_DIR or ~/tensorflow_datasets",
  )

  @property
  def evaluated(self) -> tuple[str, ...]:
    """All data specs to evaluate on."""
    return *self.validation, *self.evaluation


@dataclasses.dataclass(frozen=True)
class Source:
  """Where the rows of a data spec lie, and how one becomes a question."""

  folder: epath.Path  # of the prepared data
  identity: str  # which rows of the folder they are, and which of their fields are read
  size: int  # rows
  read: Callable[[list[int]], Sequence[Any]]  # many rows at once
  to_question: Callable[[int, Any], Question]  # of a row's number and what was read


class Dataset(Questions):
  """The questions of one spec, numbered from 0 and read on demand; a slice of it is a list."""

  def __init__(self, spec: str, source: Source, rows: np.ndarray | None = None) -> None:
    self.spec = spec
    self.source = source
    self._rows = np.arange(source.size) if rows is None else rows  # of the source

  def __len__(self) -> int:
    return len(self._rows)

  @overload
  def __getitem__(self, row: int) -> Question: ...
  @overload
  def __getitem__(self, row: slice) -> list[Question]: ...
  def __getitem__(self, row: int | slice) -> Question | list[Question]:
    if isinstance(row, slice):
      return self.read(range(len(self))[row])
    row = operator.index(row)
    if not 0 <= row < len(self):
      raise IndexError(f'{self.spec} has rows 0 to {len(self) - 1}, not {row}.')
    return self.read([row])[0]

  def __iter__(self) -> Iterator[Question]:
    for start in range(0, len(self), _BATCH):
      yield from self[start : start + _BATCH]

  def select(self, rows: np.ndarray) -> 'Dataset':
    """Some of the questions, numbered anew."""
    return Dataset(self.spec, self.source, self._rows[rows])

  def read(self, rows: Sequence[int]) -> list[Question]:
    """See Questions.read."""
    found = self.source.read(self._rows[list(rows)].tolist())
    return [self.source.to_question(row, record) for row, record in zip(rows, found)]


def load(config: Config, spec: str) -> Dataset:
  """The questions that `spec` names; prepares the data first if that has not been done.

  Safe to call from several processes at once: each prepares the data in a temporary
  folder of its own, and the first to finish renames it.

  Raises:
    InputError: there is no such data, or one of its rows cannot be used.
  """
  base, slicing = spec_names.split(spec)
  fields = records.Fields(
    question=config.question_field or 'question',
    answer=config.answer_field or 'answer',
    solution=config.solution_field,
    default_kind=config.default_kind,
  )
  if base.endswith(spec_names.FILE_ENDINGS):
    builder = builders.of_file(config.cache_dir, fields, base)
    return Dataset(spec, _source(spec, builder, builders.FILE_SPLIT, slicing))
  name, _, split = base.rpartition(':')
  if not name or not split:
    raise InputError(
      f"the data spec '{spec}' must be an embedded task's split ("
      f'{", ".join(f"{task}:train" for task in TASKS)}), a file (path/to/x.jsonl or '
      'path/to/x.parquet) or a TFDS split (name:split), optionally followed by a slice such as '
      '[:640]; nothing else can be read.'
    )
  if name in TASKS:
    builder = builders.of_task(config.cache_dir, name)
    return Dataset(spec, _source(spec, builder, split, slicing))
  builder = builders.of_tfds(config.cache_dir, fields, spec, name)
  to_question = functools.partial(_question_from_fields, fields=fields, spec=spec, source=name)
  return Dataset(spec, _source(spec, builder, split, slicing, fields, to_question))


def _source(
  spec: str,
  builder: tfds.core.DatasetBuilder,
  split: str,
  slicing: str,
  fields: records.Fields | None = None,
  to_question: Callable[[int, Any], Question] | None = None,
) -> Source:
  """A prepared split or, if `slicing` is not '', that slice of it.

  `fields` and `to_question` are for data of others; records of ours are known.
  """
  if split not in builder.info.splits:
    raise InputError(
      f"{spec}: {builder.name} has no split '{split}' (has: {', '.join(builder.info.splits)})."
    )
  size = builder.info.splits[split].num_examples
  try:
    info = builder.info.splits[split + slicing]
    num_rows = info.num_examples
  except ValueError as error:
    raise InputError(
      f'{spec}: the slice {slicing} must follow TFDS syntax, such as [:640], [100:200] or '
      f'[:10%], and stay within the {size} rows of the split: '
      f'{str(error).splitlines()[-1]}'
    ) from error
  if num_rows <= 0:
    raise InputError(
      f'{spec}: the slice {slicing} selects none of the {size} rows of the split; it must '
      'select at least one.'
    )
  decoding = tfds.decode.DeserializeMethod
  method = decoding.DESERIALIZE_AND_DECODE if to_question else decoding.RAW_BYTES
  # TFDS's logging decorator hides the method's parameters from type checkers.
  read = builder.as_data_source(
    split + slicing,  # pyright: ignore[reportCallIssue]
    deserialize_method=method,
  ).__getitems__
  parts = [(os.path.basename(i.filename), i.skip, i.take) for i in info.file_instructions]
  # A row of each file, which stays open: the run can read on when the cache is cleared.
  read(np.cumsum([0, *(take for _, _, take in parts)])[:-1].tolist())
  return Source(
    folder=epath.Path(builder.data_path),
    identity=repr((parts, fields)),
    size=num_rows,
    read=read,
    to_question=to_question or _question_from_record,
  )


def _question_from_record(row: int, record: bytes) -> Question:
  """Of a record of ours, see `record_features`; TFDS takes many times as long to decode it."""
  example: Any = tf_example_pb2  # made from a .proto, unknown to type checkers
  values = example.Example.FromString(record).features.feature

  def texts(name: str) -> list[str]:
    return [text.decode() for text in values[name].bytes_list.value]

  (answer,), (kind,), (solution,), (source,) = map(texts, ('answer', 'kind', 'solution', 'source'))
  messages = map(Message, texts('messages/role'), texts('messages/content'))
  return Question(row, tuple(messages), answer, kind, solution, source)


def _question_from_fields(
  row: int, record: Mapping[str, Any], *, fields: records.Fields, spec: str, source: str
) -> Question:
  question, answer, solution = records.texts(fields, record, f'{spec}: row {row}')
  return Question(
    row=row,
    messages=(Message('user', question),),
    answer=answer,
    kind=fields.default_kind or 'math',
    solution=solution,
    source=source,
  )


# ---- Prompts over the limit ----


def step_checker(question: Question) -> Callable[[str], bool] | None:
  """Whether each step of a response to it is right, by its text; None if that cannot be checked."""
  check = STEP_CHECKERS.get(question.source)
  return functools.partial(check, question.messages[-1].content) if check else None


def style_reader(question: Question) -> Callable[[str], str] | None:
  """In which style a response to it is, by its text; None where its task knows no styles."""
  style = STYLES.get(question.source)
  return functools.partial(style, question.messages[-1].content) if style else None


def check_prompts(spec: str, lengths: np.ndarray, limit: int, overlong: str) -> np.ndarray:
  """The rows whose prompts are within the limit, in ascending order.

  Args:
    spec: the data spec, for error messages.
    lengths: int [rows], in tokens.
    limit: the longest allowed prompt, in tokens.
    overlong: 'refuse' or 'drop', see Config.overlong.

  Returns:
    int [rows kept], indices into `lengths`.

  Raises:
    InputError: a prompt is over the limit and `overlong` is 'refuse', or every prompt is.
  """
  over = np.flatnonzero(lengths > limit)
  if over.size and overlong == 'refuse':
    raise InputError(
      f'{spec}: the prompt of row {over[0]} has {lengths[over[0]]} tokens, and {over.size} of '
      f'{len(lengths)} prompts exceed the limit of {limit}; raise the limit, or set '
      "config.data.overlong='drop' to leave them out."
    )
  if over.size == len(lengths):
    raise InputError(
      f'{spec}: all of its {len(lengths)} prompts exceed the limit of {limit} tokens (the '
      f"shortest has {lengths.min()}), so config.data.overlong='drop' would leave none; raise "
      'the limit.'
    )
  return np.flatnonzero(lengths <= limit)
