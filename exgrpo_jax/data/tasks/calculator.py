"""Sums of large numbers, for the environment `calculator`: '4821+377-912'."""

import itertools

import numpy as np

from exgrpo_jax.data.store import Record

SEED = 2510_02250
LARGEST = 9999  # of a term, and of every total
TERMS = range(2, 5)  # after the start
SPLITS = {'pretraining': 8_000, 'train': 4_000, 'test': 500}


def calculator_rows() -> dict[str, list[Record]]:
  """The records of every split, the same on every call: split name -> records.

  No two questions, within or across splits, are the same.
  """
  rng, seen = np.random.default_rng(SEED), set[str]()
  return {name: [_row(rng, seen) for _ in range(count)] for name, count in SPLITS.items()}


def _row(rng: np.random.Generator, seen: set[str]) -> Record:
  """A new record; adds its question to `seen`."""
  while True:
    count = int(rng.integers(TERMS.start, TERMS.stop))
    numbers = rng.integers(100, LARGEST, count + 1) * np.array([1, *rng.choice([-1, 1], count)])
    start, *terms = numbers.tolist()
    totals = list(itertools.accumulate([start, *terms]))
    text = f'{start}{"".join(f"{term:+d}" for term in terms)}'
    if min(totals) >= 0 and max(totals) <= LARGEST and text not in seen:
      seen.add(text)
      return {
        'messages': [{'role': 'user', 'content': text}],
        'answer': str(totals[-1]),
        'solution': f'{start}{terms[0]:+d} ={totals[-1]}?',  # the characters of a turn
        'kind': 'math',
        'source': 'calculator',
      }
