"""SIGTERM, as clouds send it before they take a machine away: the step is finished and saved.

One host listens itself. Of several it may come to one, so JAX listens: it tells the others, and
they agree on the step after which all stop.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped and saved, the same command goes on


@contextlib.contextmanager
def listening() -> Iterator[Callable[[int], bool]]:
  """Gives a function that says whether to stop after a step; for the main thread.

  It is asked once after each step. On one host a second SIGTERM ends the process at once, as
  does any outside the block; of several hosts JAX hears the first whenever it comes.
  """
  if jax.distributed.is_initialized():
    yield multihost_utils.reached_preemption_sync_point
    return
  received = []

  def hear(number, _):
    received.append(number)
    signal.signal(number, signal.SIG_DFL)

  before = signal.signal(signal.SIGTERM, hear)
  try:
    yield lambda step: bool(received)
  finally:
    signal.signal(signal.SIGTERM, before)
