"""Tools: Python functions that a model calls, until it answers without a call.

Its answer is compared with the question's by our verifier, as that of a single turn is. A call that
cannot be read, or a tool that fails, is answered by the error, and the model may try again.
"""

from collections.abc import Callable, Sequence
from typing import Any

from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.environments.tool_calls import Call, calls_of
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.user_code import ERRORS, summarize

_LONGEST = 4000  # characters of a result; the middle of a longer one is left out


class Tools:
  """An environment of functions; the model's chat template describes them to it."""

  def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
    self._functions = {function.__name__: function for function in functions}

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the task."""
    del seed  # nothing is left to chance
    self._truth = verifier.Truth(task.answer, task.kind, task.columns)
    return task.messages

  def step(self, response: str) -> Observation:
    """The reward is 1 for the right answer."""
    try:
      calls = calls_of(response)
    except ValueError as error:
      return Observation([_result(f'error: {error}')])
    if calls:
      return Observation([_result(self._called(call)) for call in calls])
    outcome = verifier.judge_with(verifier.BuiltIn(), response, self._truth).outcome
    is_right = outcome == 'correct'
    return Observation(reward=float(is_right), done=True, success=is_right)

  def _called(self, call: Call) -> str:
    """What a call returns, as text."""
    if call.name not in self._functions:
      return f'error: there is no tool {call.name}, only {", ".join(self._functions)}'
    try:
      text = str(self._functions[call.name](**call.arguments))
    except MemoryError:
      raise
    except ERRORS as error:
      return f'error: {summarize(error)}'
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f'{text[:half]} … {text[-half:]}'


def _result(text: str) -> dict[str, str]:
  return {'role': 'tool', 'content': text}
