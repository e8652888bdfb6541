r"""Chains of additions and subtractions, with solutions in several styles of unequal reliability.

A question is a chain such as '48+3-9+7'. The solutions in a language model's corpus differ in how
much they write out, and some are wrong. The split 'pretraining' imitates this, one style a row:

  written   48+3=51 -9=42 +7=49 \boxed{49}   one term a step
  skipped   48+3-9=42 +7=49 \boxed{49}       two terms a step, wrong more often
  guess     \boxed{47}                       no steps, mostly wrong, near the truth

The longer the chain, the fewer solutions are written out. The later a step in a chain, the more
often it is wrong. So a policy that has learnt this mixture solves short chains almost always and
long ones rarely, and for any chain it knows a better style than the one it mostly uses. 'train' and
'test' have chains of every difficulty. 'train_8' and similar splits have chains of one length; with
them a policy can start as weak as needed. The answer of a row is always right.

A model of two layers and half a million parameters can learn these chains: all totals have two
digits, so steps of a style are equally long, and no digit is added or subtracted twice, so the last
digit used tells the place in the question.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from exgrpo_jax.data.records import Record
from exgrpo_jax.data.tasks.sums import NUMBER, read_steps


class Split(NamedTuple):
  """The number of questions of a split, and their difficulty."""

  questions: int
  min_terms: int  # after the start
  max_terms: int  # inclusive; uniform
  one_operator: bool  # True: all terms are added, or all subtracted; False: both operators occur
  source: str  # the Question's source


SEED = 2510_02247
TOTALS = range(10, 100)  # the start and all running totals
MAX_DIGIT = 9  # of the terms, from 1; no digit occurs twice
SPLITS = {
  'pretraining': Split(20_000, min_terms=3, max_terms=9, one_operator=False, source='chains'),
  'train': Split(4_000, min_terms=3, max_terms=7, one_operator=False, source='chains'),
  'validation': Split(1_000, min_terms=3, max_terms=7, one_operator=False, source='chains'),
  'test': Split(1_000, min_terms=3, max_terms=7, one_operator=False, source='chains'),
  # Unlike anything in training: the total drifts one way, through every decade.
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
# Share of wrong totals, by the number of the step.
SLIP_RATE = (0.02, 0.02, 0.02, 0.05, 0.2, 0.4, 0.5, 0.5, 0.5)  # of steps of one term
SKIPPED_SLIP_RATE = 0.3  # of steps of two terms, wherever they are
SLIPS = range(1, 11)  # by how much a wrong total is off, up or down
GUESS_RIGHT = 0.03  # share of guesses
GUESS_ERRORS = range(1, 13)  # by how much the other guesses are off, up or down

STYLES = ('written', 'skipped', 'guess', 'other')

_TERM = rf'[+-]{NUMBER}'
_CHAIN = re.compile(rf'(?P<start>{NUMBER})(?P<terms>(?:{_TERM})+)')
_STEP = re.compile(rf'(?P<start>{NUMBER})?(?P<terms>(?:{_TERM})+)=(?P<total>{NUMBER})')


# ---- Questions ----


def chain_rows() -> dict[str, list[Record]]:
  """Make the records of every split, the same on every call: split name -> records.

  No two questions, within or across splits, have the same start and the same set of terms.
  """
  rng = np.random.default_rng(SEED)
  seen: set[tuple[int, ...]] = set()
  return {
    name: [_row(rng, split, seen) for _ in range(split.questions)] for name, split in SPLITS.items()
  }


def _row(rng: np.random.Generator, split: Split, seen: set[tuple[int, ...]]) -> Record:
  """Make a new record; add its start and sorted terms to `seen`."""
  start, *terms = chain = _unseen_chain(rng, split, seen)
  seen.add((start, *sorted(terms)))
  return {
    'messages': [{'role': 'user', 'content': f'{start}{_signed(terms)}'}],
    'answer': str(sum(chain)),
    'solution': _solution(rng, start, terms),
    'kind': 'math',
    'source': split.source,
  }


def _unseen_chain(
  rng: np.random.Generator, split: Split, seen: set[tuple[int, ...]]
) -> tuple[int, ...]:
  """Draw a start, and terms with their signs."""
  # The answer is drawn first, so that all answers are equally frequent despite rejected chains.
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


def _signed(terms: Sequence[int]) -> str:
  """Write [3, -9] as '+3-9'."""
  return ''.join(f'{term:+d}' for term in terms)


# ---- Solutions ----


def _solution(rng: np.random.Generator, start: int, terms: Sequence[int]) -> str:
  """Draw a style from the mixture and a solution in it, right or wrong."""
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
  """Draw the error of a total: not 0 with probability `rate`."""
  return _off_by(rng, SLIPS) if rng.random() < rate else 0


def _off_by(rng: np.random.Generator, sizes: range) -> int:
  return int(rng.choice(sizes)) * (1 if rng.random() < 0.5 else -1)


def steps_and_box(start: int, steps: Sequence[Sequence[int]], slips: Sequence[int]) -> str:
  r"""Write the worked solution in the given steps, each total off by its slip.

  48, [[3, -9], [7]], [0, 0] -> '48+3-9=42 +7=49 \boxed{49}': a step continues from the previous
  total, wrong or not, without repeating it. A total below 0 loses its sign, because no total of a
  chain has one.
  """
  total, written = start, []
  for terms, slip in zip(steps, slips, strict=True):
    total = abs(total + sum(terms) + slip)
    written.append(f'{_signed(terms)}={total}')
  return rf'{start}{" ".join(written)} \boxed{{{total}}}'


# ---- Responses ----


class _Reading(NamedTuple):
  """A response of steps that apply the question's terms in their order, and a box."""

  start: int
  steps: list[list[int]]  # the terms of each step, with their signs; empty if there is only a box
  totals: list[int]  # of each step
  answer: int


