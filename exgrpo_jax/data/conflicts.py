"""Questions that a data set asks more than once with different answers: none of these is sure."""

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.grading import verifier

REASON = 'another answer to the same question elsewhere'


class Answers:
  """The answers to the questions of a data set, which is added row by row.

  Answers that differ as text may still be the same to the verifier: 1/2 and 0.5.
  """

  def __init__(self) -> None:
    self.asked: list[bytes] = []  # by each row: `key`
    self.conflicting: dict[bytes, str] = {}  # key -> the places and the text of two answers
    self._first: dict[bytes, tuple[str, str]] = {}  # key -> an answer, and its place

  def add(
    self, place: str, messages: Sequence[Mapping[str, Any]], answer: str, kind: str = 'math'
  ) -> None:
    """Add a row: where it is, what it asks, its answer, and how answers to it are compared."""
    asked = key(messages)
    self.asked.append(asked)
    first, first_place = self._first.setdefault(asked, (answer, place))
    if asked not in self.conflicting and not _same(first, answer, kind):
      self.conflicting[asked] = (
        f'{first_place} ({reprlib.repr(first)}) and {place} ({reprlib.repr(answer)})'
      )

  def conflicting_rows(self) -> list[int]:
    """The numbers of the rows whose question has another answer elsewhere."""
    return [row for row, asked in enumerate(self.asked) if asked in self.conflicting]


def key(messages: Sequence[Mapping[str, Any]]) -> bytes:
  """A hash of what is asked: the texts themselves of a large data set take much memory."""
  return hashlib.sha256(repr(messages).encode()).digest()[:16]


def _same(first: str, second: str, kind: str) -> bool:
  return first.strip() == second.strip() or any(
    verifier.compare(given, answer, kind) == 'correct'
    for given, answer in ((first, second), (second, first))
  )
