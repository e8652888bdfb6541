"""Tools: descriptions of functions, parsing of calls, and replies to the model."""

import asyncio
from typing import Any, Literal

import pytest

from exgrpo_jax.environments import settings
from exgrpo_jax.environments.environment import Observation, Task, as_messages
from exgrpo_jax.environments.expressions import calculate
from exgrpo_jax.environments.pool import Pool
from exgrpo_jax.environments.tools import Call, Tools, calls_of, describe, methods
from exgrpo_jax.errors import InputError


def weather(
  city: str,
  days: int = 3,
  unit: Literal['c', 'f'] = 'c',
  tags: list[str] | None = None,
  more: dict = {},  # noqa: B006
  limits: dict[str, list[float]] | None = None,
  note: Any = None,
) -> str:
  """Tells the weather.

  Of a city,
  as it was.

  Args:
    city: which one, such as
      Berlin
    days: how many
    unit: of temperature
    tags: what to look for
    more: whatever
    limits: per day
    note: to the reader

  Returns:
    A text.
  """
  assert unit == 'c' and tags is limits is note is None and more == {}
  return 'rain, ' * (days * len(city))


STRINGS = {'type': 'array', 'items': {'type': 'string'}}
# The output of transformers 5.24's get_json_schema.
DESCRIBED = {
  'type': 'function',
  'function': {
    'name': 'weather',
    'description': 'Tells the weather.\n\nOf a city,\nas it was.',
    'parameters': {
      'type': 'object',
      'properties': {
        'city': {'type': 'string', 'description': 'which one, such as Berlin'},
        'days': {'type': 'integer', 'description': 'how many'},
        'unit': {'type': 'string', 'enum': ['c', 'f'], 'description': 'of temperature'},
        'tags': STRINGS | {'nullable': True, 'description': 'what to look for'},
        'more': {'type': 'object', 'description': 'whatever'},
        'limits': {
          'type': 'object',
          'additionalProperties': {'type': 'array', 'items': {'type': 'number'}},
          'nullable': True,
          'description': 'per day',
        },
        'note': {'description': 'to the reader'},
      },
      'required': ['city'],
    },
    'return': {'type': 'string', 'description': 'A text.'},
  },
}


def test_a_function_is_described_as_in_transformers():
  assert describe(weather) == DESCRIBED


def no_hint(x):
  """Does it.

  Args:
    x: what
  """


def no_line(x: int):
  """Does it."""


def no_words(x: int):
  pass


def odd_type(x: complex):
  pass


def by_position(x: int, /):
  pass


def any_number(*x: int):
  pass


for function in (odd_type, by_position, any_number):
  function.__doc__ = no_hint.__doc__


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    (no_hint, 'parameter x of no_hint has no type hint'),
    (no_line, 'parameter x of no_line is not described under Args:'),
    (no_words, 'no_words has no docstring'),
    (odd_type, 'parameter x of odd_type has the type .*complex'),
    (by_position, 'parameter x of by_position cannot be passed by name'),
    (any_number, 'parameter x of any_number cannot be passed by name'),
  ],
)
def test_a_function_that_cannot_be_described_is_refused(function, message):
  with pytest.raises(ValueError, match=message):
    describe(function)


