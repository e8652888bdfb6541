"""Keeps curves.png up to date while a run goes on, in a process of its own.

Drawing takes seconds of a core. A thread would take them from the loop, which waits for Python's
lock; a process of low priority takes them from nobody.
"""

import os
import subprocess
import sys
import time

EVERY_SECONDS = 60.0  # from one picture to the next, at least

# -P: its search path is ours, without the folder that it happens to start in.
_COMMAND = (sys.executable, '-P', '-m', 'exgrpo_jax.reporting.curves')


class Artist:
  """Draws the curves of a workdir, at most one picture at a time."""

  def __init__(self, workdir: str | os.PathLike) -> None:
    self._workdir = os.fspath(workdir)
    self._process: subprocess.Popen | None = None
    self._next = time.monotonic() + EVERY_SECONDS
    self._has_failed = False

  def draw(self) -> None:
    """Begins another picture of the records so far, if the last one is old enough and done."""
    if self._has_failed or time.monotonic() < self._next or self._is_drawing():
      return
    self._next = time.monotonic() + EVERY_SECONDS
    self._process = subprocess.Popen(
      [*_COMMAND, self._workdir],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C is not for it
      env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    )

  def close(self) -> None:
    """Ends what is not finished; curves.png stays the last complete picture."""
    if self._process is not None:
      self._process.terminate()
      self._process.wait()

  def _is_drawing(self) -> bool:
    if self._process is None:
      return False
    status = self._process.poll()
    if status:
      self._has_failed = True
      print(
        'WARNING: curves.png cannot be drawn during the run; '
        f'exgrpo reporting.curves {self._workdir} says why',
        file=sys.stderr,
        flush=True,
      )
    return status is None or self._has_failed
