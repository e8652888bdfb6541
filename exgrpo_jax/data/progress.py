"""Lines that say how far a long preparation is."""

import sys
import time
from collections.abc import Callable

SECONDS = 10.0  # between lines; what takes less prints none


def reporter(line: Callable[[int], str]) -> Callable[[int], None]:
  """A function to call with the number of rows done, which prints `line` of it now and then.

  It prints where standard output goes when it is made, for TFDS's is thrown away.
  """
  out, printed = sys.stdout, time.monotonic()

  def report(done: int) -> None:
    nonlocal printed
    if time.monotonic() - printed > SECONDS:
      printed = time.monotonic()
      print(line(done), file=out, flush=True)

  return report
