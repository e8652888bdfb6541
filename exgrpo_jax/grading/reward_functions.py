"""Load reward functions by name, call them with the values they ask for, and check the results.

This file must not import jax, because the processes that call rewards must start instantly.
"""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import counted
from exgrpo_jax.grading import rewards
from exgrpo_jax.workers import user_code

# Allowed parameter names, in addition to the columns of the question's row.
PARAMETERS = (
  'response',  # the text, without special tokens but with tags such as </think>
  'answer',  # the ground truth
  'outcome',  # from the verifier: one of verifier.OUTCOMES
  'question',  # the text of the last user message
  'messages',  # the prompt: dicts of role and content
  'tokens',  # the response's token ids, with the end token if there is one
  'length',  # number of `tokens`
  'truncated',  # True if the response was cut at the limit, without an end token
  'max_response',  # the limit, in tokens
  'overlong_buffer',  # config.grading.overlong_buffer
)

ROW_PARAMETERS = ('question', 'messages')  # the PARAMETERS that come from the row, like columns
_FACTS = {'tokens': [0, 1, 2], 'length': 3, 'truncated': False, 'max_response': 1024}
# Largest absolute reward. The squares of weighted sums must fit in float32, so that their standard
# deviations can be computed.
LARGEST = 1e10
# Parameters of rewards for TRL and verl, which call rewards differently.
_FOREIGN = {'completions': 'TRL', 'completion_ids': 'TRL', 'solution_str': 'verl'}
# A correct, a wrong and an empty response for trying out rewards and verifiers.
TRIALS = (
  {'response': r'So it is \boxed{1}.', 'answer': '1', 'outcome': 'correct', **_FACTS},
  {'response': r'So it is \boxed{2}.', 'answer': '1', 'outcome': 'wrong', **_FACTS},
  {'response': '', 'answer': '1', 'outcome': 'no answer', **_FACTS, 'tokens': [0], 'length': 1},
)


@dataclasses.dataclass(frozen=True)
class RewardFunction:
  """A reward function, its name in config.grading.rewards, and the parameters it asks for."""

  spec: str
  function: Callable[..., Any]
  required: tuple[str, ...]
  optional: tuple[str, ...]  # parameters with a default

  @property
  def columns(self) -> list[str]:
    """Return the data columns that the function requires."""
    return [name for name in self.required if name not in PARAMETERS]

  @property
  def reads_row(self) -> bool:
    """Return True if the function can only be tried on a row of the data."""
    names = (*self.required, *self.optional)
    return bool(self.columns) or not set(ROW_PARAMETERS).isdisjoint(names)

  def arguments(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each parameter's values for all rows, with None where a row lacks the column.

    A parameter with a default is left out if no row has a value for it.
    """
    optional = [name for name in self.optional if any(name in row for row in rows)]
    return {name: [row.get(name) for row in rows] for name in (*self.required, *optional)}

  def of_one(self, row: Mapping[str, Any]) -> float:
    """Compute one response's reward; raises ValueError or the function's own error."""
    arguments = {name: values[0] for name, values in self.arguments([row]).items()}
    return _as_number(user_code.awaited(self.function(**arguments)))

  def of_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Compute the rewards of a batch, passing lists to the function.

    Raises the same errors as `of_one`.
    """
    values = list(user_code.awaited(self.function(**self.arguments(rows))))
    if len(values) != len(rows):
      raise ValueError(
        f'it returned {counted(len(values), "number")} for {counted(len(rows), "response")}'
      )
    return [_as_number(value) for value in values]


def name_of(spec: str) -> str:
  """Return the function's name, which is the reward's name in metrics."""
  return spec.rpartition(':')[2]


def load(spec: str) -> RewardFunction:
  """Load a built-in reward or 'package.module:function'.

  Raises ValueError if it cannot be called as a reward, and any error from importing its module.
  """
  function = rewards.BUILT_IN.get(spec) or user_code.load(spec)
  required, optional = [], []
  for name, parameter in inspect.signature(function).parameters.items():
    if parameter.kind is parameter.POSITIONAL_ONLY:
      raise ValueError(f'its parameter {name!r} is positional-only, but values are passed by name')
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      (required if parameter.default is parameter.empty else optional).append(name)
  for name in required:
    if name in _FOREIGN:
      raise ValueError(
        f'its parameter {name!r} belongs to {_FOREIGN[name]} rewards; here, a reward is called '
        f'once per response, can take {", ".join(PARAMETERS)} and any columns of the data, and '
        'returns one number, as in '
        '`def reward(response, answer): return float(answer in response)`'
      )
  return RewardFunction(spec, function, tuple(required), tuple(optional))


def _as_number(value: Any) -> float:
  """Return a reward as a Python float; raises ValueError if it is too large or not a number."""
  # numbers.Real does not include NumPy's bool.
  if not isinstance(value, numbers.Real) and type(value).__name__ != 'bool':
    raise ValueError(f'it returned {value!r}, not a number')
  number = float(value)
  if not abs(number) <= LARGEST:  # also rejects NaN
    raise ValueError(f'it returned {value!r}, not a number from -{LARGEST:g} to {LARGEST:g}')
  return number
