r"""Chains of additions and subtractions, with solutions in styles that differ in reliability.

A question is a chain such as '48+3-9+7'. In a language model's training corpus, some solutions show
more steps than others, and some are wrong. The split 'pretraining' imitates this with one style per
row:

  written   48+3=51 -9=42 +7=49 \boxed{49}   one term per step
  skipped   48+3-9=42 +7=49 \boxed{49}       two terms per step, wrong more often
  guess     \boxed{47}                       no steps, usually wrong, but close to the answer

For longer chains, fewer solutions are written out, and later steps are wrong more often. A policy
that has learned this mixture therefore solves almost all short chains but few long ones. On long
chains, it mostly uses styles that are worse than the best one it knows. 'train' and 'test' mix
chains of every difficulty. 'train_8' and similar splits contain chains of a single length, so you
can choose how weak the policy is at the start. A row's answer is always correct, even if its
solution is wrong.

A two-layer model with half a million parameters can learn these chains. All totals have two
digits, so all steps of a style have the same length. No digit is added or subtracted twice, so
the last digit used marks the position in the question.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from exgrpo_jax.data.records import Record, task_record
from exgrpo_jax.data.tasks.sums import NUMBER, read_steps


class Split(NamedTuple):
  """A split's size and difficulty."""

  questions: int
  min_terms: int  # not counting the start
  max_terms: int  # inclusive; uniform
  one_operator: bool  # True: all terms are added or all are subtracted; False: both operators occur
  source: str  # the Question's source


SEED = 2510_02247
TOTALS = range(10, 100)  # the start and all running totals
MAX_DIGIT = 9  # terms are distinct digits from 1 to this
SPLITS = {
  'pretraining': Split(20_000, min_terms=3, max_terms=9, one_operator=False, source='chains'),
  'train': Split(4_000, min_terms=3, max_terms=7, one_operator=False, source='chains'),
  'validation': Split(1_000, min_terms=3, max_terms=7, one_operator=False, source='chains'),
  'test': Split(1_000, min_terms=3, max_terms=7, one_operator=False, source='chains'),
  # Unlike anything in training: the running total only rises or only falls.
  'ood': Split(1_000, min_terms=4, max_terms=7, one_operator=True, source='chains_ood'),
  **{
    f'{name}_{terms}': Split(questions, terms, terms, one_operator=False, source='chains')
    for terms in (6, 7, 8, 9)
    for name, questions in (('train', 2_000), ('test', 500))
  },
}

# The mixture of styles.
WRITTEN_SHARE = {3: 0.9, 4: 0.8, 5: 0.7, 6: 0.6, 7: 0.5, 8: 0.4, 9: 0.3}  # by the number of terms
SKIPPED_SHARE = 0.6  # of the solutions that are not written out; the rest are guesses
# Share of wrong totals, by step index.
SLIP_RATE = (0.02, 0.02, 0.02, 0.05, 0.2, 0.4, 0.5, 0.5, 0.5)  # for one-term steps
SKIPPED_SLIP_RATE = 0.3  # for two-term steps, at any position
SLIPS = range(1, 11)  # size of the error in a wrong total, up or down
GUESS_RIGHT = 0.03  # share of guesses that are right
GUESS_ERRORS = range(1, 13)  # size of the error in the other guesses, up or down

STYLES = ('written', 'skipped', 'guess', 'other')

_TERM = rf'[+-]{NUMBER}'
_CHAIN = re.compile(rf'(?P<start>{NUMBER})(?P<terms>(?:{_TERM})+)')
_STEP = re.compile(rf'(?P<start>{NUMBER})?(?P<terms>(?:{_TERM})+)=(?P<total>{NUMBER})')


# ---- Questions ----


def chain_rows() -> dict[str, list[Record]]:
  """Return each split's records, keyed by split name. Every call returns the same records.

  No two questions, within or across splits, share both their start and their set of terms.
  """
  rng = np.random.default_rng(SEED)
  seen: set[tuple[int, ...]] = set()
  return {
    name: [_row(rng, split, seen) for _ in range(split.questions)] for name, split in SPLITS.items()
  }


def _row(rng: np.random.Generator, split: Split, seen: set[tuple[int, ...]]) -> Record:
  """Generate a record and add its start and sorted terms to `seen`."""
  start, *terms = chain = _unseen_chain(rng, split, seen)
  seen.add((start, *sorted(terms)))
  solution = _solution(rng, start, terms)
  return task_record(f'{start}{_format_terms(terms)}', sum(chain), solution, split.source)


def _unseen_chain(
  rng: np.random.Generator, split: Split, seen: set[tuple[int, ...]]
) -> tuple[int, ...]:
  """Draw the start and signed terms of a chain that isn't in `seen`."""
  # Drawing the answer first keeps all answers equally frequent despite rejected chains.
  answer = int(rng.integers(TOTALS.start, TOTALS.stop))
  while True:
    count = int(rng.integers(split.min_terms, split.max_terms, endpoint=True))
    signs_N = 2 * rng.integers(2, size=1 if split.one_operator else count) - 1
    terms = (signs_N * rng.permutation(MAX_DIGIT)[:count] + signs_N).tolist()
    totals = list(itertools.accumulate(terms, initial=answer - sum(terms)))
    if (
      all(total in TOTALS for total in totals)
      and (split.one_operator or abs(signs_N.sum()) < count)
      and (totals[0], *sorted(terms)) not in seen
    ):
      return totals[0], *terms


