"""Reads experience from elsewhere: traces of another model, in a jsonl or parquet file.

A row has
  question     what was asked: text or chat messages; verl's `prompt` will do
  response     what was written: text or chat messages; LUFFY's `target` will do
  tokens       instead of a response, or beside it: its token ids, which then count
  logp         optional: the log-probability of each token under the policy that wrote it, in nats
  correctness  optional: the share of its attempts at the question that were right
"""

import dataclasses
import io
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import columns, json_lines, row_files, spec_names
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

_QUESTION, _RESPONSE = ('question', 'prompt'), ('response', 'target')  # the first that is there
_TOKENS, _LOGP, _CORRECTNESS = 'tokens', 'logp', 'correctness'
_COLUMNS = (*_QUESTION, *_RESPONSE, _TOKENS, _LOGP, _CORRECTNESS)
_NEEDED = (_QUESTION, (*_RESPONSE, _TOKENS))  # at least one of each


@dataclasses.dataclass(frozen=True)
class Config:
  """Experience from elsewhere, put into the replay buffer before the first step."""

  path: str = setting(
    '',
    None,
    "a .jsonl or .parquet file of responses, or another run's workdir, whose buffer is taken; '' "
    'starts with an empty buffer',
  )
  missing_logprobs: str = setting(
    'current',
    ('current', 'zero'),
    'log-probabilities where there are none: those of the policy at the start, so that the '
    'importance ratio begins at 1; or 0, so that it is the probability of the token, as in LUFFY',
  )

  @property
  def is_file(self) -> bool:
    """Whether `path` names a file, not a workdir."""
    return self.path.endswith(spec_names.LINES_OR_PARQUET)


@dataclasses.dataclass(frozen=True)
class Trace:
  """A response to a question, from elsewhere."""

  place: str  # file and line, for error messages
  question: str  # see `asked`
  response: str | None  # None where there are only tokens
  tokens: np.ndarray | None  # [T] integers of any kind; None where the response is to be tokenised
  logp: np.ndarray | None  # [T] float32, nats; None where unknown
  correctness: float | None  # of the question, in (0, 1]; None where unknown
  row: int | None = None  # of the question, where it is a run's; tells copies of a text apart


def asked(messages: Sequence[Message]) -> str:
  """What a question asks, by which traces find it: the last user message."""
  return next((m.content.strip() for m in reversed(messages) if m.role == 'user'), '')


def check_columns(path: str) -> None:
  """InputError where there is no such file, or it lacks a column; reads no more than a row."""
  file = _existing(path)
  if file.suffix == '.parquet':
    _check_names(path, _schema(path, file.read_bytes()))
    return
  with file.open('rb') as lines:
    if next(_jsonl_rows(path, lines), None) is None:
      raise InputError(f'{path}: the file holds no trace; at least one is needed.')


def read(path: str) -> Iterator[Trace]:
  """The traces of a jsonl or parquet file.

  Raises:
    InputError: there is no such file, it is damaged, or a row cannot be used.
  """
  file = _existing(path)
  content = file.read_bytes()
  is_parquet = file.suffix == '.parquet'
  rows = _parquet_rows(path, content) if is_parquet else _jsonl_rows(path, io.BytesIO(content))
  for place, values in rows:
    yield _trace(place, values)


def _existing(path: str) -> epath.Path:
  file = epath.Path(path).expanduser()
  if not file.is_file():
    raise InputError(
      f'config.experience.path={path}: there is no such file; it must be a .jsonl or .parquet file '
      "of responses, or another run's workdir."
    )
  return file


# ---- Files ----


def _jsonl_rows(path: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Mapping[str, Any]]]:
  for place, values in json_lines.objects(lines, path, keep_spelling=False):
    _check_names(place, list(values))
    yield place, values


