"""A status line that shows what this process is doing: `doing` sets it and `now` reads it.

Setting the line is almost free, because the text is built only when a thread of console.py calls
`now`.
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
  start: float  # time.monotonic()


_current: list[_Work] = []  # nested blocks of the main thread, outermost first
_programs: list[tuple[_Work, str]] = []  # the program being compiled, with its enclosing block


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
  """Show `what` in the status line during the block, after the text of enclosing blocks.

  `what` may be a function that reports progress. Another thread calls it, so it must not block.
  """
  _current.append(_Work(what if callable(what) else lambda: what, time.monotonic()))
  try:
    yield
  finally:
    _current.pop()


def compiling(program: str) -> None:
  """Show that a program is being compiled, until the next call or the end of the `doing` block.

  JAX does not report when a compilation fails, but the error then ends the `doing` block. Calls
  from other threads are ignored.
  """
  if threading.current_thread() is threading.main_thread():
    _programs[:] = [(work, program) for work in _current[-1:] if program]


def now() -> str:
  """Return the status line, or '' when idle. It ends with the innermost block's running time.

  For example 'step 3 of 200: generate, 12 of 256 responses, 9,216 tokens (0:00:24)'.
  """
  current = tuple(_current)
  texts = [text for work in current if (text := work.say())]
  if not texts:
    return ''
  texts += [f'compiling {program}' for work, program in tuple(_programs) if work is current[-1]]
  elapsed = datetime.timedelta(seconds=round(time.monotonic() - current[-1].start))
  return ': '.join(filter(None, (texts[0], ', '.join(texts[1:])))) + f' ({elapsed})'


# ---- Progress lines while data is prepared ----


LINE_SECONDS = 10.0  # between lines; shorter work prints nothing


def reporter(line: Callable[[int], str]) -> Callable[[int], None]:
  """Return a function that takes the number of rows done and prints the `line` for it.

  It prints at most one line every LINE_SECONDS, to the current standard output, even if standard
  output is later redirected to discard TFDS's messages.
  """
  out, print_time = sys.stdout, time.monotonic()

  def report(count: int) -> None:
    nonlocal print_time
    if time.monotonic() - print_time > LINE_SECONDS:
      print_time = time.monotonic()
      print(line(count), file=out, flush=True)

  return report
