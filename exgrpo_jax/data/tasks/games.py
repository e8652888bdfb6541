"""Tasks for two games: guessing a number and crossing a frozen lake."""

import collections
from collections.abc import Sequence

import numpy as np

from exgrpo_jax.data.records import Record, task_record

SEED = 2510_02248
NUMBERS = range(1, 65)
# Many rows share a number, within and across splits. That is fine because the policy learns how to
# search, not the numbers.
SPLITS = {'pretraining': 8_000, 'train': 2_000, 'test': 500}


def guess_rows() -> dict[str, list[Record]]:
  """Return each split's records, keyed by split name. Every call returns the same records."""
  rng = np.random.default_rng(SEED)
  question = f'{NUMBERS.start}-{NUMBERS.stop - 1}'
  return {
    name: [
      task_record(question, number, halving(number), 'guess')
      for number in rng.choice(NUMBERS, count).tolist()
    ]
    for name, count in SPLITS.items()
  }


def halving(number: int) -> str:
  """Return the guesses and replies of a binary search: '32 higher 48 lower 40' for 40."""
  low, high, words = NUMBERS.start, NUMBERS.stop - 1, list[str]()
  while (guess := (low + high) // 2) != number:
    words += [str(guess), 'higher' if guess < number else 'lower']
    low, high = (guess + 1, high) if guess < number else (low, guess - 1)
  return ' '.join([*words, str(number)])


# ---- The frozen lake ----

# @..o
#     .o..
#     ..o.
#     o..G
#
# A split's name ends in the side length of its maps. Every goal can be reached.


LAKE_SEED = 2510_02249
HOLES = 0.25  # share of squares, not counting start and goal
_MANY = {'pretraining': 4_000, 'train': 2_000, 'test': 500}
# Number of maps by side length and split. Only 3,828 of the smallest maps can be crossed.
LAKE_SPLITS = {4: {'pretraining': 1_200, 'train': 600, 'test': 200}, 5: _MANY, 6: _MANY}


def lake_rows() -> dict[str, list[Record]]:
  """Return each split's records, keyed by split name. Every call returns the same records.

  Maps are unique within and across splits.
  """
  rng, seen = np.random.default_rng(LAKE_SEED), set[str]()
  return {
    f'{name}_{side}': [_lake_row(rng, side, seen) for _ in range(count)]
    for side, splits in LAKE_SPLITS.items()
    for name, count in splits.items()
  }


def _lake_row(rng: np.random.Generator, side: int, seen: set[str]) -> Record:
  """Generate a record and add its map to `seen`."""
  while True:
    squares = np.where(rng.random((side, side)) < HOLES, HOLE, FREE)
    squares[0, 0], squares[-1, -1] = PLAYER, GOAL
    lines = [''.join(row) for row in squares]
    text, distance = '\n'.join(lines), distances(lines)
    if (0, 0) in distance and text not in seen:
      seen.add(text)
      # The answer is the shortest path's length, which the environment ignores. The solution lists
      # the task's words, so that the tokenizer is trained on them.
      return task_record(text, distance[0, 0], ' '.join(MOVES), f'lake_{side}')


# ---- The map ----


FREE, HOLE, GOAL, PLAYER = '.oG@'
MOVES = {'up': (-1, 0), 'down': (1, 0), 'left': (0, -1), 'right': (0, 1)}

Square = tuple[int, int]  # row and column


def after(square: Square, move: str, side: int) -> Square:
  """Return the square after a move. Moves off the map have no effect."""
  row, column = (coordinate + change for coordinate, change in zip(square, MOVES[move]))
  return (row, column) if row in range(side) and column in range(side) else square


def distances(lines: Sequence[str]) -> dict[Square, int]:
  """Return the number of moves from each square to the goal, leaving out squares with no path."""
  side = len(lines)
  (goal,) = ((r, line.index(GOAL)) for r, line in enumerate(lines) if GOAL in line)
  distance, queue = {goal: 0}, collections.deque([goal])
  while queue:
    square = queue.popleft()
    for move in MOVES:
      row, column = neighbor = after(square, move, side)
      if neighbor not in distance and lines[row][column] != HOLE:
        distance[neighbor] = distance[square] + 1
        queue.append(neighbor)
  return distance
