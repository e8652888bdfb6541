"""Loads the questions that a data spec names.

A spec is one of
  arithmetic:train      an embedded task and its split
  path/to/x.parquet     a file, also .jsonl, .json and .csv; columns.py says which column is which
  path/to/x-*.parquet   several of them, in the order of their names
  path/to/x.py:train    a task in Python: rows that a function makes
  reasoning_gym:chain_sum(max_terms=3):train   tasks of reasoning_gym, see reasoning_gym.py
  owner/name:config:split   a data set of the Hugging Face Hub, see hub_split.py
  tfds_name:split       a data set of TFDS, such as math_dataset:train
and may end in columns of its own, {question=problem,answer=key}, and in a slice in TFDS syntax:
[:640], [100:200], [:10%].
Data is prepared once; after that, rows are read by index, when needed.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.config import setting
from exgrpo_jax.data import (
  columns,
  hub_split,
  question_files,
  reasoning_gym,
  records,
  spec_names,
  tfds_sets,
)
from exgrpo_jax.data.question_files import Preparation
from exgrpo_jax.data.store import Record, Store
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.datatypes import Message, Question, Questions
from exgrpo_jax.errors import InputError, counted
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
    "the column that holds the question, as text or chat messages; '' finds it by its name. A data "
    'spec that names columns, such as x.jsonl{question=ask}, takes its own alone',
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
    ('', 'math', 'choice', 'text'),
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
  """Where the rows of a split lie, and how one becomes a question."""

  folder: pathlib.Path  # of the prepared data
  identity: str  # which split of the folder, and which of its fields are read
  read: Callable[[list[int]], Sequence[Any]]  # many rows at once
  to_question: Callable[[int, Any], Question]  # from a row's number and what was read
  preparation: Preparation


class Dataset(Questions):
  """The questions of one spec."""

  def __init__(self, spec: str, source: Source, rows: np.ndarray) -> None:
    self.spec = spec
    self.source = source
    self.rows = rows  # int [questions], of the source

  def __len__(self) -> int:
    return len(self.rows)

  def __iter__(self) -> Iterator[Question]:
    for start in range(0, len(self), _BATCH):
      yield from self[start : start + _BATCH]

  def select(self, rows: np.ndarray) -> 'Dataset':
    """Some of the questions, numbered anew."""
    return Dataset(self.spec, self.source, self.rows[rows])

  def read(self, rows: Sequence[int]) -> list[Question]:
    """See Questions.read."""
    found = self.source.read(self.rows[list(rows)].tolist())
    return [self.source.to_question(row, record) for row, record in zip(rows, found)]


def load(config: Config, spec: str) -> Dataset:
  """The questions that `spec` names; prepares the data first if that has not been done.

  Safe to call from several processes at once: each prepares the data in a folder of its own, and
  the first to finish renames it.

  Raises:
    InputError: there is no such data, or one of its rows cannot be used.
  """
  base, fields = spec_names.split(spec)[0], _fields(config, spec)
  if fields.of_spec and base.startswith((reasoning_gym.PREFIX, *(f'{task}:' for task in TASKS))):
    raise InputError(f'{spec}: a task has no columns to choose from. Leave the braces out.')
  if base.startswith(reasoning_gym.PREFIX):
    return _of_reasoning_gym(config, spec, base)
  if spec_names.task_file(base):
    return _of_files(config, spec, fields, [base], '')
  if base.endswith(spec_names.FILE_ENDINGS):
    return _of_files(config, spec, fields, *spec_names.files(base))
  if found := _hub_split(config, base):
    return _of_files(config, spec, fields, hub_split.files(found), found.repository.name)
  name, _, split = base.rpartition(':')
  if not name or not split:
    raise InputError(
      f"the data spec '{spec}' must be an embedded task's split ("
      f'{", ".join(f"{task}:train" for task in TASKS)}), a file that ends in '
      f'{", ".join(spec_names.FILE_ENDINGS)}, a task in Python (mine.py:train) or of reasoning_gym '
      '(reasoning_gym:chain_sum:train), a split of the Hub (owner/name:config:split) or of TFDS '
      '(name:split), optionally followed by columns such as {question=problem,answer=key} and a '
      'slice such as [:640]; nothing else can be read.'
    )
  if name in TASKS:
    return _of_store(spec, question_files.of_task(config.cache_dir, name), name, split)
  return _of_tfds(config, spec, fields, name, split)


def _fields(config: Config, spec: str) -> columns.Fields:
  """The columns that the spec names, else those that the config names for all data."""
  named = spec_names.named_columns(spec)
  of_config = {key: getattr(config, f'{key}_field') for key in spec_names.COLUMNS}
  of_spec = dict.fromkeys(spec_names.COLUMNS, '') | named
  return columns.Fields(
    **(of_spec if named else of_config), default_kind=config.default_kind, of_spec=bool(named)
  )


def _of_files(
  config: Config, spec: str, fields: columns.Fields, paths: Sequence[str], name: str
) -> Dataset:
  """The rows of some files; `name` is their source where no column says it."""
  try:
    prepared = question_files.of_files(config.cache_dir, fields, paths, name)
  except InputError as error:
    if name or fields.of_spec:  # else the path is the spec's
      raise InputError(f'{spec}: {error}') from error
    raise
  preparation = question_files.preparation(prepared)
  left_out = preparation.left_out
  if left_out and config.unverifiable == 'refuse':
    total = sum(rows for rows, _ in left_out.values())
    counts = ', '.join(f'{reason}: {rows:,}' for reason, (rows, _) in left_out.items())
    raise InputError(
      f'{spec}: {counted(total, "row")} {"has" if total == 1 else "have"} no answer that can be '
      f'checked ({counts}), the first at {next(iter(left_out.values())).first}; give each one, or '
      "set config.data.unverifiable='drop' to leave them out."
    )
  return _of_store(spec, prepared, paths[0], question_files.SPLIT, preparation)


def _of_reasoning_gym(config: Config, spec: str, base: str) -> Dataset:
  tasks, _, split = base.removeprefix(reasoning_gym.PREFIX).rpartition(':')
  if not tasks:
    raise InputError(f"{spec}: it must end in a split, such as '{base}:train'.")
  prepared = reasoning_gym.prepared(config.cache_dir, spec, tasks)
  if not prepared.sizes.get(split, 1):
    raise InputError(f'{spec}: {split} has no question, for there are too few different ones.')
  preparation = Preparation(prepared.facts['counts'])
  return _of_store(spec, prepared, tasks, split, preparation)


def _of_store(
  spec: str,
  prepared: Store,
  name: str,
  split: str,
  preparation: Preparation = question_files.NOTHING,
) -> Dataset:
  sizes = prepared.sizes
  if preparation.excluded:
    kept = np.setdiff1d(np.arange(sizes[split]), preparation.excluded)
    rows = kept[_rows(spec, name, split, {split: len(kept)})]
  else:
    rows = _rows(spec, name, split, sizes)
  source = Source(
    folder=prepared.folder,
    identity=split,
    read=prepared.reader(split),
    to_question=_question,
    preparation=preparation,
  )
  return Dataset(spec, source, rows)


def _question(row: int, record: Record) -> Question:
  messages = tuple(Message(**message) for message in record['messages'])
  row_of_data = json.loads(record['columns'] or '{}')
  return Question(row, **record | {'messages': messages, 'columns': row_of_data})


def _of_tfds(config: Config, spec: str, fields: columns.Fields, name: str, split: str) -> Dataset:
  builder = tfds_sets.prepared(config.cache_dir, spec, name)
  layout = columns.recognize(tfds_sets.columns(builder), fields, spec)
  sizes = {key: info.num_examples for key, info in builder.info.splits.items()}
  rows = _rows(spec, name, split, sizes)

  def to_question(row: int, values: Mapping[str, Any]) -> Question:
    place = f'{spec}: row {row}'
    record = records.record(layout, fields, values, place, name)
    if isinstance(record, records.Uncheckable):
      raise InputError(f'{place}: {record.reason}, so its answer cannot be checked.')
    return _question(row, record)

  source = Source(
    folder=pathlib.Path(builder.data_path),
    identity=repr((split, fields)),
    read=tfds_sets.reader(builder, split),
    to_question=to_question,
    preparation=Preparation([layout.describe()]),
  )
  return Dataset(spec, source, rows)


def _rows(spec: str, name: str, split: str, sizes: Mapping[str, int]) -> np.ndarray:
  """The rows of a split that the spec's slice selects."""
  if split not in sizes:
    raise InputError(f"{spec}: {name} has no split '{split}' (has: {', '.join(sizes)}).")
  return np.array(spec_names.rows(spec, sizes[split]))


