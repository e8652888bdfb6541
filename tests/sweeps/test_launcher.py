"""Commands beside each other: how a failure is told, how many run, how they are ended."""

import os
import signal
import threading
import time

import pytest

from exgrpo_jax.sweeps import launcher
from tests.helpers.processes import is_running


def shell(tmp_path, name, script):
  return launcher.Job(name, ['sh', '-c', script], str(tmp_path / name / 'log.txt'))


@pytest.mark.parametrize(
  ('script', 'reason'),
  [
    ('echo step 3; echo; kill -9 $$', 'SIGKILL: step 3'),
    ('echo ValueError: x; echo; echo a note behind it; exit 3', 'exit status 3: ValueError: x'),
    (
      'echo jax.errors.JaxRuntimeError: x; echo ----; false',
      'exit status 1: jax.errors.JaxRuntimeError: x',
    ),
    ('exit 1', 'exit status 1: its log is empty'),
  ],
)
def test_a_failure_is_told_by_the_log_line_that_says_why(script, reason, tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'log.txt').write_text('error: of an earlier start\n')
  assert launcher.run([shell(tmp_path, 'a', script), shell(tmp_path, 'b', 'true')], 1) == (
    {'a': reason},
    [],
  )


@pytest.mark.parametrize('parallel', [1, 2])
def test_as_many_run_at_a_time_as_asked(parallel, tmp_path):
  """Each of two waits a while for the other's mark."""
  script = 'cd {}; touch {}; for i in 1 2 3 4 5 6 7 8 9; do sleep .1; done; test -e {}; echo $?>{}'
  run_one = [
    shell(tmp_path, 'a', script.format(tmp_path, 'x', 'y', 'met')),
    shell(tmp_path, 'b', script.format(tmp_path, 'y', 'nothing', 'rc')),
  ]
  assert launcher.run(run_one, parallel) == ({}, [])
  assert (tmp_path / 'met').read_text() == ('1\n' if parallel == 1 else '0\n')


def test_a_job_that_will_not_end_is_killed_by_the_second_signal(tmp_path):
  """With what it has started itself, and the rest is not begun."""
  stubborn = shell(
    tmp_path,
    'a',
    f'trap : TERM; sleep 30 & echo $! > {tmp_path}/child; touch {tmp_path}/x; wait; wait; wait',
  )

  def interrupt():
    while not (tmp_path / 'x').exists():
      time.sleep(0.02)
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)  # in the background of a shell SIGINT is ignored
      time.sleep(0.5)

  before = signal.getsignal(signal.SIGTERM)
  sender = threading.Thread(target=interrupt)
  sender.start()
  assert launcher.run([stubborn, shell(tmp_path, 'b', 'true')], 1) == ({}, ['a', 'b'])
  sender.join()
  child = int((tmp_path / 'child').read_text())
  assert not is_running(child)
  assert signal.getsignal(signal.SIGTERM) is before
