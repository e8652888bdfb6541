"""The protocol of environments. Imports no jax so that a worker starts in an instant."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from exgrpo_jax.grading.reward_functions import LARGEST

# {'role': 'user', 'content': 'higher'}, as chat templates take it; plain text is from the user.
Messages = str | Sequence[Mapping[str, str]]


# Metrics under environment/ that every episode has; see rollout/episodes.py.
TAKEN = ('turns_mean', 'turns_max', 'tokens_mean', 'seconds', 'idle_seconds')


class Task(NamedTuple):
  """A question as an environment sees it."""

  row: int  # in its data source
  messages: Sequence[Mapping[str, str]]
  answer: str  # the ground truth
  columns: Mapping[str, Any]  # of the row
  kind: str = 'math'  # how answers are compared: one of verifier.KINDS


class Observation(NamedTuple):
  """An environment's answer to a turn."""

  messages: Messages = ()  # for the policy to read before its next turn
  reward: float = 0.0  # of this turn
  done: bool = False  # whether the episode ends here
  success: bool = False  # whether it was solved; only this decides what is stored and replayed
  # Counts of this turn by name. A step's metrics have their sums.
  counts: Mapping[str, float] = MappingProxyType({})


class Environment(Protocol):
  """One episode; `config.environment.name` names the class.

  It is made without arguments for each episode, in a worker process. The limits on time and memory
  of this process hold for every call. The same task, seed and turns must give the same
  observations: if a process is lost, its episodes are played again up to where they stood.

  For a warm start it may have a method `demonstrate(rng)`, which returns a player's next turn;
  `rng` is a NumPy generator.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Begin the episode and return the prompt.

    The prompt depends only on the task. The seed is for what comes later.
    """
    ...

  def step(self, response: str) -> Observation:
    """Take a turn of the policy, without its end token and other special tokens."""
    ...


def as_messages(messages: Messages) -> list[dict[str, str]]:
  """Return a list of messages. Raises ValueError if they are something else."""
  if isinstance(messages, str):
    return [{'role': 'user', 'content': messages}]
  found = [dict(message) for message in messages]
  for message in found:
    if set(message) != {'role', 'content'} or not all(isinstance(v, str) for v in message.values()):
      raise ValueError(
        f'{message!r} is not a message, such as {{"role": "user", "content": "higher"}}'
      )
  return found


def checked(observation: Observation) -> Observation:
  """Convert the fields to JSON values. Raises ValueError if one cannot be converted."""
  messages, reward, done, success, counts = observation
  reward = float(reward)
  if not abs(reward) <= LARGEST:  # nor NaN
    raise ValueError(f'the reward is {reward!r}, not a number from -{LARGEST:g} to {LARGEST:g}')
  for name in counts:
    if name in TAKEN or not re.fullmatch('[a-z][a-z0-9_]*', name):
      raise ValueError(
        f'{name!r} cannot be the name of a count: a name has lower-case letters, digits and _, '
        f'and is not one of {", ".join(TAKEN)}'
      )
  numbers = {name: float(value) for name, value in counts.items()}
  return Observation(as_messages(messages), reward, bool(done), bool(success), numbers)
