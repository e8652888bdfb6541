"""A folder in which one process at a time may work: a lock that its owner's death releases.

An flock on a file in the folder: the kernel holds it, so there is no stale one to clean up. On NFS
it counts for all hosts. On a file system without such locks, such as some mounted buckets, other
hosts or even other processes are not kept out.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import BinaryIO

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity, hosts

# An NFS server keeps the locks of a host that died until its lease ends, mostly after 90 s.
LEASE_SECONDS = 120.0
_POLL_SECONDS = 1.0
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def held(folder: str, name: str, refusal: str) -> Iterator[int]:
  """Holds the lock on the file `name` in `folder`, made where missing; yields its descriptor.

  A process that inherits the descriptor holds the lock as well, even after its parent's death.

  Raises:
    InputError: `refusal` and the owner, where another holds it: at once if that runs on this
      machine, else after LEASE_SECONDS, by when the lock of a machine that is gone has ended.
  """
  path = os.path.join(folder, name)
  os.makedirs(folder, exist_ok=True)
  with open(path, 'a+b', buffering=0) as file:
    _take(file, refusal)
    since = datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')
    me = f'{_machine()} process {os.getpid()} on {socket.gethostname()}, at {since}'
    with contextlib.suppress(OSError):  # a full disk; only refusals read it
      file.truncate(0)
      file.write(me.encode())
    yield file.fileno()


@contextlib.contextmanager
def in_turn(folder: str, name: str, waiting: str) -> Iterator[None]:
  """Holds the lock like `held`, but waits for its owner, and prints `waiting` when it must."""
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, name), 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(waiting, flush=True)
      with activity.doing(waiting):
        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _take(file: BinaryIO, refusal: str) -> None:
  """Takes the lock, or raises InputError; see `held`."""
  deadline = time.monotonic() + LEASE_SECONDS
  is_waiting = False
  while True:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return
    except BlockingIOError:
      file.seek(0)
      machine, _, owner = file.read().decode().partition(' ')
      taken = f'The lock was taken by {owner or "another process just now"}'
      if machine in ('', _machine()) or time.monotonic() >= deadline:
        raise InputError(f'{refusal} {taken}.') from None
    except OSError as error:
      if error.errno not in _UNSUPPORTED:
        raise
      hosts.warn(f'{file.name} cannot be locked ({error}): see to it that nothing else works there')
      return
    if not is_waiting:
      is_waiting = True
      print(f'{file.name}: {taken}; waiting for at most {LEASE_SECONDS:.0f} s', flush=True)
    time.sleep(_POLL_SECONDS)


def _machine() -> str:
  """An id that no other machine has: containers may share host names and process ids."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  except OSError:
    return socket.gethostname()
