"""Questions that a data set asks more than once with different answers: none of these is sure."""

import hashlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence

from exgrpo_jax.data.records import Uncheckable
from exgrpo_jax.data.store import Record
from exgrpo_jax.grading import verifier

REASON = 'another answer to the same question elsewhere'


def find(rows: Iterator[tuple[str, Record | Uncheckable]]) -> dict[bytes, str]:
  """The questions whose answers differ, by `key`, with the places and the text of two answers.

  Answers that differ as text may still be the same to the verifier: 1/2 and 0.5.

  Args:
    rows: the place and the record of each row of a data set.
  """
  answers: dict[bytes, tuple[str, str]] = {}  # the first of each question, and its place
  found: dict[bytes, str] = {}
  for place, record in rows:
    if isinstance(record, Uncheckable):
      continue
    asked, answer = key(record['messages']), record['answer']
    first, first_place = answers.setdefault(asked, (answer, place))
    if asked not in found and not _same(first, answer, record['kind']):
      found[asked] = f'{first_place} ({reprlib.repr(first)}) and {place} ({reprlib.repr(answer)})'
  return found


def key(messages: Sequence[Mapping[str, str]]) -> bytes:
  """A hash of what is asked: the texts themselves of a large data set take much memory."""
  return hashlib.sha256(repr(messages).encode()).digest()[:16]


def _same(first: str, second: str, kind: str) -> bool:
  return first.strip() == second.strip() or any(
    verifier.compare(given, answer, kind) == 'correct'
    for given, answer in ((first, second), (second, first))
  )
