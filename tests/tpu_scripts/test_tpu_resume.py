"""tpu_scripts/resume.sh: what it does about each state of the slice and of training."""

import pytest

from tests.helpers.stand_ins import (
  CREATE,
  DELETE,
  NOTHING,
  answer,
  calls,
  done_by,
  dry_run,
  fake,
  run,
)

RUNNING, IDLE = r'exgrpo: running\nexgrpo: running', r'exgrpo: idle\nexgrpo: idle'
DONE = r'exgrpo: exit_code 0\nexgrpo: exit_code 0'
FAILED = r'exgrpo: exit_code 1\nexgrpo: running'


def test_resume_takes_an_empty_project_to_a_finished_run(place):
  answer(
    place,
    requests=[NOTHING, 'WAITING_FOR_RESOURCES', 'ACTIVE'],
    nodes=['READY'],
    statuses=[IDLE, RUNNING, RUNNING, r'exgrpo: exit_code 0\nexgrpo: running', DONE],
  )
  found = run(place, 'resume.sh')
  assert found.returncode == 0, found.stderr
  assert 'training is done' in found.stderr
  assert done_by(place) == ['create', 'stop', 'copy', 'install', 'start']
  assert f'{CREATE} --spot' in calls(place)
  assert sum('worker.sh status' in call for call in calls(place)) == 5, 'waits for all workers'


@pytest.mark.parametrize(
  'requests, nodes',
  [
    (['ACTIVE', 'SUSPENDING', 'SUSPENDED', NOTHING, 'PROVISIONING', 'ACTIVE'], ['READY']),
    (['ACTIVE', 'ACTIVE', NOTHING, 'ACTIVE'], ['READY', 'PREEMPTED', 'READY']),
  ],
)
def test_resume_replaces_a_preempted_slice(requests, nodes, place):
  answer(place, requests=requests, nodes=nodes, statuses=[RUNNING, IDLE, RUNNING, DONE])
  found = run(place, 'resume.sh')
  assert found.returncode == 0, found.stderr
  assert done_by(place) == ['delete', 'create', 'stop', 'copy', 'install', 'start']


def test_resume_restarts_all_workers_when_one_fails(place):
  answer(place, requests=['ACTIVE'], nodes=['READY'], statuses=[RUNNING, FAILED, RUNNING, DONE])
  assert run(place, 'resume.sh').returncode == 0
  assert done_by(place) == ['stop', 'copy', 'install', 'start']


def test_resume_gives_up_on_failures_that_make_no_progress(place):
  answer(place, requests=['ACTIVE'], nodes=['READY'], statuses=[FAILED])
  found = run(place, 'resume.sh', MAX_FAILURES='2')
  assert found.returncode == 2
  assert 'training failed 3 times without a new checkpoint' in found.stderr
  assert done_by(place).count('start') == 2


def test_resume_goes_on_as_long_as_checkpoints_come(place):
  answer(place, requests=['ACTIVE'], nodes=['READY'], statuses=[FAILED] * 4 + [DONE])
  (place / 'checkpoints').write_text(
    ''.join(
      rf'gs://b/r/checkpoints/9/\ngs://b/r/checkpoints/{step}/' '\n' for step in range(50, 100, 10)
    )
  )
  assert run(place, 'resume.sh', MAX_FAILURES='1').returncode == 0
  assert done_by(place).count('start') == 4


def test_resume_does_not_repeat_what_training_refuses(place):
  answer(
    place,
    requests=['ACTIVE'],
    nodes=['READY'],
    statuses=[RUNNING, r'exgrpo: exit_code 2\nexgrpo: running'],
  )
  found = run(place, 'resume.sh')
  assert found.returncode == 2
  assert 'training refuses what it was given' in found.stderr
  assert done_by(place) == []


@pytest.mark.parametrize(
  'answers',
  [
    dict(requests=['!ERROR: no network'], nodes=['READY'], statuses=[RUNNING]),
    dict(requests=['ACTIVE'], nodes=['!ERROR: no network'], statuses=[RUNNING]),
    dict(requests=['ACTIVE'], nodes=['READY'], statuses=['!ssh: no network']),
  ],
)
def test_resume_touches_nothing_while_gcloud_fails(answers, place):
  answer(place, **answers)
  found = run(place, 'resume.sh')
  assert found.returncode == 2
  assert '10 attempts in a row failed' in found.stderr
  assert 'no network' in found.stderr
  assert done_by(place) == []


