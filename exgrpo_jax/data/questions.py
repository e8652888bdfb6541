"""From data specs to Questions.

A spec is one of
  arithmetic:train      an embedded task and its split
  path/to/x.jsonl       one JSON object a line, GSM8K's fields unless configured
  path/to/x.parquet     verl's columns: data_source, prompt, reward_model.ground_truth
  tfds_name:split       anything TFDS prepares, such as math_dataset:train
and may end in a slice in the manner of TFDS: [:640], [100:200], [:10%].
Whatever it names is prepared once, by TFDS, into array_record and read by row.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import records
from exgrpo_jax.data.tasks import TASKS, record_features
from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.verifier import KINDS

_SPEC = re.compile(r'(?P<place>.+?)(?P<slice>\[[^\[\]]*\])?')
_FILE_SPLIT = 'rows'


@dataclasses.dataclass(frozen=True)
class Config:
  """Where questions come from, and which fields of theirs are read."""

  train: str = setting(None, 'the data spec of the questions to train on')
  evaluation: tuple[str, ...] = setting(None, 'the data specs to evaluate on')
  question_field: str = setting(
    None, "the field of jsonl and TFDS rows that holds the question; '' means 'question'"
  )
  answer_field: str = setting(
    None, "the field of jsonl and TFDS rows that holds the answer; '' means 'answer'"
  )
  solution_field: str = setting(
    None,
    'the field, or parquet column, that holds a written solution (a row without it has '
    "none); '' means the text before GSM8K's '#### ', where there is one",
  )
  default_kind: str = setting(
    ('', *KINDS),
    "how answers are compared where a row does not say: '' is math, and refuses a "
    'parquet row whose data_source is not known',
  )
  overlong: str = setting(
    ('refuse', 'drop'), 'what to do with a question whose prompt exceeds the limit'
  )
  cache_dir: str = setting(
    None,
    "the folder of prepared data; '' means TFDS's own, $TFDS_DATA_DIR or ~/tensorflow_datasets",
  )


class Dataset(Sequence[Question]):
  """The questions of one spec; those of a slice are numbered from 0."""

  def __init__(
    self,
    spec: str,
    records: Sequence[Mapping[str, Any]],
    to_question: Callable[[int, Mapping[str, Any]], Question],
  ):
    self.spec = spec
    self._records = records
    self._to_question = to_question

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, row: int) -> Question:
    row = operator.index(row)
    if not 0 <= row < len(self):
      raise IndexError(f'{self.spec} has rows 0 to {len(self) - 1}, not {row}.')
    return self._to_question(row, self._records[row])


def load(config: Config, spec: str) -> Dataset:
  """The questions that `spec` names, prepared first where they are not yet.

  A second process that prepares the same data at the same time does no harm: each
  writes a folder of its own, and the first to finish gives it its name.

  Raises:
    InputError: there is no such data, or a row of it cannot be used.
  """
  match = _SPEC.fullmatch(spec)
  place, part = (match['place'], match['slice'] or '') if match else ('', '')
  fields = records.Fields(
    config.question_field or 'question',
    config.answer_field or 'answer',
    config.solution_field,
    config.default_kind,
  )
  if place.endswith(('.jsonl', '.parquet')):
    return Dataset(spec, _records(spec, _file(config, fields, place), _FILE_SPLIT, part), _question)
  name, _, split = place.rpartition(':')
  if not name or not split:
    raise InputError(
      f"the data spec '{spec}' must be an embedded task's split ("
      f'{", ".join(f"{task}:train" for task in TASKS)}), a file (path/to/x.jsonl or '
      'path/to/x.parquet) or a TFDS split (name:split), each with an optional slice such as '
      '[:640], for nothing else can be read.'
    )
  if name in TASKS:
    builder = _prepared(functools.partial(TASKS[name], **_storage(config)))
    return Dataset(spec, _records(spec, builder, split, part), _question)
  builder = _named(config, fields, spec, name)
  return Dataset(
    spec,
    _records(spec, builder, split, part),
    functools.partial(_question_of_fields, fields=fields, spec=spec, source=name),
  )


def _storage(config):
  folder = epath.Path(config.cache_dir).expanduser() if config.cache_dir else None
  return {'data_dir': folder, 'file_format': 'array_record'}


def _prepared(make: Callable[[], tfds.core.DatasetBuilder]) -> tfds.core.DatasetBuilder:
  builder = make()
  tfds.disable_progress_bar()  # seconds of work, and pages of output
  try:
    # TFDS writes into incomplete.*, then renames: a kill leaves nothing that reads as whole.
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
      )
  except OSError:
    builder = make()
    if not builder.is_prepared():  # else another process was first to rename
      raise
  return builder


def _records(spec, builder, split, part) -> Sequence[Mapping[str, Any]]:
  """Random access to a prepared split, or to the slice `part` of it ('' is all)."""
  if split not in builder.info.splits:
    raise InputError(
      f"{spec}: {builder.name} has no split '{split}' (has: {', '.join(builder.info.splits)})."
    )
  size = builder.info.splits[split].num_examples
  try:
    wanted = builder.info.splits[split + part].num_examples
  except ValueError as error:
    raise InputError(
      f'{spec}: the slice {part} must be as in TFDS, such as [:640], [100:200] or '
      f'[:10%], and within the {size} rows there are: '
      f'{str(error).splitlines()[-1]}'
    ) from error
  if wanted <= 0:
    raise InputError(
      f'{spec}: the slice {part} holds none of the {size} rows there are; at least one is needed.'
    )
  return builder.as_data_source(split + part)


def _question(row: int, record: Mapping[str, Any]) -> Question:
  roles, contents = record['messages']['role'], record['messages']['content']
  return Question(
    row=row,
    messages=tuple(Message(role.decode(), text.decode()) for role, text in zip(roles, contents)),
    answer=record['answer'].decode(),
    kind=record['kind'].decode(),
    solution=record['solution'].decode(),
    source=record['source'].decode(),
  )


# ---- TFDS names ----


def _named(config, fields, spec, name) -> tfds.core.DatasetBuilder:
  try:
    builder = _prepared(functools.partial(tfds.builder, name, **_storage(config)))
  except tfds.core.DatasetNotFoundError as error:
    raise InputError(
      f"{spec}: '{name}' is neither an embedded task ({', '.join(TASKS)}) nor a dataset that TFDS "
      'finds here; one whose builder needs TensorFlow must be prepared elsewhere, as '
      'array_record, into config.data.cache_dir.'
    ) from error
  except Exception as error:  # a builder is foreign code, and reaches out to the network
    reason = f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
    raise InputError(
      f"{spec}: TFDS could not give '{name}' as array_record ({reason}); its builder must need no "
      'TensorFlow, and config.data.cache_dir must not hold it in another format.'
    ) from error
  present = list(builder.info.features) if hasattr(builder.info.features, 'keys') else []
  for key, field in [('question', fields.question), ('answer', fields.answer)]:
    if field not in present:
      raise InputError(records.no_field(spec, field, present, key))
  return builder


def _question_of_fields(row, record, *, fields, spec, source) -> Question:
  question, answer, solution = records.texts(fields, record, f'{spec}: row {row}')
  return Question(
    row, (Message('user', question),), answer, fields.default_kind or 'math', solution, source
  )


# ---- Files ----


class _FileBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """The records of one jsonl or parquet file, in its order."""

  name = 'question_file'
  VERSION = tfds.core.Version('1.1.0')  # raise it when the readers of records.py read differently

  def __init__(self, *, read: Callable[[], Iterator[dict]], **kwargs):
    self._read = read
    super().__init__(**kwargs)

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self, features=record_features(), description=self.__doc__, disable_shuffling=True
    )  # a question's row is its place in the file

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing to download
    return {_FILE_SPLIT: self._generate_examples()}

  def _generate_examples(self):
    return enumerate(self._read())


def _file(config, fields, path) -> tfds.core.DatasetBuilder:
  """A file as prepared data, under a key of its content and of all that shapes a record."""
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(
      f'{path}: there is no such file; a data spec that ends in {file.suffix} must '
      'name one, from the current folder or absolute.'
    )
  content = file.read_bytes()
  shaping = (
    file.suffix,
    file.stem,
    config.question_field,
    config.answer_field,
    config.solution_field,
    config.default_kind,
  )
  key = hashlib.sha256(repr(shaping).encode() + content).hexdigest()[:32]
  reader = records.jsonl_rows if file.suffix == '.jsonl' else records.parquet_rows
  return _prepared(
    functools.partial(
      _FileBuilder,
      read=functools.partial(records.non_empty, reader(fields, path, content), path),
      config=tfds.core.BuilderConfig(name=key),
      **_storage(config),
    )
  )


# ---- Prompts over the limit ----


def check_prompts(spec: str, lengths: np.ndarray, limit: int, overlong: str) -> np.ndarray:
  """The rows whose prompts are within the limit, in order.

  Args:
    spec: the data spec, for messages.
    lengths: int [rows], tokens.
    limit: tokens; a prompt of exactly so many is within it.
    overlong: 'refuse' or 'drop', config.data.overlong.

  Raises:
    InputError: a prompt is over the limit and `overlong` is 'refuse', or all of them are.
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
      f"shortest has {lengths.min()}), so config.data.overlong='drop' leaves nothing; raise the "
      'limit.'
    )
  return np.flatnonzero(lengths <= limit)
