"""The scripts for TPU VMs: creating, setting up, training on, and deleting a slice."""

import configparser
import dataclasses
import re
import subprocess
import sys

import pytest

from tests.helpers.stand_ins import (
  CREATE,
  CREATE_SPOT,
  DELETE,
  FAKE,
  LOCATION,
  NO_SLICE,
  RECORD,
  ROOT,
  SCRIPTS,
  actions,
  answer,
  background,
  calls,
  changes_by,
  dry_calls,
  fake,
  fake_cloud,
  run,
  training,
  variables,
  wait_until,
  worker,
)

pytestmark = pytest.mark.full

WAITS_FOR_SIGTERM = 'trap "exit 75" TERM; touch "$PWD/ready"; while true; do sleep .1; done'


@pytest.fixture
def cloud(place):
  """A slice with two workers, the folders 0 and 1."""
  fake_cloud(place)
  for number in '01':
    (place / number).mkdir()
  return place


def await_marks(cloud, name):
  """Wait until training has written the file on both workers; return their homes and the files."""
  homes = [cloud / number for number in '01']
  marks = [home / 'exgrpo' / 'tree' / name for home in homes]
  wait_until(lambda: all(mark.exists() for mark in marks), lambda: calls(cloud))
  return homes, marks


# Creating and deleting.


def test_create_requests_spot_capacity_only_if_spot_is_yes(place):
  assert dry_calls(place, 'create.sh')[0] == CREATE_SPOT
  assert dry_calls(place, 'create.sh', SPOT='no')[0] == CREATE


def test_create_waits_until_the_slice_is_ready_and_does_not_request_it_twice(place):
  states = ['WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE']
  answer(place, requests=[NO_SLICE, *states], nodes=['CREATING', 'READY'])
  result = run(place, 'create.sh')
  assert result.returncode == 0
  assert result.stderr.splitlines() == [
    f'run-1: {state}' for state in ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'CREATING', 'READY')
  ]
  assert changes_by(place) == ['create']
  answer(place, requests=['PROVISIONING', 'ACTIVE'], nodes=['READY'])
  assert run(place, 'create.sh').returncode == 0
  assert changes_by(place) == ['create']


@pytest.mark.parametrize(
  ('state', 'reason'),
  [
    ('FAILED', 'because of quota'),
    ('SUSPENDED', 'has lost its VMs'),
    ('!ERROR: PERMISSION_DENIED', 'PERMISSION_DENIED'),
  ],
)
def test_create_says_why_it_gives_up(state, reason, place):
  answer(place, requests=[state], nodes=['READY'])
  result = run(place, 'create.sh')
  assert result.returncode == 2
  assert reason in result.stderr


def test_delete_asks_first(place):
  assert dry_calls(place, 'delete.sh') == [DELETE]
  assert run(place, 'delete.sh').returncode == 2
  assert run(place, 'delete.sh', typed='y\n').returncode == 2
  assert not calls(place)
  assert run(place, 'delete.sh', typed='yes\n').returncode == 0
  assert run(place, 'delete.sh', '--yes').returncode == 0
  assert calls(place) == [DELETE, DELETE]


# Setting up and training.


def test_set_up_installs_this_tree_and_launch_starts_the_same_training_on_all_workers(cloud):
  """Training runs detached, in the tree, with quotes and spaces in the arguments intact."""
  stale = cloud / '1' / 'exgrpo' / 'tree' / 'stale.py'
  stale.parent.mkdir(parents=True)
  stale.touch()
  assert run(cloud, 'set_up.sh').returncode == 0
  assert not stale.exists()
  trees = [cloud / number / 'exgrpo' / 'tree' for number in '01']
  installs = [('install', '-e', f'{tree}[tpu,gcs,wandb]') for tree in trees]
  assert [call.words for call in calls(cloud, 'pip')] == installs
  assert [call.words for call in calls(cloud, 'gcsfuse')] == [('my-bucket', '/mnt/my-bucket')] * 2
  for call in calls(cloud, 'gcloud'):
    assert call.flags.items() >= (LOCATION | {'worker': 'all', 'quiet': ''}).items()
    flag = call.flags['scp-flag' if 'scp' in call.words else 'ssh-flag']
    assert '-oServerAliveInterval=30' in flag  # otherwise, a worker that is gone blocks for hours
  assert run(cloud, 'launch.sh', RUN="it's a run").returncode == 0
  wait_until(lambda: len(calls(cloud, 'python')) == 2, lambda: calls(cloud))
  assert calls(cloud, 'python') == [training("it's a run")] * 2
  assert {call.cwd for call in calls(cloud, 'python')} == set(map(str, trees))


