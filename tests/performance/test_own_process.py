"""What a command takes is measured from a process that is small itself."""

import subprocess
import sys

import numpy as np
import pytest

from exgrpo_jax.performance import own_process

COMMAND = 'import time; held = b"x" * {}; time.sleep({})'


def test_seconds_and_memory_are_those_of_the_command():
  usage = own_process.measure([sys.executable, '-c', COMMAND.format(200_000_000, 0.2)])
  assert 0.2 <= usage.seconds < 20
  assert 200 < usage.megabytes < 300


def test_what_the_caller_holds_does_not_count():
  held = np.ones(50_000_000)  # 400 MB
  usage = own_process.measure([sys.executable, '-c', COMMAND.format(1, 0)])
  assert usage.megabytes < 100 < held.nbytes


def test_a_command_that_fails_raises():
  with pytest.raises(subprocess.CalledProcessError, match='exit status 3'):
    own_process.measure([sys.executable, '-c', 'raise SystemExit(3)'])
