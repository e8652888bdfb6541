"""Step records of an invented run, see step_records.py, with values as a language model has them.

Most tokens are nearly certain, and a tail is not; lengths are lognormal; wrong responses are longer
and less certain than right ones.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from exgrpo_jax.performance.synthetic.history import Size, Visits
from exgrpo_jax.performance.synthetic.prose import Text
from exgrpo_jax.reporting import step_records

_STEPS_OF_FILE = 10
_SPREAD = 0.894  # of the logarithm of lengths: the 99th percentile is 8 times the median
_QUESTION = 250  # characters, about
_ANSWERS = np.array(
  [f'{n}' for n in range(2000)]
  + [rf'\frac{{{a}}}{{{b}}}' for a in range(1, 30) for b in range(2, 30)]
  + [rf'{a}\sqrt{{{b}}}' for a in range(2, 30) for b in range(2, 20)],
  object,
)
_FAILURES = np.array(['wrong', 'no answer', 'timed out'], object)
_SHARES = (0.9, 0.095, 0.005)  # of what is not correct


@dataclasses.dataclass(frozen=True)
class Data:
  """What a run was trained on."""

  questions: np.ndarray  # [rows] of text
  answers: np.ndarray  # the same


def make_data(size: Size, text: Text, rng: np.random.Generator) -> Data:
  """Questions of about 250 characters, and their answers."""
  lengths = np.maximum(40, rng.normal(_QUESTION, _QUESTION / 3, size.rows)).astype(int)
  texts = text.cut(rng.random(size.rows), lengths)
  return Data(np.array(texts, object), rng.choice(_ANSWERS, size.rows))


def write(
  workdir: pathlib.Path,
  size: Size,
  visits: Visits,
  data: Data,
  text: Text,
  rng: np.random.Generator,
) -> None:
  """Writes the folder records/ of a run with these visits."""
  (workdir / step_records.FOLDER).mkdir()
  for first in range(1, size.steps + 1, _STEPS_OF_FILE):
    part = visits.of_steps(first, first + _STEPS_OF_FILE - 1)
    responses = _responses(size, part, data, rng)
    tables = {
      'responses': responses,
      'questions': _questions(size, part, data),
      'tokens': _tokens(size, part, responses, text, rng),
    }
    for name, columns in tables.items():
      table = pa.table(dict(columns), schema=step_records.SCHEMAS[name])
      step_records.write_file(step_records.path_of(workdir, name, first), table)


def lengths(
  size: Size, shape: int | tuple[int, ...], rng: np.random.Generator, scale: float = 1.0
) -> np.ndarray:
  """Tokens of responses; what would be longer than the limit is cut there."""
  drawn = size.median * scale * np.exp(rng.normal(0, _SPREAD, shape))
  return np.clip(drawn, 2, size.longest).astype(int)


def token_values(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
  """Log-probability and entropy of so many tokens, float32: mostly near 0, 1 in 20 above 0.6."""
  spread = rng.standard_normal(count, np.float32)
  entropy = np.minimum(np.exp(np.float32(2.5) * spread - np.float32(4.5)), np.float32(5))
  return -entropy * rng.standard_exponential(count, np.float32), entropy


def _questions(size: Size, visits: Visits, data: Data) -> Mapping[str, Any]:
  return {
    'step': visits.step,
    'question': visits.question,
    'group': visits.group,
    'text': data.questions[visits.question],
    'answer': data.answers[visits.question],
    'is_replay': visits.is_replay,
    'correctness': visits.successes / size.samples,
    'bucket_before': _known(visits.before, visits.before > 0, pa.int32()),
    'bucket_after': _known(visits.after, visits.after > 0, pa.int32()),
    'retired_step': _known(visits.step, visits.retires, pa.int32()),
  }


def _responses(
  size: Size, visits: Visits, data: Data, rng: np.random.Generator
) -> Mapping[str, Any]:
  """Of each visit K rows, the replayed one last."""
  shape = (len(visits.step), size.samples)
  is_replay = np.zeros(shape, bool)
  is_replay[:, -1] = visits.is_replay
  place = rng.random(shape)
  place[is_replay] = -1  # always among the successes
  correct = place.argsort(1).argsort(1) < visits.successes[:, None]
  length = np.where(correct, lengths(size, shape, rng), lengths(size, shape, rng, 1.3))
  outcome = np.where(correct, 'correct', rng.choice(_FAILURES, shape, p=_SHARES))
  truth = np.broadcast_to(data.answers[visits.question][:, None], shape)
  answer = np.where(correct, truth, rng.choice(_ANSWERS, shape))
  has_answer = ~is_replay & np.isin(outcome, ['correct', 'wrong'])
  entropy = np.where(correct, 0.25, 0.35) * np.exp(rng.normal(0, 0.4, shape))
  columns = {
    'step': _repeated(visits.step, shape),
    'question': _repeated(visits.question, shape),
    'group': _repeated(visits.group, shape),
    'sample': np.tile(np.arange(size.samples), shape[0]),
    'is_replay': is_replay.ravel(),
    'reward': correct.ravel().astype(float),
    'components': pa.nulls(length.size, step_records.RESPONSES.field('components').type),
    'outcome': outcome.ravel(),
    'reason': _known(np.full(shape, 'no result within 5 s', object), outcome == 'timed out'),
    'answer': _known(answer, has_answer),
    'length': length.ravel(),
    'truncated': (length == size.longest).ravel(),
    'entropy': entropy.ravel(),
    'probability': np.exp(-0.8 * entropy).ravel(),
    'advantage': (correct - visits.successes[:, None] / size.samples).ravel(),
    'policy_step': np.where(is_replay, visits.written[:, None], visits.step[:, None]).ravel(),
    'has_code_block': (rng.random(shape) < 0.05).ravel(),
    'valid_steps': pa.nulls(length.size, pa.bool_()),
  }
  return {**columns, **_replays(visits, is_replay.ravel(), entropy.ravel(), rng)}


def _replays(
  visits: Visits, is_replay: np.ndarray, entropy: np.ndarray, rng: np.random.Generator
) -> Mapping[str, Any]:
  """The columns that replayed responses alone have; ratios spread with their age."""
  rows, count = len(is_replay), int(is_replay.sum())
  age = (visits.step - visits.written)[visits.is_replay]
  spread = 0.02 + 0.002 * age
  ratio = np.exp(rng.normal(0, spread / 10))
  values = {
    'ratio_mean': ratio,
    'ratio_max': ratio * np.exp(4 * spread * (1 + rng.random(count))),
    'ratio_variance': spread**2 * (1 + rng.random(count)),
    'shaped_mean': ratio / (ratio + 0.1),
    'shaped_variance': (spread / 20) ** 2 * (1 + rng.random(count)),
    'times_replayed': visits.times[visits.is_replay].astype(float),
  }
  columns: dict[str, Any] = {}
  for name, known in values.items():
    whole = np.zeros(rows)
    whole[is_replay] = known
    kind = pa.int32() if name == 'times_replayed' else pa.float32()
    columns[name] = _known(whole, is_replay, kind)
  candidates = rng.integers(1, 5, count)  # the lowest entropy, that of the chosen one, and others
  offered = np.repeat(entropy[is_replay], candidates) * (1 + rng.random(candidates.sum()))
  offered[np.cumsum(candidates) - 1] = entropy[is_replay]
  columns['candidate_entropies'] = _lists(offered, candidates, is_replay)
  return columns


def _tokens(
  size: Size,
  visits: Visits,
  responses: Mapping[str, Any],
  text: Text,
  rng: np.random.Generator,
) -> Mapping[str, Any]:
  """Of the recorded visits every response token by token."""
  chosen = np.repeat(visits.is_recorded, size.samples)
  length, is_replay = responses['length'][chosen], responses['is_replay'][chosen]
  tokens = text.cut_tokens(rng.random(len(length)), length)
  ends = np.cumsum(length)
  tokens[(ends - 1)[~responses['truncated'][chosen]]] = text.eos
  logp, entropy = token_values(len(tokens), rng)
  past = logp[np.repeat(is_replay, length)]
  past = np.minimum(past + past * rng.normal(0, 0.1, len(past)).astype(np.float32), 0)
  everywhere = np.ones(len(length), bool)
  return {
    **{name: responses[name][chosen] for name in ('step', 'question', 'group', 'sample')},
    'tokens': _lists(tokens, length, everywhere),
    'logp': _lists(logp, length, everywhere),
    'entropy': _lists(entropy, length, everywhere),
    'past_logp': _lists(past, length[is_replay], is_replay),
  }


def _repeated(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
  return np.repeat(values, shape[1])


def _known(values: np.ndarray, known: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
  """A column of the values that are known, null elsewhere."""
  return pa.array(values.ravel(), kind or pa.string(), mask=~known.ravel())


def _lists(values: np.ndarray, counts: np.ndarray, known: np.ndarray) -> pa.Array:
  """A column of lists in the rows `known`, of so many values each, null elsewhere."""
  of_row = np.zeros(len(known), int)
  of_row[known] = counts
  offsets = np.concatenate([[0], np.cumsum(of_row)]).astype(np.int32)
  kind = pa.int32() if np.issubdtype(values.dtype, np.integer) else pa.float32()
  return pa.ListArray.from_arrays(
    pa.array(offsets), pa.array(values, kind), mask=pa.array(~known, pa.bool_())
  )
