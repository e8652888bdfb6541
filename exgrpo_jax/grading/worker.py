"""The worker process: judges what a model wrote, one response after another.

pool.py starts it as `python -m exgrpo_jax.grading.worker` and kills it where it must. Both sides
send lines of JSON over a socket, which is the worker's standard input:

  the fields of `Setup`        answered by {'ready': true} or {'refused': reason}
  [response, answer, kind]     answered by {'outcome': …, 'reward': …, 'reason': …, 'given': …,
                               'must_be_replaced': …}, as often as the pool asks

Whatever a reward prints goes to standard error and cannot pass for a verdict. The worker imports
no jax: it must start in an instant, and leave the accelerator alone.
"""

import ctypes
import dataclasses
import importlib
import inspect
import io
import json
import math
import numbers
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from exgrpo_jax.grading import verifier

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MAX_ANSWER = 64  # characters of an extracted answer that are reported
_MAX_REASON = 300  # characters of an error's text

# A right, a wrong and an empty response, on which a reward is tried: (response, answer, outcome).
_TRIALS = (
  (r'So it is \boxed{1}.', '1', 'correct'),
  (r'So it is \boxed{2}.', '1', 'wrong'),
  ('', '1', 'no answer'),
)

Reward = Callable[[str, str, str], float]  # of response, answer and outcome


@dataclasses.dataclass(frozen=True)
class Setup:
  """What the pool sends first."""

  parent: int  # process id
  memory_limit: int  # MiB, in addition to what the process uses when it is ready
  max_length: int  # characters
  reward: str  # 'package.module:function', or ''
  verifier: verifier.Config


def main() -> None:
  """Serves until the socket is closed or the parent ends."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(0), 'wb', 0)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  values = json.loads(requests.readline() or 'null')
  if values is None:
    return  # the parent has ended already
  setup = Setup(**values | {'verifier': verifier.Config(**values['verifier'])})
  _die_with(setup.parent)
  try:
    reward = _load_reward(setup.reward)
  except Exception as error:  # the user's module may raise anything
    _write(replies, {'refused': _summarize(error)})
    return
  _limit_memory(setup.memory_limit)
  _write(replies, {'ready': True})
  for line in requests:
    response, answer, kind = json.loads(line)
    _write(replies, _grade(response, answer, kind, reward, setup))


def bounded(response: str, max_length: int) -> str | None:
  """The part of a response that is judged: of a long one the end, if that is all its solution.

  Of more than `max_length` characters the last `max_length` are judged if they contain the last
  '</think>', because then only thought is lost, which is no answer anyway. Otherwise None: the
  end of a thought must not pass for an answer.
  """
  if len(response) <= max_length:
    return response
  end = response[-max_length:]
  return end if '</think>' in end else None


def _grade(
  response: str, answer: str, kind: str, reward: Reward | None, setup: Setup
) -> dict[str, Any]:
  try:
    judged = bounded(response, setup.max_length)
    given = None if judged is None else verifier.extract(judged, setup.verifier)
    outcome = verifier.compare(given, answer, kind)
    value = float(outcome == 'correct')
    if reward is not None:
      value = _check_reward(reward(response, answer, outcome), setup.reward)
    return {
      'outcome': outcome,
      'reward': value,
      'reason': '',
      'given': given and given[:MAX_ANSWER],
      'must_be_replaced': False,
    }
  except Exception as error:  # concerns this response alone
    return {
      'outcome': 'crashed',
      'reward': 0.0,
      'reason': _summarize(error),
      'given': None,
      'must_be_replaced': isinstance(error, MemoryError),  # it may have left things inconsistent
    }


def _load_reward(name: str) -> Reward | None:
  """The function 'package.module:function'; raises if it gives no reward for `_TRIALS`."""
  if not name:
    return None
  module, colon, attribute = name.partition(':')
  if not (module and colon and attribute):
    raise ValueError("it does not have the form 'package.module:function'")
  function = getattr(importlib.import_module(module), attribute)
  inspect.signature(function).bind('response', 'answer', 'outcome')
  for trial in _TRIALS:
    try:
      _check_reward(function(*trial), name)
    except Exception as error:
      raise ValueError(f'tried on {trial}: {_summarize(error)}') from error
  return function


def _check_reward(value: Any, name: str) -> float:
  """A reward as a Python float; raises ValueError if it is not a finite number."""
  # NumPy's bool is the one scalar that does not count as a real number.
  if not isinstance(value, numbers.Real) and type(value).__name__ != 'bool':
    raise ValueError(f'{name} returned {value!r}, not a number')
  number = float(value)
  if not math.isfinite(number):
    raise ValueError(f'{name} returned {value!r}, not a finite number')
  return number


def _summarize(error: Exception) -> str:
  """An error on one short line; it may quote the response."""
  text = f'{type(error).__name__}: {error}'[:_MAX_REASON]
  return ''.join(c if c.isprintable() else ' ' for c in text).strip(': ')


def _die_with(parent: int) -> None:
  """Makes this process end with its parent, even while it is busy with a response."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # it ended before the call above
    os._exit(0)


def _limit_memory(mebibytes: int) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no core file
  if sys.platform != 'linux':
    return  # elsewhere the limit is not enforced, or counts memory that is only reserved
  # Imported libraries take a large address space, which is not the response's doing.
  with open('/proc/self/statm') as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
  limit = used + mebibytes * 2**20
  _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
  if hard_limit != resource.RLIM_INFINITY:
    limit = min(limit, hard_limit)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(replies: io.RawIOBase, value: dict[str, Any]) -> None:
  replies.write(json.dumps(value).encode() + b'\n')


if __name__ == '__main__':
  main()
