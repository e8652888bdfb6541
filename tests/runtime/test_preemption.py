"""Signals: what the process does, also while Python cannot run a handler, and before the steps."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.paths import REPOSITORY


def start(program):
  """A process that has printed 'ready', which is the last thing it does before it waits."""
  process = subprocess.Popen(
    [sys.executable, '-c', program],
    cwd=REPOSITORY,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert process.stdout.readline() == 'ready\n', process.communicate()
  return process


# One long call of C, during which Python runs no handler, as during a compilation.
BUSY = """
import hashlib, signal
from exgrpo_jax.runtime import preemption
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with preemption.listening():
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_process_that_is_busy_at_once(number):
  process = start(BUSY)
  process.send_signal(number)
  line = process.stderr.readline()
  assert line == (
    f'{number.name}: the run stops once this step is finished and saved; a second signal ends it '
    'at once\n'
  )
  assert process.poll() is None
  process.send_signal(number)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (128 + number, '')