def style(question_text: str, response: str) -> str:
  """Return the style of a response, one of STYLES, from its form only: it may be right or wrong.

  'written' applies one term a step, 'skipped' several in some step; both apply all terms of the
  question in their order. 'guess' is only a box. A response with other text, other terms, another
  order or no box is 'other'.
  """
  reading = _read(question_text, response)
  if not reading:
    return 'other'
  if not reading.steps:
    return 'guess'
  return 'written' if all(len(terms) == 1 for terms in reading.steps) else 'skipped'


def valid_steps(question_text: str, response: str) -> bool:
  """Return True if every step of `response` is right, not just its final answer.

  Each step must apply one term and have the right total. The steps must apply all terms of the
  question in their order, and the box must hold the last total. A guess is invalid, and so is a
  step of several terms even if its total is right: skipped additions cannot be checked, and were
  right by chance.
  """
  reading = _read(question_text, response)
  if not reading or any(len(terms) != 1 for terms in reading.steps):
    return False
  terms = [term for (term,) in reading.steps]
  _, *totals = itertools.accumulate(terms, initial=reading.start)
  return bool(totals) and reading.totals == totals and reading.answer == totals[-1]


def _read(question_text: str, response: str) -> _Reading | None:
  """Parse the response; None if it has another form, or the question is no chain."""
  question = _CHAIN.fullmatch(question_text.strip())
  reading = read_steps(response, _STEP)
  if not question or not reading:
    return None
  start, (steps, answer) = question['start'], reading
  if not steps:
    return _Reading(int(start), [], [], answer)
  terms = [_terms(step['terms']) for step in steps]
  starts = [step['start'] for step in steps]
  applied = list(itertools.chain.from_iterable(terms))
  if starts != [start, *[None] * (len(steps) - 1)] or applied != _terms(question['terms']):
    return None
  return _Reading(int(start), terms, [int(step['total']) for step in steps], answer)


def _terms(text: str) -> list[int]:
  """Parse '+3-9' as [3, -9]."""
  return [int(term) for term in re.findall(_TERM, text)]
