"""Several hosts, one run: how they find each other, who writes, and how all come to know a thing.

Every host runs the same program and must come to the same decisions, or they wait for each other
for ever. So what one host alone can see is told to all (`all_gather`, `broadcast_from_first`). On one host
nothing here does anything.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from exgrpo_jax.errors import InputError

_COORDINATOR = flags.DEFINE_string(
  'coordinator_address',
  None,
  'host:port of the first host, where the hosts meet; Cloud TPU, GKE and Slurm say it themselves.',
)
_COUNT = flags.DEFINE_integer(
  'num_processes', None, 'Processes in all; 1 alone: do not look for others.', lower_bound=1
)
_NUMBER = flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.', lower_bound=0)

_MEETING_SECONDS = 300
# Without a sign of life for so long a host is dead, and JAX ends the others.
HEARTBEAT_SECONDS = 20
# A host that fails waits for so long, for another's death may be why, and JAX will say so.
_LAST_WORDS_SECONDS = HEARTBEAT_SECONDS + 5


@contextlib.contextmanager
def joined() -> Iterator[None]:
  """The block is run as one of the hosts; must come before JAX is asked for anything.

  The hosts are found by what Cloud TPU, GKE or Slurm put into the environment, or by the flags;
  where there is neither, this is the only one. Of several only the first prints to standard
  output. One that fails ends without waiting for the others, which end within a minute.

  Raises InputError for flags that do not belong together, and where the hosts cannot meet.
  """
  _join()
  if not _are_several():
    yield
    return
  with (
    open(os.devnull, 'w') as nowhere,
    contextlib.redirect_stdout(sys.stdout if is_first() else nowhere),
  ):
    names = all_gather(socket.gethostname())
    print(
      'hosts: ' + ', '.join(f'{number} is {name}' for number, name in enumerate(names)), flush=True
    )
    try:
      yield
    except Exception as error:
      _fail(error)


def _join():
  place, count, number = _COORDINATOR.value, _COUNT.value, _NUMBER.value
  if (place, number) == (None, None) and count == 1:
    return
  given = [flag.value is not None for flag in (_COORDINATOR, _COUNT, _NUMBER)]
  if any(given) and not all(given):
    raise InputError(
      '--coordinator_address, --num_processes and --process_id belong together: '
      'either all are given, or none and the environment says them.'
    )
  if any(given) and number >= count:
    raise InputError(
      f'--process_id={number} must be below --num_processes={count}: the first is 0.'
    )
  if any(given) and not re.fullmatch(r'.+:\d+', place):
    raise InputError(
      f'--coordinator_address={place} must be host:port, of the first host and a '
      'port that is free there.'
    )
  if any(given):
    print(
      f'host {number}: waiting at {place} until all {count} are there, for '
      f'{_MEETING_SECONDS} s at most',
      file=sys.stderr,
      flush=True,
    )
  # Hosts agree by `all_gather` when to stop. JAX's own way counts steps, and orbax reports those
  # of the checkpoints that it has finished in the background to it: then a step that all agreed
  # to stop at may have gone by.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      place,
      count,
      number,
      initialization_timeout=_MEETING_SECONDS,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
  except ValueError as error:
    if 'coordinator_address' not in str(error):
      raise
    # Neither the flags nor the environment name a place to meet: there are no others.


def _fail(error):
  """Ends this process at once: JAX's own way waits for hosts that will never come."""
  name = f'host {jax.process_index()} ({socket.gethostname()})'
  if isinstance(error, InputError):
    print(f'error: {name}: {error}', file=sys.stderr, flush=True)
    os._exit(2)
  traceback.print_exception(error)
  print(
    f'error: {name} failed, as above. It ends in {_LAST_WORDS_SECONDS} s, unless JAX tells '
    'before that another host died, which is then the cause.',
    file=sys.stderr,
    flush=True,
  )
  time.sleep(_LAST_WORDS_SECONDS)
  os._exit(1)


def _are_several() -> bool:
  # Without a look at the devices, which not every command needs.
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
  """Whether this host is the one that writes what is written once."""
  return not _are_several() or jax.process_index() == 0


def warn(message: str) -> None:
  """Tells on standard error what all hosts see, once."""
  if is_first():
    print(f'WARNING: {message}', file=sys.stderr, flush=True)


def all_gather(value: Any) -> list[Any]:
  """Every host's `value`, in their order; of what JSON can hold. All must call it."""
  if not _are_several():
    return [value]
  own = np.frombuffer(json.dumps(value).encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(own)))
  padded = np.zeros(1 << int(lengths.max() - 1).bit_length(), np.uint8)  # few shapes
  padded[: len(own)] = own
  return [
    json.loads(row[:length].tobytes())
    for row, length in zip(multihost_utils.process_allgather(padded), lengths)
  ]


def broadcast_from_first(value: Any) -> Any:
  """The first host's `value`; see `all_gather`."""
  return all_gather(value)[0]


def is_own_share(number: int) -> bool:
  """Whether this host takes piece `number` of some work; `merge_shares` undoes it."""
  return not _are_several() or number % jax.process_count() == jax.process_index()


def merge_shares(own: list[Any]) -> list[Any]:
  """What all hosts made of their shares, in the order of the pieces; all must call it."""
  shares = all_gather(own)
  return [
    shares[number % len(shares)][number // len(shares)] for number in range(sum(map(len, shares)))
  ]


def barrier(name: str) -> None:
  """Returns when every host has come here."""
  if _are_several():
    multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def first_host_first(name: str) -> Iterator[None]:
  """The first host runs the block, then the others: they find what it has made."""
  if not is_first():
    barrier(name)
  yield
  if is_first():
    barrier(name)


def check_same(place: str, what: str, content: Callable[[], bytes]) -> None:
  """InputError where not all hosts have the same content; `place` is where each has read it.

  One host alone is not asked for it.
  """
  if not _are_several():
    return
  first, *others = all_gather(hashlib.sha256(content()).hexdigest())
  for number, other in enumerate(others, 1):
    if other != first:
      raise InputError(
        f'{place}: {what} of host {number} are not those of host 0; each host reads '
        'its own copy, and all must be alike.'
      )


def check_shared(folder: str) -> None:
  """InputError where `folder` is not one and the same for all hosts."""
  if not _are_several():
    return
  word = broadcast_from_first(uuid.uuid4().hex)
  path = os.path.join(folder, f'.hosts_{word}')
  if is_first():
    with open(path, 'w'):
      pass
  barrier('written')
  sees = all_gather(os.path.exists(path))
  if is_first():
    os.remove(path)
  if not all(sees):
    blind = ', '.join(str(number) for number, one in enumerate(sees) if not one)
    raise InputError(
      f'--workdir={folder} must be a folder that all hosts share, such as a mounted '
      f'bucket; these do not see what host 0 writes into it: {blind}.'
    )
