"""A number is to be found by higher and lower: it cannot be told in one turn."""

import re

import numpy as np

from exgrpo_jax.environments.environment import Messages, Observation, Task

# How a player of the warm start errs.
_FORGETS = 0.25  # share of turns that forget all answers
_HALVES = 0.3  # share of the others that halve the interval; the rest takes any number in it


class Guess:
  """Answers 'higher', 'lower', or '?' to what is no number; the answer of a task is the number."""

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the task: the lowest and the highest number, as '1-64'."""
    del seed  # nothing is left to chance
    self._number = int(task.answer)
    self._low, self._high = map(int, task.messages[-1]['content'].split('-'))
    self._all = range(self._low, self._high + 1)
    return task.messages

  def step(self, response: str) -> Observation:
    """The reward is 1 for the number, and ends the episode."""
    if not re.fullmatch(r'\d{1,9}', guess := response.strip(), re.ASCII):
      return Observation('?')
    guessed = int(guess)
    if guessed == self._number:
      return Observation(reward=1.0, done=True, success=True)
    if guessed < self._number:
      self._low = max(self._low, guessed + 1)
      return Observation('higher')
    self._high = min(self._high, guessed - 1)
    return Observation('lower')

  def demonstrate(self, rng: np.random.Generator) -> str:
    """A guess of a player who halves the interval at times, and at times forgets it."""
    if rng.random() < _FORGETS:
      return str(rng.choice(self._all))
    if rng.random() < _HALVES:
      return str((self._low + self._high) // 2)
    return str(rng.integers(self._low, self._high, endpoint=True))
