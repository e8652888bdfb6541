"""Loads the Questions that a data spec names.

A spec is one of
  arithmetic:train      an embedded task and its split
  path/to/x.jsonl       one JSON object per line, with GSM8K's fields unless configured
  path/to/x.parquet     verl's columns: data_source, prompt, reward_model.ground_truth
  tfds_name:split       any dataset that TFDS can prepare, such as math_dataset:train
and may end in a slice in TFDS syntax: [:640], [100:200], [:10%].
TFDS converts the data to array_record once; after that, rows are read by index.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import records, spec_names
from exgrpo_jax.data.tasks import TASKS, record_features
from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.verifier import KINDS

_FILE_SPLIT = 'rows'


@dataclasses.dataclass(frozen=True)
class Config:
  """Where questions come from, and which of their fields are read."""

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


class Dataset(Sequence[Question]):
  """The questions of one spec; rows of a slice are numbered from 0."""

  def __init__(
    self,
    spec: str,
    rows: Sequence[Mapping[str, Any]],
    to_question: Callable[[int, Mapping[str, Any]], Question],
  ) -> None:
    self.spec = spec
    self._rows = rows
    self._to_question = to_question

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, row: int) -> Question:
    row = operator.index(row)
    if not 0 <= row < len(self):
      raise IndexError(f'{self.spec} has rows 0 to {len(self) - 1}, not {row}.')
    return self._to_question(row, self._rows[row])


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
    builder = _file_builder(config, fields, base)
    return Dataset(spec, _data_source(spec, builder, _FILE_SPLIT, slicing), _question_from_record)
  name, _, split = base.rpartition(':')
  if not name or not split:
    raise InputError(
      f"the data spec '{spec}' must be an embedded task's split ("
      f'{", ".join(f"{task}:train" for task in TASKS)}), a file (path/to/x.jsonl or '
      'path/to/x.parquet) or a TFDS split (name:split), optionally followed by a slice such as '
      '[:640]; nothing else can be read.'
    )
  if name in TASKS:
    builder = _prepare(functools.partial(TASKS[name], **_storage(config)))
    return Dataset(spec, _data_source(spec, builder, split, slicing), _question_from_record)
  builder = _tfds_builder(config, fields, spec, name)
  return Dataset(
    spec,
    _data_source(spec, builder, split, slicing),
    functools.partial(_question_from_fields, fields=fields, spec=spec, source=name),
  )


def _storage(config: Config) -> dict[str, Any]:
  """The arguments that tell a TFDS builder where and how to store the data."""
  folder = epath.Path(config.cache_dir).expanduser() if config.cache_dir else None
  return {'data_dir': folder, 'file_format': 'array_record'}


def _prepare(make: Callable[[], tfds.core.DatasetBuilder]) -> tfds.core.DatasetBuilder:
  builder = make()
  tfds.disable_progress_bar()  # it prints pages for seconds of work
  try:
    # TFDS writes to incomplete.* and renames at the end, so a killed process leaves no
    # partial data under the final name.
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
      )
  except OSError:
    builder = make()
    if not builder.is_prepared():  # otherwise another process renamed its folder first
      raise
  return builder


def _data_source(
  spec: str, builder: tfds.core.DatasetBuilder, split: str, slicing: str
) -> Sequence[Mapping[str, Any]]:
  """Random access to a prepared split or, if `slicing` is not '', to that slice of it."""
  if split not in builder.info.splits:
    raise InputError(
      f"{spec}: {builder.name} has no split '{split}' (has: {', '.join(builder.info.splits)})."
    )
  size = builder.info.splits[split].num_examples
  try:
    num_rows = builder.info.splits[split + slicing].num_examples
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
  # TFDS's logging decorator hides the method's parameters from type checkers.
  return builder.as_data_source(split + slicing)  # pyright: ignore[reportCallIssue]


def _question_from_record(row: int, record: Mapping[str, Any]) -> Question:
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


def _tfds_builder(
  config: Config, fields: records.Fields, spec: str, name: str
) -> tfds.core.DatasetBuilder:
  try:
    builder = _prepare(functools.partial(tfds.builder, name, **_storage(config)))
  except tfds.core.DatasetNotFoundError as error:
    raise InputError(
      f"{spec}: '{name}' is neither an embedded task ({', '.join(TASKS)}) nor a dataset that TFDS "
      'finds here. If its builder needs TensorFlow, prepare it on another machine as '
      'array_record, and set config.data.cache_dir to that folder.'
    ) from error
  except Exception as error:  # builders are third-party code and may download files
    reason = f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
    raise InputError(
      f"{spec}: TFDS could not prepare '{name}' as array_record ({reason}). Its builder must not "
      'need TensorFlow, and config.data.cache_dir must not hold it in another format.'
    ) from error
  features = builder.info.features
  present = list(features) if isinstance(features, tfds.features.FeaturesDict) else []
  for key, field in [('question', fields.question), ('answer', fields.answer)]:
    if field not in present:
      raise InputError(records.no_field(spec, field, present, key))
  return builder


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


# ---- Files ----


class _FileBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """The records of one jsonl or parquet file, in its order."""

  name = 'question_file'
  VERSION = tfds.core.Version('1.1.0')  # increase it when records.py reads files differently

  def __init__(self, *, read: Callable[[], Iterator[dict[str, Any]]], **kwargs: Any) -> None:
    self._read = read
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self, features=record_features(), description=self.__doc__, disable_shuffling=True
    )  # a question's row is its position in the file, so the order must be kept

  def _split_generators(
    self, dl_manager: tfds.download.DownloadManager
  ) -> dict[str, Iterable[tuple[int, dict[str, Any]]]]:
    del dl_manager  # nothing to download
    return {_FILE_SPLIT: self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
    return enumerate(self._read())


def _file_builder(config: Config, fields: records.Fields, path: str) -> tfds.core.DatasetBuilder:
  """Prepares a file under a name that hashes its content and all that shapes its records."""
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(
      f'{path}: there is no such file; a data spec that ends in {file.suffix} must be the '
      'path of a file, absolute or relative to the current folder.'
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
  return _prepare(
    functools.partial(
      _FileBuilder,
      read=functools.partial(records.non_empty, reader(fields, path, content), path),
      config=tfds.core.BuilderConfig(name=key),
      **_storage(config),
    )
  )


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
