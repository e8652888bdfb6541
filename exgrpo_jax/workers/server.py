"""The worker's side: a process that loads user code and answers requests.

Both sides send lines of JSON over a socket, which is the worker's standard input:

  {'parent', 'memory_limit', 'setup'}   answered by {'trying': a setting, 'how': …} before each
                                        import or trial of user code, and then by the greeting or by
                                        {'refused': the error}
  a request                             answered by the reply or, if an error occurs, by {'reason',
                                        'must_be_replaced': true if the worker may be inconsistent}

The user code's output goes to standard error, where it cannot be mistaken for a reply. This module
must not import jax: a worker must start instantly and must not touch the accelerator.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.workers.user_code import ERRORS, summarize

MAX_REPLY = 1 << 20  # bytes of a line
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Reply = Mapping[str, Any]
# Reports which setting's code is about to run, and how, because that code may never return.
Say = Callable[[str, str, str], None]  # key, value, 'importing it'
# Takes a program's setup; returns the greeting and a function that answers. Raises InputError.
Load = Callable[[Mapping[str, Any], Say], tuple[Reply, Callable[[Any], Reply]]]


def serve(load: Load) -> None:
  """Answer requests until the socket is closed or the parent exits."""
  # Standard input is the socket. Duplicate the socket, then make standard input empty.
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(0), 'wb', 0)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  if not (line := requests.readline()):
    return  # the parent has ended already
  first_line = json.loads(line)
  if sys.platform == 'linux':  # end with the parent, even while this process is busy
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != first_line['parent']:
    return  # the parent ended before the call above

  def send(value: Reply) -> None:
    replies.write(_line(value))

  def say(key: str, value: str, how: str) -> None:
    send({'trying': f'config.{key}: {value!r}', 'how': how})

  try:
    greeting, answer = load(first_line['setup'], say)
  except InputError as error:
    send({'refused': str(error)})
    return
  if first_line['memory_limit']:
    _limit_memory(first_line['memory_limit'])
  send(greeting)
  for line in requests:
    try:
      send(answer(json.loads(line)))
    except ERRORS as error:
      send(failure_reply(error))


def _line(value: Reply) -> bytes:
  line = json.dumps(value).encode() + b'\n'
  if len(line) > MAX_REPLY:
    raise ValueError(f'the reply is {len(line):,} bytes long, but the limit is {MAX_REPLY:,}')
  return line


def failure_reply(error: BaseException, place: str = '') -> Reply:
  """Return the reply to a request that raised an error; `place` names the code that failed."""
  return {'reason': place + summarize(error), 'must_be_replaced': isinstance(error, MemoryError)}


def _limit_memory(mebibytes: int) -> None:
  """Let this process use at most `mebibytes` MiB more memory than it uses now. Linux only."""
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no core file
  if sys.platform != 'linux':
    return  # other systems don't enforce the limit, or they count memory that is only reserved
  # Imported libraries already use a large address space, which must not count toward the limit.
  with open('/proc/self/statm') as file:
    usage = int(file.read().split()[0]) * resource.getpagesize()
  limit = usage + mebibytes * 2**20
  _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
  if hard_limit != resource.RLIM_INFINITY:
    limit = min(limit, hard_limit)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
