"""The embedded procedural tasks, as TFDS builders: data that needs no download.

Arithmetic asks for a sum such as '48+9+3+7'. Its written solution starts at the first
term and adds the digits in a random order, '48+3=51 +9=60 +7=67 \\boxed{67}', so a
question has many right solutions and a model has something to choose between. The
first term makes the answers many, so that a guess earns next to nothing; the rest are
digits, so that a model of half a million parameters can learn to pick them.
"""

import collections
import hashlib
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds


class Split(NamedTuple):
  """How many sums, with how many digits to add (both ends included)."""

  questions: int
  min_digits: int
  max_digits: int
  is_high: bool  # every digit is at least ARITHMETIC_HIGH; elsewhere some digit is below
  source: str


ARITHMETIC_SEED = 2510_02245
ARITHMETIC_START_RANGE = (10, 99)  # the first term; both ends included, uniform
ARITHMETIC_DIGIT_RANGE = (1, 9)  # the others
ARITHMETIC_HIGH = 6
ARITHMETIC_SPLITS = {
  'train': Split(24_000, 3, 5, False, 'arithmetic'),
  'validation': Split(2_000, 3, 5, False, 'arithmetic'),
  'test': Split(2_000, 3, 5, False, 'arithmetic'),
  # A kind that training has none of, and harder: the most steps, nearly each with a
  # carry, and among four different digits some that must be told apart by their number.
  'ood': Split(2_000, 5, 5, True, 'arithmetic_ood'),
}

# Not \d, which takes the digits of every script; int() refuses numbers of 4,301 digits.
_NUMBER = '(0|[1-9][0-9]{0,17})'
_SUM = re.compile(rf'{_NUMBER}(\+{_NUMBER})+')
_STEP = re.compile(rf'(?P<start>{_NUMBER})?\+(?P<term>{_NUMBER})=(?P<total>{_NUMBER})')
_BOX = re.compile(rf'\\boxed\{{{_NUMBER}\}}')


def record_features() -> tfds.features.FeaturesDict:
  """What a prepared question is on disk: the fields of types.Question but its row."""
  text = tfds.features.Text()
  return tfds.features.FeaturesDict(
    {
      'messages': tfds.features.Sequence({'role': text, 'content': text}),
      'answer': text,
      'kind': text,
      'solution': text,
      'source': text,
    }
  )


class ArithmeticBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Sums of small positive integers, in the splits of ARITHMETIC_SPLITS."""

  name = 'arithmetic'
  VERSION = tfds.core.Version('1.1.0')
  # The configuration is named after this file's text, so that a tuned constant is
  # prepared anew instead of being hidden by what lies on disk.
  BUILDER_CONFIGS = [
    tfds.core.BuilderConfig(
      name=hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:16]
    )
  ]

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self, features=record_features(), description=self.__doc__, disable_shuffling=True
    )  # a question's row is its place in the generator

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing to download
    return {name: self._generate_examples(rows) for name, rows in arithmetic_rows().items()}

  def _generate_examples(self, rows):
    return enumerate(rows)


def arithmetic_rows() -> dict[str, list[dict]]:
  """The records of every split, the same on every call.

  No two questions, in one split or in two, have the same multiset of terms.
  """
  rng = np.random.default_rng(ARITHMETIC_SEED)
  seen = set()
  return {
    name: [_arithmetic_row(rng, split, seen) for _ in range(split.questions)]
    for name, split in ARITHMETIC_SPLITS.items()
  }


def _arithmetic_row(rng, split, seen):
  start, *digits = _unseen_terms(rng, split, seen)
  terms = [start, *digits]
  seen.add(tuple(sorted(terms)))
  return {
    'messages': [{'role': 'user', 'content': '+'.join(map(str, terms))}],
    'answer': str(sum(terms)),
    'solution': written_sum([start, *rng.permutation(digits).tolist()]),
    'kind': 'math',
    'source': split.source,
  }


def _unseen_terms(rng, split: Split, seen: Set[tuple[int, ...]]) -> list[int]:
  while True:
    count = rng.integers(split.min_digits, split.max_digits, endpoint=True)
    start = int(rng.integers(*ARITHMETIC_START_RANGE, endpoint=True))
    lowest, highest = ARITHMETIC_DIGIT_RANGE
    digits = rng.integers(
      ARITHMETIC_HIGH if split.is_high else lowest, highest, size=count, endpoint=True
    ).tolist()
    terms = [start, *digits]
    if (min(digits) >= ARITHMETIC_HIGH) == split.is_high and tuple(sorted(terms)) not in seen:
      return terms


def written_sum(terms: Sequence[int]) -> str:
  """The running totals of `terms` in their order, and the box.

  [48, 3, 9] -> '48+3=51 +9=60 \\boxed{60}': a total is written once.
  """
  totals = list(itertools.accumulate(terms))[1:]
  steps = [f'+{term}={total}' for term, total in zip(terms[1:], totals)]
  return f'{terms[0]}{" ".join(steps)} \\boxed{{{totals[-1]}}}'


def valid_steps(question_text: str, response: str) -> bool:
  """Whether `response` is a proof of the sum: exact, not only right at the end.

  The first step adds two of the terms, every other one more term to the running
  total; every addition is true, every term of the question is used exactly once,
  and the box states the last total. Words beside the steps, a second box or a number
  with leading zeros make it invalid.

  Args:
    question_text: terms joined by '+', such as '48+9+3'; anything else has no valid steps.
    response: steps and box between white space; any order of the terms.
  """
  question = question_text.strip()
  if not _SUM.fullmatch(question):
    return False
  terms = collections.Counter(int(term) for term in question.split('+'))
  *written, last = response.split() or ['']
  steps = [_STEP.fullmatch(step) for step in written]
  box = _BOX.fullmatch(last)
  if not (steps and all(steps) and box):
    return False
  start, *later = [step['start'] for step in steps]
  if start is None or any(later):
    return False
  added = [int(step['term']) for step in steps]
  totals = [int(step['total']) for step in steps]
  true = [int(start), *itertools.accumulate(added, initial=int(start))][2:]
  return (
    totals == true
    and collections.Counter([int(start), *added]) == terms
    and int(box[1]) == totals[-1]
  )


def guess_rate(answers: Sequence[str]) -> float:
  """The share of `answers`, in [0, 1], that the best constant guess gets right.

  What a model can earn without reading the question. ValueError if there are none.
  """
  return max(collections.Counter(answers).values()) / len(answers)


# What other files find tasks by: the name in a data spec, and a question's source.
TASKS: Mapping[str, type[tfds.core.GeneratorBasedBuilder]] = {'arithmetic': ArithmeticBuilder}
STEP_CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
  'arithmetic': valid_steps,
  'arithmetic_ood': valid_steps,
}