QWEN = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
  ('text', 'calls'),
  [
    (f'Let me see.\n{QWEN}\n{QWEN}', [Call('f', {'x': 1})] * 2),
    ('{"name": "f", "parameters": {"x": "1"}}', [Call('f', {'x': '1'})]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', [Call('f', {})]),
    ('The answer is {1, 2}.', []),
    (r'\boxed{"name"}', []),
    (f'<think>I could write {QWEN}, but I know it.</think>It is 7.', []),
    (f'I could write {QWEN}.\n</think>\n{QWEN}', [Call('f', {'x': 1})]),
    (f'<think>A call begins with <tool_call>.</think>{QWEN}', [Call('f', {'x': 1})]),
    (f'<think>A call is {QWEN}', []),
    ('<think>So f.</think>\n{"name": "f", "parameters": {}}', [Call('f', {})]),
    ('', []),
  ],
)
def test_calls_are_read(text, calls):
  assert calls_of(text) == calls


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('<tool_call>{"name": "f", "arguments": {}}', 'must be closed'),
    (f'{QWEN}</tool_call>', 'must be closed'),
    ('<tool_call>f(1)</tool_call>', 'is not valid JSON'),
    ('<tool_call>{"name": "f"}</tool_call>', 'a call must be'),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', '"arguments": {'),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', 'a call must be'),
    ('{"name": "f", "arguments": {}}', '"parameters": {'),
    (f'<think>So {QWEN}.</think><tool_call>', 'must be closed'),
    (f'<tool_call>{"[" * 99_999}</tool_call>', 'a call must be .*, which is not valid JSON'),
    (f'{{"name": {"[" * 99_999}}}', '"parameters": {.*, which is not valid JSON'),
  ],
)
def test_an_invalid_call_is_explained(text, message):
  with pytest.raises(ValueError, match=message):
    calls_of(text)


@pytest.mark.parametrize(
  ('expression', 'value'),
  [(' 3 * (4.5 - 2) ** 2', '18.75'), ('-7 // 2', '-4'), ('7 % 4 + +1', '4'), ('2**-1', '0.5')],
)
def test_arithmetic(expression, value):
  assert calculate(expression) == value


@pytest.mark.parametrize(
  'expression',
  [
    *('__import__("os")', 'x', '1 if 1 else 2', '"a" * 9', '[1]', 'abs(1)', '(1).real', 'True', ''),
    *('9 ** 999999999', '9 ** 99 ** 99', '10 ** 99 * 100', '(-1) ** 0.5', '1 / 0', '1' * 1001),
  ],
)
def test_only_bounded_arithmetic_is_evaluated(expression):
  with pytest.raises((ValueError, SyntaxError, ArithmeticError)):
    calculate(expression)


NO_CALLS = {'tool_calls': 0, 'failed_calls': 0}
RIGHT = Observation([], reward=1.0, done=True, success=True, counts=NO_CALLS)


def begun(*functions, answer='12'):
  environment = Tools(functions)
  question = [{'role': 'user', 'content': '3 * 4?'}]
  assert environment.reset(Task(0, question, answer, {}), 0) == question
  return environment


def said(environment, turn):
  observation = environment.step(turn)
  assert not observation.done and {m['role'] for m in observation.messages} == {'tool'}
  return [message['content'] for message in as_messages(observation.messages)]


def call(name, arguments):
  return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_model_calls_tools_until_it_answers():
  environment = begun(calculate, weather)
  both = call('calculate', '{"expression": "3*4"}') + call('weather', '{"city": "B", "days": 1}')
  assert said(environment, both) == ['12', 'rain, ']
  assert environment.step(r'It is \boxed{12}.') == RIGHT
  assert begun().step(r'\boxed{13}') == RIGHT._replace(reward=0.0, success=False)


def test_errors_are_returned_to_the_model():
  environment = begun(calculate, weather)
  failures = {
    '<tool_call>': 'each <tool_call> must be closed by </tool_call>',
    call('f', '{}'): 'there is no tool f, only calculate, weather',
    call('calculate', '{"expression": "1/0"}'): 'ZeroDivisionError: division by zero',
    call('calculate', '{"x": 1}'): 'TypeError: ',
    call('calculate', '[' * 99_999): 'a call must be {"name": "…", "arguments": {…}}, which is not',
    call(r'\ud83d', '{}'): 'there is no tool ?, only calculate, weather',
  }
  for turn, error in failures.items():
    (reply,) = said(environment, turn)
    assert reply.startswith(f'error: {error}')
  counted = environment.step(call('calculate', '{"expression": "1"}') + call('f', '{}')).counts
  assert counted == {'tool_calls': 2, 'failed_calls': 1}
  (long,) = said(environment, call('weather', '{"city": "Berlin", "days": 999}'))
  assert len(long) < 4010 and ' … ' in long


