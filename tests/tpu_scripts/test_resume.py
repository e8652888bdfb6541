"""tpu_scripts/resume.sh: what it does in each state of the slice and of training."""

import sys

import pytest

from tests.helpers.stand_ins import (
  CREATE_SPOT,
  DELETE,
  NO_SLICE,
  RECORD,
  actions,
  answer,
  calls,
  changes_by,
  dry_calls,
  fake_cloud,
  run,
  training,
)

RUNNING, IDLE = r'exgrpo: running\nexgrpo: running', r'exgrpo: idle\nexgrpo: idle'
DONE = r'exgrpo: exit_code 0\nexgrpo: exit_code 0'
FAILED = r'exgrpo: exit_code 1\nexgrpo: running'


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


RESTART = ['stop', 'copy', 'install', 'start']
REPLACE = ['delete', 'create', *RESTART]


@pytest.mark.parametrize(
  ('requests', 'nodes', 'statuses', 'changes'),
  [
    pytest.param(
      ['ACTIVE', 'SUSPENDING', 'SUSPENDED', NO_SLICE, 'PROVISIONING', 'ACTIVE'],
      ['READY'],
      [RUNNING, IDLE, RUNNING, DONE],
      REPLACE,
      id='suspended',
    ),
    pytest.param(
      ['ACTIVE', 'ACTIVE', NO_SLICE, 'ACTIVE'],
      ['READY', 'PREEMPTED', 'READY'],
      [RUNNING, IDLE, RUNNING, DONE],
      REPLACE,
      id='preempted',
    ),
    pytest.param(['ACTIVE'], ['READY'], [RUNNING, FAILED, RUNNING, DONE], RESTART, id='one_fails'),
    pytest.param(
      ['ACTIVE'],
      ['READY'],
      [r'exgrpo: exit_code 255\nexgrpo: running', DONE],
      RESTART,
      id='only_2_is_a_refusal',
    ),
  ],
)
def test_resume_replaces_a_lost_slice_and_restarts_all_workers_when_one_fails(
  requests, nodes, statuses, changes, place
):
  answer(place, requests=requests, nodes=nodes, statuses=statuses)
  result = run(place, 'resume.sh')
  assert result.returncode == 0, result.stderr
  assert changes_by(place) == changes


def test_resume_gives_up_on_failures_without_progress(place):
  answer(place, requests=['ACTIVE'], nodes=['READY'], statuses=[FAILED])
  result = run(place, 'resume.sh', MAX_FAILURES='2')
  assert result.returncode == 2
  assert 'training failed 3 times without a new checkpoint' in result.stderr
  assert changes_by(place).count('start') == 2


def test_resume_goes_on_as_long_as_there_are_new_checkpoints(place):
  answer(place, requests=['ACTIVE'], nodes=['READY'], statuses=[FAILED] * 4 + [DONE])
  (place / 'checkpoints').write_text(
    ''.join(
      rf'gs://b/r/checkpoints/9/\ngs://b/r/checkpoints/{step}/' '\n' for step in range(50, 100, 10)
    )
  )
  assert run(place, 'resume.sh', MAX_FAILURES='1').returncode == 0
  assert changes_by(place).count('start') == 4


READY = dict(requests=['ACTIVE'], nodes=['READY'], statuses=[RUNNING])


@pytest.mark.parametrize(
  ('answers', 'message'),
  [
    (
      dict(statuses=[RUNNING, r'exgrpo: exit_code 2\nexgrpo: running']),
      'training refused its config, a flag or a file',
    ),
    (dict(requests=['!ERROR: no network']), '10 attempts in a row failed (gcloud: ERROR: no net'),
    (dict(nodes=['!ERROR: no network']), '10 attempts in a row failed (gcloud: ERROR: no net'),
    (dict(statuses=['!ssh: no network']), 'unreachable (ssh: no network)'),
    (dict(requests=['FAILED']), 'the request for run-1 failed'),
  ],
)
def test_resume_ends_and_changes_nothing_after_a_refusal_and_where_gcloud_fails(
  answers, message, place
):
  answer(place, **READY | answers)
  result = run(place, 'resume.sh')
  assert result.returncode == 2 and message in result.stderr
  assert changes_by(place) == []


def test_a_config_that_training_would_refuse_is_refused_here_before_anything_is_requested(place):
  answer(place, requests=[NO_SLICE], nodes=['READY'], statuses=[IDLE])
  result = run(place, 'resume.sh', PYTHON=sys.executable, CONFIG='configs/smok.py')
  assert result.returncode == 2
  assert 'error: --config=configs/smok.py: there is no such file' in result.stderr
  assert 'so nothing was done; mend CONFIG' in result.stderr
  assert calls(place) == []


def test_a_dry_run_of_resume_prints_a_whole_round(place):
  commands = dry_calls(place, 'resume.sh')
  for script in ('stop.sh', 'set_up.sh', 'launch.sh'):
    for command in dry_calls(place, script):
      assert command in commands, script
  assert [command for command in commands if command in (DELETE, CREATE_SPOT)] == [
    DELETE,
    CREATE_SPOT,
  ]
  listing = commands[-1]
  assert listing.words == ('storage', 'ls', 'gs://my-bucket/runs/first/checkpoints/')


# Has the slice preempted as soon as both workers train, and finishes on the next slice.
TRAIN = (
  RECORD
  + r"""
[[ ! -e $FAKE/deleted ]] || exit 0
until (($(grep -c $'\x1fpython\x1f-m\x1f' "$FAKE/calls") == 2)); do sleep .05; done
echo SUSPENDED >"$FAKE/state"
exec sleep 60
"""
)


@pytest.mark.full
def test_a_preempted_run_finishes_on_workers_that_are_folders(place):
  fake_cloud(place, train=TRAIN)
  result = run(place, 'resume.sh', RUN='runs/first run')
  assert result.returncode == 0, result.stderr
  states = [line.partition(' run-1: ')[2] for line in result.stderr.splitlines()]
  assert [state for state in states if state.startswith(('NOT_FOUND', 'SUSPENDED'))] == [
    'NOT_FOUND ',
    'SUSPENDED ',
    'NOT_FOUND ',
  ]
  trainings = calls(place, 'python')
  assert trainings == [training('runs/first run')] * 4
  assert sorted(call.cwd for call in trainings) == [
    f'{place}/{number}/exgrpo/tree' for number in '0011'
  ]
