"""Reading from a store that may fail: trying again, and telling failure from damage.

A store that fails says nothing about what is stored: a checkpoint that cannot be read for now is
not a damaged one.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from logging import LogRecord
from typing import Any, TypeVar

import jax
from absl import logging
from rich.filesize import decimal

from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.learner.optimizer import TrainState

WAITS = (1.0, 4.0, 10.0)  # seconds before each further attempt

# What the store itself says when files are missing or not what they should be.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# How tensorstore reports what the operating system or a remote store told it.
_NUMBERED = re.compile(r"os_error_code='(\d+)'")
_STATUS = re.compile(
  'UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED'
)

T = TypeVar('T')


def patiently(read: Callable[[], T], place: str) -> T:
  """What `read` returns, tried again after each of WAITS while the store of `place` fails.

  Raises InputError where it keeps failing, and what `read` raises for any other reason.
  """
  for wait in (*WAITS, None):
    try:
      return read()
    except Exception as error:  # orbax and its stores raise many types
      reason = store_failure(error)
      if not reason:
        raise
      if wait is None:
        raise InputError(
          f'{place} cannot be read ({reason}), not in {1 + len(WAITS)} attempts over '
          f'{sum(WAITS):.0f} s: the disk or the network fails, or a permission is missing. Nothing '
          'was moved or changed; mend it and start the same command again, or move it away if it '
          'is lost.'
        ) from error
      print(
        f'WARNING: {place} cannot be read ({reason}); next attempt in {wait:.0f} s',
        file=sys.stderr,
        flush=True,
      )
      time.sleep(wait)
  raise AssertionError('the last attempt returns or raises')


def store_failure(error: BaseException) -> str:
  """What the store said if `error` is due to its failure; '' otherwise."""
  return next(filter(None, map(_failure, with_causes(error))), '')


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
  """The error and what it was raised from."""
  while error:
    yield error
    error = error.__cause__ or error.__context__


def _failure(error: BaseException) -> str:
  if isinstance(error, TimeoutError | ConnectionError):
    return str(error) or type(error).__name__
  if isinstance(error, OSError):
    return str(error) if error.errno not in (None, *_DAMAGE) else ''
  first_line = str(error).partition('\n')[0]
  if number := _NUMBERED.search(first_line):
    return os.strerror(int(number[1])) if int(number[1]) not in _DAMAGE else ''
  return first_line[:200] if _STATUS.match(first_line) else ''


# ---- The disk ----


# What the system tells whoever writes, in Python's words and in tensorstore's.
_FULL = re.compile('no space left|quota exceeded|file too large', re.IGNORECASE)
_FAILING = re.compile('input/output error|read-only file system|stale file handle', re.IGNORECASE)


def check_space(workdir: str, state: TrainState) -> None:
  """Prints the size of a checkpoint of `state`, or of its shapes, and the free disk space.

  Raises InputError where there is too little. The buffer does not count: it is small beside a
  model.
  """
  needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  free = shutil.disk_usage(workdir).free
  if free < needed:
    raise InputError(
      f'--workdir={workdir} has {decimal(free)} left, and a checkpoint takes {decimal(needed)}: '
      'free some space, or use another disk.'
    )
  print(f'a checkpoint takes {decimal(needed)}; {workdir} has {decimal(free)} left', flush=True)


@contextlib.contextmanager
def explain_failure(workdir: str) -> Iterator[None]:
  """Turns an error in the block that is due to a full or failing disk into an InputError.

  The file system reports it to whoever writes, and orbax passes it on in errors of many types.
  """
  hook, log = sys.unraisablehook, logging.get_absl_handler()
  # Each of orbax's threads logs the error in full, before it is raised or long after.
  log.addFilter(_is_other_news)
  sys.unraisablehook = functools.partial(_report_unraisable, hook)
  is_failing = False
  try:
    yield
  except Exception as error:
    reason = '' if isinstance(error, InputError) else _write_failure(error)
    if not reason:
      raise
    is_failing = True
    complete = ', '.join(map(str, checkpoint.steps(workdir))) or 'none'
    is_full = _FULL.search(reason)
    raise InputError(
      f'--workdir={workdir}: the disk {"is full" if is_full else "fails"} ({reason}). Complete '
      f'checkpoints: {complete}. {"Free some space" if is_full else "Mend it"} and start the same '
      'command again; it resumes from the newest.'
    ) from error
  finally:
    if not is_failing:
      log.removeFilter(_is_other_news)
      sys.unraisablehook = hook


def _write_failure(error: BaseException) -> str:
  """What the system said if `error` is due to a full or failing disk; '' otherwise."""
  for cause in with_causes(error):
    for line in str(cause).splitlines():
      if found := _FULL.search(line) or _FAILING.search(line):
        return line[max(0, found.start() - 100) : found.end() + 100]
  return ''


def _is_other_news(record: LogRecord) -> bool:
  error = record.exc_info[1] if record.exc_info else None
  return error is None or not _write_failure(error)


def _report_unraisable(hook: Callable[[Any], object], unraisable: Any) -> None:
  # Writes of tensorstore that end after orbax has given up their checkpoint.
  if str(unraisable.exc_value) != 'Event loop is closed':
    hook(unraisable)
