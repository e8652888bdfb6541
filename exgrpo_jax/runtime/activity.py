"""What this process is doing, announced with `doing` and read with `now`.

Announcing costs nothing: the text is made only when `now` is called, by a thread of console.py.
"""

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


class _Work(NamedTuple):
  say: Callable[[], str]
  since: float


_current: list[_Work] = []  # in the main thread, the outermost first
_compiled: list[tuple[_Work, str]] = []  # the program that the main thread compiles, and in what


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
  """Has `now` name the block while it runs, after the blocks that enclose it.

  `what` may be a function, to report progress; another thread calls it, so it must return at once.
  """
  _current.append(_Work(what if callable(what) else lambda: what, time.monotonic()))
  try:
    yield
  finally:
    _current.pop()


def compiling(program: str) -> None:
  """Have `now` name a program until the next call, or the end of the innermost block.

  A compilation that fails does not say so, but the block around it ends. Other threads say nothing.
  """
  if threading.current_thread() is threading.main_thread():
    _compiled[:] = [(work, program) for work in _current[-1:] if program]


def now() -> str:
  """E.g. 'step 3 of 200: generate, 12 of 256 responses, 9,216 tokens (0:00:24)'; '' when idle.

  The time is the innermost block's.
  """
  current = tuple(_current)
  said = [text for work in current if (text := work.say())]
  if not said:
    return ''
  said += [f'compiling {program}' for work, program in tuple(_compiled) if work is current[-1]]
  elapsed = datetime.timedelta(seconds=round(time.monotonic() - current[-1].since))
  return ': '.join(filter(None, (said[0], ', '.join(said[1:])))) + f' ({elapsed})'


# ---- Lines that say how far a preparation is ----


LINE_SECONDS = 10.0  # between lines; what takes less prints none


def reporter(line: Callable[[int], str]) -> Callable[[int], None]:
  """A function to call with the number of rows done, which prints `line` of it now and then.

  It prints where standard output goes when it is made, for TFDS's is thrown away.
  """
  out, printed = sys.stdout, time.monotonic()

  def report(done: int) -> None:
    nonlocal printed
    if time.monotonic() - printed > LINE_SECONDS:
      printed = time.monotonic()
      print(line(done), file=out, flush=True)

  return report
