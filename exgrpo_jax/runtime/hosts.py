"""Multi-host runs: connecting the hosts, choosing which one writes, exchanging values.

Every host runs the same program and must make the same decisions; otherwise the hosts wait for each
other forever. So anything that only one host sees must be shared (`all_gather`,
`broadcast_from_first`). On a single host, everything here is a no-op.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from exgrpo_jax.errors import InputError

_MEETING_SECONDS = 300
_ABORT_SECONDS = 60  # XLA aborts the process this long after _MEETING_SECONDS
HEARTBEAT_SECONDS = 20  # a host without a heartbeat for this long is dead; JAX ends the others
# A failing host waits this long before it exits. If another host's death is the cause, JAX will
# have reported it by then.
_LAST_WORDS_SECONDS = HEARTBEAT_SECONDS + 5


class Meeting(NamedTuple):
  """Flags for connecting to the other hosts; all None on a known cluster or a single host."""

  coordinator_address: str | None = None  # host:port of the first host
  num_processes: int | None = None
  process_id: int | None = None  # from 0


@contextlib.contextmanager
def joined(meeting: Meeting) -> Iterator[None]:
  """Run the block as one of the run's hosts. Enter the block before any other use of JAX.

  On Cloud TPU, GKE and Slurm, the environment lists the hosts; elsewhere, `meeting` does. If
  neither does, this is the only host. With several hosts, only the first host prints to standard
  output. A host that fails exits without waiting for the other hosts, which end within a minute.
  Raises InputError if `meeting` is incomplete or wrong, or the hosts cannot connect.
  """
  _join(meeting)
  if not are_several():
    yield
    return
  # If another host dies, JAX names it and aborts. absl would print all threads' stacks after that.
  signal.signal(signal.SIGABRT, signal.SIG_DFL)
  with (
    open(os.devnull, 'w') as devnull,
    contextlib.redirect_stdout(sys.stdout if is_first() else devnull),
  ):
    names = all_gather(socket.gethostname())
    print('hosts: ' + ', '.join(f'{n} is {name}' for n, name in enumerate(names)), flush=True)
    try:
      yield
      barrier('end')  # because JAX's own shutdown waits for the slowest host only a few minutes
    except Exception as error:
      _fail(error)


def _join(meeting: Meeting) -> None:
  if meeting == Meeting(num_processes=1):  # a single host: don't look for others
    return
  _check(meeting)
  if meeting.coordinator_address is not None:
    print(
      f'host {meeting.process_id}: waiting up to {_MEETING_SECONDS} s for all '
      f'{meeting.num_processes} hosts to connect to {meeting.coordinator_address}',
      file=sys.stderr,
      flush=True,
    )
  # Hosts use `all_gather` to agree on when to stop. JAX's preemption service would count steps
  # instead, and orbax tells the service when background checkpoints finish. The service could then
  # skip the step at which all hosts agreed to stop.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    _connect(meeting)
  except ValueError as error:
    if 'coordinator_address' not in str(error):
      raise
    # Neither `meeting` nor the environment names a coordinator, so this is the only host.
  except (RuntimeError, OSError) as error:
    place = f'--coordinator_address={meeting.coordinator_address}: ' * (meeting != Meeting())
    raise InputError(
      f'{place}the hosts of the run cannot connect to each other ({error}). Run the same command '
      'on every host, and make sure that every host can reach the first host.',
      status=1,
    ) from error


def _connect(meeting: Meeting) -> None:
  """Call `jax.distributed.initialize`. Raises TimeoutError before XLA aborts the process."""
  errors: list[Exception] = []

  def initialize() -> None:
    try:
      jax.distributed.initialize(
        **meeting._asdict(),
        # XLA aborts the process when this expires, so this process must report and exit earlier.
        initialization_timeout=_MEETING_SECONDS + _ABORT_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
      )
    except Exception as error:
      errors.append(error)

  thread = threading.Thread(target=initialize, daemon=True)
  thread.start()
  thread.join(_MEETING_SECONDS)
  if thread.is_alive():
    raise TimeoutError(f'some hosts are still missing after {_MEETING_SECONDS} s')
  if errors:
    raise errors[0]


def _check(meeting: Meeting) -> None:
  address, count, number = meeting
  if meeting == Meeting():
    return
  if address is None or count is None or number is None:
    raise InputError(
      '--coordinator_address, --num_processes and --process_id must be set together. Set all three '
      'flags, or none of them if the cluster provides the addresses of its hosts.'
    )
  if number >= count:
    raise InputError(
      f'--process_id={number}: the value must be below --num_processes={count}, because '
      'numbering starts at 0.'
    )
  port = re.fullmatch(r'.+:(\d+)', address)
  if not port or int(port[1]) >= 2**16:
    raise InputError(
      f'--coordinator_address={address}: the value must be host:port, where host is the first '
      'host, and port is a free port on it.'
    )
  if number == 0:
    try:  # XLA crashes if the port is in use
      socket.create_server(('', int(port[1]))).close()
    except OSError as error:
      raise InputError(
        f'--coordinator_address={address}: host 0 cannot listen on this port ({error}). Choose a '
        'free port.'
      ) from error


def _fail(error: Exception) -> None:
  """Exit without JAX's own shutdown, which would wait forever for the other hosts."""
  name = f'host {jax.process_index()} ({socket.gethostname()})'
  if isinstance(error, InputError):
    print(f'error: {name}: {error}', file=sys.stderr, flush=True)
    time.sleep(2 * is_first())  # JAX aborts the others when the first host exits
    os._exit(error.status)
  traceback.print_exception(error)
  print(
    f'error: {name} failed; see above. This host exits in {_LAST_WORDS_SECONDS} s. If JAX reports '
    'before then that another host died, that host is the cause.',
    file=sys.stderr,
    flush=True,
  )
  time.sleep(_LAST_WORDS_SECONDS)
  os._exit(1)