def _parquet_rows(path: str, content: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
  names = _schema(path, content)
  _check_names(path, names)
  wanted = [name for name in names if name in _COLUMNS]
  number = 0
  try:
    batches = pq.ParquetFile(pa.BufferReader(content)).iter_batches(1024, columns=wanted)
    for batch in batches:
      for row in range(batch.num_rows):
        yield (
          f'{path}: row {number}',
          {name: _value(batch.column(name)[row]) for name in batch.schema.names},
        )
        number += 1
  except UnicodeDecodeError as error:
    raise row_files.not_utf8(f'{path}: row {number}', error) from error
  except (pa.ArrowInvalid, OSError) as error:
    raise row_files.damaged_parquet(path, error) from error


def _value(scalar: pa.Scalar) -> Any:
  """A parquet value; numbers of a list as an array, for there may be thousands."""
  is_list = isinstance(scalar, pa.ListScalar) and scalar.is_valid
  if is_list and not pa.types.is_nested(scalar.type.value_type):
    return scalar.values.to_numpy(zero_copy_only=False)
  return scalar.as_py()


def _schema(path: str, content: bytes) -> list[str]:
  try:
    return pq.read_schema(pa.BufferReader(content)).names
  except (pa.ArrowInvalid, OSError) as error:
    raise row_files.damaged_parquet(path, error) from error


def _check_names(place: str, names: Sequence[str]) -> None:
  columns.check_distinct(names, place)
  for choices in _NEEDED:
    if not set(choices) & set(names):
      raise InputError(
        f'{place}: no {" or ".join(map(repr, choices))} (has: {", ".join(map(repr, names))}); a '
        'trace needs a question and a response.'
      )


# ---- One row ----


def _trace(place: str, values: Mapping[str, Any]) -> Trace:
  tokens = _numbers(values.get(_TOKENS), _TOKENS, place)
  if tokens is not None and not np.issubdtype(tokens.dtype, np.integer):
    raise InputError(f'{place}: {_TOKENS} must be whole numbers: the ids of tokens.')
  logp = _numbers(values.get(_LOGP), _LOGP, place)
  if logp is not None and not np.all(logp <= 0):  # nor NaN
    raise InputError(
      f'{place}: {_LOGP} must be at most 0 everywhere, not {logp[~(logp <= 0)][0]}: it is the '
      'logarithm of a probability, in nats.'
    )
  correctness = values.get(_CORRECTNESS)
  if correctness is not None and not (_is_number(correctness) and 0 < correctness < 1):
    raise InputError(
      f'{place}: {_CORRECTNESS} is {reprlib.repr(correctness)}; it must lie in (0, 1): the share '
      'of attempts at the question that were right, for replay wants neither all nor none.'
    )
  return Trace(
    place=place,
    question=_text(values, _QUESTION, 'user', place),
    response=_text(values, _RESPONSE, 'assistant', place) if tokens is None else None,
    tokens=tokens,
    logp=None if logp is None else logp.astype(np.float32),
    correctness=correctness,
  )


def _text(values: Mapping[str, Any], names: Sequence[str], role: str, place: str) -> str:
  """The text of the first of these columns that is there; of chat messages the last of `role`."""
  name = next((name for name in names if values.get(name) is not None), names[0])
  value = found = values.get(name)
  if isinstance(value, (list, np.ndarray)):
    contents = [
      turn.get('content') for turn in value if isinstance(turn, dict) and turn.get('role') == role
    ]
    found = contents[-1] if contents else None
  if not isinstance(found, str) or not found.strip():
    raise InputError(
      f'{place}: {name} is {reprlib.repr(value)}; it must be non-empty text, or chat messages of '
      f"which the last with the role '{role}' has some."
    )
  try:
    found.encode()
  except UnicodeEncodeError as error:  # JSON allows lone surrogates
    raise InputError(f'{place}: {name} is not valid Unicode ({error}).') from error
  return found.strip() if role == 'user' else found


def _numbers(value: Any, name: str, place: str) -> np.ndarray | None:
  if value is None:
    return None
  try:
    array = np.array(value if isinstance(value, (list, np.ndarray)) else None)
  except ValueError:  # lists of different lengths in it
    array = np.array(None)
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iuf':
    raise InputError(
      f'{place}: {name} is {reprlib.repr(value)}; it must be a list of numbers, one for each token.'
    )
  return array


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
