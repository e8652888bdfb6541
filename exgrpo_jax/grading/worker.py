"""The process that reads what a model wrote: verifier and reward, one response after another.

grading.py starts it as `python -m exgrpo_jax.grading.worker` and kills it where it must. Lines of
JSON go both ways over the socket that it finds as its standard input: first what
`_Setup` holds, answered by {'ready': true} or {'refused': why}; then [response, answer, kind],
each answered by {'outcome': …, 'reward': …, 'reason': …, 'spent': …}, spent where the process
should judge no other. What is printed here goes to standard error and cannot pass for a verdict.
It imports no jax: it must start in an instant, and leave the accelerator alone.
"""

import ctypes
import dataclasses
import importlib
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from exgrpo_jax.grading import verifier

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_REASON = 300  # characters of an error's text, at most


@dataclasses.dataclass(frozen=True)
class _Setup:
  parent: int  # process id
  memory_limit: int  # MiB, beyond what the process has when it is ready
  max_length: int  # characters
  reward: str  # 'package.module:function', or ''
  verifier: verifier.Config


def main() -> None:
  """Serves until the socket ends or the parent does."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(0), 'wb', 0)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  values = json.loads(requests.readline() or 'null')
  if values is None:
    return  # the parent is gone already
  setup = _Setup(**values | {'verifier': verifier.Config(**values['verifier'])})
  _die_with(setup.parent)
  try:
    reward = _reward(setup.reward)
  except Exception as error:  # the user's module, which may do anything
    _write(replies, {'refused': _reason(error)})
    return
  _limit_memory(setup.memory_limit)
  _write(replies, {'ready': True})
  for line in requests:
    _write(replies, _graded(*json.loads(line), reward, setup))


def bounded(response: str, max_length: int) -> str | None:
  """What is judged of a response: all of it, or without most of its thought where it is long.

  Of more than `max_length` characters the last `max_length` count, if these hold the
  last '</think>': only thought is lost then, which is no answer anyway. Otherwise
  None: an answer of that length is none, and the end of a thought must not pass for one.
  """
  if len(response) <= max_length:
    return response
  kept = response[-max_length:]
  return kept if '</think>' in kept else None


def _graded(
  response: str, answer: str, kind: str, reward: Callable[..., float] | None, setup: _Setup
) -> dict[str, Any]:
  try:
    judged = bounded(response, setup.max_length)
    outcome = (
      'no answer' if judged is None else verifier.judge(judged, answer, setup.verifier, kind)
    )
    value = float(outcome == 'correct')
    if reward is not None:
      value = _number(reward(response, answer, outcome), setup.reward)
    return {'outcome': outcome, 'reward': value, 'reason': '', 'spent': False}
  except Exception as error:  # whatever it is, it concerns this response alone
    # Out of memory, though, what is left may be in pieces.
    return {
      'outcome': 'crashed',
      'reward': 0.0,
      'reason': _reason(error),
      'spent': isinstance(error, MemoryError),
    }


def _reward(name: str) -> Callable[..., float] | None:
  """The function that 'package.module:function' names; raises where there is none such."""
  if not name:
    return None
  module, colon, attribute = name.partition(':')
  if not (module and colon and attribute):
    raise ValueError("it has not the form 'package.module:function'")
  function = getattr(importlib.import_module(module), attribute)
  inspect.signature(function).bind('response', 'answer', 'outcome')
  return function


def _number(value: Any, name: str) -> float:
  """A reward as Python's float; ValueError where it is not a finite number."""
  number = float(value) if not isinstance(value, str) else math.nan
  if not math.isfinite(number):
    raise ValueError(f'{name} returned {value!r}, not a finite number')
  return number


def _reason(error: Exception) -> str:
  text = f'{type(error).__name__}: {error}'[:_REASON]  # it may quote the response
  return ''.join(c if c.isprintable() else ' ' for c in text).strip(': ')


def _die_with(parent: int) -> None:
  """Ends with the parent, also while a response keeps this process from reading on."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # it died before it could be watched
    os._exit(0)


def _limit_memory(mebibytes: int) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file behind
  if sys.platform != 'linux':
    return  # elsewhere the limit is not kept, or counts what was only reserved
  # The address space of imported libraries is large and not a response's doing.
  with open('/proc/self/statm') as file:
    own = int(file.read().split()[0]) * resource.getpagesize()
  limit = own + mebibytes * 2**20
  _, hard = resource.getrlimit(resource.RLIMIT_AS)
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(replies, value: dict[str, Any]) -> None:
  replies.write(json.dumps(value).encode() + b'\n')


if __name__ == '__main__':
  main()
