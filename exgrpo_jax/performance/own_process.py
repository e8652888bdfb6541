"""Seconds and peak memory of a command, measured by a process that is small itself.

The peak of a new process begins with what its parent held when it started it, so a parent with
arrays in memory would be measured in place of its child.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple


class Usage(NamedTuple):
  """What a command took."""

  seconds: float
  megabytes: float  # the most memory that it held


def measure(command: Sequence[str]) -> Usage:
  """Runs a command; what it prints is dropped, but for errors.

  Raises subprocess.CalledProcessError where it fails.
  """
  launcher = [sys.executable, '-m', 'exgrpo_jax.performance.own_process']
  done = subprocess.run([*launcher, *command], check=True, stdout=subprocess.PIPE)
  return Usage(*json.loads(done.stdout))


def _main(command: Sequence[str]) -> None:
  """Runs a command, prints what it took as JSON, and ends as it did."""
  started = time.perf_counter()
  status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
  seconds = time.perf_counter() - started
  unit = 1 if sys.platform == 'darwin' else 1024  # bytes there, KiB elsewhere
  peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
  print(json.dumps(Usage(seconds, 1e-6 * peak)))
  sys.exit(abs(status))


if __name__ == '__main__':
  _main(sys.argv[1:])
