"""Reports what a step is doing when it takes far longer than those before it.

A host that waits for another, or for a file system, looks like one that works. Every host
reports for itself: the one whose phase differs from the others' is the one to look at.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from exgrpo_jax.runtime.clock import Clock, Now

FACTOR = 10  # times the median step
LEAST_SECONDS = 60.0  # no step is reported before this


@contextlib.contextmanager
def watching(
  tell: Callable[[str], None] | None = None, least_seconds: float = LEAST_SECONDS
) -> Iterator[Clock]:
  """A clock for the steps in the block, watched by a thread.

  `tell` gets a line once a step has taken FACTOR times the median of those before it and at least
  `least_seconds`, and another each time that doubles; by default it is printed.
  """
  clock, over = Clock(), threading.Event()
  thread = threading.Thread(
    target=_watch, args=(clock, over, tell or _print, least_seconds), daemon=True
  )
  thread.start()
  try:
    yield clock
  finally:
    over.set()
    thread.join()


def _watch(
  clock: Clock, over: threading.Event, tell: Callable[[str], None], least_seconds: float
) -> None:
  step, limit = None, 0.0
  while not over.wait(least_seconds / 100):
    now = clock.now()
    if now.step != step:
      step, limit = now.step, first_limit(now, least_seconds)
    if now.step_seconds > limit:
      limit = 2 * now.step_seconds
      tell(message(now))


def first_limit(now: Now, least_seconds: float) -> float:
  """Seconds after which the current step has taken too long."""
  return max(FACTOR * now.median_seconds, least_seconds)


def message(now: Now) -> str:
  """The report on a step that has taken too long."""
  doing = (
    f"has been in phase '{now.phase}' for {now.phase_seconds:.0f} s"
    if now.phase
    else 'is between two phases'
  )
  return (
    f'this step has taken {now.step_seconds:.0f} s, where the median of those before it is '
    f'{now.median_seconds:.1f} s; it {doing}'
  )


def _print(message: str) -> None:
  print(f'WARNING: {socket.gethostname()}: {message}', file=sys.stderr, flush=True)
