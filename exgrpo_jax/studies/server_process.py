"""A process that runs one job after another, so that what it has loaded and compiled serves all."""

import json
import os
import select
import subprocess
from collections.abc import Sequence
from typing import IO

_ANSWER_BYTES = 100  # at most; it says that a job has finished


class ServerProcess:
  """Has the parts of subprocess.Popen that a launcher needs; of the job that it works on.

  `command` reads requests as exgrpo_jax.train_server does, and ends with the first job that fails.
  """

  def __init__(self, command: Sequence[str], log: IO[bytes], kept_open: Sequence[int]) -> None:
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=log,
      start_new_session=True,
      pass_fds=kept_open,
    )
    self.pid = self._process.pid

  def send(self, arguments: Sequence[str], log: str) -> None:
    """Asks for a job; its output is appended to the file `log`."""
    assert self._process.stdin is not None
    request = json.dumps({'arguments': list(arguments), 'log': log})
    try:
      self._process.stdin.write(f'{request}\n'.encode())
      self._process.stdin.flush()
    except BrokenPipeError:
      pass  # it has died, as `poll` will say

  def poll(self) -> int | None:
    """0 once the job has finished, None while it runs, else the exit status of the process."""
    assert self._process.stdout is not None
    if (status := self._process.poll()) is not None:
      return status
    answered, _, _ = select.select([self._process.stdout], [], [], 0)
    if answered and os.read(self._process.stdout.fileno(), _ANSWER_BYTES):
      return 0
    return None  # at the end of its output it is about to exit

  def terminate(self) -> None:
    """Asks it to stop, job and all."""
    self._process.terminate()

  def wait(self) -> int:
    """Its exit status, once it has ended."""
    return self._process.wait()
