"""What this process is doing, announced with `doing` and read with `now`.

Announcing costs nothing: the text is made only when `now` is called, by a thread of console.py.
"""

import contextlib
import datetime
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exgrpo_jax.runtime import hosts


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


# ---- Preemption ----

# Clouds send SIGTERM before they take a machine away; Ctrl-C sends SIGINT. Before the first step
# there is nothing to save, and both end the process at once: see exgrpo_jax/__init__.py.


EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped and saved, the same command resumes

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], str]]:
  """Yields a function that names the signal that any host has received, or ''; in the main thread.

  All hosts must call that function together. A second signal ends the process at once, even while
  the main thread compiles or waits for the device, where Python runs no handler.
  """
  received: list[str] = []

  def handle(number: int, _: types.FrameType | None) -> None:
    received.append(signal.Signals(number).name)

  reader, writer = socket.socketpair()
  writer.setblocking(False)
  thread = threading.Thread(target=_answer, args=(reader,), daemon=True)
  before = {
    number: signal.signal(number, handle)
    for number in _SIGNALS
    if signal.getsignal(number) is not signal.SIG_IGN
  }
  file = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  thread.start()
  try:
    yield lambda: next(filter(None, hosts.all_gather(''.join(received[:1]))), '')
  finally:
    signal.set_wakeup_fd(file)
    for number, handler in before.items():
      signal.signal(number, handler)
    writer.close()  # which ends the thread
    thread.join()
    reader.close()


def _answer(reader: socket.socket) -> None:
  """Announces the stop on the first signal, and ends the process on the second."""
  is_first = True
  while number := reader.recv(1):  # Python writes each signal that has a handler, at once
    if number[0] not in _SIGNALS:
      continue
    if not is_first:
      os._exit(128 + number[0])
    is_first = False
    print(
      f'{signal.Signals(number[0]).name}: the run stops once this step is finished and saved; '
      'a second signal ends it at once',
      file=sys.stderr,
      flush=True,
    )