def test_set_up_packs_only_what_an_installation_needs(place):
  assert run(place, 'set_up.sh').returncode == 0
  archive = place / 'exgrpo_jax_run-1' / 'tree.tar.gz'
  listing = subprocess.run(['tar', '-tzf', archive], capture_output=True, text=True, check=True)
  packed = listing.stdout.splitlines()
  folders = {'exgrpo_jax', 'configs', 'tpu_scripts'}
  files = {'setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE'}
  assert {path.split('/')[0] for path in packed} == folders | files
  assert not [path for path in packed if '__pycache__' in path]
  assert {'exgrpo_jax/__main__.py', 'configs/base.py', 'tpu_scripts/worker.sh'} <= set(packed)
  setup = configparser.ConfigParser()
  setup.read(ROOT / 'setup.cfg')
  for package in setup['options']['packages'].split():
    path = package.replace('.', '/').replace('exgrpo_jax/configs', 'configs')
    assert f'{path}/__init__.py' in packed
  assert changes_by(place) == ['copy', 'install']


def test_set_up_never_replaces_a_tree_in_use_and_stop_ends_training_on_all_workers(cloud):
  fake_cloud(cloud, train=WAITS_FOR_SIGTERM)
  assert run(cloud, 'set_up.sh').returncode == 0
  assert run(cloud, 'launch.sh').returncode == 0
  homes, marks = await_marks(cloud, 'ready')
  refused = run(cloud, 'set_up.sh')
  assert refused.returncode != 0
  assert 'training is already running' in refused.stderr
  assert all(mark.exists() for mark in marks)
  assert run(cloud, 'stop.sh').returncode == 0
  for home in homes:
    assert worker(cloud, 'status', HOME=str(home)).stdout == 'exgrpo: exit_code 75\n'
  assert run(cloud, 'set_up.sh').returncode == 0
  assert not any(mark.exists() for mark in marks)


# Secrets.

KEY = 'secret-0123456789'
REPORTS_KEY = '[[ $WANDB_API_KEY == secret-0123456789 ]] && touch has_key'


def test_a_key_reaches_training_but_no_command_line_or_log(cloud):
  (cloud / 'keys').write_text(f'# mine\nWANDB_API_KEY={KEY}\n')
  fake_cloud(cloud, train=f'{RECORD}\n{REPORTS_KEY}')
  for script in ('set_up.sh', 'launch.sh'):
    result = run(cloud, script, ENV_FILE=str(cloud / 'keys'))
    assert result.returncode == 0, result.stderr
    assert KEY not in result.stdout + result.stderr
  homes, _ = await_marks(cloud, 'has_key')
  assert KEY not in (cloud / 'calls').read_text()
  for home in homes:
    assert (home / 'exgrpo' / 'private').stat().st_mode & 0o77 == 0
    assert KEY not in (home / 'exgrpo' / 'log').read_text()
  # A later set-up without the file deletes it.
  (cloud / '0' / 'exgrpo' / 'exit_code').touch()
  assert run(cloud, 'set_up.sh').returncode == 0
  assert not (cloud / '0' / 'exgrpo' / 'private' / 'env').exists()


def test_a_missing_key_file_is_rejected_before_anything_is_done(place):
  for script in ('resume.sh', 'set_up.sh', 'gke_launch.sh'):
    result = run(place, script, ENV_FILE='/nowhere')
    assert result.returncode == 2 and "error: ENV_FILE='/nowhere' in " in result.stderr
  assert not calls(place)


# Logs and results.


def test_logs_follow_the_output_of_one_worker(cloud):
  for arguments, worker_of in ([], '0'), (['--worker=all'], 'all'), (['--worker=3'], '3'):
    (call,) = dry_calls(cloud, 'logs.sh', *arguments)
    assert call.flags.items() >= (LOCATION | {'worker': worker_of}).items()
  assert run(cloud, 'logs.sh', '--worker=first').returncode == 2
  (cloud / '1' / 'exgrpo').mkdir()
  log, output = cloud / '1' / 'exgrpo' / 'log', cloud / 'output'
  log.write_text('starts\n')
  command = [SCRIPTS / 'logs.sh', f'--variables={variables(cloud)}', '--worker=1']
  with output.open('w') as stdout, background(cloud, command, stdout=stdout):
    wait_until(lambda: output.read_text() == 'starts\n', output.read_text)
    with log.open('a') as file:
      file.write('more\n')
    wait_until(lambda: output.read_text() == 'starts\nmore\n', output.read_text)


