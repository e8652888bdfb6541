"""Loads the Questions that a data spec names.

A spec is one of
  arithmetic:train      an embedded task and its split
  path/to/x.parquet     a file, also .jsonl, .json and .csv; columns.py says which is which
  path/to/x-*.parquet   several of them, in the order of their names
  tfds_name:split       any dataset that TFDS can prepare, such as math_dataset:train
  owner/name:config:split   a data set of the Hugging Face Hub, see hub_split.py
and may end in a slice in TFDS syntax: [:640], [100:200], [:10%].
TFDS converts the data to array_record once; after that, rows are read by index, when needed.
"""

import dataclasses
import functools
import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2

from exgrpo_jax.config import setting
from exgrpo_jax.data import builders, columns, hub_split, records, spec_names
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.datatypes import Message, Question, Questions
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.verifier import KINDS
from exgrpo_jax.runtime import hub

_BATCH = 1000  # rows that are read together: one at a time takes several times as long


@dataclasses.dataclass(frozen=True)
class Config:
  """Where questions come from, and which of their fields are read."""

  train: str = setting('arithmetic:train', None, 'the data spec of the questions to train on')
  validation: tuple[str, ...] = setting(
    (), None, 'the data specs to evaluate on that choose the best policy, see config.export.best'
  )
  evaluation: tuple[str, ...] = setting(
    ('arithmetic:validation',), None, 'the data specs to evaluate on that are reported alone'
  )
  question_field: str = setting(
    '',
    None,
    "the column that holds the question, as text or chat messages; '' finds it by its name",
  )
  answer_field: str = setting(
    '',
    None,
    "the column that holds the answer, 'a.b' for field b of structs in a; '' finds it by its name",
  )
  solution_field: str = setting(
    '',
    None,
    "the column that holds a worked solution (rows may lack it); '' finds it by its name, or "
    "takes the text before GSM8K's '#### ' or a chat's last turn of the assistant",
  )
  default_kind: str = setting(
    '',
    ('', *KINDS),
    "how answers are compared where a row does not say it: '' is math, and refuses verl's rows of "
    'an unknown data_source',
  )
  unverifiable: str = setting(
    'refuse', ('refuse', 'drop'), "rows whose answer cannot be checked: there is none, or 'proof'"
  )
  overlong: str = setting(
    'refuse', ('refuse', 'drop'), 'what to do with questions whose prompt exceeds the limit'
  )
  cache_dir: str = setting(
    '~/.cache/exgrpo_jax',
    None,
    "the folder for prepared data; '' is TFDS's: $TFDS_DATA_DIR or ~/tensorflow_datasets",
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
  preparation: builders.Preparation = builders.NOTHING  # how columns were read; not of tasks


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

  Args:
    config: how the data is read.
    spec: the data spec.

  Raises:
    InputError: there is no such data, or one of its rows cannot be used.
  """
  return Dataset(spec, _named(config, spec))


def _named(config: Config, spec: str) -> Source:
  """The rows that a spec names, prepared."""
  base, slicing = spec_names.split(spec)
  fields = columns.Fields(
    question=config.question_field,
    answer=config.answer_field,
    solution=config.solution_field,
    default_kind=config.default_kind,
  )
  if base.endswith(spec_names.FILE_ENDINGS):
    return _of_files(config, spec, fields, *spec_names.files(base))
  if split := _hub_split(config, base):
    return _of_files(config, spec, fields, hub_split.files(split), split.repository.name)
  name, _, split = base.rpartition(':')
  if not name or not split:
    raise InputError(
      f"the data spec '{spec}' must be an embedded task's split ("
      f'{", ".join(f"{task}:train" for task in TASKS)}), a file that ends in '
      f'{", ".join(spec_names.FILE_ENDINGS)}, a split of the Hub (owner/name:config:split) or of '
      'TFDS (name:split), optionally followed by a slice such as [:640]; nothing else can be read.'
    )
  if name in TASKS:
    return _source(spec, builders.of_task(config.cache_dir, name), split, slicing)
  builder = builders.of_tfds(config.cache_dir, spec, name)
  features = builder.info.features
  present = list(features) if isinstance(features, tfds.features.FeaturesDict) else []
  layout = columns.recognize(present, fields, spec)
  to_question = functools.partial(
    _question_from_row, layout=layout, fields=fields, spec=spec, source=name
  )
  source = _source(spec, builder, split, slicing, fields, to_question)
  return dataclasses.replace(source, preparation=builders.Preparation([layout.describe()], {}))


def _of_files(
  config: Config, spec: str, fields: columns.Fields, paths: Sequence[str], name: str
) -> Source:
  """The rows of some files; `name` is their source where no column says it."""
  builder = builders.of_files(config.cache_dir, fields, paths, name)
  preparation = builders.preparation(builder)
  if config.unverifiable == 'refuse':
    _refuse_unverifiable(spec, preparation)
  source = _source(spec, builder, builders.FILE_SPLIT, spec_names.split(spec)[1])
  return dataclasses.replace(source, preparation=preparation)


def _refuse_unverifiable(spec: str, preparation: builders.Preparation) -> None:
  left_out = preparation.left_out
  if left_out:
    counts = ', '.join(f'{reason}: {rows:,}' for reason, (rows, _) in left_out.items())
    raise InputError(
      f'{spec}: {sum(rows for rows, _ in left_out.values()):,} rows have no answer that can be '
      f'checked ({counts}), the first at {next(iter(left_out.values())).first}; give them one, or '
      "set config.data.unverifiable='drop' to leave them out."
    )


def settle(config: Config, spec: str) -> None:
  """Has all hosts agree on the commit that a spec means, where it names a data set of the Hub.

  All hosts call it before `load`. Raises InputError where the Hub or the cache has no such data.
  """
  if split := _hub_split(config, spec_names.split(spec)[0]):
    hub_split.settle(split)


def _hub_split(config: Config, base: str) -> hub_split.Split | None:
  """What a spec without its slice names on the Hub; None where it is something else, or TFDS's.

  Raises InputError where it names a data set and no split.
  """
  if base.endswith(spec_names.FILE_ENDINGS):
    return None
  split = hub_split.parse(base)
  repository = split.repository if split else hub.parse('dataset', base)
  if not repository or builders.knows(config.cache_dir, repository.name):
    return None
  is_file = os.path.splitext(base)[1][1:].isalpha()  # of a kind that is not read; see _named
  if not split and not is_file and not os.path.exists(base):
    hub_split.refuse_unsplit(repository)
  return split


def _source(
  spec: str,
  builder: tfds.core.DatasetBuilder,
  split: str,
  slicing: str,
  fields: columns.Fields | None = None,
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
  row_of_data = next(map(json.loads, texts('columns')), {})
  return Question(row, tuple(messages), answer, kind, solution, source, row_of_data)


def _question_from_row(
  row: int,
  values: Mapping[str, Any],
  *,
  layout: columns.Layout,
  fields: columns.Fields,
  spec: str,
  source: str,
) -> Question:
  """Of a row of TFDS's; one whose answer cannot be checked is refused when it is read."""
  place = f'{spec}: row {row}'
  record = records.record(layout, fields, values, place, source)
  if isinstance(record, records.Uncheckable):
    raise InputError(f'{place}: {record.reason}, so its answer cannot be checked.')
  messages = tuple(Message(**message) for message in record.pop('messages'))
  row_of_data = json.loads(record.pop('columns'))
  return Question(row=row, messages=messages, columns=row_of_data, **record)


# ---- Prompts over the limit ----


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
