"""tpu_scripts/, with stand-ins for gcloud and xpk: no cloud is reached from here."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers.stand_ins import (
  CREATE,
  DELETE,
  NOTHING,
  PLACE,
  ROOT,
  SCRIPTS,
  SSH,
  VALUES,
  WORKER,
  answer,
  calls,
  done_by,
  dry_run,
  environment,
  run,
)

SOURCED = {'common.sh', 'node.sh', 'variables.sh'}
VERBS = sorted(
  path.name for path in SCRIPTS.glob('*.sh') if path.name not in SOURCED | {'worker.sh'}
)


def needed(script):
  """The variables that a script asks for."""
  text = (SCRIPTS / script).read_text().replace('\\\n', ' ')
  return re.search(r'^need (.*)$', text, re.M).group(1).split()


def test_scripts_can_be_run_and_stop_at_the_first_error():
  for name in (*VERBS, 'worker.sh'):
    path = SCRIPTS / name
    lines = path.read_text().splitlines()
    assert os.access(path, os.X_OK), name
    assert lines[0] == '#!/usr/bin/env bash', name
    first = next(line for line in lines if line and not line.startswith('#'))
    assert first == 'set -euo pipefail', name


def test_shellcheck_finds_nothing():
  tool = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.defpath}')
  if not tool:
    pytest.skip("shellcheck is not installed; pip install -e '.[test]' brings it.")
  found = subprocess.run(
    [tool, *sorted(SCRIPTS.glob('*.sh')), ROOT / '.ci' / 'run'], capture_output=True, text=True
  )
  assert found.returncode == 0, found.stdout


@pytest.mark.parametrize('script', VERBS)
def test_a_dry_run_prints_commands_and_runs_none(script, place):
  lines = dry_run(place, script)
  assert lines
  assert {shlex.split(line)[0] for line in lines} <= {'gcloud', 'xpk', 'mkdir', 'tar'}
  assert not (place / 'exgrpo_jax_run-1').exists()


@pytest.mark.parametrize('script', VERBS)
def test_an_empty_variable_is_named_with_its_file_and_meaning(script, place):
  for name in needed(script):
    found = run(place, script, '--dry_run', **{name: ''})
    assert found.returncode == 2, name
    assert found.stdout == ''
    assert found.stderr.startswith(f'error: {name} is not set in {place}/my variables.sh: ')
    assert len(found.stderr.split('variables.sh: ')[1]) > 20, 'says what it is'


@pytest.mark.parametrize('script', VERBS)
def test_an_unknown_argument_is_refused(script, place):
  found = run(place, script, '--dry-run')
  assert found.returncode == 2
  assert found.stderr.startswith(
    f"error: '--dry-run' is no argument of this script; usage: {script} "
  )
  assert not calls(place)


@pytest.mark.parametrize(
  'name, value',
  [
    ('SPOT', 'maybe'),
    ('NAME', 'Run_1'),
    ('BUCKET', 'gs://my-bucket'),
    ('RUN', '/runs/first'),
    ('POLL_SECONDS', 'a minute'),
    ('MAX_FAILURES', '-1'),
  ],
)
def test_a_value_that_cannot_be_is_refused(name, value, place):
  found = run(place, 'resume.sh', '--dry_run', **{name: value})
  assert found.returncode == 2
  assert found.stderr.startswith(f"error: {name}='{value}' in ")


def test_a_missing_file_of_variables_is_named():
  found = subprocess.run(
    [SCRIPTS / 'create.sh', '--variables=/nowhere', '--dry_run'], capture_output=True, text=True
  )
  assert found.returncode == 2
  assert "there is no file '/nowhere'" in found.stderr


def test_the_repository_leaves_what_it_cannot_know_empty(place):
  found = subprocess.run(
    [SCRIPTS / 'resume.sh', '--dry_run'], env=environment(place), capture_output=True, text=True
  )
  assert found.returncode == 2
  assert 'error: PROJECT is not set' in found.stderr
  text = (SCRIPTS / 'variables.sh').read_text()
  empty = re.findall(r"^(\w+)=''$", text, re.M)
  assert set(empty) == set(VALUES) - {'POLL_SECONDS'}


def test_create_asks_for_spot_only_where_it_is_wanted(place):
  assert dry_run(place, 'create.sh')[0] == f'{CREATE} --spot'
  assert dry_run(place, 'create.sh', SPOT='no')[0] == CREATE


def test_set_up_copies_and_installs_on_all_workers(place):
  archive = f'{place}/exgrpo_jax_run-1/tree.tar.gz'
  assert dry_run(place, 'set_up.sh') == [
    f'mkdir -p {place}/exgrpo_jax_run-1',
    f'tar -czf {archive} --exclude=__pycache__ -C {ROOT} exgrpo_jax configs tpu_scripts '
    'setup.cfg pyproject.toml README.md LICENSE',
    f'gcloud compute tpus tpu-vm scp {archive} run-1:exgrpo_tree.tar.gz {PLACE} --worker=all '
    '--quiet',
    f"{SSH} '--command=if [ -e {WORKER} ]; then bash {WORKER} free; fi && rm -rf exgrpo/tree && "
    'mkdir -p exgrpo/tree && tar -xzf exgrpo_tree.tar.gz -C exgrpo/tree && '
    f"bash {WORKER} install && bash {WORKER} mount my-bucket' --quiet",
  ]


def test_set_up_packs_a_tree_that_can_be_installed(place):
  assert run(place, 'set_up.sh').returncode == 0
  packed = subprocess.run(
    ['tar', '-tzf', place / 'exgrpo_jax_run-1' / 'tree.tar.gz'],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.splitlines()
  assert {'setup.cfg', 'exgrpo_jax/train.py', 'configs/base.py', 'tpu_scripts/worker.sh'} <= set(
    packed
  )
  assert not [path for path in packed if path.startswith(('.', 'tests', 'results'))]
  assert done_by(place) == ['copy', 'install']


def test_launch_gives_every_worker_the_same_training_command(place):
  lines = dry_run(place, 'launch.sh', RUN='runs/first run')
  assert len(lines) == 1
  words = shlex.split(lines[0])
  assert words[:6] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'run-1']
  assert '--worker=all' in words
  command = next(word for word in words if word.startswith('--command='))
  assert shlex.split(command.removeprefix('--command=')) == [
    'bash',
    WORKER,
    'start',
    '/mnt/my-bucket/runs/first run',
    'python',
    '-m',
    'exgrpo_jax.train',
    '--config=configs/qwen2_5_math_1_5b.py',
    '--workdir=/mnt/my-bucket/runs/first run',
    '--config.model.path=gs://my-bucket/Qwen2.5-Math-1.5B',
    '--config.data.train=gs://my-bucket/openr1_math_46k.parquet',
    '--config.data.evaluation=("gs://my-bucket/math_benchmarks.parquet",)',
  ]


def test_what_a_dry_run_prints_does_the_same_when_pasted(place):
  lines = dry_run(place, 'launch.sh', RUN="it's a run")
  assert run(place, 'launch.sh', RUN="it's a run").returncode == 0
  subprocess.run(['bash', '-c', '\n'.join(lines)], env=environment(place), check=True)
  by_script, pasted = calls(place)
  assert by_script == pasted
  assert "it'\\''s a run" in pasted


def test_logs_follow_one_worker(place):
  command = "'--command=tail -n 100 -F exgrpo/log' --quiet"
  ssh = f'gcloud compute tpus tpu-vm ssh run-1 {PLACE}'
  assert dry_run(place, 'logs.sh') == [f'{ssh} --worker=0 {command}']
  assert dry_run(place, 'logs.sh', '--worker=3') == [f'{ssh} --worker=3 {command}']
  assert run(place, 'logs.sh', '--worker=first').returncode == 2


def test_fetch_leaves_checkpoints_where_they_are(place):
  folder = f'{ROOT}/results/runs/first'
  copy = f'gcloud storage rsync gs://my-bucket/runs/first {folder} --project=my-project --recursive'
  assert dry_run(place, 'fetch.sh') == [
    f'mkdir -p {folder}',
    f"{copy} '--exclude=^(checkpoints|warm_start)/.*'",
  ]
  assert dry_run(place, 'fetch.sh', '--all') == [f'mkdir -p {folder}', copy]


def test_delete_asks_first(place):
  assert dry_run(place, 'delete.sh') == [DELETE]
  assert run(place, 'delete.sh').returncode == 2
  assert run(place, 'delete.sh', typed='y\n').returncode == 2
  assert not calls(place)
  assert run(place, 'delete.sh', typed='yes\n').returncode == 0
  assert run(place, 'delete.sh', '--yes').returncode == 0
  assert calls(place) == [DELETE, DELETE]


def test_create_waits_until_the_slice_can_be_used(place):
  answer(
    place,
    requests=[NOTHING, 'WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE'],
    nodes=['CREATING', 'READY'],
  )
  found = run(place, 'create.sh')
  assert found.returncode == 0
  assert found.stderr.splitlines() == [
    f'run-1: {state}' for state in ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'CREATING', 'READY')
  ]
  assert done_by(place) == ['create']


def test_create_does_not_ask_twice(place):
  answer(place, requests=['PROVISIONING', 'ACTIVE'], nodes=['READY'])
  assert run(place, 'create.sh').returncode == 0
  assert done_by(place) == []


@pytest.mark.parametrize(
  'state, words',
  [
    ('FAILED', 'by quota'),
    ('SUSPENDED', 'has lost its VMs'),
    ('!ERROR: PERMISSION_DENIED', 'PERMISSION_DENIED'),
  ],
)
def test_create_says_why_it_ends(state, words, place):
  answer(place, requests=[state], nodes=['READY'])
  found = run(place, 'create.sh')
  assert found.returncode == 2
  assert words in found.stderr


def test_gke_makes_a_cluster_that_sees_the_bucket(place):
  of_cluster = f'--cluster=my-cluster {PLACE}'
  create, attach = dry_run(place, 'gke_create.sh')
  assert create == (
    f'xpk cluster create {of_cluster} --tpu-type=v5litepod-16 --num-slices=1 '
    '--spot --enable-gcsfuse-csi-driver'
  )
  assert attach.startswith(
    f'xpk storage attach exgrpo-bucket {of_cluster} --type=gcsfuse '
    '--bucket=my-bucket --mount-point=/mnt/my-bucket --readonly=false '
  )
  assert ' --on-demand ' in dry_run(place, 'gke_create.sh', SPOT='no')[0]


def test_gke_runs_the_same_training_command(place):
  *_, line = dry_run(place, 'gke_launch.sh')
  words = shlex.split(line)
  assert words[:4] == ['xpk', 'workload', 'create', '--workload=run-1']
  assert {
    '--cluster=my-cluster',
    '--tpu-type=v5litepod-16',
    '--base-docker-image=python:3.12',
    f'--script-dir={place}/exgrpo_jax_run-1',
    '--storage=exgrpo-bucket',
    '--max-restarts=50',
  } < set(words)
  launched = shlex.split(dry_run(place, 'launch.sh')[0])[-2]
  assert words[-1].endswith(
    ' && exec bash tpu_scripts/worker.sh run ' + launched.partition(' start ')[2]
  )


def test_gke_deletes_the_workload_or_the_cluster(place):
  assert dry_run(place, 'gke_delete.sh') == [
    f'xpk workload delete --workload=run-1 --cluster=my-cluster {PLACE} --force'
  ]
  assert dry_run(place, 'gke_delete.sh', '--cluster') == [
    f'xpk cluster delete --cluster=my-cluster {PLACE} --force'
  ]
  assert run(place, 'gke_delete.sh').returncode == 2
  assert not calls(place)
