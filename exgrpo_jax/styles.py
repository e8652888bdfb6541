r"""How correctness spreads over questions, and which styles of solution are right and sure.

python -m exgrpo_jax.evaluate --checkpoint=/tmp/chains --data=chains:test --samples=8 \
    --temperature=1
python -m exgrpo_jax.styles /tmp/chains/evaluation/step_000100_chains_test_temperature_1_….jsonl

Reads the records of evaluations with several samples. For each file: how many questions have 0, 1,
… K right responses; how often each style occurs and is right, where the task knows styles; and the
mean token entropy of right responses with valid steps, of right ones with invalid steps and of
wrong ones, by the right responses of their question, where the task can check steps. Entropies have
1.96 standard errors to either side and a count; errors take responses as independent, which those
to one question are not quite.
"""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from exgrpo_jax import cli
from exgrpo_jax.errors import InputError

_FIELDS = ('correct', 'entropies')
_VALIDITY = ('right, valid steps', 'right, invalid steps', 'wrong')  # kinds of responses


class Responses(NamedTuple):
  """The responses of an evaluation: Q questions, K samples."""

  correct_QK: np.ndarray  # bool
  entropy_QK: np.ndarray  # nats, mean over tokens
  valid_QK: np.ndarray | None  # bool, whether all steps are right; None where that is not known
  style_QK: np.ndarray | None  # str; None where the task knows no styles


def define_flags() -> None:
  """None but those of every command."""


def main(args: cli.Args, *files: str) -> None:
  """Prints what is known of each file."""
  del args
  for file in files:
    print('\n'.join([file, *describe(read(file))]), flush=True)


def read(file: str) -> Responses:
  """The responses of an evaluation's records; InputError where it holds none that can be used."""
  try:
    lines = pathlib.Path(file).read_text(encoding='utf-8').splitlines()
    records = [json.loads(line) for line in lines]
    columns = {
      name: np.array([record[name] for record in records])
      for name in (*_FIELDS, 'valid_steps', 'styles')
      if records and name in records[0]
    }
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise InputError(f'{file} cannot be read as the records of an evaluation: {error}.') from None
  missing = [name for name in _FIELDS if name not in columns]
  if missing or not all(column.ndim == 2 and column.size for column in columns.values()):
    raise InputError(
      f'{file} has no {" and no ".join(map(repr, missing or _FIELDS))}, a list in each line; it '
      'must be the records of an evaluation, as evaluate and train write them.'
    )
  correct_QK, entropy_QK = (columns[name] for name in _FIELDS)
  if len({column.shape for column in columns.values()}) > 1:
    raise InputError(f'{file}: {", ".join(columns)} must have a value for each response.')
  if correct_QK.dtype != bool or entropy_QK.dtype.kind not in 'fi':
    raise InputError(f"{file}: 'correct' must be true or false, and 'entropies' numbers.")
  return Responses(correct_QK, entropy_QK, columns.get('valid_steps'), columns.get('styles'))


def describe(responses: Responses) -> Iterator[str]:
  """The lines of text that say it."""
  num_questions, samples = responses.correct_QK.shape
  yield f'{num_questions} questions, {samples} responses to each'
  yield from _lines(['right', 'questions', 'share'], _spread(responses.correct_QK))
  if responses.style_QK is not None:
    header = ['style', 'share', 'right', 'entropy', 'of right', 'of wrong']
    yield from _lines(header, _styles(responses, responses.style_QK))
  if responses.valid_QK is not None:
    header = ['right', *_VALIDITY]
    yield from _lines(header, _entropies(responses, responses.valid_QK))


def _spread(correct_QK: np.ndarray) -> Iterator[list[str]]:
  """Right responses, questions with so many, their share."""
  counts = np.bincount(correct_QK.sum(axis=1), minlength=correct_QK.shape[1] + 1)
  for right, count in enumerate(counts.tolist()):
    yield [str(right), str(count), f'{count / len(correct_QK):.3f}']


def _styles(responses: Responses, style_QK: np.ndarray) -> Iterator[list[str]]:
  """Each style, its share, the share that is right, and entropies."""
  for style in np.unique(style_QK):
    is_style_QK = style_QK == style
    right_QK = is_style_QK & responses.correct_QK
    yield [
      style,
      f'{is_style_QK.mean():.3f}',
      f'{responses.correct_QK[is_style_QK].mean():.3f}',
      *(
        _mean(responses.entropy_QK[chosen_QK])
        for chosen_QK in (is_style_QK, right_QK, is_style_QK & ~responses.correct_QK)
      ),
    ]


def _entropies(responses: Responses, valid_QK: np.ndarray) -> Iterator[list[str]]:
  """Right responses of the question, and the mean entropy of each of _VALIDITY among them."""
  correct_QK = responses.correct_QK
  right_Q1 = correct_QK.sum(axis=1, keepdims=True)
  kinds = (correct_QK & valid_QK, correct_QK & ~valid_QK, ~correct_QK)
  for right in range(correct_QK.shape[1] + 1):
    yield [str(right), *(_mean(responses.entropy_QK[kind & (right_Q1 == right)]) for kind in kinds)]
  yield ['all', *(_mean(responses.entropy_QK[kind]) for kind in kinds)]


def _mean(entropies: np.ndarray) -> str:
  """With 1.96 standard errors and the count; '-' of fewer than two."""
  if entropies.size < 2:
    return '-'
  half = 1.96 * np.std(entropies, ddof=1) / np.sqrt(entropies.size)
  return f'{entropies.mean():.3f} ± {half:.3f} ({entropies.size})'


def _lines(header: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
  """A table as text, with columns of equal width."""
  table = [list(header), *rows]
  widths = [max(map(len, column)) for column in zip(*table)]
  for row in table:
    yield '  ' + '  '.join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()


if __name__ == '__main__':
  cli.run(main, define_flags, several='FILE')
