"""From data specs to Questions, and the stream that says which ones a step reads.

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
import json
import operator
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow_datasets as tfds
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.tasks import TASKS, record_features
from exgrpo_jax.types import Cursor, Message, Question

_SPEC = re.compile(r'(?P<place>.+?)(?P<slice>\[[^\[\]]*\])?')
_FILE_SPLIT = 'rows'
_VERL = 'data_source, prompt (chat messages) and reward_model.ground_truth'
_FINAL_ANSWER = '#### '  # GSM8K: the answer follows the last one
_CALCULATOR = re.compile(r'<<.*?>>')  # GSM8K's annotations: 48/2 = <<48/2=24>>24


@dataclasses.dataclass(frozen=True)
class Config:
  """Where questions come from, and which fields of theirs are read."""

  train: str = setting(None, 'the data spec of the questions to train on')
  evaluation: tuple[str, ...] = setting(None, 'the data specs to evaluate on')
  question_field: str = setting(
    None, "the field of jsonl and TFDS rows that holds the question; '' means 'question'")
  answer_field: str = setting(
    None, "the field of jsonl and TFDS rows that holds the answer; '' means 'answer'")
  solution_field: str = setting(
    None, 'the field, or parquet column, that holds a written solution (a row without it has '
          "none); '' means the text before GSM8K's '#### ', where there is one")
  overlong: str = setting(
    ('refuse', 'drop'), 'what to do with a question whose prompt exceeds the limit')
  cache_dir: str = setting(
    None, "the folder of prepared data; '' means TFDS's own, $TFDS_DATA_DIR or "
          '~/tensorflow_datasets')


class Dataset(Sequence[Question]):
  """The questions of one spec; those of a slice are numbered from 0."""

  def __init__(self, spec: str, records: Sequence[Mapping[str, Any]],
               to_question: Callable[[int, Mapping[str, Any]], Question]):
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
  if place.endswith(('.jsonl', '.parquet')):
    return Dataset(spec, _records(spec, _file(config, place), _FILE_SPLIT, part), _question)
  name, _, split = place.rpartition(':')
  if not name or not split:
    raise InputError(
      f"the data spec '{spec}' must be an embedded task's split ("
      f'{", ".join(f"{task}:train" for task in TASKS)}), a file (path/to/x.jsonl or '
      'path/to/x.parquet) or a TFDS split (name:split), each with an optional slice such as '
      '[:640], for nothing else can be read.')
  if name in TASKS:
    builder = _prepared(functools.partial(TASKS[name], **_storage(config)))
    return Dataset(spec, _records(spec, builder, split, part), _question)
  builder = _named(config, spec, name)
  records = _records(spec, builder, split, part)
  return Dataset(spec, records, functools.partial(
    _question_of_fields, config=config, spec=spec, source=name))


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
        download_config=tfds.download.DownloadConfig(try_download_gcs=False))
  except OSError:
    builder = make()
    if not builder.is_prepared():  # else another process was first to rename
      raise
  return builder


def _records(spec, builder, split, part) -> Sequence[Mapping[str, Any]]:
  """Random access to a prepared split, or to the slice `part` of it ('' is all)."""
  if split not in builder.info.splits:
    raise InputError(f"{spec}: {builder.name} has no split '{split}' "
                     f'(has: {", ".join(builder.info.splits)}).')
  size = builder.info.splits[split].num_examples
  try:
    wanted = builder.info.splits[split + part].num_examples
  except ValueError as error:
    raise InputError(f'{spec}: the slice {part} must be as in TFDS, such as [:640], [100:200] or '
                     f'[:10%], and within the {size} rows there are: '
                     f'{str(error).splitlines()[-1]}') from error
  if wanted <= 0:
    raise InputError(f'{spec}: the slice {part} holds none of the {size} rows there are; at '
                     'least one is needed.')
  return builder.as_data_source(split + part)


def _question(row: int, record: Mapping[str, Any]) -> Question:
  roles, contents = record['messages']['role'], record['messages']['content']
  return Question(
    row=row,
    messages=tuple(Message(role.decode(), text.decode()) for role, text in zip(roles, contents)),
    answer=record['answer'].decode(),
    solution=record['solution'].decode(),
    source=record['source'].decode())


# ---- TFDS names ----


def _named(config, spec, name) -> tfds.core.DatasetBuilder:
  try:
    builder = _prepared(functools.partial(tfds.builder, name, **_storage(config)))
  except tfds.core.DatasetNotFoundError as error:
    raise InputError(
      f"{spec}: '{name}' is neither an embedded task ({', '.join(TASKS)}) nor a dataset that TFDS "
      'finds here; one whose builder needs TensorFlow must be prepared elsewhere, as '
      'array_record, into config.data.cache_dir.') from error
  except Exception as error:  # a builder is foreign code, and reaches out to the network
    reason = f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
    raise InputError(
      f"{spec}: TFDS could not give '{name}' as array_record ({reason}); its builder must need no "
      'TensorFlow, and config.data.cache_dir must not hold it in another format.') from error
  fields = list(builder.info.features) if hasattr(builder.info.features, 'keys') else []
  for key, field in [('question', _question_field(config)), ('answer', _answer_field(config))]:
    if field not in fields:
      raise InputError(_no_field(spec, field, fields, key))
  return builder


def _question_of_fields(row, record, *, config, spec, source) -> Question:
  question, answer, solution = _texts(config, record, f'{spec}: row {row}')
  return Question(row, (Message('user', question),), answer, solution, source)


# ---- Files ----


class _FileBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """The records of one jsonl or parquet file, in its order."""

  name = 'question_file'
  VERSION = tfds.core.Version('1.0.0')  # raise it when the readers below read differently

  def __init__(self, *, read: Callable[[], Iterator[dict]], **kwargs):
    self._read = read
    super().__init__(**kwargs)

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self, features=record_features(), description=self.__doc__,
      disable_shuffling=True)  # a question's row is its place in the file

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing to download
    return {_FILE_SPLIT: self._generate_examples()}

  def _generate_examples(self):
    return enumerate(self._read())


def _file(config, path) -> tfds.core.DatasetBuilder:
  """A file as prepared data, under a key of its content and of all that shapes a record."""
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(f'{path}: there is no such file; a data spec that ends in {file.suffix} must '
                     'name one, from the current folder or absolute.')
  content = file.read_bytes()
  shaping = (file.suffix, file.stem, config.question_field, config.answer_field,
             config.solution_field)
  key = hashlib.sha256(repr(shaping).encode() + content).hexdigest()[:32]
  reader = _jsonl_rows if file.suffix == '.jsonl' else _parquet_rows
  return _prepared(functools.partial(
    _FileBuilder, read=functools.partial(_some, reader(config, path, content), path),
    config=tfds.core.BuilderConfig(name=key), **_storage(config)))


def _some(rows, path):
  """`rows`, of which there must be one: TFDS asserts it without naming the file."""
  empty = True
  for row in rows:
    empty = False
    yield row
  if empty:
    raise InputError(f'{path}: the file holds no question; at least one is needed.')


def _jsonl_rows(config, path, content: bytes) -> Iterator[dict]:
  source = epath.Path(path).stem
  for number, line in enumerate(io.BytesIO(content), start=1):
    if line.strip():
      place = f'{path}:{number}'
      question, answer, solution = _texts(config, _parsed(line, place), place)
      yield {'messages': [{'role': 'user', 'content': question}], 'answer': answer,
             'solution': solution, 'source': source}


def _parsed(line: bytes, place: str) -> dict:
  try:
    # Numbers stay as they are written: an answer of 0.50 does not become 0.5.
    record = json.loads(line.decode('utf-8'), parse_int=str, parse_float=str)
  except ValueError as error:
    raise InputError(f'{place}: not valid JSON ({error}); every line must hold one object, in '
                     'UTF-8.') from error
  if not isinstance(record, dict):
    raise InputError(f'{place}: {reprlib.repr(record)} is not an object; every line must hold '
                     "one, for its fields are found by name.")
  return record


def _parquet_rows(config, path, content: bytes) -> Iterator[dict]:
  table = _parquet_table(config, path, content)
  rows = (row for batch in table.to_batches(max_chunksize=1024) for row in batch.to_pylist())
  for number, row in enumerate(rows):
    place = f'{path}: row {number}'
    if not isinstance(row['reward_model'], dict):
      raise InputError(f"{place}: reward_model is {reprlib.repr(row['reward_model'])}; it must "
                       'hold ground_truth, the answer to verify against.')
    solution = row.get(config.solution_field)
    yield {
      'messages': _chat(row['prompt'], place),
      'answer': _text(row['reward_model'].get('ground_truth'), 'reward_model.ground_truth', place),
      'solution': '' if solution is None else _text(solution, config.solution_field, place),
      'source': _text(row['data_source'], 'data_source', place)}


def _parquet_table(config, path, content) -> pa.Table:
  try:
    columns = pq.read_schema(pa.BufferReader(content)).names
    needed = ['data_source', 'prompt', 'reward_model']
    for column in needed:
      if column not in columns:
        raise InputError(f"{path}: no column '{column}' (has: {_quoted(columns)}); a parquet "
                         f"file must have verl's columns {_VERL}.")
    optional = [column for column in columns if column == config.solution_field]
    return pq.read_table(pa.BufferReader(content), columns=needed + optional)
  except (pa.ArrowInvalid, OSError) as error:
    raise InputError(f'{path}: not a whole parquet file ({error}); write it again, for example '
                     'with pyarrow or pandas.') from error


def _chat(prompt, place) -> list[dict]:
  turns = prompt if isinstance(prompt, list) else []
  if not turns or not all(
      isinstance(turn, dict) and turn.get('role') in ('system', 'user', 'assistant')
      for turn in turns):
    raise InputError(f'{place}: prompt is {reprlib.repr(prompt)}; it must be a list of chat '
                     "messages, each with a role ('system', 'user' or 'assistant') and a content.")
  return [{'role': turn['role'], 'content': _text(turn.get('content'), 'content', place)}
          for turn in turns]


# ---- One row's fields ----


def _question_field(config):
  return config.question_field or 'question'


def _answer_field(config):
  return config.answer_field or 'answer'


def _texts(config, record: Mapping[str, Any], place: str) -> tuple[str, str, str]:
  """Question, ground truth and written solution ('' for none) of a row with named fields."""
  question = _field(record, _question_field(config), 'question', place)
  whole = _field(record, _answer_field(config), 'answer', place)
  _, mark, final = whole.rpartition(_FINAL_ANSWER)
  if mark and not final.strip():
    raise InputError(f"{place}: nothing follows the last '{_FINAL_ANSWER}' of field "
                     f"'{_answer_field(config)}'; it must be the final answer.")
  solution = _CALCULATOR.sub('', whole) if mark else ''
  if record.get(config.solution_field) is not None:
    solution = _field(record, config.solution_field, 'solution', place)
  return question, final.strip() if mark else whole, solution


def _field(record, field, key, place) -> str:
  if field not in record:
    raise InputError(_no_field(place, field, record, key))
  return _text(record[field], field, place)


def _no_field(place, field, fields, key):
  return (f"{place}: no field '{field}' (has: {_quoted(fields)}); set config.data.{key}_field.")


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
    raise InputError(f"{place}: field '{name}' is {shown}; it must be a text that is not empty, "
                     'or a number.')
  try:
    value.encode()
  except UnicodeEncodeError as error:  # JSON can spell half of a character: "\ud83d"
    raise InputError(f"{place}: field '{name}' is not valid Unicode ({error}); it must be, to be "
                     'written as UTF-8.') from error
  return value


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
      "config.data.overlong='drop' to leave them out.")
  if over.size == len(lengths):
    raise InputError(
      f'{spec}: all of its {len(lengths)} prompts exceed the limit of {limit} tokens (the '
      f"shortest has {lengths.min()}), so config.data.overlong='drop' leaves nothing; raise the "
      'limit.')
  return np.flatnonzero(lengths <= limit)


# ---- The stream ----


@functools.lru_cache(maxsize=4)  # a step reads one epoch, or two at its border
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
  """The order of an epoch: int64 [size], read-only, the same wherever it is asked for."""
  order = np.random.default_rng((seed, epoch)).permutation(size)
  order.flags.writeable = False  # it is shared between callers
  return order


def retired_return(epoch: int, size: int, retired_epoch: Mapping[int, int], quorum: int) -> bool:
  """Whether `epoch` reads retired questions too, there being too few others.

  Args:
    epoch: of the stream.
    size: questions there are.
    retired_epoch: row -> the epoch in which it retired; it is out from the next one.
    quorum: Q, questions per step.
  """
  return size - sum(retired < epoch for retired in retired_epoch.values()) < quorum


def take(cursor: Cursor, count: int, size: int, seed: int, retired_epoch: Mapping[int, int],
         taken: Collection[int], quorum: int) -> tuple[list[int], Cursor]:
  """The next `count` rows of the stream, all different, and the place after them.

  Passes over rows that retired in an earlier epoch (unless `retired_return`), rows in
  `taken` and, where a step crosses into the next epoch, rows it has read already. An
  epoch's end is left only when a row of the next one is needed, so that what retires in
  the step that reads an epoch's last row retires in that epoch.

  Args:
    cursor: the next position to read.
    count: rows wanted, at most `quorum` less `taken`.
    size: questions there are.
    seed: of the permutations.
    retired_epoch: row -> the epoch in which it retired.
    taken: rows that the step replays.
    quorum: Q, questions per step.

  Raises:
    InputError: there are fewer questions than a step needs.
  """
  if size < quorum:
    raise InputError(f'the training data has {size} questions, and a step needs {quorum} different '
                     'ones; give more data, or take fewer questions per step.')
  if count + len(taken) > quorum:
    raise ValueError(f'{count} fresh and {len(taken)} replayed questions are over {quorum}.')
  epoch, position = cursor.epoch, cursor.position
  rows, passed = [], set(taken)
  while len(rows) < count:
    order = permutation(seed, epoch, size)
    everyone = retired_return(epoch, size, retired_epoch, quorum)
    while position < size and len(rows) < count:
      row = int(order[position])
      position += 1
      if row not in passed and (everyone or retired_epoch.get(row, epoch) >= epoch):
        passed.add(row)
        rows.append(row)
    if len(rows) < count:
      epoch, position = epoch + 1, 0
  return rows, Cursor(epoch, position)
