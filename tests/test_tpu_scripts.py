"""tpu_scripts/, with stand-ins for gcloud and xpk: no cloud is reached from here."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / 'tpu_scripts'
SOURCED = {'common.sh', 'node.sh', 'variables.sh'}
VERBS = sorted(path.name for path in SCRIPTS.glob('*.sh')
               if path.name not in SOURCED | {'worker.sh'})
VALUES = dict(
    PROJECT='my-project', ZONE='us-west4-a', NAME='run-1', SPOT='yes', BUCKET='my-bucket',
    RUN='runs/first', SERVICE_ACCOUNT='trainer@my-project.iam.gserviceaccount.com',
    CLUSTER='my-cluster', POLL_SECONDS='0')
PLACE = '--project=my-project --zone=us-west4-a'
WORKER = 'exgrpo/tree/tpu_scripts/worker.sh'
CREATE = (
    f'gcloud compute tpus queued-resources create run-1 --node-id=run-1 {PLACE} '
    '--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite '
    '--service-account=trainer@my-project.iam.gserviceaccount.com')
DELETE = f'gcloud compute tpus queued-resources delete run-1 {PLACE} --force --quiet'
SSH = f'gcloud compute tpus tpu-vm ssh run-1 {PLACE} --worker=all'

# Writes its arguments down, and answers questions from files, a line each time; the last line
# stays, and one that begins with ! is an error.
FAKE = r'''#!/usr/bin/env bash
printf '%s\n' "${0##*/} $*" >>"$FAKE/calls"
next() {
  local line
  line=$(head -n 1 "$FAKE/$1")
  [[ $(wc -l <"$FAKE/$1") -le 1 ]] || sed -i 1d "$FAKE/$1"
  if [[ $line == '!'* ]]; then
    printf '%s\n' "${line#!}" >&2
    exit 1
  fi
  printf '%b\n' "$line"
}
case "$*" in
  *'queued-resources describe'*) next requests ;;
  *'tpu-vm describe'*) next nodes ;;
  *'tpu-vm ssh'*'worker.sh status'*) next statuses ;;
  'storage ls'*) next checkpoints ;;
esac
'''
NOTHING = '!ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: no run-1'
RUNNING, IDLE = r'exgrpo: running\nexgrpo: running', r'exgrpo: idle\nexgrpo: idle'
DONE = r'exgrpo: exit_code 0\nexgrpo: exit_code 0'
FAILED = r'exgrpo: exit_code 1\nexgrpo: running'


@pytest.fixture
def place(tmp_path):
  """A folder with fake tools, and a home of its own."""
  for tool in ('gcloud', 'xpk', 'gsutil', 'kubectl', 'sudo', 'curl', 'gcsfuse', 'uv'):
    path = tmp_path / 'bin' / tool
    path.parent.mkdir(exist_ok=True)
    path.write_text(FAKE)
    path.chmod(0o755)
  yield tmp_path
  if (tmp_path / 'exgrpo' / 'pid').exists():
    worker(tmp_path, 'stop', STOP_SECONDS='0')  # what a failed test left


def environment(place):
  return {'PATH': f'{place / "bin"}:/usr/bin:/bin', 'HOME': str(place), 'FAKE': str(place),
          'TMPDIR': str(place), 'CLOUDSDK_CONFIG': str(place)}


def variables(place, **changes):
  """The repository's variables.sh, filled in."""
  text = (SCRIPTS / 'variables.sh').read_text()
  for name, value in (VALUES | changes).items():
    text, count = re.subn(rf'^{name}=.*$', f'{name}={shlex.quote(value)}', text, flags=re.M)
    assert count == 1, name
  path = place / 'my variables.sh'
  path.write_text(text)
  return path


def run(place, script, *arguments, typed='', **changes):
  return subprocess.run(
      [SCRIPTS / script, f'--variables={variables(place, **changes)}', *arguments],
      env=environment(place), input=typed, capture_output=True, text=True, timeout=60)


def dry_run(place, script, *arguments, **changes):
  """The commands that a script prints, one a line; none of the tools was run."""
  found = run(place, script, '--dry_run', *arguments, **changes)
  assert found.returncode == 0, found.stderr
  assert not calls(place)
  return found.stdout.splitlines()


def calls(place):
  path = place / 'calls'
  return path.read_text().splitlines() if path.exists() else []


