"""The arguments, variables and errors of all scripts in tpu_scripts/, then GKE and worker.sh."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers.stand_ins import (
  LOCATION,
  RECORD,
  ROOT,
  SCRIPTS,
  VALUES,
  background,
  calls,
  dry_calls,
  dry_run,
  environment,
  fake,
  fake_cloud,
  parse,
  run,
  training,
  wait_until,
  worker,
)

pytestmark = pytest.mark.full

SOURCED = {'common.sh', 'node.sh', 'variables.sh'}
COMMANDS = sorted(
  path.name for path in SCRIPTS.glob('*.sh') if path.name not in SOURCED | {'worker.sh'}
)
VARIABLES = re.findall(r'^(\w+)=[^(]', (SCRIPTS / 'variables.sh').read_text(), re.M)


def test_scripts_are_executable_and_strict():
  for name in (*COMMANDS, 'worker.sh'):
    path = SCRIPTS / name
    lines = path.read_text().splitlines()
    assert os.access(path, os.X_OK), name
    assert lines[0] == '#!/usr/bin/env bash', name
    first = next(line for line in lines if line and not line.startswith('#'))
    assert first == 'set -euo pipefail', name


def test_shellcheck_reports_nothing():
  tool = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.defpath}')
  if not tool:
    pytest.skip("shellcheck is not installed; pip install -e '.[test]' installs it.")
  result = subprocess.run(
    [tool, *sorted(SCRIPTS.glob('*.sh')), ROOT / '.ci' / 'run'], capture_output=True, text=True
  )
  assert result.returncode == 0, result.stdout


@pytest.mark.parametrize('script', COMMANDS)
def test_a_dry_run_only_prints_commands_and_rejects_unknown_arguments(script, place):
  lines = dry_run(place, script)
  assert {shlex.split(line)[0] for line in lines} <= {'cd', 'gcloud', 'xpk', 'mkdir', 'tar'}
  assert lines and not (place / 'exgrpo_jax_run-1').exists()
  refused = run(place, script, '--dry-run')
  assert refused.returncode == 2 and "unknown argument '--dry-run'" in refused.stderr
  assert not calls(place)


@pytest.mark.parametrize('script', COMMANDS)
def test_an_empty_required_variable_is_an_error_that_explains_it(script, place):
  complete = dry_run(place, script)
  refused = []
  for name in VARIABLES:
    result = run(place, script, '--dry_run', **{name: ''})
    if result.returncode == 0:
      assert result.stdout.splitlines() == complete, f'{name} is used although it is empty'
      continue
    refused.append(name)
    assert (result.returncode, result.stdout) == (2, ''), name
    assert result.stderr.startswith(f'error: {name} is not set in {place}/my variables.sh: ')
    assert len(result.stderr.split('variables.sh: ')[1]) > 20, f'{name} is not explained'
  assert 'PROJECT' in refused


def test_a_malformed_value_is_rejected(place):
  malformed = dict(SPOT='maybe', NAME='Run_1', BUCKET='gs://my-bucket', RUN='/runs/first')
  malformed |= dict(POLL_SECONDS='a minute', MAX_FAILURES='-1')
  for name, value in malformed.items():
    result = run(place, 'resume.sh', '--dry_run', **{name: value})
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {name}='{value}' in ")


def test_variables_that_only_the_user_knows_are_empty(place):
  result = subprocess.run(
    [SCRIPTS / 'resume.sh', '--dry_run'], env=environment(place), capture_output=True, text=True
  )
  assert result.returncode == 2
  assert 'error: PROJECT is not set' in result.stderr
  text = (SCRIPTS / 'variables.sh').read_text()
  empty = re.findall(r"^(\w+)=''$", text, re.M)
  assert set(empty) == set(VALUES) - {'POLL_SECONDS', 'PYTHON'}


def test_a_script_stops_at_the_first_command_that_fails(place):
  for tool in ('gcloud', 'xpk', 'tar'):
    fake(place, tool, RECORD, 'exit 1')
  for number, script in enumerate(('set_up.sh', 'launch.sh', 'gke_create.sh', 'gke_launch.sh'), 1):
    assert run(place, script).returncode == 1
    assert len(calls(place)) == number


def test_pasted_commands_of_a_dry_run_do_the_same(place):
  lines = dry_run(place, 'launch.sh', RUN="it's a run")
  assert run(place, 'launch.sh', RUN="it's a run").returncode == 0
  subprocess.run(['bash', '-c', '\n'.join(lines)], env=environment(place), check=True)
  by_script, pasted = calls(place)
  assert by_script == pasted
  assert "/mnt/my-bucket/it's a run" in shlex.split(pasted.flags['command'])


# ---- The scripts for GKE: a cluster with the bucket, and training as a workload of it ----


CLUSTER = LOCATION | {'cluster': 'my-cluster'}
DELETE_WORKLOAD = ['xpk', 'workload', 'delete', '--workload=run-1', '--force']
DELETE_CLUSTER = ['xpk', 'cluster', 'delete', '--force']


def in_cluster(command):
  return parse([*command, *(f'--{name}={value}' for name, value in CLUSTER.items())])


def test_the_cluster_has_one_slice_and_sees_the_bucket_without_caches(place):
  create, attach = dry_calls(place, 'gke_create.sh')
  options = ('--tpu-type=v5litepod-16', '--num-slices=1', '--spot', '--enable-gcsfuse-csi-driver')
  assert create == in_cluster(['xpk', 'cluster', 'create', *options])
  assert attach.words == ('storage', 'attach', 'exgrpo-bucket')
  expected = {'bucket': 'my-bucket', 'mount-point': '/mnt/my-bucket', 'readonly': 'false'}
  assert attach.flags.items() >= (CLUSTER | {'type': 'gcsfuse'} | expected).items()
  uncached = {'metadata-cache:ttl-secs:0', 'metadata-cache:negative-ttl-secs:0'}
  options = set(attach.flags['mount-options'].split(','))
  assert options == uncached | {'write:enable-streaming-writes:false'}
  create, _ = dry_calls(place, 'gke_create.sh', SPOT='no')
  assert 'on-demand' in create.flags and 'spot' not in create.flags


@pytest.fixture
def launch(place):
  """Start the workload; return the call of xpk and a folder that stands for the pod."""
  assert run(place, 'gke_launch.sh').returncode == 0
  (workload,) = calls(place)
  pod = place / 'pod'
  shutil.copytree(workload.flags['script-dir'], pod)
  return workload, pod


def test_a_pod_installs_the_tree_and_runs_the_same_training(launch, place):
  """It is restarted after preemptions and failures, but not if it rejects its input."""
  workload, pod = launch
  assert workload.words == ('workload', 'create')
  expected = {'workload': 'run-1', 'tpu-type': 'v5litepod-16', 'num-slices': '1'}
  expected |= {'base-docker-image': 'python:3.12', 'storage': 'exgrpo-bucket'}
  expected |= {'max-restarts': '50', 'restart-on-exit-codes': '1,75'}
  assert workload.flags.items() >= (CLUSTER | expected).items()
  fake(place, 'python', RECORD)
  command = ['bash', '-c', workload.flags['command']]
  subprocess.run(command, cwd=pod, env=environment(place), check=True)
  install, train = calls(place, 'python')
  assert install.words == ('-m', 'pip', 'install', '.[tpu,gcs,wandb]')
  assert train == training() and {install.cwd, train.cwd} == {str(pod)}
  assert (pod / 'exgrpo_jax' / '__main__.py').exists()


def test_keys_reach_the_workload_through_a_file(place):
  (place / 'keys').write_text('WANDB_API_KEY=secret-0123456789\n')
  assert run(place, 'gke_launch.sh', ENV_FILE=str(place / 'keys')).returncode == 0
  assert calls(place)[0].flags['env-file'] == str(place / 'keys')
  assert 'secret' not in (place / 'calls').read_text()


def test_sigterm_to_a_pod_reaches_training_and_the_pod_returns_its_exit_code(launch, place):
  workload, pod = launch
  trains = 'trap "exit 75" TERM; echo ready; while true; do sleep .1; done'
  fake(place, 'python', f'[[ $2 == pip ]] || {{ {trains}; }}')
  command = ['bash', '-c', workload.flags['command']]
  with background(place, command, cwd=pod, stdout=subprocess.PIPE) as process:
    assert process.stdout.readline() == 'ready\n'
    process.terminate()
    assert process.wait(timeout=30) == 75


def test_delete_removes_the_workload_or_the_cluster_and_asks_first(place):
  assert dry_calls(place, 'gke_delete.sh') == [in_cluster(DELETE_WORKLOAD)]
  assert dry_calls(place, 'gke_delete.sh', '--cluster') == [in_cluster(DELETE_CLUSTER)]
  assert run(place, 'gke_delete.sh').returncode == 2
  assert not calls(place)
  assert run(place, 'gke_delete.sh', typed='yes\n').returncode == 0
  assert run(place, 'gke_delete.sh', '--cluster', '--yes').returncode == 0
  assert calls(place) == [in_cluster(DELETE_WORKLOAD), in_cluster(DELETE_CLUSTER)]


# ---- tpu_scripts/worker.sh, with real processes ----


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
  assert second.stderr == 'error: training is already running. To stop it, run stop.sh.\n'
  assert worker(place, 'free').returncode == 1
  assert worker(place, 'stop').returncode == 0
  assert status(place) == 'exgrpo: exit_code 7\n'
  await_log(place, 'saved')
  assert worker(place, 'free').returncode == 0


def test_a_worker_kills_training_that_does_not_stop_and_says_so(place):
  start(place, 'trap "" TERM; echo ready; while true; do sleep .1; done')
  await_log(place, 'ready')
  assert worker(place, 'stop', STOP_SECONDS='1').returncode == 0
  await_status(place, 'lost')


def test_a_worker_creates_its_venv_once_unless_it_is_incomplete(place):
  fake_cloud(place)
  left = place / 'exgrpo' / 'venv' / 'bin' / 'left'
  left.parent.mkdir(parents=True)
  left.touch()  # left over from a killed uv
  for _ in range(2):
    result = worker(place, 'install')
    assert result.returncode == 0, result.stderr
  assert len(calls(place, 'uv')) == 1 and len(calls(place, 'pip')) == 2
  assert not left.exists()


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


def test_in_the_foreground_a_worker_forwards_sigterm_and_the_exit_code(place):
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