def _format_terms(terms: Sequence[int]) -> str:
  """Format [3, -9] as '+3-9'."""
  return ''.join(f'{term:+d}' for term in terms)


# ---- Solutions ----


def _solution(rng: np.random.Generator, start: int, terms: Sequence[int]) -> str:
  """Draw a style from the mixture and return a correct or wrong solution in that style."""
  if rng.random() < WRITTEN_SHARE[len(terms)]:
    slips = [_slip(rng, rate) for rate in SLIP_RATE[: len(terms)]]
    return steps_and_box(start, [[term] for term in terms], slips)
  if rng.random() < SKIPPED_SHARE:
    steps = [terms[i : i + 2] for i in range(0, len(terms), 2)]
    slips = [_slip(rng, SKIPPED_SLIP_RATE) if len(step) > 1 else 0 for step in steps]
    return steps_and_box(start, steps, slips)
  error = 0 if rng.random() < GUESS_RIGHT else _off_by(rng, GUESS_ERRORS)
  return rf'\boxed{{{abs(start + sum(terms) + error)}}}'


def _slip(rng: np.random.Generator, rate: float) -> int:
  """Draw the error to add to a total. It is nonzero with probability `rate`."""
  return _off_by(rng, SLIPS) if rng.random() < rate else 0


def _off_by(rng: np.random.Generator, sizes: range) -> int:
  return int(rng.choice(sizes)) * (1 if rng.random() < 0.5 else -1)


def steps_and_box(start: int, steps: Sequence[Sequence[int]], slips: Sequence[int]) -> str:
  r"""Write out the solution in the given steps, adding each step's slip to its total.

  48, [[3, -9], [7]], [0, 0] -> '48+3-9=42 +7=49 \boxed{49}': a step continues from the previous
  total, even if that total is wrong, and does not repeat it. A negative total loses its sign,
  because totals in a chain are never negative.
  """
  total, step_texts = start, []
  for terms, slip in zip(steps, slips, strict=True):
    total = abs(total + sum(terms) + slip)
    step_texts.append(f'{_format_terms(terms)}={total}')
  return rf'{start}{" ".join(step_texts)} \boxed{{{total}}}'


# ---- Responses ----


class _Reading(NamedTuple):
  """A parsed response: steps that apply the question's terms in order, then a box."""

  start: int
  steps: list[list[int]]  # the signed terms of each step; empty if the response is only a box
  totals: list[int]  # one per step
  answer: int


def style(question_text: str, response: str) -> str:
  """Return a response's style, one of STYLES. Only the form matters, not correctness.

  'written' applies one term per step; 'skipped' applies several in at least one step. Both must
  apply all of the question's terms in order. 'guess' is only a box. A response with extra text,
  different terms, a different order or no box is 'other'.
  """
  reading = _read(question_text, response)
  if not reading:
    return 'other'
  if not reading.steps:
    return 'guess'
  return 'written' if all(len(terms) == 1 for terms in reading.steps) else 'skipped'


def valid_steps(question_text: str, response: str) -> bool:
  """Return True if every step of `response` is correct, not just its final answer.

  Each step must apply one term and reach the correct total. The steps must apply all of the
  question's terms in order, and the box must contain the last total. Guesses are invalid. So are
  steps with several terms, even if the total is correct: skipped additions cannot be checked, so a
  correct total may be luck.
  """
  reading = _read(question_text, response)
  if not reading or any(len(terms) != 1 for terms in reading.steps):
    return False
  terms = [term for (term,) in reading.steps]
  _, *totals = itertools.accumulate(terms, initial=reading.start)
  return bool(totals) and reading.totals == totals and reading.answer == totals[-1]


def _read(question_text: str, response: str) -> _Reading | None:
  """Parse a response. Returns None if its form is invalid or the question isn't a chain."""
  question = _CHAIN.fullmatch(question_text.strip())
  reading = read_steps(response, _STEP)
  if not question or not reading:
    return None
  start, (steps, answer) = question['start'], reading
  if not steps:
    return _Reading(int(start), [], [], answer)
  terms = [_parse_terms(step['terms']) for step in steps]
  starts = [step['start'] for step in steps]
  all_terms = list(itertools.chain.from_iterable(terms))
  if starts != [start, *[None] * (len(steps) - 1)] or all_terms != _parse_terms(question['terms']):
    return None
  return _Reading(int(start), terms, [int(step['total']) for step in steps], answer)


def _parse_terms(text: str) -> list[int]:
  """Parse '+3-9' as [3, -9]."""
  return [int(term) for term in re.findall(_TERM, text)]
