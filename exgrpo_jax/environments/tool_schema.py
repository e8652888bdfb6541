"""What a chat template tells a model of a Python function: name, purpose and parameters.

The same description as `transformers.utils.get_json_schema` makes, for functions with simple types.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

_TYPES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean', dict: 'object'}
_SECTIONS = ('Args:', 'Returns:', 'Raises:')


def describe(function: Callable[..., Any]) -> dict[str, Any]:
  """The description of a function with type hints and a docstring of Google's style.

  Raises:
    ValueError: a parameter has no type hint or no description, or a type that JSON has not.
  """
  name = function.__name__
  purpose, described, returned = _docstring(name, inspect.getdoc(function) or '')
  hints = typing.get_type_hints(function)
  properties, required = {}, []
  for parameter in inspect.signature(function).parameters.values():
    if parameter.name not in hints:
      raise ValueError(f'parameter {parameter.name} of {name} has no type hint')
    if parameter.name not in described:
      raise ValueError(
        f'parameter {parameter.name} of {name} has no line below Args: in its docstring'
      )
    schema = _schema(hints[parameter.name], f'parameter {parameter.name} of {name}')
    properties[parameter.name] = {**schema, 'description': described[parameter.name]}
    if parameter.default is parameter.empty:
      required.append(parameter.name)
  parameters = {'type': 'object', 'properties': properties}
  parameters |= {'required': required} if required else {}
  found = {'name': name, 'description': purpose, 'parameters': parameters}
  if 'return' in hints:
    schema = _schema(hints['return'], f'the result of {name}')
    found['return'] = {**schema, 'description': returned} if returned else schema
  return {'type': 'function', 'function': found}


def _docstring(name: str, text: str) -> tuple[str, dict[str, str], str]:
  """(purpose, description of each parameter, that of the result) of a docstring."""
  pieces = re.split(rf'^\s*({"|".join(_SECTIONS)})\s*$', text, flags=re.MULTILINE)
  purpose = pieces[0].strip()
  if not purpose:
    raise ValueError(f'{name} has no docstring: its first words tell the model what it is for')
  sections = dict(zip(pieces[1::2], pieces[2::2]))
  lines = inspect.cleandoc('\n' + sections.get('Args:', '')).split('\n')
  described: dict[str, str] = {}
  for line in lines:
    if found := re.match(r'(\w+)(?: \(.*?\))?:\s*(.*)', line):
      described[last := found[1]] = found[2]
    elif described and line.strip():  # it goes on
      described[last] += f' {line.strip()}'
  return purpose, described, ' '.join(sections.get('Returns:', '').split())


def _schema(hint: Any, where: str) -> dict[str, Any]:
  """A type hint as JSON schema."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if hint in _TYPES:
    return {'type': _TYPES[hint]}
  if origin is typing.Literal and len(kinds := {type(value) for value in arguments}) == 1:
    return {'type': _TYPES[kinds.pop()], 'enum': list(arguments)}
  if hint is list or origin is list:
    return {'type': 'array', **({'items': _schema(arguments[0], where)} if arguments else {})}
  if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
    (other,) = (argument for argument in arguments if argument is not type(None))
    return {**_schema(other, where), 'nullable': True}
  names = ', '.join(known.__name__ for known in _TYPES)
  raise ValueError(f'{where} has the type {hint}, not one of {names}, list, Literal or None')
