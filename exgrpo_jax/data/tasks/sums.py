r"""Sums of small positive integers, with worked solutions.

A question is a sum such as '48+9+3+7'. Its worked solution starts with the first term and adds the
digits in random order: '48+3=51 +9=60 +7=67 \boxed{67}'. A question therefore has many correct
solutions, which gives the policy something to explore. The first term varies so widely that there
are many possible answers, so guessing earns almost nothing. The other terms are digits, so a model
with half a million parameters can learn the task.
"""

import itertools
import re
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from exgrpo_jax.data.records import Record, task_record

# Not \d, which matches digits in every script. Bounded because int() raises beyond 4,300 digits.
NUMBER = '(?:0|[1-9][0-9]{0,17})'
_BOX = re.compile(rf'\\boxed\{{({NUMBER})\}}')


def read_steps(response: str, step: re.Pattern[str]) -> tuple[list[re.Match[str]], int] | None:
  """Return a response's whitespace-separated steps and the number in the box that follows them.

  Returns None if a step does not match `step` or the response does not end in a box.
  """
  *words, last = response.split() or ['']
  matches = [step.fullmatch(text) for text in words]
  steps = [match for match in matches if match]
  box = _BOX.fullmatch(last)
  return (steps, int(box[1])) if box and len(steps) == len(matches) else None


class Split(NamedTuple):
  """A split's size and difficulty."""

  questions: int
  min_digits: int  # terms added to the first, all digits
  max_digits: int  # inclusive
  is_high: bool  # True: every digit is at least ARITHMETIC_HIGH; False: at least one is below it
  source: str  # the Question's source


ARITHMETIC_SEED = 2510_02245
ARITHMETIC_START_RANGE = (10, 99)  # of the first term; inclusive, uniform
ARITHMETIC_DIGIT_RANGE = (1, 9)  # of the other terms; inclusive
ARITHMETIC_HIGH = 6
ARITHMETIC_SPLITS = {
  'train': Split(24_000, min_digits=3, max_digits=5, is_high=False, source='arithmetic'),
  'validation': Split(2_000, min_digits=3, max_digits=5, is_high=False, source='arithmetic'),
  'test': Split(2_000, min_digits=3, max_digits=5, is_high=False, source='arithmetic'),
  # Unlike anything in training, and harder: the maximum number of steps, nearly all with a
  # carry. The five digits have only four possible values, so repeats must be counted.
  'ood': Split(2_000, min_digits=5, max_digits=5, is_high=True, source='arithmetic_ood'),
}

_SUM = re.compile(rf'{NUMBER}(\+{NUMBER})+')
_STEP = re.compile(rf'(?P<start>{NUMBER})?\+(?P<term>{NUMBER})=(?P<total>{NUMBER})')


def arithmetic_rows() -> dict[str, list[Record]]:
  """Return each split's records, keyed by split name. Every call returns the same records.

  No two questions, within or across splits, have the same multiset of terms.
  """
  rng = np.random.default_rng(ARITHMETIC_SEED)
  seen: set[tuple[int, ...]] = set()
  return {
    name: [_arithmetic_row(rng, split, seen) for _ in range(split.questions)]
    for name, split in ARITHMETIC_SPLITS.items()
  }


def _arithmetic_row(rng: np.random.Generator, split: Split, seen: set[tuple[int, ...]]) -> Record:
  """Generate a record and add its sorted terms to `seen`."""
  start, *digits = terms = _unseen_terms(rng, split, seen)
  seen.add(tuple(sorted(terms)))
  solution = written_sum([start, *rng.permutation(digits).tolist()])
  return task_record('+'.join(map(str, terms)), sum(terms), solution, split.source)


def _unseen_terms(rng: np.random.Generator, split: Split, seen: Set[tuple[int, ...]]) -> list[int]:
  while True:
    count = rng.integers(split.min_digits, split.max_digits, endpoint=True)
    start = int(rng.integers(*ARITHMETIC_START_RANGE, endpoint=True))
    lowest, highest = ARITHMETIC_DIGIT_RANGE
    minimum = ARITHMETIC_HIGH if split.is_high else lowest
    digits = rng.integers(minimum, highest, size=count, endpoint=True).tolist()
    terms = [start, *digits]
    if (min(digits) >= ARITHMETIC_HIGH) == split.is_high and tuple(sorted(terms)) not in seen:
      return terms


def written_sum(terms: Sequence[int]) -> str:
  r"""Write out the solution that adds `terms` in the given order.

  [48, 3, 9] -> '48+3=51 +9=60 \boxed{60}': a step continues from the previous total
  without repeating it.
  """
  totals = list(itertools.accumulate(terms))[1:]
  steps = [f'+{term}={total}' for term, total in zip(terms[1:], totals)]
  return f'{terms[0]}{" ".join(steps)} \\boxed{{{totals[-1]}}}'


def valid_steps(question_text: str, response: str) -> bool:
  """Return True if every step of `response` is correct, not just its final answer.

  The question must be terms joined by '+', such as '48+9+3'. The first step must add two of the
  terms, and every later step must add one more term to the running total, in any order. Every
  addition must be correct, every term must be used exactly once, and the box must contain the last
  total. Other text between the steps, a second box or leading zeros make the response invalid.
  """
  question = question_text.strip()
  if not _SUM.fullmatch(question) or not (reading := read_steps(response, _STEP)):
    return False
  steps, answer = reading
  start, *later_starts = [step['start'] for step in steps] or [None]
  if start is None or any(later_starts):
    return False
  terms = [int(start), *(int(step['term']) for step in steps)]
  totals = [int(step['total']) for step in steps]
  return (
    totals == list(itertools.accumulate(terms))[1:]
    and sorted(terms) == sorted(map(int, question.split('+')))
    and answer == totals[-1]
  )


# ---- Sums for a calculator ----


CALCULATOR_SEED = 2510_02250
LARGEST_TOTAL = 9999  # upper limit for terms and totals
CALCULATOR_TERMS = range(2, 5)  # number of terms after the start
CALCULATOR_SPLITS = {'pretraining': 8_000, 'train': 4_000, 'test': 500}


def calculator_rows() -> dict[str, list[Record]]:
  """Return each split's records, keyed by split name. Every call returns the same records.

  Questions are unique within and across splits.
  """
  rng, seen = np.random.default_rng(CALCULATOR_SEED), set[str]()
  return {
    name: [_calculator_row(rng, seen) for _ in range(count)]
    for name, count in CALCULATOR_SPLITS.items()
  }


def _calculator_row(rng: np.random.Generator, seen: set[str]) -> Record:
  """Generate a record and add its question to `seen`."""
  while True:
    count = int(rng.integers(CALCULATOR_TERMS.start, CALCULATOR_TERMS.stop))
    sizes = rng.integers(100, LARGEST_TOTAL, count + 1)
    start, *terms = numbers = (sizes * np.array([1, *rng.choice([-1, 1], count)])).tolist()
    totals = list(itertools.accumulate(numbers))
    text = f'{start}{"".join(f"{term:+d}" for term in terms)}'
    if min(totals) >= 0 and max(totals) <= LARGEST_TOTAL and text not in seen:
      seen.add(text)
      solution = f'{start}{terms[0]:+d} ={totals[-1]}?'  # has every character of a turn
      return task_record(text, totals[-1], solution, 'calculator')
