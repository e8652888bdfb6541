"""The tool calls of a turn, as models of two families write them.

Qwen2.5 and Qwen3: text, and any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>.
Llama 3: {"name": …, "parameters": {…}} and nothing else, after <|python_tag|> or not.
Before either there may be a thought, in which nothing is a call.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from exgrpo_jax.grading.answers import extraction

_QWEN = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)
_LLAMA = re.compile(r'\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*', re.DOTALL)


class Call(NamedTuple):
  """A call of a tool."""

  name: str
  arguments: Mapping[str, Any]


def calls_of(text: str) -> list[Call]:
  """Return the calls of a turn after its thought, in their order; none if it makes no call.

  Raises:
    ValueError: it begins a call that cannot be read, which says what a call looks like.
  """
  text = extraction.solution(text, require_think=False, require_box=False) or ''
  found = _QWEN.findall(text)
  if '<tool_call>' in text or '</tool_call>' in text:
    if len(found) != text.count('<tool_call>') or len(found) != text.count('</tool_call>'):
      raise ValueError('each <tool_call> must be closed by </tool_call>')
    return [_call(each, 'arguments') for each in found]
  if (whole := _LLAMA.fullmatch(text)) and '"name"' in whole[1]:
    return [_call(whole[1], 'parameters')]
  return []


def _call(text: str, key: str) -> Call:
  example = f'a call must be {{"name": "…", "{key}": {{…}}}}'
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
    raise ValueError(f'{example}, which is no JSON here: {error}') from error
  if not isinstance(value, dict) or set(value) != {'name', key}:
    raise ValueError(example)
  name, arguments = value['name'], value[key]
  if not isinstance(name, str) or not isinstance(arguments, dict):
    raise ValueError(example)
  return Call(name, arguments)