def answer(place, **answers):
  for name, lines in dict(checkpoints=['!none'], **answers).items():
    (place / name).write_text(''.join(f'{line}\n' for line in lines))


def done_by(place):
  """What a run did to the slice, in order, by verb."""
  verbs = {'queued-resources create': 'create', 'queued-resources delete': 'delete',
           'tpu-vm scp': 'copy', 'worker.sh install': 'install', 'worker.sh start': 'start',
           'worker.sh stop': 'stop'}
  return [verb for call in calls(place) for words, verb in verbs.items() if words in call]


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
  found = subprocess.run([tool, *sorted(SCRIPTS.glob('*.sh')), ROOT / '.ci' / 'run'],
                         capture_output=True, text=True)
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
      f"error: '--dry-run' is no argument of this script; usage: {script} ")
  assert not calls(place)


@pytest.mark.parametrize('name, value', [
    ('SPOT', 'maybe'), ('NAME', 'Run_1'), ('BUCKET', 'gs://my-bucket'), ('RUN', '/runs/first'),
    ('POLL_SECONDS', 'a minute'), ('MAX_FAILURES', '-1')])
def test_a_value_that_cannot_be_is_refused(name, value, place):
  found = run(place, 'resume.sh', '--dry_run', **{name: value})
  assert found.returncode == 2
  assert found.stderr.startswith(f"error: {name}='{value}' in ")


def test_a_missing_file_of_variables_is_named():
  found = subprocess.run([SCRIPTS / 'create.sh', '--variables=/nowhere', '--dry_run'],
                         capture_output=True, text=True)
  assert found.returncode == 2
  assert "there is no file '/nowhere'" in found.stderr


def test_the_repository_leaves_what_it_cannot_know_empty(place):
  found = subprocess.run([SCRIPTS / 'resume.sh', '--dry_run'], env=environment(place),
                         capture_output=True, text=True)
  assert found.returncode == 2
  assert "error: PROJECT is not set" in found.stderr
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
      f"bash {WORKER} install && bash {WORKER} mount my-bucket' --quiet"]


def test_set_up_packs_a_tree_that_can_be_installed(place):
  assert run(place, 'set_up.sh').returncode == 0
  packed = subprocess.run(['tar', '-tzf', place / 'exgrpo_jax_run-1' / 'tree.tar.gz'],
                          capture_output=True, text=True, check=True).stdout.splitlines()
  assert {'setup.cfg', 'exgrpo_jax/train.py', 'configs/base.py', 'tpu_scripts/worker.sh'} <= set(
      packed)
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
      'bash', WORKER, 'start', '/mnt/my-bucket/runs/first run',
      'python', '-m', 'exgrpo_jax.train', '--config=configs/qwen2_5_math_1_5b.py',
      '--workdir=/mnt/my-bucket/runs/first run',
      '--config.model.path=gs://my-bucket/Qwen2.5-Math-1.5B',
      '--config.data.train=gs://my-bucket/openr1_math_46k.parquet',
      '--config.data.evaluation=("gs://my-bucket/math_benchmarks.parquet",)']


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
      f'mkdir -p {folder}', f"{copy} '--exclude=^(checkpoints|warm_start)/.*'"]
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
  answer(place, requests=[NOTHING, 'WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE'],
         nodes=['CREATING', 'READY'])
  found = run(place, 'create.sh')
  assert found.returncode == 0
  assert found.stderr.splitlines() == [
      f'run-1: {state}' for state in ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'CREATING', 'READY')]
  assert done_by(place) == ['create']


def test_create_does_not_ask_twice(place):
  answer(place, requests=['PROVISIONING', 'ACTIVE'], nodes=['READY'])
  assert run(place, 'create.sh').returncode == 0
  assert done_by(place) == []


@pytest.mark.parametrize('state, words', [
    ('FAILED', 'by quota'), ('SUSPENDED', 'has lost its VMs'),
    ('!ERROR: PERMISSION_DENIED', 'PERMISSION_DENIED')])
def test_create_says_why_it_ends(state, words, place):
  answer(place, requests=[state], nodes=['READY'])
  found = run(place, 'create.sh')
  assert found.returncode == 2
  assert words in found.stderr


