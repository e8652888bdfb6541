"""What the policy talks to, turn after turn. Imports no jax: a worker must start in an instant."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from exgrpo_jax.grading.reward_functions import LARGEST

# {'role': 'user', 'content': 'higher'}, as chat templates take it; a text alone is the user's.
Messages = str | Sequence[Mapping[str, str]]


# Names of metrics below environment/ that episodes have anyway; see rollout/episodes.py.
TAKEN = ('turns_mean', 'turns_max', 'tokens_mean', 'seconds', 'idle_seconds')


class Task(NamedTuple):
  """A question, as an environment knows it."""

  row: int  # in its data source
  messages: Sequence[Mapping[str, str]]
  answer: str  # the ground truth
  columns: Mapping[str, Any]  # of its row
  kind: str = 'math'  # how answers are compared, of verifier.KINDS


class Observation(NamedTuple):
  """What an environment answers to a turn."""

  messages: Messages = ()  # that the policy reads before its next turn
  reward: float = 0.0  # of this turn
  done: bool = False  # whether the episode ends here
  success: bool = False  # whether it was solved; that alone decides what is stored and replayed
  # What is to be counted of this turn, by name: a step's metrics have their sums.
  counts: Mapping[str, float] = MappingProxyType({})


class Environment(Protocol):
  """One episode; `config.environment.name` names the class.

  It is made without arguments for each episode, in a worker process whose limits on time and memory
  hold for every call. The same task, seed and turns must give the same observations, for an episode
  whose process is lost is played again up to where it stood.

  For a warm start it may have a method `demonstrate(rng)`, which returns what a player would say
  next; `rng` is a NumPy generator.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Begins the episode, and returns the prompt.

    Of one task the prompt is the same whatever the seed, which is for what comes later.
    """
    ...

  def step(self, response: str) -> Observation:
    """Takes a turn of the policy, without its end token and other special ones."""
    ...


def as_messages(messages: Messages) -> list[dict[str, str]]:
  """A list of messages; ValueError where they are something else."""
  if isinstance(messages, str):
    return [{'role': 'user', 'content': messages}]
  found = [dict(message) for message in messages]
  for message in found:
    if set(message) != {'role', 'content'} or not all(isinstance(v, str) for v in message.values()):
      raise ValueError(
        f'{message!r} is no message, such as {{"role": "user", "content": "higher"}}'
      )
  return found


def checked(observation: Observation) -> Observation:
  """Return an observation whose fields are JSON values; raises ValueError if they cannot be."""
  messages, reward, done, success, counts = observation
  reward = float(reward)
  if not abs(reward) <= LARGEST:  # nor NaN
    raise ValueError(f'the reward is {reward!r}, not a number from -{LARGEST:g} to {LARGEST:g}')
  for name in counts:
    if name in TAKEN or not re.fullmatch('[a-z][a-z0-9_]*', name):
      raise ValueError(
        f'{name!r} cannot be counted: a name has small letters, digits and _, and is none of '
        f'{", ".join(TAKEN)}'
      )
  numbers = {name: float(value) for name, value in counts.items()}
  return Observation(as_messages(messages), reward, bool(done), bool(success), numbers)
