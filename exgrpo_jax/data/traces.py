"""Reads experience from elsewhere: traces of another model, in a jsonl or parquet file.

A row has
  question     what was asked: text or chat messages; verl's `prompt` will do
  response     what was written: text or chat messages; LUFFY's `target` will do
  tokens       instead of a response, or beside it: its token ids, which then count
  logp         optional: the log-probability of each token under the policy that wrote it, in nats
  correctness  optional: the share of its attempts at the question that were right
"""

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.data import row_files
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
    return self.path.endswith(row_files.LINES_OR_PARQUET)


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
  """The last user message, by which a trace finds its question."""
  return next((m.content.strip() for m in reversed(messages) if m.role == 'user'), '')


def check_columns(path: str) -> None:
  """InputError where there is no such file, or it lacks a column; reads a few rows at most."""
  if next(_rows(path), None) is None:
    raise InputError(f'{path}: the file holds no trace; at least one is needed.')


def read(path: str) -> Iterator[Trace]:
  """The traces of a jsonl or parquet file.

  Raises:
    InputError: there is no such file, it is damaged, or a row cannot be used.
  """
  for place, values in _rows(path):
    yield _trace(place, values)


def _rows(path: str) -> row_files.Rows:
  if not epath.Path(path).expanduser().is_file():
    raise InputError(
      f'config.experience.path={path}: there is no such file; it must be a .jsonl or .parquet file '
      "of responses, or another run's workdir."
    )
  file, unread = row_files.opened(path, keep_spelling=False), []
  if path.endswith('.parquet'):  # every row has the same columns
    _check_names(path, file.columns())
    unread = set(file.columns()) - {*_COLUMNS}
  for place, values in file.rows(unread):
    _check_names(place, list(values))
    yield place, values


def _check_names(place: str, names: Sequence[str]) -> None:
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
  if isinstance(value, list):
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
    array = np.array(value if isinstance(value, list) else None)
  except ValueError:  # lists of different lengths in it
    array = np.array(None)
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iuf':
    raise InputError(
      f'{place}: {name} is {reprlib.repr(value)}; it must be a list of numbers, one for each token.'
    )
  return array


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
