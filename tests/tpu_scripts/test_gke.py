"""The scripts for GKE: a cluster with the bucket, and training as a workload of it."""

import shutil
import subprocess

import pytest

from tests.helpers.stand_ins import (
  LOCATION,
  RECORD,
  background,
  calls,
  dry_calls,
  environment,
  fake,
  parse,
  run,
  training,
)

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
  assert set(attach.flags['mount-options'].split(',')) == {
    'metadata-cache:ttl-secs:0',
    'metadata-cache:negative-ttl-secs:0',
    'write:enable-streaming-writes:false',
  }
  create, _ = dry_calls(place, 'gke_create.sh', SPOT='no')
  assert 'on-demand' in create.flags and 'spot' not in create.flags


@pytest.fixture
def launch(place):
  """Starts the workload; gives its call of xpk and a folder as the pod that it describes."""
  assert run(place, 'gke_launch.sh').returncode == 0
  (workload,) = calls(place)
  pod = place / 'pod'
  shutil.copytree(workload.flags['script-dir'], pod)
  return workload, pod


def test_a_pod_installs_the_tree_and_runs_the_same_training(launch, place):
  """It is restarted after preemptions and failures but not after a refusal."""
  workload, pod = launch
  assert workload.words == ('workload', 'create')
  expected = CLUSTER | {
    'workload': 'run-1',
    'tpu-type': 'v5litepod-16',
    'num-slices': '1',
    'base-docker-image': 'python:3.12',
    'storage': 'exgrpo-bucket',
    'max-restarts': '50',
    'restart-on-exit-codes': '1,75',
  }
  assert workload.flags.items() >= expected.items()
  fake(place, 'python', RECORD)
  subprocess.run(
    ['bash', '-c', workload.flags['command']], cwd=pod, env=environment(place), check=True
  )
  install, train = calls(place, 'python')
  assert install.words == ('-m', 'pip', 'install', '.[tpu,gcs,wandb]')
  assert train == training() and {install.cwd, train.cwd} == {str(pod)}
  assert (pod / 'exgrpo_jax' / '__main__.py').exists()


def test_keys_reach_the_workload_through_a_file(place):
  (place / 'keys').write_text('WANDB_API_KEY=secret-0123456789\n')
  assert run(place, 'gke_launch.sh', ENV_FILE=str(place / 'keys')).returncode == 0
  assert calls(place)[0].flags['env-file'] == str(place / 'keys')
  assert 'secret' not in (place / 'calls').read_text()


def test_sigterm_to_a_pod_reaches_training_and_its_exit_code_is_the_pods(launch, place):
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