def test_resume_takes_an_empty_project_to_a_finished_run(place):
  answer(place, requests=[NOTHING, 'WAITING_FOR_RESOURCES', 'ACTIVE'], nodes=['READY'],
         statuses=[IDLE, RUNNING, RUNNING, r'exgrpo: exit_code 0\nexgrpo: running', DONE])
  found = run(place, 'resume.sh')
  assert found.returncode == 0, found.stderr
  assert 'training is done' in found.stderr
  assert done_by(place) == ['create', 'stop', 'copy', 'install', 'start']
  assert f'{CREATE} --spot' in calls(place)
  assert sum('worker.sh status' in call for call in calls(place)) == 5, 'waits for all workers'


@pytest.mark.parametrize('requests, nodes', [
    (['ACTIVE', 'SUSPENDING', 'SUSPENDED', NOTHING, 'PROVISIONING', 'ACTIVE'], ['READY']),
    (['ACTIVE', 'ACTIVE', NOTHING, 'ACTIVE'], ['READY', 'PREEMPTED', 'READY'])])
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
  (place / 'checkpoints').write_text(''.join(
      rf'gs://b/r/checkpoints/9/\ngs://b/r/checkpoints/{step}/' '\n'
      for step in range(50, 100, 10)))
  assert run(place, 'resume.sh', MAX_FAILURES='1').returncode == 0
  assert done_by(place).count('start') == 4


def test_resume_does_not_repeat_what_training_refuses(place):
  answer(place, requests=['ACTIVE'], nodes=['READY'],
         statuses=[RUNNING, r'exgrpo: exit_code 2\nexgrpo: running'])
  found = run(place, 'resume.sh')
  assert found.returncode == 2
  assert 'training refuses what it was given' in found.stderr
  assert done_by(place) == []


@pytest.mark.parametrize('answers', [
    dict(requests=['!ERROR: no network'], nodes=['READY'], statuses=[RUNNING]),
    dict(requests=['ACTIVE'], nodes=['!ERROR: no network'], statuses=[RUNNING]),
    dict(requests=['ACTIVE'], nodes=['READY'], statuses=['!ssh: no network'])])
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
  for command in (DELETE, f'{CREATE} --spot', *dry_run(place, 'stop.sh'),
                  *dry_run(place, 'set_up.sh'), *dry_run(place, 'launch.sh'),
                  'gcloud storage ls gs://my-bucket/runs/first/checkpoints/ --project=my-project'):
    assert command in lines
  assert lines.index(DELETE) < lines.index(f'{CREATE} --spot')


def test_gke_makes_a_cluster_that_sees_the_bucket(place):
  of_cluster = f'--cluster=my-cluster {PLACE}'
  create, attach = dry_run(place, 'gke_create.sh')
  assert create == (f'xpk cluster create {of_cluster} --tpu-type=v5litepod-16 --num-slices=1 '
                    '--spot --enable-gcsfuse-csi-driver')
  assert attach.startswith(f'xpk storage attach exgrpo-bucket {of_cluster} --type=gcsfuse '
                           '--bucket=my-bucket --mount-point=/mnt/my-bucket --readonly=false ')
  assert ' --on-demand ' in dry_run(place, 'gke_create.sh', SPOT='no')[0]


def test_gke_runs_the_same_training_command(place):
  *_, line = dry_run(place, 'gke_launch.sh')
  words = shlex.split(line)
  assert words[:4] == ['xpk', 'workload', 'create', '--workload=run-1']
  assert {'--cluster=my-cluster', '--tpu-type=v5litepod-16', '--base-docker-image=python:3.12',
          f'--script-dir={place}/exgrpo_jax_run-1', '--storage=exgrpo-bucket',
          '--max-restarts=50'} < set(words)
  launched = shlex.split(dry_run(place, 'launch.sh')[0])[-2]
  assert words[-1].endswith(
      ' && exec bash tpu_scripts/worker.sh run ' + launched.partition(' start ')[2])


def test_gke_deletes_the_workload_or_the_cluster(place):
  assert dry_run(place, 'gke_delete.sh') == [
      f'xpk workload delete --workload=run-1 --cluster=my-cluster {PLACE} --force']
  assert dry_run(place, 'gke_delete.sh', '--cluster') == [
      f'xpk cluster delete --cluster=my-cluster {PLACE} --force']
  assert run(place, 'gke_delete.sh').returncode == 2
  assert not calls(place)


