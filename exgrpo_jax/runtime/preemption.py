"""Handling of SIGTERM and SIGINT: finish and save the current step, then stop the run.

Cloud providers send SIGTERM before they reclaim a machine; Ctrl-C sends SIGINT. Before the first
step there is nothing to save, so either signal ends the process immediately: see
exgrpo_jax/__main__.py.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator

from exgrpo_jax.runtime import hosts

EXIT_CODE = 75  # EX_TEMPFAIL in sysexits.h: the run was saved; the same command resumes it

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], str]]:
  """Yield a function that returns the name of a signal received by any host, or ''.

  Enter the block in the main thread. All hosts must call the function together. A second signal
  ends the process immediately, even while Python cannot run signal handlers (during compilation
  or while waiting for the device).
  """
  signal_names: list[str] = []

  def handle(number: int, _: types.FrameType | None) -> None:
    signal_names.append(signal.Signals(number).name)

  reader, writer = socket.socketpair()
  writer.setblocking(False)
  thread = threading.Thread(target=_answer, args=(reader,), daemon=True)
  old_handlers = {
    number: signal.signal(number, handle)
    for number in _SIGNALS
    if signal.getsignal(number) is not signal.SIG_IGN
  }
  file = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  thread.start()
  try:
    yield lambda: next(filter(None, hosts.all_gather(''.join(signal_names[:1]))), '')
  finally:
    signal.set_wakeup_fd(file)
    for number, handler in old_handlers.items():
      signal.signal(number, handler)
    writer.close()  # this ends the thread
    thread.join()
    reader.close()


def _answer(reader: socket.socket) -> None:
  """Announce the stop on the first signal, and end the process on the second."""
  is_first = True
  while number := reader.recv(1):  # Python writes each handled signal here immediately
    if number[0] not in _SIGNALS:
      continue
    if not is_first:
      os._exit(128 + number[0])
    is_first = False
    print(
      f'{signal.Signals(number[0]).name}: the run will stop after this step is finished and saved. '
      'A second signal stops the run immediately.',
      file=sys.stderr,
      flush=True,
    )
