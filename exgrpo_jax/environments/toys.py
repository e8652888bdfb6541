"""Small built-in environments: three games for small policies, and retries for any question.

They are deterministic, so seeds are ignored. Each game has a scripted player for the warm start.
"""

import re

import numpy as np

from exgrpo_jax.data.tasks.games import FREE, GOAL, HOLE, MOVES, PLAYER, after, distances
from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.grading import verifier

# Error rates of the warm start's players.
_FORGETS = 0.25  # Guess: share of turns on which the player forgets all replies
_HALVES = 0.3  # Guess: share of the other turns that halve the interval; the rest guess inside it
_SKIPS = 0.15  # Calculator: share of turns that answer before the sum is complete
_SLIPS = 0.1  # Calculator: share of the other turns that use a wrong number
_STRAYS = 0.35  # Lake: share of turns that make a random move

_CALL = re.compile(r'(\d{1,12})([+-])(\d{1,12})', re.ASCII)
_ANSWER = re.compile(r'=(-?\d{1,12})', re.ASCII)
WRONG = 'That is not right. Try again.'
MISSING = 'I find no answer in that. Try again.'


class Guess:
  """A guessing game: find a hidden number, using the replies 'higher' and 'lower'.

  Anything that isn't a number is answered with '?'. The task's answer is the hidden number.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Return the task's prompt, a range such as '1-64'."""
    del seed
    self._number = int(task.answer)
    self._low, self._high = map(int, task.messages[-1]['content'].split('-'))
    self._numbers = range(self._low, self._high + 1)
    return task.messages

  def step(self, response: str) -> Observation:
    """Compare a guess with the number. A correct guess ends the episode with a reward of 1."""
    if not re.fullmatch(r'\d{1,9}', guess := response.strip(), re.ASCII):
      return Observation('?')
    number = int(guess)
    if number == self._number:
      return Observation(reward=1.0, done=True, success=True)
    if number < self._number:
      self._low = max(self._low, number + 1)
      return Observation('higher')
    self._high = min(self._high, number - 1)
    return Observation('lower')

  def demonstrate(self, rng: np.random.Generator) -> str:
    """Return the guess of a player who sometimes halves the interval or forgets all replies."""
    if rng.random() < _FORGETS:
      return str(rng.choice(self._numbers))
    if rng.random() < _HALVES:
      return str((self._low + self._high) // 2)
    return str(rng.integers(self._low, self._high, endpoint=True))


class Calculator:
  """A sum that is too hard for a small policy unless it calls a calculator.

  A turn such as '4821+377' is answered with the total. A turn such as '=4286' submits an answer and
  ends the episode. Anything else is answered with '?'.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Return the task's prompt, a chain of sums."""
    del seed
    self._answer = int(task.answer)
    self._total, *self._rest = re.findall(r'[+-]?\d+', task.messages[-1]['content'])
    return task.messages

  def step(self, response: str) -> Observation:
    """Add or subtract two numbers, or judge an answer. The correct answer earns a reward of 1."""
    if match := _ANSWER.fullmatch(response.strip()):
      is_right = int(match[1]) == self._answer
      return Observation(reward=float(is_right), done=True, success=is_right)
    if match := _CALL.fullmatch(response.strip()):
      self._total, self._rest = str(int(match[1]) + int(match[2] + match[3])), self._rest[1:]
      return Observation(self._total)
    return Observation('?')

  def demonstrate(self, rng: np.random.Generator) -> str:
    """Return the turn of a player who adds term by term and sometimes stops early or slips up."""
    if not self._rest or rng.random() < _SKIPS or int(self._total) < 0:
      return f'={self._total}'
    term = self._rest[0]
    if rng.random() < _SLIPS:
      term = f'{term[0]}{rng.integers(100, 9999)}'
    return f'{self._total}{term}'


class Lake:
  """A frozen lake to cross. Falling into a hole ends the episode; reaching the goal solves it.

  A move is answered with the new map. A turn that isn't one of MOVES is answered with '?'.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Return the task's prompt, a map."""
    del seed
    self._lines = task.messages[-1]['content'].split('\n')
    (self._square,) = (
      (row, line.index(PLAYER)) for row, line in enumerate(self._lines) if PLAYER in line
    )
    return task.messages

  def step(self, response: str) -> Observation:
    """Make a move. Reaching the goal earns a reward of 1."""
    if (move := response.strip()) not in MOVES:
      return Observation('?')
    (row, column), (new_row, new_column) = self._square, after(self._square, move, len(self._lines))
    if self._lines[new_row][new_column] == HOLE:
      return Observation(done=True)
    if self._lines[new_row][new_column] == GOAL:
      return Observation(reward=1.0, done=True, success=True)
    rows = [list(line) for line in self._lines]
    rows[row][column] = FREE
    rows[new_row][new_column] = PLAYER
    self._lines, self._square = [''.join(line) for line in rows], (new_row, new_column)
    return Observation('\n'.join(self._lines))

  def demonstrate(self, rng: np.random.Generator) -> str:
    """Return the move of a player who mostly takes a shortest path and sometimes moves randomly."""
    distance_of, moves = distances(self._lines), list(MOVES)
    if rng.random() < _STRAYS:
      return str(rng.choice(moves))
    squares = [after(self._square, move, len(self._lines)) for move in moves]
    lengths = [distance_of.get(square, len(distance_of)) for square in squares]
    return str(rng.choice([move for move, length in zip(moves, lengths) if length == min(lengths)]))


class Attempts:
  """A question with several attempts: after a wrong answer, the policy may try again.

  Each turn is judged like a single-turn response. reasoning_gym tasks use their own score_answer.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Return the task's prompt."""
    del seed
    self._truth = verifier.Truth(task.answer, task.kind, task.columns)
    return task.messages

  def step(self, response: str) -> Observation:
    """Judge an answer. A correct one earns a reward of 1 before environment.discount is applied."""
    outcome = verifier.judge_with(verifier.BuiltIn(), response, self._truth).outcome
    if outcome == 'correct':
      return Observation(reward=1.0, done=True, success=True)
    return Observation(WRONG if outcome == 'wrong' else MISSING)
