"""Maps of frozen lakes as text: squares, moves, and how far the goal is."""

import collections
from collections.abc import Sequence

FREE, HOLE, GOAL, PLAYER = '.oG@'
MOVES = {'up': (-1, 0), 'down': (1, 0), 'left': (0, -1), 'right': (0, 1)}

Square = tuple[int, int]  # row and column


def after(square: Square, move: str, side: int) -> Square:
  """Where a move leads; at the edge of the map it leads nowhere."""
  row, column = (at + by for at, by in zip(square, MOVES[move]))
  return (row, column) if row in range(side) and column in range(side) else square


def distances(lines: Sequence[str]) -> dict[Square, int]:
  """Moves to the goal from each square from which it can be reached around the holes."""
  side = len(lines)
  (goal,) = ((r, line.index(GOAL)) for r, line in enumerate(lines) if GOAL in line)
  found, waiting = {goal: 0}, collections.deque([goal])
  while waiting:
    square = waiting.popleft()
    for move in MOVES:
      row, column = near = after(square, move, side)
      if near not in found and lines[row][column] != HOLE:
        found[near] = found[square] + 1
        waiting.append(near)
  return found
