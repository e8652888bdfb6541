"""What this process is doing, said by the code that does it, for whoever asks.

Long work says what it is with `doing`. That costs nothing: the words are made only when someone
calls `now`, as console.py does from a thread of its own, so nothing waits for a display.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


class _Work(NamedTuple):
  say: Callable[[], str]
  since: float


_current: list[_Work] = []  # of the main thread, the outermost first


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
  """For as long as the block runs, `now` names it, after the blocks that it lies in.

  `what` says how far the work is where it is a function: one that another thread may call at any
  moment, and that takes no time.
  """
  _current.append(_Work(what if callable(what) else lambda: what, time.monotonic()))
  try:
    yield
  finally:
    _current.pop()


def now() -> str:
  """E.g. 'step 3 of 200: generate, 12 of 256 responses, 9,216 tokens (0:00:24)'; '' for nothing.

  The time is that of the innermost block.
  """
  current = tuple(_current)
  said = [text for work in current if (text := work.say())]
  if not said:
    return ''
  elapsed = datetime.timedelta(seconds=round(time.monotonic() - current[-1].since))
  return ': '.join(filter(None, (said[0], ', '.join(said[1:])))) + f' ({elapsed})'
