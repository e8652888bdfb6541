"""Reading from unreliable storage: retries of failed reads, and checksums that detect damage.

A checkpoint that cannot be read right now is not necessarily damaged: the storage may have failed
while the data is still intact.
"""

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from exgrpo_jax.errors import InputError, with_causes
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy.model import Params

WAITS = (1.0, 4.0, 10.0)  # seconds to wait before each retry

# Error numbers for files that are missing or of the wrong kind.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# Patterns in tensorstore's reports of errors from the operating system or a remote store.
_NUMBERED = re.compile(r"os_error_code='(\d+)'")
_STATUS = re.compile(
  'UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED'
)

T = TypeVar('T')


def patiently(read: Callable[[], T], place: str) -> T:
  """Call `read`; if the storage that holds `place` fails, retry after each delay in WAITS.

  Raises InputError if the storage keeps failing; errors with other causes propagate.
  """
  waits = iter(WAITS)
  while True:
    try:
      return read()
    except Exception as error:  # orbax and its stores raise many types
      reason = store_failure(error)
      if not reason:
        raise
      wait = next(waits, None)
      if wait is None:
        raise InputError(
          f'{place} could not be read after {1 + len(WAITS)} attempts over {sum(WAITS):.0f} s '
          f'({reason}). The disk or network is failing, or you lack permission. Nothing was moved '
          'or changed. Fix the problem and run the same command again. If the data is lost, move '
          'this folder out of the way before you rerun the command.',
          status=1,
        ) from error
      message = f'WARNING: {place} cannot be read ({reason}); next attempt in {wait:.0f} s'
      print(message, file=sys.stderr, flush=True)
      time.sleep(wait)


def store_failure(error: BaseException) -> str:
  """Return the storage's error message if a storage failure caused `error`, else ''."""
  return next(filter(None, map(_failure, with_causes(error))), '')


def _failure(error: BaseException) -> str:
  if isinstance(error, TimeoutError | ConnectionError):
    return str(error) or type(error).__name__
  if isinstance(error, OSError):
    return str(error) if error.errno not in (None, *_DAMAGE) else ''
  first_line = str(error).partition('\n')[0]
  if number := _NUMBERED.search(first_line):
    return os.strerror(int(number[1])) if int(number[1]) not in _DAMAGE else ''
  return first_line[:200] if _STATUS.match(first_line) else ''


# ---- Checksums ----

# A checksum is the sum of an array's bits. It is equal on every mesh, and a flipped bit changes it.


def state_checksums(state: TrainState, cursor: Mapping[str, int]) -> dict[str, int]:
  """Map each array's name to its checksum; the cursor's numbers are their own checksums."""
  return {f'cursor.{name}': value for name, value in cursor.items()} | _sums_by_name(state)


def base_checksums(base: Params) -> dict[str, int]:
  """Map the name of each array in LoRA's frozen base to its checksum."""
  return {f'base{name}': value for name, value in _sums_by_name(base).items()}


def digest(state: TrainState, base_sums: Mapping[str, int]) -> str:
  """Return twelve hex digits that identify the parameters or, with LoRA, the base.

  Without LoRA, computes the checksums of the whole state, because saving compiles that program
  anyway.
  """
  sums = base_sums or {k: v for k, v in _sums_by_name(state).items() if k.startswith('.params')}
  return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]


def changed(saved_sums: Mapping[str, int], computed_sums: Mapping[str, int]) -> str:
  """Name the arrays that were not saved or differ from the saved ones; return '' if all match."""
  return ', '.join(name for name, value in computed_sums.items() if value != saved_sums.get(name))


def _sums_by_name(tree: Any) -> dict[str, int]:
  named_sums = jax.tree_util.tree_leaves_with_path(jax.device_get(bit_sums(tree)))
  return {jax.tree_util.keystr(path): int(value) for path, value in named_sums}


@jax.jit
def bit_sums(tree: Any) -> Any:
  """Sum each array's bits in uint32; the sum wraps around, so the order does not matter."""

  def bits(leaf: jax.Array) -> jax.Array:
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    return jax.lax.bitcast_convert_type(leaf, f'uint{8 * leaf.dtype.itemsize}')

  return jax.tree.map(lambda leaf: jnp.sum(bits(leaf), dtype=jnp.uint32), tree)