class Shop:
  """Tools that share a state."""

  def reset(self, money, **row):
    self.money, self.reward = money, 0.0
    return f'You have {self.money} coins for {row["answer"]} apples.'

  def buy(self, apples: int) -> str:
    """Buys apples.

    Args:
      apples: how many.
    """
    if apples > self.money:
      raise ValueError('too dear')
    self.money -= apples
    self.reward = 1.0 if self.money == 0 else 0.5
    return f'{self.money} coins left'

  def _count(self):
    raise AssertionError('this is no tool')


def test_methods_of_a_class_are_tools_that_share_a_state():
  environment = Tools([calculate, Shop])
  question = Task(0, [{'role': 'user', 'content': 'Buy.'}], '5', {'money': 3})
  (prompt,) = environment.reset(question, 0)
  assert prompt == {'role': 'user', 'content': 'Buy.\nYou have 3 coins for 5 apples.'}
  (absent,) = said(environment, call('_count', '{}'))
  assert absent == 'error: there is no tool _count, only calculate, buy'
  assert said(environment, call('buy', '{"apples": 4}')) == ['error: ValueError: too dear']
  assert said(environment, call('buy', '{"apples": 2}')) == ['1 coins left']
  another = Tools([Shop])
  another.reset(question, 0)
  assert environment.step('5') == RIGHT._replace(reward=0.5, success=False)
  assert another.step('5') == RIGHT._replace(reward=0.0, success=False)
  said(another, call('buy', '{"apples": 3}'))
  assert another.step('whatever') == RIGHT


class Trl:
  """An environment written for TRL's trainer."""

  def reset(self, **row):
    self.added = len(row['prompt'])

  @property
  def total(self):
    return self.added / 4

  async def add(self, number: int) -> str:
    """Adds.

    Args:
      number: what to add.
    """
    await asyncio.sleep(0)
    self.added += number
    return self.say(self.added)

  @staticmethod
  def say(number: int) -> str:
    """Says a number.

    Args:
      number: what to say.
    """
    return f'It is {number}.'

  def get_reward(self):
    return self.total


def test_a_class_written_for_trl_needs_no_change():
  """TRL 1.16: a property is not a tool, a coroutine is awaited, and `get_reward` is the reward."""
  assert [tool.__name__ for tool in methods(Trl())] == ['add', 'say']
  environment = Tools([Trl])
  environment.reset(Task(0, [{'role': 'user', 'content': 'Add.'}], '5', {}), 0)
  assert said(environment, call('add', '{"number": 2}')) == ['It is 3.']
  assert environment.step('5') == RIGHT._replace(reward=0.75, success=False)
  assert said(environment, call('add', '{"number": 1}')) == ['It is 4.']
  assert environment.step('whatever') == RIGHT


def described(*tools):
  """Return a worker's description of its tools."""
  return Pool(settings.EnvironmentConfig(name='tools', tools=tools, workers=1)).tools()


class Idle:
  def reset(self, **_):
    return ''


@pytest.mark.full
def test_the_worker_describes_functions_and_the_methods_of_classes():
  spec = 'exgrpo_jax.environments.expressions:calculate'
  assert described(spec, f'{__name__}:Shop') == [describe(calculate), describe(Shop().buy)]
  with pytest.raises(InputError, match=r"config\.environment\.tools: .*no attribute 'calculate_'"):
    described(f'{spec}_')
  with pytest.raises(InputError, match=r'tools: .*parameter path of listdir has no type hint'):
    described('os:listdir')
  with pytest.raises(InputError, match=r"tools: .*:Shop' .*there is another tool named buy"):
    described(f'{__name__}:Shop', f'{__name__}:Shop')
  with pytest.raises(InputError, match=r'tools: .*Idle has no public method'):
    described(f'{__name__}:Idle')


def test_tools_without_a_function_are_refused():
  with pytest.raises(InputError, match=r"config\.environment\.tools=\(\): .*name='tools' requires"):
    settings.check(settings.EnvironmentConfig(name='tools'))


def test_a_character_that_no_tokenizer_can_encode_is_replaced_in_any_message():
  assert as_messages('a\ud83d') == [{'role': 'user', 'content': 'a?'}]
