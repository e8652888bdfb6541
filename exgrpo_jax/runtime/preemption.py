"""SIGTERM, which clouds send before they take a machine away: the step is finished and saved."""

import contextlib
import signal
import types
from collections.abc import Callable, Iterator

from exgrpo_jax.runtime import hosts

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped and saved, the same command resumes


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], bool]]:
  """Yields a function that says whether any host has received SIGTERM; for the main thread.

  All hosts must call that function together. A second SIGTERM ends the process at once, as does
  any outside the block.
  """
  received = []

  def handle(number: int, _: types.FrameType | None) -> None:
    received.append(number)
    signal.signal(number, signal.SIG_DFL)

  before = signal.signal(signal.SIGTERM, handle)
  try:
    yield lambda: any(hosts.all_gather(bool(received)))
  finally:
    signal.signal(signal.SIGTERM, before)
