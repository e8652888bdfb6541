"""Environments for tests: one that does as it is told, and others that cannot be used."""

import os
import time

from exgrpo_jax.environments.environment import Observation


class Obedient:
  """Does what a turn says; counts its turns, and says the seed when asked."""

  def reset(self, task, seed):
    self.turns, self.seed = 0, seed
    if task.columns.get('prompt') == 'random':
      return str(seed)
    return task.columns.get('prompt') or task.messages

  def step(self, response):
    self.turns += 1
    word, _, rest = response.partition(' ')
    if word == 'hang':
      time.sleep(float(rest or 60))
    elif word == 'raise':
      raise RuntimeError('as it was told')
    elif word == 'die':
      os._exit(3)
    elif word == 'pid':
      return Observation(str(os.getpid()))
    elif word == 'strange':
      return Observation([{'role': 'user'}])
    elif word == 'done':
      return Observation(reward=2.0, done=True, success=rest == 'well')
    return Observation(f'{self.turns} {self.seed} {response}', reward=0.5)


def not_a_class():
  raise TypeError('it has no arguments to be made without')
