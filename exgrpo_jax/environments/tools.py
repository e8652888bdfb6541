"""Tools: Python functions that a model can call. A turn without a call is the model's answer.

Our verifier compares this answer with the ground truth, as in single-turn training. If a call
cannot be parsed or a tool fails, the model sees the error and may try again.

Tools that share state are the public methods of a class, which is instantiated without arguments
for each episode, as in TRL's `environment_factory`. A `reset` method isn't a tool. It receives the
row's prompt, answer and columns as keyword arguments, and the text it returns is added to the
prompt. A class may provide a reward: the result of its `get_reward` method or, without such a
method, its `reward` attribute. When the model answers, this becomes the episode's reward, and the
answer is not compared with the ground truth. The reward must be a number from 0 to 1; 1 counts as a
success. If several classes provide a reward, the mean is used.

Calls are recognized only after the reasoning. Two call formats are supported:

  Qwen2.5, Qwen3: text, and any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>
  Llama 3: {"name": …, "parameters": {…}} and nothing else, optionally after <|python_tag|>

For functions with simple types, chat templates receive the same description that
`transformers.utils.get_json_schema` returns.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.answers import extraction
from exgrpo_jax.workers.user_code import ERRORS, awaited, on_a_line

_ERROR = 'error: '  # prefix of the reply to a failed call
_LONGEST = 4000  # characters of a result; longer results lose their middle
_QWEN = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)
_LLAMA = re.compile(r'\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*', re.DOTALL)
_TYPES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean', dict: 'object'}
_SECTIONS = ('Args:', 'Returns:', 'Raises:')


class Call(NamedTuple):
  """A tool call."""

  name: str
  arguments: Mapping[str, Any]


class Tools:
  """An environment with functions that the model can call; the chat template describes them."""

  def __init__(self, sources: Sequence[Callable[..., Any]]) -> None:
    """Collect the tools: plain functions, and classes whose methods share state."""
    self._states: list[Any] = [source() for source in sources if inspect.isclass(source)]
    states = iter(self._states)
    tools = [
      tool
      for source in sources
      for tool in (methods(next(states)) if inspect.isclass(source) else [source])
    ]
    self.functions = {tool.__name__: tool for tool in tools}

  def reset(self, task: Task, seed: int) -> Messages:
    """Return the task's prompt followed by the text from the classes' `reset` methods."""
    del seed  # nothing is random
    self._truth = verifier.Truth(task.answer, task.kind, task.columns)
    row = {**task.columns, 'prompt': task.messages, 'answer': task.answer}
    texts = [state.reset(**row) for state in self._states if hasattr(state, 'reset')]
    *before, last = task.messages
    return [*before, {**last, 'content': '\n'.join([last['content'], *filter(None, texts)])}]

  def step(self, response: str) -> Observation:
    """Run the calls or, if there are none, end the episode.

    The episode's reward comes from the classes or the verifier.
    """
    try:
      calls = calls_of(response)
    except ValueError as error:
      return _as_observation([f'{_ERROR}{error}'])
    if calls:
      return _as_observation([self._run(call) for call in calls])
    if rewards := [*_rewards(self._states)]:
      reward = sum(rewards) / len(rewards)
    else:
      judgement = verifier.judge_with(verifier.BuiltIn(), response, self._truth)
      reward = float(judgement.outcome == 'correct')
    return _as_observation([])._replace(reward=reward, done=True, success=reward >= 1)

  def _run(self, call: Call) -> str:
    """Run a call and return its result, or the error, as text."""
    if call.name not in self.functions:
      return f'{_ERROR}there is no tool {call.name}, only {", ".join(self.functions)}'
    try:
      text = str(awaited(self.functions[call.name](**call.arguments)))
    except MemoryError:
      raise
    except ERRORS as error:
      return f'{_ERROR}{on_a_line(error)}'  # the model does not need the file and line
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f'{text[:half]} … {text[-half:]}'


def methods(state: object) -> list[Callable[..., Any]]:
  """Return the tool methods of a class instance, in definition order."""
  names = [name for kind in type(state).__mro__[-2::-1] for name in vars(kind)]
  return [
    method
    for name in dict.fromkeys(names)
    if not name.startswith('_') and name not in ('reset', 'get_reward')
    # Check the class first, because getattr would run a property now, before `reset`.
    if callable(getattr(type(state), name)) and inspect.isroutine(method := getattr(state, name))
  ]


def _rewards(states: Sequence[Any]) -> Iterator[float]:
  """Yield the reward of each state that has one."""
  for state in states:
    if hasattr(state, 'get_reward'):
      yield awaited(state.get_reward())
    elif hasattr(state, 'reward'):
      yield state.reward


def _as_observation(results: Sequence[str]) -> Observation:
  num_failed = sum(text.startswith(_ERROR) for text in results)
  return Observation(
    [{'role': 'tool', 'content': text} for text in results],
    counts={'tool_calls': len(results), 'failed_calls': num_failed},
  )


def calls_of(text: str) -> list[Call]:
  """Return the calls that follow a turn's reasoning, in order; the list may be empty.

  Raises ValueError if a call cannot be parsed; the message shows the expected format.
  """
  text = extraction.solution(text) or ''
  contents = _QWEN.findall(text)
  if '<tool_call>' in text or '</tool_call>' in text:
    if len(contents) != text.count('<tool_call>') or len(contents) != text.count('</tool_call>'):
      raise ValueError('each <tool_call> must be closed by </tool_call>')
    return [_call(content, 'arguments') for content in contents]
  if (match := _LLAMA.fullmatch(text)) and '"name"' in match[1]:
    return [_call(match[1], 'parameters')]
  return []


def _call(text: str, key: str) -> Call:
  example = f'a call must be {{"name": "…", "{key}": {{…}}}}'
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:  # RecursionError if it is nested too deeply
    raise ValueError(f'{example}, which is not valid JSON: {error}') from error
  if not isinstance(value, dict) or set(value) != {'name', key}:
    raise ValueError(example)
  name, arguments = value['name'], value[key]
  if not isinstance(name, str) or not isinstance(arguments, dict):
    raise ValueError(example)
  return Call(name, arguments)


def describe(function: Callable[..., Any]) -> dict[str, Any]:
  """Describe a function as a JSON schema, based on its type hints and Google-style docstring.

  Raises ValueError if the function has no docstring, or if a parameter has no type hint, has no
  description, has a type that JSON cannot represent, or cannot be passed by name.
  """
  name = function.__name__
  purpose, descriptions, return_description = _docstring(name, inspect.getdoc(function) or '')
  hints = typing.get_type_hints(function)
  properties, required = {}, []
  for parameter in inspect.signature(function).parameters.values():
    if parameter.name not in hints:
      raise ValueError(f'parameter {parameter.name} of {name} has no type hint')
    if parameter.name not in descriptions:
      raise ValueError(f'parameter {parameter.name} of {name} is not described under Args:')
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
      raise ValueError(f'parameter {parameter.name} of {name} cannot be passed by name')
    schema = _schema(hints[parameter.name], f'parameter {parameter.name} of {name}')
    properties[parameter.name] = {**schema, 'description': descriptions[parameter.name]}
    if parameter.default is parameter.empty:
      required.append(parameter.name)
  parameters = {'type': 'object', 'properties': properties}
  parameters |= {'required': required} if required else {}
  function_schema = {'name': name, 'description': purpose, 'parameters': parameters}
  if 'return' in hints:
    schema = _schema(hints['return'], f'the result of {name}')
    function_schema['return'] = (
      {**schema, 'description': return_description} if return_description else schema
    )
  return {'type': 'function', 'function': function_schema}


def _docstring(name: str, text: str) -> tuple[str, dict[str, str], str]:
  """Split a docstring into (purpose, parameter descriptions, result description)."""
  pieces = re.split(rf'^\s*({"|".join(_SECTIONS)})\s*$', text, flags=re.MULTILINE)
  purpose = pieces[0].strip()
  if not purpose:
    raise ValueError(f'{name} has no docstring to tell the model what the tool does')
  sections = dict(zip(pieces[1::2], pieces[2::2]))
  lines = inspect.cleandoc('\n' + sections.get('Args:', '')).split('\n')
  descriptions: dict[str, str] = {}
  for line in lines:
    if match := re.match(r'(\w+)(?: \(.*?\))?:\s*(.*)', line):
      descriptions[parameter := match[1]] = match[2]
    elif descriptions and line.strip():  # the description continues
      descriptions[parameter] += f' {line.strip()}'
  return purpose, descriptions, ' '.join(sections.get('Returns:', '').split())


def _schema(hint: Any, where: str) -> dict[str, Any]:
  """Convert a type hint to a JSON schema."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return {}
  if hint in _TYPES:
    return {'type': _TYPES[hint]}
  if origin is typing.Literal and len(kinds := {type(value) for value in arguments}) == 1:
    return {'type': _TYPES[kinds.pop()], 'enum': list(arguments)}
  if origin is dict and arguments:
    return {'type': 'object', 'additionalProperties': _schema(arguments[1], where)}
  if hint is list or origin is list:
    return {'type': 'array', **({'items': _schema(arguments[0], where)} if arguments else {})}
  if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
    (other,) = (argument for argument in arguments if argument is not type(None))
    return {**_schema(other, where), 'nullable': True}
  names = ', '.join(kind.__name__ for kind in _TYPES)
  raise ValueError(
    f'{where} has the type {hint}, but only {names}, list, Literal, Any and None are supported'
  )
