"""tpu_scripts/worker.sh: what happens on a worker, with real processes."""

import os
import signal
import subprocess
import time

import pytest

from tests.helpers.stand_ins import RECORD, ROOT, SCRIPTS, calls, environment, fake, worker


def await_status(place, wanted, seconds=30):
  for _ in range(seconds * 20):
    status = worker(place, 'status').stdout.strip()
    if status == f'exgrpo: {wanted}':
      return
    time.sleep(0.05)
  pytest.fail(f'{status}, where {wanted} was awaited')


def await_log(place, words, seconds=30):
  log = place / 'exgrpo' / 'log'
  for _ in range(seconds * 20):
    if words in log.read_text().splitlines():
      return
    time.sleep(0.05)
  pytest.fail(f'{words!r} did not come: {log.read_text()}')


def test_a_worker_keeps_the_exit_code_and_the_output(place):
  assert worker(place, 'status').stdout == 'exgrpo: idle\n'
  assert worker(place, 'start', '/none', 'bash', '-c', 'echo hello; exit 3').returncode == 0
  await_status(place, 'exit_code 3')
  await_log(place, 'hello')


def test_a_worker_trains_once_at_a_time_and_stops_by_sigterm(place):
  command = 'trap "echo saved; exit 7" TERM; echo ready; while true; do sleep .1; done'
  assert worker(place, 'start', '/none', 'bash', '-c', command).returncode == 0
  await_log(place, 'ready')
  again = worker(place, 'start', '/none', 'true')
  assert again.returncode == 1
  assert again.stderr == 'error: training runs already; stop.sh ends it.\n'
  assert worker(place, 'free').returncode == 1
  assert worker(place, 'stop').returncode == 0
  assert worker(place, 'status').stdout == 'exgrpo: exit_code 7\n'
  await_log(place, 'saved')
  assert worker(place, 'free').returncode == 0


def test_a_worker_kills_what_does_not_stop(place):
  command = 'trap "" TERM; echo ready; while true; do sleep .1; done'
  assert worker(place, 'start', '/none', 'bash', '-c', command).returncode == 0
  await_log(place, 'ready')
  assert worker(place, 'stop', STOP_SECONDS='1').returncode == 0
  await_status(place, 'lost')


def test_a_worker_that_was_killed_says_so(place):
  assert worker(place, 'start', '/none', 'bash', '-c', 'echo ready; sleep 60').returncode == 0
  await_log(place, 'ready')
  os.killpg(int((place / 'exgrpo' / 'pid').read_text()), signal.SIGKILL)
  await_status(place, 'lost')


def test_a_worker_mounts_the_bucket_once(place):
  fake(place, 'mountpoint', 'exit 1')
  assert worker(place, 'mount', 'my-bucket').returncode == 0
  assert calls(place) == [
    'sudo mkdir -p /mnt/my-bucket',
    f'sudo chown {os.getuid()} /mnt/my-bucket',
    'gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 '
    '--enable-streaming-writes=false my-bucket /mnt/my-bucket',
  ]
  fake(place, 'mountpoint', 'exit 0')
  assert worker(place, 'mount', 'my-bucket').returncode == 0
  assert len(calls(place)) == 3


def test_a_worker_installs_this_tree_into_its_own_python(place):
  fake(
    place,
    'uv',
    RECORD,
    'mkdir -p "$HOME/exgrpo/venv/bin"',
    'cp "$FAKE/bin/pip" "$HOME/exgrpo/venv/bin/pip"',
  )
  fake(place, 'pip', RECORD)
  venv = f'{place}/exgrpo/venv'
  install = f'pip install --quiet -e {ROOT}[tpu,gcs]'
  assert worker(place, 'install').returncode == 0
  assert calls(place) == [f'uv venv --quiet --seed --python 3.12 {venv}', install]
  assert worker(place, 'install').returncode == 0
  assert calls(place)[2:] == [install]


def test_metrics_reach_the_bucket_while_training_runs(place):
  (place / 'metrics.jsonl').touch()
  fake(place, 'sync', RECORD)
  fake(place, 'sleep', 'exec /bin/sleep .1')
  until_synced = 'until [[ -e $FAKE/calls ]]; do read -rt .1 <> <(:) || true; done'
  assert worker(place, 'run', str(place), 'bash', '-c', until_synced).returncode == 0
  assert calls(place)[0] == f'sync {place}/metrics.jsonl'


def test_a_pod_exits_as_training_does_and_hears_sigterm(place):
  assert worker(place, 'run', '/none', 'bash', '-c', 'exit 5').returncode == 5
  command = 'trap "exit 6" TERM; echo ready; while true; do sleep .1; done'
  process = subprocess.Popen(
    [SCRIPTS / 'worker.sh', 'run', '/none', 'bash', '-c', command],
    env=environment(place),
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'ready\n'
  process.terminate()
  assert process.wait(timeout=30) == 6
