"""Environments for tests: one that does as it is told, and others that cannot be used."""

import os
import time
import zlib

from exgrpo_jax.environments.environment import Observation


def fail(how, seconds=60.0):
  """Hangs so long, raises, or ends the process."""
  if how == 'hang':
    time.sleep(seconds)
  elif how == 'raise':
    raise RuntimeError('as it was told')
  elif how == 'die':
    dies()


class Obedient:
  """Does what a turn says; counts its turns, and says the seed when asked."""

  def reset(self, task, seed):
    self.turns, self.seed = 0, seed
    if task.columns.get('prompt') == 'random':
      return str(seed)
    if task.columns.get('prompt') == 'more':
      return f'{task.messages[0]["content"]} and more'
    return task.columns.get('prompt') or task.messages

  def step(self, response):
    self.turns += 1
    word, _, rest = response.partition(' ')
    if word in ('hang', 'raise', 'die'):
      fail(word, float(rest or 60))
    elif word == 'pid':
      return Observation(str(os.getpid()))
    elif word == 'count':
      return Observation(done=True, counts={rest: 2})
    elif word == 'strange':
      return Observation([{'role': 'user'}])
    elif word == 'done':
      return Observation(reward=2.0, done=True, success=rest == 'well')
    return Observation(f'{self.turns} {self.seed} {response}', reward=0.5)


class Chance:
  """Ends and succeeds by a hash of what is said, so that a policy that knows nothing does both."""

  def reset(self, task, seed):
    self.said = f'{task.row} {seed}'
    return task.messages

  def step(self, response):
    self.said += response
    number = zlib.crc32(self.said.encode())
    if number % 3:
      return Observation('on', reward=0.25)
    return Observation(reward=1.0, done=True, success=number % 2 == 0)


class Announced(Chance):
  """Begins with another prompt than its task's, and plays by itself."""

  def reset(self, task, seed):
    (asked,) = super().reset(task, seed)
    return f'a number in {asked["content"]}'

  def demonstrate(self, rng):
    del rng
    return '1'


def failure_of(said):
  """How an `Unreliable` that has been told all this fails, for `fail`; '' where it answers."""
  return {17: 'raise', 26: 'hang', 29: 'die'}.get(zlib.crc32(said.encode()) % 48, '')


class Unreliable(Chance):
  """Fails in some turns, and does in the others what `Chance` does of seed ''."""

  def reset(self, task, seed):
    del seed  # so that what was said tells all
    return super().reset(task, '')

  def step(self, response):
    fail(failure_of(self.said + response))
    return super().step(response)


def not_a_class():
  raise TypeError('it has no arguments to be made without')


def dies():
  os._exit(3)
