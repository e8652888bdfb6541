"""The `Environment` protocol. This file must not import jax, so that workers start instantly."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from exgrpo_jax.grading.reward_functions import LARGEST

# {'role': 'user', 'content': 'higher'}, as in chat templates; plain text is a user message.
Messages = str | Sequence[Mapping[str, str]]
# Metrics under environment/ that are always reported; see rollout/episodes.py.
METRICS = ('turns_mean', 'turns_max', 'tokens_mean', 'seconds', 'idle_seconds')


class Task(NamedTuple):
  """The question data passed to an environment."""

  row: int  # index in the data source
  messages: Sequence[Mapping[str, str]]
  answer: str  # the ground truth
  columns: Mapping[str, Any]  # the row's values by column
  kind: str = 'math'  # how answers are compared: one of verifier.KINDS


class Observation(NamedTuple):
  """An environment's reply to a turn."""

  messages: Messages = ()  # for the policy to read before its next turn
  reward: float = 0.0  # for this turn
  done: bool = False  # True if the episode ends here
  success: bool = False  # True if solved; only this field decides what is stored and replayed
  # This turn's counts by name. The step's metrics contain their sums.
  counts: Mapping[str, float] = MappingProxyType({})


class Environment(Protocol):
  """One episode; `config.environment.name` names the class.

  A worker process creates an instance for each episode, without arguments or, if
  config.environment.tools is set, with the list of tools as the only argument. The process's time
  and memory limits apply to every call. The same task, seed and turns must produce the same
  observations: if a process is lost, its episodes are replayed up to their last turn.

  For a warm start, the class may define `demonstrate(rng)`, which returns the next turn of a
  scripted player. `rng` is a NumPy generator.
  """

  def reset(self, task: Task, seed: int) -> Messages:
    """Start the episode and return the prompt.

    The prompt must depend only on the task. The seed may affect only what follows the prompt.
    """
    ...

  def step(self, response: str) -> Observation:
    """Process a turn; `response` is its text without special tokens such as the end token."""
    ...


def as_messages(messages: Messages) -> list[dict[str, str]]:
  """Convert `messages` to a list of dicts. Raises ValueError if a message is invalid.

  Replaces lone surrogates, which JSON allows but no tokenizer can encode.
  """
  if isinstance(messages, str):
    messages = [{'role': 'user', 'content': messages}]
  message_dicts = list[dict[str, str]]()
  for message in messages if isinstance(messages, Sequence) else [messages]:
    parts = dict(message) if isinstance(message, Mapping) else {}
    if set(parts) != {'role', 'content'} or not all(isinstance(v, str) for v in parts.values()):
      raise ValueError(
        f'{message!r} is not a valid message. Example: {{"role": "user", "content": "higher"}}'
      )
    message_dicts.append({n: value.encode(errors='replace').decode() for n, value in parts.items()})
  return message_dicts


def checked(observation: Observation) -> Observation:
  """Convert an observation's fields to JSON values. Raises ValueError if a field is invalid."""
  if not isinstance(observation, Observation):  # Gymnasium's step also returns five values
    raise ValueError(f'step must return an Observation, but returned {observation!r}')
  messages, reward, done, success, counts = observation
  reward = float(reward)
  if not abs(reward) <= LARGEST:  # also rejects NaN
    raise ValueError(f'the reward is {reward!r}, not a number from -{LARGEST:g} to {LARGEST:g}')
  for name in counts:
    if name in METRICS or not re.fullmatch('[a-z][a-z0-9_]*', name):
      raise ValueError(
        f'{name!r} cannot be the name of a count: a name must start with a lowercase letter, '
        f'contain only lowercase letters, digits and _, and must not be one of {", ".join(METRICS)}'
      )
  numbers = {name: float(value) for name, value in counts.items()}
  return Observation(as_messages(messages), reward, bool(done), bool(success), numbers)
