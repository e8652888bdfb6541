"""A folder that one process at a time may work in: a lock that its owner's death releases.

An flock on a file in the folder. The kernel holds it for the owner, so there is no stale one to
clean up. On NFS it counts for all hosts. A file system without such locks, as some mounted buckets
are, leaves the folder unprotected from other hosts or altogether.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts

# An NFS server keeps the locks of a host that died until its lease ends, mostly after 90 s.
LEASE_SECONDS = 120.0
_POLL_SECONDS = 1.0
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def held(folder: str, name: str, refusal: str) -> Iterator[int]:
  """Holds the lock on the file `name` in `folder`, made where missing; gives its descriptor.

  A process that inherits the descriptor holds the lock as well, after its parent's death too.

  Raises InputError with `refusal` and the owner where another holds it: at once if that runs on
  this machine, else after LEASE_SECONDS, in which the lock of a machine that is gone ends.
  """
  path = os.path.join(folder, name)
  os.makedirs(folder, exist_ok=True)
  with open(path, 'a+b', buffering=0) as file:
    _take(file, refusal)
    with contextlib.suppress(OSError):  # a full disk: who it is, is for others to read
      file.truncate(0)
      file.write(json.dumps(_myself()).encode())
    yield file.fileno()


def _take(file: BinaryIO, refusal: str) -> None:
  """Takes the lock, or raises InputError; see `held`."""
  deadline = time.monotonic() + LEASE_SECONDS
  is_waiting = False
  while True:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return
    except BlockingIOError:
      owner = _owner(file)
      is_here = owner.get('machine', _machine()) == _machine()
      if is_here or time.monotonic() >= deadline:
        raise InputError(f'{refusal} {_taken_by(owner)}.') from None
    except OSError as error:
      if error.errno not in _UNSUPPORTED:
        raise
      hosts.warn(f'{file.name} cannot be locked ({error}): see to it that nothing else works there')
      return
    if not is_waiting:
      is_waiting = True
      message = f'{file.name}: {_taken_by(owner)}; waiting for at most {LEASE_SECONDS:.0f} s'
      print(message, flush=True)
    time.sleep(_POLL_SECONDS)


def _myself() -> dict[str, Any]:
  now = datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')
  return {'pid': os.getpid(), 'host': socket.gethostname(), 'since': now, 'machine': _machine()}


def _machine() -> str:
  """What no other machine has: containers may share a host's name and each other's process ids."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  except OSError:
    return socket.gethostname()


def _owner(file: BinaryIO) -> dict[str, Any]:
  """What the owner wrote; {} where it has not yet."""
  file.seek(0)
  try:
    return json.load(file)
  except ValueError:
    return {}


def _taken_by(owner: dict[str, Any]) -> str:
  if not owner:
    return 'Another process has just taken the lock'
  return 'The lock was taken by process {pid} on {host}, at {since}'.format_map(owner)
