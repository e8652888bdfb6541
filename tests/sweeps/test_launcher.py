"""Commands in parallel: how many run, how a failure is reported, how they are interrupted."""

import ast
import os
import signal
import sys
import threading
import time

import pytest

from exgrpo_jax.sweeps import launcher
from tests.helpers.processes import is_running


def shell_job(tmp_path, name, script):
  return launcher.Job(name=name, command=['sh', '-c', script], log=str(tmp_path / name / 'log.txt'))


@pytest.mark.parametrize(
  ('script', 'reason'),
  [
    ('echo step 3; echo; kill -9 $$', 'SIGKILL: step 3'),
    ('echo ValueError: x; echo; echo a note after it; exit 3', 'exit status 3: ValueError: x'),
    (
      'echo jax.errors.JaxRuntimeError: x; echo ----; false',
      'exit status 1: jax.errors.JaxRuntimeError: x',
    ),
    ('exit 1', 'exit status 1: its log is empty'),
  ],
)
def test_a_failure_is_reported_with_the_error_line_of_its_log(script, reason, tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'log.txt').write_text('error: of an earlier start\n')
  jobs = [shell_job(tmp_path, 'a', script), shell_job(tmp_path, 'b', 'true')]
  assert launcher.run(jobs, 1) == launcher.Outcome(failed={'a': reason}, unfinished=[])


@pytest.mark.parametrize('parallel', [1, 2])
def test_as_many_jobs_run_at_a_time_as_asked_for(parallel, tmp_path):
  """Each job creates a file, waits a while, and reports whether the other's file exists."""
  script = 'cd {}; touch {}; for i in 1 2 3 4 5 6 7 8 9; do sleep .1; done; test -e {}; echo $?>{}'
  jobs = [
    shell_job(tmp_path, 'a', script.format(tmp_path, 'x', 'y', 'a_met_b')),
    shell_job(tmp_path, 'b', script.format(tmp_path, 'y', 'nothing', 'rc')),
  ]
  assert launcher.run(jobs, parallel) == launcher.Outcome(failed={}, unfinished=[])
  assert (tmp_path / 'a_met_b').read_text() == ('1\n' if parallel == 1 else '0\n')


@pytest.mark.skipif(
  not hasattr(os, 'sched_getaffinity') or len(os.sched_getaffinity(0)) < 2, reason='one core'
)
def test_jobs_at_the_same_time_have_cores_of_their_own(tmp_path):
  meets = 'for i in $(seq 100); do sleep 0.1; test -e {other} && break; done'
  ask = f'sleep 0.3; {sys.executable} -c "import os; print(os.sched_getaffinity(0))"'
  jobs = [
    shell_job(
      tmp_path,
      name,
      f'{ask} > {tmp_path}/{name}.txt; {meets.format(other=tmp_path / f"{other}.txt")}',
    )
    for name, other in ('ab', 'ba')
  ]
  launcher.run(jobs, 2)
  one, two = (ast.literal_eval((tmp_path / f'{name}.txt').read_text()) for name in 'ab')
  assert one and two and not one & two


def test_a_second_signal_kills_a_job_that_does_not_exit(tmp_path):
  """Its child processes too; jobs that wait are not started."""
  stubborn = shell_job(
    tmp_path,
    'a',
    f'trap : TERM; sleep 30 & echo $! > {tmp_path}/child; touch {tmp_path}/x; wait; wait; wait',
  )

  def interrupt_twice():
    while not (tmp_path / 'x').exists():
      time.sleep(0.02)
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)  # a background job of a shell ignores SIGINT
      time.sleep(0.5)

  handler = signal.getsignal(signal.SIGTERM)
  sender = threading.Thread(target=interrupt_twice)
  sender.start()
  outcome = launcher.run([stubborn, shell_job(tmp_path, 'b', 'true')], 1)
  assert outcome == launcher.Outcome(failed={}, unfinished=['a', 'b'])
  sender.join()
  child = int((tmp_path / 'child').read_text())
  assert not is_running(child)
  assert signal.getsignal(signal.SIGTERM) is handler
