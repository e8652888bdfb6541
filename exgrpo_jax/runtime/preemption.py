"""SIGTERM, as clouds send it before they take a machine away: the step is finished and saved."""

import contextlib
import signal
from collections.abc import Callable, Iterator

from exgrpo_jax.runtime import hosts

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped and saved, the same command goes on


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], bool]]:
  """Gives a function that says whether SIGTERM has come to any host; for the main thread.

  All hosts must ask it together. A second SIGTERM ends the process at once, as does any
  outside the block.
  """
  received = []

  def hear(number, _):
    received.append(number)
    signal.signal(number, signal.SIG_DFL)

  before = signal.signal(signal.SIGTERM, hear)
  try:
    yield lambda: any(hosts.all_gather(bool(received)))
  finally:
    signal.signal(signal.SIGTERM, before)