def worker(place, *words, **changes):
  return subprocess.run([SCRIPTS / 'worker.sh', *words], env=environment(place) | changes,
                        capture_output=True, text=True, timeout=60)


def await_status(place, wanted, seconds=30):
  for _ in range(seconds * 20):
    status = worker(place, 'status').stdout.strip()
    if status == f'exgrpo: {wanted}':
      return
    time.sleep(.05)
  pytest.fail(f'{status}, where {wanted} was awaited')


def await_log(place, words, seconds=30):
  log = place / 'exgrpo' / 'log'
  for _ in range(seconds * 20):
    if words in log.read_text().splitlines():
      return
    time.sleep(.05)
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


def fake(place, tool, *lines):
  path = place / 'bin' / tool
  path.write_text('\n'.join(('#!/usr/bin/env bash', *lines, '')))
  path.chmod(0o755)


RECORD = 'printf "%s\\n" "${0##*/} $*" >>"$FAKE/calls"'


def test_a_worker_mounts_the_bucket_once(place):
  fake(place, 'mountpoint', 'exit 1')
  assert worker(place, 'mount', 'my-bucket').returncode == 0
  assert calls(place) == [
      'sudo mkdir -p /mnt/my-bucket', f'sudo chown {os.getuid()} /mnt/my-bucket',
      'gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 '
      '--enable-streaming-writes=false my-bucket /mnt/my-bucket']
  fake(place, 'mountpoint', 'exit 0')
  assert worker(place, 'mount', 'my-bucket').returncode == 0
  assert len(calls(place)) == 3


def test_a_worker_installs_this_tree_into_its_own_python(place):
  fake(place, 'uv', RECORD, 'mkdir -p "$HOME/exgrpo/venv/bin"',
       'cp "$FAKE/bin/pip" "$HOME/exgrpo/venv/bin/pip"')
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


# A cloud of two workers, which are folders here; it takes the first slice away.
CLOUD = r'''
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
'''
TRAIN = r'''
printf '%s\n' "$PWD" "$@" >>"$FAKE/trained"
[[ ! -e $FAKE/again ]] || exit 0
until (($(grep -c exgrpo_jax.train "$FAKE/trained") == 2)); do sleep .05; done
echo SUSPENDED >"$FAKE/state"
exec sleep 60
'''


def test_a_preempted_run_ends_on_workers_that_are_folders(place):
  fake(place, 'gcloud', CLOUD)
  fake(place, 'python', TRAIN)
  fake(place, 'uv', 'mkdir -p "$HOME/exgrpo/venv/bin"',
       'cp "$FAKE/bin/python" "$FAKE/bin/pip" "$HOME/exgrpo/venv/bin"')
  for tool in ('pip', 'mountpoint'):
    fake(place, tool)
  found = run(place, 'resume.sh', RUN='runs/first run')
  assert found.returncode == 0, found.stderr
  lines = [line.partition(' run-1: ')[2] for line in found.stderr.splitlines()]
  assert [line for line in lines if line.startswith(('NOT_FOUND', 'SUSPENDED'))] == [
      'NOT_FOUND ', 'SUSPENDED ', 'NOT_FOUND ']
  trained = (place / 'trained').read_text().splitlines()
  start = trained.index(f'{place}/1/exgrpo/tree')
  assert trained[start:start + 7] == [
      f'{place}/1/exgrpo/tree', '-m', 'exgrpo_jax.train',
      '--config=configs/qwen2_5_math_1_5b.py', '--workdir=/mnt/my-bucket/runs/first run',
      '--config.model.path=gs://my-bucket/Qwen2.5-Math-1.5B',
      '--config.data.train=gs://my-bucket/openr1_math_46k.parquet']
  assert trained.count(f'{place}/0/exgrpo/tree') == 2


def test_a_pod_exits_as_training_does_and_hears_sigterm(place):
  assert worker(place, 'run', '/none', 'bash', '-c', 'exit 5').returncode == 5
  command = 'trap "exit 6" TERM; echo ready; while true; do sleep .1; done'
  process = subprocess.Popen([SCRIPTS / 'worker.sh', 'run', '/none', 'bash', '-c', command],
                             env=environment(place), stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'ready\n'
  process.terminate()
  assert process.wait(timeout=30) == 6
