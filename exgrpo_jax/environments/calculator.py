"""A sum of numbers that are too large for a small policy's head, and a calculator.

A turn such as '4821+377' is answered by the total; '=4286' ends the episode with an answer.
"""

import re

import numpy as np

from exgrpo_jax.environments.environment import Messages, Observation, Task

_CALL = re.compile(r'(\d{1,12})([+-])(\d{1,12})', re.ASCII)
_ANSWER = re.compile(r'=(-?\d{1,12})', re.ASCII)
# How a player of the warm start errs.
_SKIPS = 0.15  # share of turns that answer with what is not the end yet
_SLIPS = 0.1  # share of the other turns that take a wrong number


class Calculator:
  """Computes sums of two numbers; answers '?' to what is neither a sum nor an answer."""

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the task, a chain of sums."""
    del seed  # nothing is left to chance
    self._answer = int(task.answer)
    first, *rest = re.findall(r'[+-]?\d+', task.messages[-1]['content'])
    self._total, self._rest = first, rest
    return task.messages

  def step(self, response: str) -> Observation:
    """The reward is 1 for the right answer."""
    if found := _ANSWER.fullmatch(response.strip()):
      is_right = int(found[1]) == self._answer
      return Observation(reward=float(is_right), done=True, success=is_right)
    if found := _CALL.fullmatch(response.strip()):
      total = int(found[1]) + int(found[2] + found[3])
      self._total, self._rest = str(total), self._rest[1:]
      return Observation(self._total)
    return Observation('?')

  def demonstrate(self, rng: np.random.Generator) -> str:
    """A turn of a player who adds term by term, at times stops early, and at times slips."""
    if not self._rest or rng.random() < _SKIPS or int(self._total) < 0:
      return f'={self._total}'
    term = self._rest[0]
    if rng.random() < _SLIPS:
      term = f'{term[0]}{rng.integers(100, 9999)}'
    return f'{self._total}{term}'
