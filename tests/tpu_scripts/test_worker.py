"""tpu_scripts/worker.sh: what runs on a worker, with real processes."""

import os
import subprocess

from tests.helpers.stand_ins import (
  RECORD,
  SCRIPTS,
  background,
  calls,
  fake,
  wait_until,
  worker,
)

# Trains until SIGTERM.
TRAIN = 'trap "echo saved; exit 7" TERM; echo ready; while true; do sleep .1; done'


def start(place, command):
  assert worker(place, 'start', '/none', 'bash', '-c', command).returncode == 0


def status(place):
  return worker(place, 'status').stdout


def await_status(place, expected):
  wait_until(lambda: status(place) == f'exgrpo: {expected}\n', lambda: status(place))


def await_log(place, line):
  log = place / 'exgrpo' / 'log'
  wait_until(lambda: line in log.read_text().splitlines(), log.read_text)


def test_a_worker_keeps_the_exit_code_and_the_output(place):
  assert status(place) == 'exgrpo: idle\n'
  start(place, 'echo hello; exit 3')
  await_status(place, 'exit_code 3')
  await_log(place, 'hello')


def test_a_worker_runs_one_training_at_a_time_and_stops_it_with_sigterm(place):
  start(place, TRAIN)
  await_log(place, 'ready')
  second = worker(place, 'start', '/none', 'true')
  assert second.returncode == 1
  assert second.stderr == 'error: training is already running; stop.sh stops it.\n'
  assert worker(place, 'free').returncode == 1
  assert worker(place, 'stop').returncode == 0
  assert status(place) == 'exgrpo: exit_code 7\n'
  await_log(place, 'saved')
  assert worker(place, 'free').returncode == 0


def test_a_worker_kills_training_that_does_not_stop_and_says_that_it_was_killed(place):
  start(place, 'trap "" TERM; echo ready; while true; do sleep .1; done')
  await_log(place, 'ready')
  assert worker(place, 'stop', STOP_SECONDS='1').returncode == 0
  await_status(place, 'lost')


def test_a_worker_mounts_the_bucket_once(place):
  fake(place, 'mountpoint', 'exit 1')
  assert worker(place, 'mount', 'my-bucket').returncode == 0
  make, own, mount = calls(place)
  assert {make.tool, own.tool} == {'sudo'}
  assert make.words == ('mkdir', '-p', '/mnt/my-bucket')
  assert own.words == ('chown', str(os.getuid()), '/mnt/my-bucket')
  assert (mount.tool, *mount.words) == ('gcsfuse', 'my-bucket', '/mnt/my-bucket')
  assert mount.flags == {
    'metadata-cache-ttl-secs': '0',
    'metadata-cache-negative-ttl-secs': '0',
    'enable-streaming-writes': 'false',
  }
  fake(place, 'mountpoint', 'exit 0')
  assert worker(place, 'mount', 'my-bucket').returncode == 0
  assert len(calls(place)) == 3


def test_metrics_reach_the_bucket_while_training_runs(place):
  (place / 'metrics.jsonl').touch()
  fake(place, 'sync', RECORD)
  fake(place, 'sleep', 'exec /bin/sleep .1')
  until_synced = 'until [[ -e $FAKE/calls ]]; do read -rt .1 <> <(:) || true; done'
  assert worker(place, 'run', str(place), 'bash', '-c', until_synced).returncode == 0
  assert calls(place)[0].words == (f'{place}/metrics.jsonl',)


def test_in_the_foreground_a_worker_exits_as_training_does_and_passes_sigterm_on(place):
  assert worker(place, 'run', '/none', 'bash', '-c', 'exit 5').returncode == 5
  command = [SCRIPTS / 'worker.sh', 'run', '/none', 'bash', '-c', TRAIN]
  with background(place, command, stdout=subprocess.PIPE) as process:
    assert process.stdout.readline() == 'ready\n'
    process.terminate()
    assert process.wait(timeout=30) == 7


def test_sigterm_that_comes_as_soon_as_training_starts_is_not_lost(place):
  train = 'trap "exit 7" TERM; kill -TERM $PPID; while true; do sleep .1; done'
  command = [SCRIPTS / 'worker.sh', 'run', '/none', 'bash', '-c', train]
  for _ in range(5):
    with background(place, command) as process:
      assert process.wait(timeout=30) == 7