def are_several() -> bool:
  """Return True if this process is one of several hosts."""
  # This avoids initializing the devices, which not every command needs.
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
  """Return True on the first host, the only one that writes shared output."""
  return not are_several() or jax.process_index() == 0


def warn(message: str) -> None:
  """Print a warning to standard error, on the first host only."""
  if is_first():
    print(f'WARNING: {message}', file=sys.stderr, flush=True)


def all_gather(value: Any) -> list[Any]:
  """Return each host's `value`, a JSON value, in host order. All hosts must call this."""
  if not are_several():
    return [value]
  encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(encoded)))
  # Round up to a power of two, so that few shapes are compiled.
  padded = np.zeros(1 << int(lengths.max() - 1).bit_length(), np.uint8)
  padded[: len(encoded)] = encoded
  rows = multihost_utils.process_allgather(padded)
  return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]


def broadcast_from_first(value: Any) -> Any:
  """Return the first host's `value`; see `all_gather`."""
  return all_gather(value)[0]


def is_own_share(number: int) -> bool:
  """Return True if this host handles piece `number` of the work; see `merge_shares`."""
  return not are_several() or number % jax.process_count() == jax.process_index()


def merge_shares(results: list[Any]) -> list[Any]:
  """Combine the results of all hosts in piece order. All hosts must call this."""
  shares = all_gather(results)
  return [
    shares[number % len(shares)][number // len(shares)] for number in range(sum(map(len, shares)))
  ]


def barrier(name: str) -> None:
  """Wait until every host has called this."""
  if are_several():
    multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def refusing_together(*kinds: type[Exception]) -> Iterator[None]:
  """Raise an error on all hosts if any host raises InputError or one of `kinds` in the block.

  An InputError takes precedence over other errors. All hosts must enter the block.
  """
  error, report, kinds = None, None, (InputError, *kinds)
  try:
    yield
  except kinds as caught:
    error = caught
    status = [error.status] if isinstance(error, InputError) else []
    report = [[isinstance(error, kind) for kind in kinds].index(True), str(error), *status]
  reports = all_gather(report)
  if failures := [[each[0], number, *each[1:]] for number, each in enumerate(reports) if each]:
    kind, number, message, *status = min(failures)
    where = f'on host {number}: ' * (None in reports)
    raise kinds[kind](where + message, *status) from error


@contextlib.contextmanager
def first_host_first(name: str) -> Iterator[None]:
  """Run the block on the first host first, so that the other hosts can reuse its results."""
  if not is_first():
    barrier(name)
  yield
  if is_first():
    barrier(name)


def check_same(place: str, what: str, content: Callable[[], bytes]) -> None:
  """Raise InputError unless all hosts read the same content from `place`."""
  if not are_several():
    return
  first, *others = all_gather(hashlib.sha256(content()).hexdigest())
  for number, other in enumerate(others, 1):
    if other != first:
      raise InputError(
        f'{place}: {what} differ between host 0 and host {number}. Each host has its own copy of '
        'data and code. Make all copies identical.'
      )


def check_shared(folder: str) -> None:
  """Raise InputError unless all hosts share `folder`."""
  if not are_several():
    return
  path = pathlib.Path(folder, f'.hosts_{broadcast_from_first(uuid.uuid4().hex)}')
  if is_first():
    path.touch()
  barrier('written')
  sees = all_gather(path.exists())
  if is_first():
    path.unlink()
  if blind := ', '.join(str(number) for number, is_seen in enumerate(sees) if not is_seen):
    raise InputError(
      f'--workdir={folder}: some hosts cannot see the files that host 0 writes there (hosts: '
      f'{blind}). Choose a folder that all hosts share, such as a mounted bucket.'
    )
