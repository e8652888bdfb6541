"""A process that answers lines of JSON with lines of JSON and can be killed at any time.

Replies are JSON, so they cannot contain code that runs here. The process runs server.py.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from exgrpo_jax.workers.server import MAX_REPLY


class WorkerProcess:
  """A process and the socket connected to it.

  `send` and `receive` take a deadline as a time.monotonic() value. They raise TimeoutError when the
  deadline passes, and EOFError with the exit status if the process is dead.
  """

  def __init__(self, command: Sequence[str], first_line: Any, timeout: float) -> None:
    """Start the process and send it the first line within `timeout` seconds."""
    self._socket, child_socket = socket.socketpair()
    self._buffer = b''  # received bytes of an incomplete line
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with child_socket:
      # Because the worker has its own session, Ctrl-C reaches only the parent, and a kill reaches
      # the worker's children too. The worker's standard output goes to our standard error, because
      # our standard output may be a result that another program reads.
      self._process = subprocess.Popen(
        command,
        stdin=child_socket.fileno(),
        stdout=2,
        start_new_session=True,
        env=os.environ | {'PYTHONPATH': search_path},
      )
    with contextlib.suppress(EOFError):  # `receive` will raise it again
      self.send(first_line, time.monotonic() + timeout)

  def is_idle(self) -> bool:
    """Return True if the process is alive and has no unread output, i.e. is between requests."""
    self._socket.setblocking(False)
    try:
      self._socket.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
      return True
    except OSError:
      pass
    return False

  def send(self, value: Any, deadline: float) -> None:
    """Send one line."""
    with self._until(deadline):
      self._socket.sendall(json.dumps(value).encode() + b'\n')

  def receive(self, deadline: float) -> dict[str, Any]:
    """Return the next line, parsed. May be called again after a TimeoutError."""
    while b'\n' not in self._buffer:
      with self._until(deadline):
        data = self._socket.recv(MAX_REPLY)
      if not data or len(self._buffer) > MAX_REPLY:
        raise self._kill_and_report()
      self._buffer += data
    line, _, self._buffer = self._buffer.partition(b'\n')
    return json.loads(line)

  def kill(self) -> None:
    """Kill the process and all its children. Does nothing if the process has already ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # already a zombie
      if self._process.returncode is None:
        os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()

  def close(self) -> None:
    """Kill the process and free the socket."""
    self.kill()
    self._socket.close()

  @contextlib.contextmanager
  def _until(self, deadline: float) -> Iterator[None]:
    """Set the socket timeout to the deadline; turn errors other than timeouts into EOFError."""
    self._socket.settimeout(max(1e-6, deadline - time.monotonic()))  # 0 would mean non-blocking
    try:
      yield
    except TimeoutError:
      raise
    except OSError as error:
      raise self._kill_and_report() from error

  def _kill_and_report(self) -> EOFError:
    self.kill()
    return EOFError(f'with exit status {self._process.returncode}')
