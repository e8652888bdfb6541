"""Numbers to guess, for the environment `guess`: all questions look the same, and none tells."""

import numpy as np

from exgrpo_jax.data.store import Record

SEED = 2510_02248
NUMBERS = range(1, 65)
# A question is a row, so many have the same number, in each split and across them: what is learnt
# is how to ask.
SPLITS = {'pretraining': 8_000, 'train': 2_000, 'test': 500}


def guess_rows() -> dict[str, list[Record]]:
  """The records of every split, the same on every call: split name -> records."""
  rng = np.random.default_rng(SEED)
  return {
    name: [_row(int(number)) for number in rng.choice(NUMBERS, count)]
    for name, count in SPLITS.items()
  }


def _row(number: int) -> Record:
  return {
    'messages': [{'role': 'user', 'content': f'{NUMBERS.start}-{NUMBERS.stop - 1}'}],
    'answer': str(number),
    'solution': halving(number),
    'kind': 'math',
    'source': 'guess',
  }


def halving(number: int) -> str:
  """How halving finds it: '32 higher 48 lower 40' for 40."""
  low, high, said = NUMBERS.start, NUMBERS.stop - 1, list[str]()
  while (guess := (low + high) // 2) != number:
    said += [str(guess), 'higher' if guess < number else 'lower']
    low, high = (guess + 1, high) if guess < number else (low, guess - 1)
  return ' '.join([*said, str(number)])
