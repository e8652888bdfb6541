"""Checks of the run's disk: the space for a checkpoint, and the cause of a failed write."""

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from logging import LogRecord
from typing import Any

import jax
from absl import logging
from rich.filesize import decimal

from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import checkpoint, storage
from exgrpo_jax.learner.optimizer import TrainState

# The operating system's write errors, as worded by Python and by tensorstore.
_FULL = re.compile('no space left|quota exceeded|file too large', re.IGNORECASE)
_FAILING = re.compile('input/output error|read-only file system|stale file handle', re.IGNORECASE)


def check_space(workdir: str, state: TrainState) -> None:
  """Raise InputError if a checkpoint does not fit on the disk; print its size and the free space.

  `state` may consist of arrays or shapes. The buffer is ignored because it is small compared to a
  model.
  """
  needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  free = shutil.disk_usage(workdir).free
  if free < needed:
    raise InputError(
      f'--workdir={workdir}: the disk has {decimal(free)} left, but a checkpoint takes '
      f'{decimal(needed)}. Free some space, or use another disk.'
    )
  print(f'a checkpoint takes {decimal(needed)}; {workdir} has {decimal(free)} left', flush=True)


@contextlib.contextmanager
def explain_failure(workdir: str) -> Iterator[None]:
  """Convert an error raised in the block to an InputError if a full or failing disk caused it.

  Orbax wraps the file system's errors in many exception types.
  """
  hook, log = sys.unraisablehook, logging.get_absl_handler()

  def report_unraisable(unraisable: Any) -> None:
    # Ignore tensorstore writes that end after orbax has given up on their checkpoint.
    if str(unraisable.exc_value) != 'Event loop is closed':
      hook(unraisable)

  # Each of orbax's threads logs the full error, before it is raised or long afterwards.
  log.addFilter(_is_other_news)
  sys.unraisablehook = report_unraisable
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
      f'--workdir={workdir}: the disk {"is full" if is_full else "failed"} ({reason}). Complete '
      f'checkpoints: {complete}. {"Free some space" if is_full else "Repair the disk"} and run '
      'the same command again. It resumes from the newest checkpoint.'
    ) from error
  finally:
    if not is_failing:
      log.removeFilter(_is_other_news)
      sys.unraisablehook = hook


def _write_failure(error: BaseException) -> str:
  """Return the system's error message if a full or failing disk caused `error`, else ''."""
  for cause in storage.with_causes(error):
    for line in str(cause).splitlines():
      if found := _FULL.search(line) or _FAILING.search(line):
        return line[max(0, found.start() - 100) : found.end() + 100]
  return ''


def _is_other_news(record: LogRecord) -> bool:
  error = record.exc_info[1] if record.exc_info else None
  return error is None or not _write_failure(error)
