"""A frozen lake, to be crossed square by square: a hole ends the episode, the goal solves it."""

import numpy as np

from exgrpo_jax.data.tasks.games import FREE, GOAL, HOLE, MOVES, PLAYER, Square, after, distances
from exgrpo_jax.environments.environment import Messages, Observation, Task

_STRAYS = 0.35  # share of the turns in which the player of the warm start goes anywhere


class Lake:
  """Shows the map again after each move, and '?' where a turn is none of MOVES."""

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the task, a map."""
    del seed  # the ice is not slippery
    self._lines = task.messages[-1]['content'].split('\n')
    (self._square,) = (
      (row, line.index(PLAYER)) for row, line in enumerate(self._lines) if PLAYER in line
    )
    return task.messages

  def step(self, response: str) -> Observation:
    """The reward is 1 at the goal."""
    if (move := response.strip()) not in MOVES:
      return Observation('?')
    row, column = square = after(self._square, move, len(self._lines))
    if self._lines[row][column] == HOLE:
      return Observation(done=True)
    if self._lines[row][column] == GOAL:
      return Observation(reward=1.0, done=True, success=True)
    self._move_to(square)
    return Observation('\n'.join(self._lines))

  def demonstrate(self, rng: np.random.Generator) -> str:
    """A move of a player who mostly takes a shortest way, and at times any."""
    reached, moves = distances(self._lines), list(MOVES)
    if rng.random() < _STRAYS:
      return str(rng.choice(moves))
    ways = [
      reached.get(after(self._square, move, len(self._lines)), len(reached)) for move in moves
    ]
    shortest = [move for move, way in zip(moves, ways) if way == min(ways)]
    return str(rng.choice(shortest))

  def _move_to(self, square: Square) -> None:
    (row, column), (new_row, new_column) = self._square, square
    rows = [list(line) for line in self._lines]
    rows[row][column] = FREE
    rows[new_row][new_column] = PLAYER
    self._lines, self._square = [''.join(row) for row in rows], square