def test_fetch_copies_the_results_and_checkpoints_only_with_all(place):
  target = f'{ROOT}/results/runs/first'
  mkdir, copy = dry_calls(place, 'fetch.sh')
  assert mkdir.words == ('-p', target)
  assert copy.words == ('storage', 'rsync', 'gs://my-bucket/runs/first', target)
  assert copy.flags.keys() == {'project', 'recursive', 'exclude'}
  excluded = re.compile(copy.flags['exclude'])
  for path in ('checkpoints/90/state/d/1', 'warm_start/checkpoints/1/x'):
    assert excluded.match(path), path
  for path in ('metrics.jsonl', 'export/best/model.safetensors', 'evaluation/step_000001.jsonl'):
    assert not excluded.match(path), path
  everything = {name: value for name, value in copy.flags.items() if name != 'exclude'}
  copy_all = dataclasses.replace(copy, flags=everything)
  assert dry_calls(place, 'fetch.sh', '--all') == [mkdir, copy_all]


# ---- tpu_scripts/resume.sh in each state of the slice and of training ----


RUNNING, IDLE = r'exgrpo: running\nexgrpo: running', r'exgrpo: idle\nexgrpo: idle'
DONE = r'exgrpo: exit_code 0\nexgrpo: exit_code 0'
FAILED = r'exgrpo: exit_code 1\nexgrpo: running'
REFUSED = r'exgrpo: exit_code 2\nexgrpo: running'


def test_resume_goes_from_an_empty_project_to_a_finished_run(place):
  answer(
    place,
    requests=[NO_SLICE, 'WAITING_FOR_RESOURCES', 'ACTIVE'],
    nodes=['READY'],
    statuses=[IDLE, RUNNING, RUNNING, r'exgrpo: exit_code 0\nexgrpo: running', DONE],
  )
  result = run(place, 'resume.sh')
  assert result.returncode == 0, result.stderr
  assert 'training is done' in result.stderr
  assert changes_by(place) == ['create', 'stop', 'copy', 'install', 'start']
  assert CREATE_SPOT in calls(place)
  assert actions(calls(place, 'gcloud')).count('status') == 5, 'waits for all workers'


READY = dict(requests=['ACTIVE'], nodes=['READY'], statuses=[RUNNING])
LOST = dict(statuses=[RUNNING, IDLE, RUNNING, DONE])
SUSPENDED = ['ACTIVE', 'SUSPENDING', 'SUSPENDED', NO_SLICE, 'PROVISIONING', 'ACTIVE']
PREEMPTED = ['ACTIVE', 'ACTIVE', NO_SLICE, 'ACTIVE']
RESTART = ['stop', 'copy', 'install', 'start']
REPLACE = ['delete', 'create', *RESTART]


@pytest.mark.parametrize(
  ('answers', 'changes'),
  [
    (LOST | dict(requests=SUSPENDED), REPLACE),
    (LOST | dict(requests=PREEMPTED, nodes=['READY', 'PREEMPTED', 'READY']), REPLACE),
    (dict(statuses=[RUNNING, FAILED, RUNNING, DONE]), RESTART),
    # Only exit code 2 means that the input was rejected.
    (dict(statuses=[r'exgrpo: exit_code 255\nexgrpo: running', DONE]), RESTART),
    # Exit codes from before resume.sh started: the cause may be fixed, or the run is now longer.
    (dict(statuses=[REFUSED, RUNNING, DONE]), RESTART),
    (dict(statuses=[DONE, RUNNING, DONE]), RESTART),
  ],
)
def test_resume_replaces_a_lost_slice_and_restarts_all_workers_when_one_fails(
  answers, changes, place
):
  answer(place, **READY | answers)
  result = run(place, 'resume.sh')
  assert result.returncode == 0, result.stderr
  assert changes_by(place) == changes


# The first `count` gcloud calls that contain `pattern` fail.
FAIL = """case "$*" in *'{pattern}'*)
  echo >>"$FAKE/failed"
  (($(wc -l <"$FAKE/failed") > {count})) || exit 1
esac"""