def test_resume_ends_when_the_request_fails(place):
  answer(place, requests=['FAILED'], nodes=['READY'], statuses=[RUNNING])
  found = run(place, 'resume.sh')
  assert found.returncode == 2
  assert done_by(place) == []


def test_resume_prints_a_whole_round(place):
  lines = dry_run(place, 'resume.sh')
  for command in (
    DELETE,
    f'{CREATE} --spot',
    *dry_run(place, 'stop.sh'),
    *dry_run(place, 'set_up.sh'),
    *dry_run(place, 'launch.sh'),
    'gcloud storage ls gs://my-bucket/runs/first/checkpoints/ --project=my-project',
  ):
    assert command in lines
  assert lines.index(DELETE) < lines.index(f'{CREATE} --spot')


# A cloud of two workers, which are folders here; it takes the first slice away.
CLOUD = r"""
command='' archive=''
for word in "$@"; do
  case $word in
    --command=*) command=${word#*=} ;;
    /*.tar.gz) archive=$word ;;
  esac
done
case "$*" in
  *'queued-resources create'*) mkdir "$FAKE/0" "$FAKE/1" && echo ACTIVE >"$FAKE/state" ;;
  *'queued-resources delete'*)
    for worker in 0 1; do
      kill -KILL -- "-$(<"$FAKE/$worker/exgrpo/pid")"
    done
    rm -r "$FAKE/0" "$FAKE/1" "$FAKE/state" && touch "$FAKE/again" ;;
  *'queued-resources describe'*) cat "$FAKE/state" || { echo NOT_FOUND >&2; exit 1; } ;;
  *'tpu-vm describe'*) echo READY ;;
  *'tpu-vm scp'*) tee "$FAKE/0/exgrpo_tree.tar.gz" <"$archive" >"$FAKE/1/exgrpo_tree.tar.gz" ;;
  *'tpu-vm ssh'*)
    for worker in 0 1; do
      (cd "$FAKE/$worker" && HOME=$PWD bash -c "$command") || exit
    done ;;
  'storage ls'*) exit 1 ;;
esac
"""
TRAIN = r"""
printf '%s\n' "$PWD" "$@" >>"$FAKE/trained"
[[ ! -e $FAKE/again ]] || exit 0
until (($(grep -c exgrpo_jax.train "$FAKE/trained") == 2)); do sleep .05; done
echo SUSPENDED >"$FAKE/state"
exec sleep 60
"""


def test_a_preempted_run_ends_on_workers_that_are_folders(place):
  fake(place, 'gcloud', CLOUD)
  fake(place, 'python', TRAIN)
  fake(
    place,
    'uv',
    'mkdir -p "$HOME/exgrpo/venv/bin"',
    'cp "$FAKE/bin/python" "$FAKE/bin/pip" "$HOME/exgrpo/venv/bin"',
  )
  for tool in ('pip', 'mountpoint'):
    fake(place, tool)
  found = run(place, 'resume.sh', RUN='runs/first run')
  assert found.returncode == 0, found.stderr
  lines = [line.partition(' run-1: ')[2] for line in found.stderr.splitlines()]
  assert [line for line in lines if line.startswith(('NOT_FOUND', 'SUSPENDED'))] == [
    'NOT_FOUND ',
    'SUSPENDED ',
    'NOT_FOUND ',
  ]
  trained = (place / 'trained').read_text().splitlines()
  start = trained.index(f'{place}/1/exgrpo/tree')
  assert trained[start : start + 7] == [
    f'{place}/1/exgrpo/tree',
    '-m',
    'exgrpo_jax.train',
    '--config=configs/qwen2_5_math_1_5b.py',
    '--workdir=/mnt/my-bucket/runs/first run',
    '--config.model.path=gs://my-bucket/Qwen2.5-Math-1.5B',
    '--config.data.train=gs://my-bucket/openr1_math_46k.parquet',
  ]
  assert trained.count(f'{place}/0/exgrpo/tree') == 2
