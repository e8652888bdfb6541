"""Responses and stored successes token by token, as the page shows them."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from exgrpo_jax.datatypes import Trajectory
from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.page import charts

Pieces = Callable[[Sequence[int]], list[str]]  # token ids -> the text of each
_DIGITS = 3  # of entropies and log-probabilities, in nats


class Group(NamedTuple):
  """A question's responses in a step."""

  step: int
  group: int


@dataclasses.dataclass(frozen=True)
class Size:
  """A recorded group before its tokens are read."""

  question: int
  tokens: int  # of all its responses


def sizes(workdir: pathlib.Path) -> dict[Group, Size]:
  """All groups whose tokens are recorded, in the order of steps."""
  found: dict[Group, Size] = {}
  for path in step_records.files(workdir, 'tokens'):
    table = step_records.read_file(path, 'tokens')
    lengths = table['tokens'].combine_chunks().value_lengths().to_pylist()
    keys = zip(*(table[name].to_pylist() for name in ('step', 'group', 'question')))
    for (step, group, question), length in zip(keys, lengths):
      key = Group(step, group)
      before = found[key].tokens if key in found else 0
      found[key] = Size(question, before + length)
  return found


def choose(found: Mapping[Group, Size], max_tokens: int) -> set[Group]:
  """The groups that are shown: whole stories of the questions that were visited most often.

  Questions are taken one after the other as long as all of their groups fit.
  """
  by_question: dict[int, list[Group]] = {}
  for key, size in found.items():
    by_question.setdefault(size.question, []).append(key)
  chosen: set[Group] = set()
  room = max_tokens
  for groups in sorted(by_question.values(), key=len, reverse=True):
    tokens = sum(found[key].tokens for key in groups)
    if tokens <= room:
      chosen.update(groups)
      room -= tokens
  return chosen


def read(workdir: pathlib.Path, wanted: Callable[[Group], bool]) -> Iterator[dict[str, Any]]:
  """The recorded responses of the wanted groups, one by one; a file at a time is in memory."""
  for path in step_records.files(workdir, 'tokens'):
    table = step_records.read_file(path, 'tokens')
    keys = map(Group, table['step'].to_pylist(), table['group'].to_pylist())
    yield from table.filter(pa.array([wanted(key) for key in keys], pa.bool_())).to_pylist()


def read_by_step(workdir: pathlib.Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
  """All recorded responses of each step; a file at a time is in memory."""
  for path in step_records.files(workdir, 'tokens'):
    table = step_records.read_file(path, 'tokens')
    for step in np.unique(table['step'].to_numpy()).tolist():
      yield step, _of_step(table, step)


def read_step(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """All recorded responses of one step, which are in one file, named after it or an earlier one."""
  last = step_records.path_of(workdir, 'tokens', step)
  for path in reversed(step_records.files(workdir, 'tokens')):
    if path <= last and (found := _of_step(step_records.read_file(path, 'tokens'), step)):
      return found
  return []


def _of_step(table: pa.Table, step: int) -> list[dict[str, Any]]:
  return table.filter(pa.array(table['step'].to_numpy() == step)).to_pylist()


def describe(responses: Iterable[dict[str, Any]], pieces: Pieces) -> dict[str, Any]:
  """Recorded responses by 'step/group', each with its sample, pieces of text and their values."""
  vocabulary = _Vocabulary(pieces)
  groups: dict[str, list[dict[str, Any]]] = {}
  for response in responses:
    members = groups.setdefault(f'{response["step"]}/{response["group"]}', [])
    members.append(
      {
        'sample': response['sample'],
        'pieces': vocabulary.numbers(response['tokens']),
        'entropy': _rounded(response['entropy']),
        'logp': _rounded(response['logp']),
        'past': response['past_logp'] and _rounded(response['past_logp']),
        'turns': response['turns'] and [list(turn.values()) for turn in response['turns']],
      }
    )
  return {'groups': groups, 'pieces': vocabulary.words()}


def read_stored(
  workdir: str, rows: Sequence[int], max_tokens: int
) -> dict[int, tuple[Trajectory, ...]] | None:
  """Trajectories of these questions in the newest checkpoint's buffer, oldest first.

  Questions are taken in order as long as their tokens fit. None where no checkpoint can be read;
  a run that goes on may delete one meanwhile, so older ones are tried too.
  """
  for step in reversed(checkpoint.steps(workdir)):
    try:
      return buffer_files.read_some(checkpoint.buffer_folder(workdir, step), rows, max_tokens)
    except (OSError, ValueError):
      continue
  return None


def describe_stored(stored: Mapping[int, Sequence[Trajectory]], pieces: Pieces) -> dict[str, Any]:
  """Stored successes by question, oldest first."""
  vocabulary = _Vocabulary(pieces)
  questions = {
    str(row): [
      {
        'step': trajectory.step,
        'times': trajectory.times_replayed,
        'pieces': vocabulary.numbers(trajectory.tokens.tolist()),
        'logp': _rounded(trajectory.logp),
        'turns': trajectory.turns or None,
      }
      for trajectory in trajectories
    ]
    for row, trajectories in stored.items()
  }
  return {'questions': questions, 'pieces': vocabulary.words()}


class _Vocabulary:
  """The distinct pieces of some responses, numbered as they come."""

  def __init__(self, pieces: Pieces) -> None:
    self._pieces = pieces
    self._number: dict[str, int] = {}

  def numbers(self, tokens: Sequence[int]) -> list[int]:
    return [self._number.setdefault(text, len(self._number)) for text in self._pieces(tokens)]

  def words(self) -> list[str]:
    return list(self._number)


def _rounded(values: Sequence[float] | np.ndarray) -> list[float | None]:
  return charts.rounded(values, _DIGITS)