@pytest.mark.parametrize(
  ('pattern', 'count', 'statuses', 'message', 'starts'),
  [
    ('tpu-vm scp', 99, [RUNNING, FAILED], '10 attempts in a row failed (READY failed)', 0),
    ('tpu-vm scp', 2, [FAILED], 'training failed 2 times without a new checkpoint', 1),
    # The connection breaks, but training has started.
    ('worker.sh start', 99, [FAILED, RUNNING, FAILED], 'training failed 2 times without', 1),
    ('no call', 0, [FAILED], 'training failed 2 times without a new checkpoint', 1),
    # An exit code 2 from before resume.sh started counts only after a restart.
    ('tpu-vm scp', 2, [REFUSED], 'training rejected its config, a flag or a file', 1),
  ],
)
def test_resume_counts_a_failure_again_only_after_a_restart(
  pattern, count, statuses, message, starts, place
):
  answer(place, **READY | dict(statuses=statuses))
  fake(place, 'gcloud', FAKE, FAIL.format(pattern=pattern, count=count))
  result = run(place, 'resume.sh', MAX_FAILURES='1')
  assert result.returncode == 2 and message in result.stderr
  assert changes_by(place).count('start') == starts


def test_resume_continues_as_long_as_there_are_new_checkpoints(place):
  answer(place, **READY | dict(statuses=[FAILED] * 4 + [DONE]))
  listing = r'gs://b/r/checkpoints/9/\ngs://b/r/checkpoints/%s/' '\n'
  (place / 'checkpoints').write_text(''.join(listing % step for step in range(50, 100, 10)))
  assert run(place, 'resume.sh', MAX_FAILURES='1').returncode == 0
  assert changes_by(place).count('start') == 4


@pytest.mark.parametrize(
  ('answers', 'message'),
  [
    (dict(statuses=[RUNNING, REFUSED]), 'training rejected its config, a flag or a file'),
    (dict(requests=['!ERROR: no network']), '10 attempts in a row failed (gcloud: ERROR: no net'),
    (dict(nodes=['!ERROR: no network']), '10 attempts in a row failed (gcloud: ERROR: no net'),
    (dict(statuses=['!ssh: no network']), 'unreachable (ssh: no network)'),
    (dict(requests=['FAILED']), 'the request for run-1 failed'),
  ],
)
def test_resume_ends_without_changes_if_training_rejects_its_input_or_gcloud_fails(
  answers, message, place
):
  answer(place, **READY | answers)
  result = run(place, 'resume.sh')
  assert result.returncode == 2 and message in result.stderr
  assert changes_by(place) == []


@pytest.mark.parametrize(
  ('changes', 'messages'),
  [
    (
      dict(PYTHON=sys.executable, CONFIG='configs/smok.py'),
      ['error: --config=configs/smok.py: there is no such file', 'nothing was done. Fix CONFIG'],
    ),
    # If the check itself fails, the message does not blame the config.
    (dict(PYTHON='exits_1'), ['could not be checked, so nothing was done. If neither the network']),
    (dict(PYTHON='exits_127'), ['cannot check the config: A Python on this machine']),
  ],
)
def test_resume_requests_nothing_before_the_config_is_checked(changes, messages, place):
  answer(place, requests=[NO_SLICE], nodes=['READY'], statuses=[IDLE])
  for status in (1, 127):
    fake(place, f'exits_{status}', f'exit {status}')
  result = run(place, 'resume.sh', **changes)
  assert result.returncode == 2 and all(message in result.stderr for message in messages)
  assert calls(place) == []


def test_a_dry_run_of_resume_prints_a_whole_round(place):
  commands = dry_calls(place, 'resume.sh')
  for script in ('stop.sh', 'set_up.sh', 'launch.sh'):
    for command in dry_calls(place, script):
      assert command in commands, script
  replaced = [command for command in commands if command in (DELETE, CREATE_SPOT)]
  assert replaced == [DELETE, CREATE_SPOT]
  assert commands[-1].words == ('storage', 'ls', 'gs://my-bucket/runs/first/checkpoints/')


# Preempt the slice as soon as both workers train, and finish on the next slice.
TRAIN = (
  RECORD
  + r"""
[[ ! -e $FAKE/deleted ]] || exit 0
until (($(grep -c $'\x1fpython\x1f-m\x1f' "$FAKE/calls") == 2)); do sleep .05; done
echo SUSPENDED >"$FAKE/state"
exec sleep 60
"""
)


def test_a_preempted_run_finishes_on_workers_that_are_folders(place):
  fake_cloud(place, train=TRAIN)
  result = run(place, 'resume.sh', RUN='runs/first run')
  assert result.returncode == 0, result.stderr
  states = [line.partition(' run-1: ')[2] for line in result.stderr.splitlines()]
  without = [state for state in states if state.startswith(('NOT_FOUND', 'SUSPENDED'))]
  assert without == ['NOT_FOUND ', 'SUSPENDED ', 'NOT_FOUND ']
  trainings = calls(place, 'python')
  assert trainings == [training('runs/first run')] * 4
  trees = [f'{place}/{number}/exgrpo/tree' for number in '0011']
  assert sorted(call.cwd for call in trainings) == trees
