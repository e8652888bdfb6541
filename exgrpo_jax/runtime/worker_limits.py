"""What a worker process does to itself first. Imports no jax, for it must start in an instant."""

import ctypes
import os
import resource
import signal
import sys
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def streams() -> tuple[BinaryIO, BinaryIO]:
  """(requests, replies): the socket that its standard input was, which then is empty."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(0), 'wb', 0)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  return requests, replies


def die_with(parent: int) -> None:
  """Makes this process end with its parent, even while it is busy with a response."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # it ended before the call above
    os._exit(0)


def limit_memory(mebibytes: int) -> None:
  """Lets this process use so many MiB more than it does now; on Linux alone."""
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
