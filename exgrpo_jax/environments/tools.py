"""Tools: Python functions that a model calls, until it answers without a call.

Its answer is compared with the question's by our verifier, as that of a single turn is. A call that
cannot be read, or a tool that fails, is answered by the error, and the model may try again.

Where tools share a state they are the public methods of a class, which is made without arguments
for each episode. That is the form of TRL's `environment_factory`: its method `reset`, if it has
one, is no tool but gets prompt, answer and columns of the row by name, and what it returns is added
to the prompt. If it has an attribute `reward`, a number from 0 to 1, that is the episode's reward
when the model answers, 1 is a success, and the answer is not compared.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.environments.tool_calls import Call, calls_of
from exgrpo_jax.grading import verifier
from exgrpo_jax.workers.user_code import ERRORS, on_a_line

_ERROR = 'error: '  # what the answer to a call that failed begins with
_LONGEST = 4000  # characters of a result; the middle of a longer one is left out


class Tools:
  """An environment of functions; the model's chat template describes them to it."""

  def __init__(self, sources: Sequence[Callable[..., Any]]) -> None:
    """Takes functions, and classes whose methods are tools and share a state."""
    self._states: list[Any] = [source() for source in sources if inspect.isclass(source)]
    made = iter(self._states)
    tools = [
      tool
      for source in sources
      for tool in (methods(next(made)) if inspect.isclass(source) else [source])
    ]
    self._tools = {tool.__name__: tool for tool in tools}

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the task, with what the classes add to it."""
    del seed  # nothing is left to chance
    self._truth = verifier.Truth(task.answer, task.kind, task.columns)
    row = {**task.columns, 'prompt': task.messages, 'answer': task.answer}
    said = [state.reset(**row) for state in self._states if hasattr(state, 'reset')]
    *before, last = task.messages
    return [*before, {**last, 'content': '\n'.join([last['content'], *filter(None, said)])}]

  def step(self, response: str) -> Observation:
    """The reward is 1 for the right answer, or that of the classes together."""
    try:
      calls = calls_of(response)
    except ValueError as error:
      return _answered([f'{_ERROR}{error}'])
    if calls:
      return _answered([self._called(call) for call in calls])
    rewards = [state.reward for state in self._states if hasattr(state, 'reward')]
    if rewards:
      reward = sum(rewards) / len(rewards)
    else:
      judged = verifier.judge_with(verifier.BuiltIn(), response, self._truth)
      reward = float(judged.outcome == 'correct')
    return _answered([])._replace(reward=reward, done=True, success=reward >= 1)

  def _called(self, call: Call) -> str:
    """What a call returns, as text."""
    if call.name not in self._tools:
      return f'{_ERROR}there is no tool {call.name}, only {", ".join(self._tools)}'
    try:
      text = str(self._tools[call.name](**call.arguments))
    except MemoryError:
      raise
    except ERRORS as error:
      return f'{_ERROR}{on_a_line(error)}'  # the model has no use for the place in a file
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f'{text[:half]} … {text[-half:]}'


def methods(state: object) -> list[Callable[..., Any]]:
  """The tools of a class's instance, in the order in which they are defined."""
  names = [name for kind in type(state).__mro__[-2::-1] for name in vars(kind)]
  return [
    method
    for name in dict.fromkeys(names)
    if not name.startswith('_') and name != 'reset'
    if inspect.ismethod(method := getattr(state, name))
  ]


def _answered(results: Sequence[str]) -> Observation:
  failed = sum(text.startswith(_ERROR) for text in results)
  # JSON allows lone surrogates in what a call says, and no tokenizer reads them in an answer.
  texts = [text.encode(errors='replace').decode() for text in results]
  return Observation(
    [{'role': 'tool', 'content': text} for text in texts],
    counts={'tool_calls': len(results), 'failed_calls': failed},
  )
