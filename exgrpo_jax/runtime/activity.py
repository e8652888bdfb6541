"""A status line for what this process is doing: `doing` sets it and `now` reads it.

Setting it costs nothing: the text is made only when a thread of console.py calls `now`.
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
_compiled: list[tuple[_Work, str]] = []  # the program being compiled, with its enclosing block


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
  """Have `now` name the block while it runs, after the blocks that enclose it.

  To report progress, `what` may be a function. Another thread calls it, so it must return at once.
  """
  _current.append(_Work(what if callable(what) else lambda: what, time.monotonic()))
  try:
    yield
  finally:
    _current.pop()


def compiling(program: str) -> None:
  """Have `now` name a program until the next call, or the end of the innermost block.

  JAX does not report a failed compilation, but the block around it ends. Calls from other threads
  are ignored.
  """
  if threading.current_thread() is threading.main_thread():
    _compiled[:] = [(work, program) for work in _current[-1:] if program]


def now() -> str:
  """Return the status line, or '' when idle. The time is how long the innermost block has run.

  E.g. 'step 3 of 200: generate, 12 of 256 responses, 9,216 tokens (0:00:24)'.
  """
  current = tuple(_current)
  said = [text for work in current if (text := work.say())]
  if not said:
    return ''
  said += [f'compiling {program}' for work, program in tuple(_compiled) if work is current[-1]]
  elapsed = datetime.timedelta(seconds=round(time.monotonic() - current[-1].since))
  return ': '.join(filter(None, (said[0], ', '.join(said[1:])))) + f' ({elapsed})'


# ---- Progress lines while data is prepared ----


LINE_SECONDS = 10.0  # between lines; shorter work prints none


def reporter(line: Callable[[int], str]) -> Callable[[int], None]:
  """Return a function that takes the number of rows done and sometimes prints `line(done)`.

  It remembers the current standard output, because TFDS's output is redirected and thrown away.
  """
  out, printed = sys.stdout, time.monotonic()

  def report(done: int) -> None:
    nonlocal printed
    if time.monotonic() - printed > LINE_SECONDS:
      printed = time.monotonic()
      print(line(done), file=out, flush=True)

  return report