def settle(config: Config, spec: str) -> None:
  """Has all hosts agree on the commit that a spec means, where it names a data set of the Hub.

  All hosts call it before `load`. Raises InputError where the Hub or the cache has no such data.
  """
  if found := _hub_split(config, spec_names.split(spec)[0]):
    hub_split.settle(found)


def _hub_split(config: Config, base: str) -> hub_split.Split | None:
  """The split that a spec without its slice names on the Hub; None for all else, and TFDS's names.

  Raises InputError where it names a data set and no split.
  """
  if base.endswith(spec_names.FILE_ENDINGS) or spec_names.task_file(base):
    return None
  found = hub_split.parse(base)
  repository = found.repository if found else hub.parse('dataset', base)
  if not repository or tfds_sets.knows(config.cache_dir, repository.name):
    return None
  is_file = os.path.splitext(base)[1][1:].isalpha()  # of a kind that is not read; see `load`
  if not found and not is_file and not os.path.exists(base):
    hub_split.refuse_unsplit(repository)
  return found


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
      f'{counted(len(lengths), "prompt")} {"exceeds" if over.size == 1 else "exceed"} the limit of '
      f'{limit}; raise the limit, or set '
      "config.data.overlong='drop' to leave them out."
    )
  if over.size == len(lengths):
    raise InputError(
      f'{spec}: no prompt is within the limit of {counted(limit, "token")} (the shortest has '
      f"{lengths.min()}), so config.data.overlong='drop' would leave none; raise the limit."
    )
  return np.flatnonzero(lengths <= limit)
