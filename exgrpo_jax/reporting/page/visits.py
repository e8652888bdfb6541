"""Every visit of a question and every response of a run, as columns that the page filters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from exgrpo_jax.reporting.figures.runs import Recorded
from exgrpo_jax.reporting.page import charts
from exgrpo_jax.reporting.page.columns import flags, known

_MAX_TEXT = 300  # characters of a question that are kept
_MAX_ANSWER = 60  # of an extracted answer
_ENTROPY_DIGITS = 4


def describe(run: Recorded, max_responses: int) -> dict[str, Any]:
  """Columns of questions, visits, responses and replays; nothing where there are no records.

  A visit is a question in a step; its responses are those from 'first' on, and a replay belongs to
  the response of that number. Where there are more than `max_responses`, only every n-th step has
  its responses, and 'every' says which.
  """
  visits, responses = run.questions, run.responses
  if not visits.num_rows:
    return {}
  every = -(-responses.num_rows // max_responses)
  if every > 1:
    kept = np.unique(responses['step'].to_numpy())[::every]
    responses = responses.filter(pa.array(np.isin(responses['step'].to_numpy(), kept)))
  place = _place(visits, responses)
  responses = responses.filter(pa.array(place >= 0))  # of a visit whose row is lost, there is none
  place = place[place >= 0]
  first = np.full(visits.num_rows, -1)
  counts = np.bincount(place, minlength=visits.num_rows)
  with_responses = np.unique(place)
  first[with_responses] = np.searchsorted(place, with_responses)
  return {
    'every': every,
    'visits': _visits(visits) | {'first': first.tolist(), 'responses': counts.tolist()},
    'responses': _responses(responses, _asked(visits, place)),
    'replays': _replays(responses),
    'questions': _questions(visits),
  }


def _place(visits: pa.Table, responses: pa.Table) -> np.ndarray:
  """The visit of each response, both in the order of steps and groups; -1 where it is missing."""

  def key(table: pa.Table) -> np.ndarray:
    return table['step'].to_numpy().astype(np.int64) << 32 | table['group'].to_numpy()

  keys, wanted = key(visits), key(responses)
  found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[found] == wanted, found, -1)


def _visits(visits: pa.Table) -> dict[str, list]:
  columns = ('step', 'question', 'bucket_before', 'bucket_after', 'retired_step')
  return {name: visits[name].to_pylist() for name in columns} | {
    'replayed': flags(visits['is_replay']).astype(int).tolist(),
    'correctness': charts.numbers(visits['correctness'].to_numpy()),
  }


def _responses(responses: pa.Table, asked: Sequence[str | None]) -> dict[str, Any]:
  """An extracted answer that is the question's own is written as true."""
  outcome = responses['outcome'].dictionary_encode().unify_dictionaries().combine_chunks()
  names = outcome.dictionary.to_pylist() if responses.num_rows else []
  answers = _cut(responses['answer'], _MAX_ANSWER)
  return {
    'outcomes': names,
    'outcome': outcome.indices.to_pylist() if responses.num_rows else [],
    'reward': charts.numbers(responses['reward'].to_numpy()),
    'advantage': charts.numbers(responses['advantage'].to_numpy()),
    'length': responses['length'].to_pylist(),
    'truncated': flags(responses['truncated']).astype(int).tolist(),
    'replayed': flags(responses['is_replay']).astype(int).tolist(),
    'entropy': _rounded(responses['entropy']),
    'probability': _rounded(responses['probability']),
    'reason': _reasons(responses),
    'answer': [
      True if own is not None and own == truth else own for own, truth in zip(answers, asked)
    ],
  }


def _reasons(responses: pa.Table) -> dict[str, str]:
  """Why grading failed, by the number of the response, where it did."""
  failed = np.flatnonzero(responses['reason'].is_valid().to_numpy())
  reasons = responses['reason'].take(pa.array(failed)).to_pylist()
  return {str(index): reason for index, reason in zip(failed.tolist(), reasons)}


def _replays(responses: pa.Table) -> dict[str, list]:
  chosen = flags(responses['is_replay'])
  replays = responses.filter(pa.array(chosen))
  names = ('ratio_mean', 'ratio_max', 'shaped_mean', 'shaped_variance')
  numbers = {name: charts.numbers(known(replays[name])) for name in names}
  return numbers | {
    'response': np.flatnonzero(chosen).tolist(),
    'written': replays['policy_step'].to_pylist(),
    'times': replays['times_replayed'].to_pylist(),
    'candidates': [
      None if entropies is None else charts.numbers(entropies)
      for entropies in replays['candidate_entropies'].to_pylist()
    ],
  }


def _questions(visits: pa.Table) -> dict[str, list]:
  """Each question that was visited, once: its row, its text and its answer."""
  rows, index = np.unique(visits['question'].to_numpy(), return_index=True)
  taken = visits.take(pa.array(index))
  return {
    'row': rows.tolist(),
    'text': _cut(taken['text'], _MAX_TEXT),
    'answer': taken['answer'].to_pylist(),
  }


def _asked(visits: pa.Table, place: np.ndarray) -> Sequence[str | None]:
  """The answer to the question of each response."""
  answers = np.array(visits['answer'].to_pylist(), object)
  return answers[place].tolist()


def _cut(column: pa.ChunkedArray, length: int) -> list[str | None]:
  return [text and text[:length] for text in column.to_pylist()]


def _rounded(column: pa.ChunkedArray) -> list[float | None]:
  return charts.numbers(np.round(known(column), _ENTROPY_DIGITS))
