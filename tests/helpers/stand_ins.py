"""Stand-ins for gcloud, xpk and what a worker calls, for the tests of tpu_scripts/."""

import re
import shlex
import subprocess

from tests.helpers.paths import REPOSITORY

ROOT = REPOSITORY
SCRIPTS = ROOT / 'tpu_scripts'
VALUES = dict(
  PROJECT='my-project',
  ZONE='us-west4-a',
  NAME='run-1',
  SPOT='yes',
  BUCKET='my-bucket',
  RUN='runs/first',
  SERVICE_ACCOUNT='trainer@my-project.iam.gserviceaccount.com',
  CLUSTER='my-cluster',
  POLL_SECONDS='0',
)
PLACE = '--project=my-project --zone=us-west4-a'
WORKER = 'exgrpo/tree/tpu_scripts/worker.sh'
CREATE = (
  f'gcloud compute tpus queued-resources create run-1 --node-id=run-1 {PLACE} '
  '--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite '
  '--service-account=trainer@my-project.iam.gserviceaccount.com'
)
DELETE = f'gcloud compute tpus queued-resources delete run-1 {PLACE} --force --quiet'
SSH = f'gcloud compute tpus tpu-vm ssh run-1 {PLACE} --worker=all'

# Writes its arguments down, and answers questions from files, a line each time; the last line
# stays, and one that begins with ! is an error.
FAKE = r"""
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
"""
# What the fake says of a slice that is not there.
NOTHING = '!ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: no run-1'
# Writes its arguments down.
RECORD = 'printf "%s\\n" "${0##*/} $*" >>"$FAKE/calls"'


def folder(tmp_path):
  """A folder with fake tools, for a home of its own; yields it, and ends what a test left there."""
  (tmp_path / 'bin').mkdir()
  for tool in ('gcloud', 'xpk', 'gsutil', 'kubectl', 'sudo', 'curl', 'gcsfuse', 'uv'):
    fake(tmp_path, tool, FAKE)
  yield tmp_path
  if (tmp_path / 'exgrpo' / 'pid').exists():
    worker(tmp_path, 'stop', STOP_SECONDS='0')


def fake(place, tool, *lines):
  path = place / 'bin' / tool
  path.write_text('\n'.join(('#!/usr/bin/env bash', *lines, '')))
  path.chmod(0o755)


def environment(place):
  return {
    'PATH': f'{place / "bin"}:/usr/bin:/bin',
    'HOME': str(place),
    'FAKE': str(place),
    'TMPDIR': str(place),
    'CLOUDSDK_CONFIG': str(place),
  }


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
    env=environment(place),
    input=typed,
    capture_output=True,
    text=True,
    timeout=60,
  )


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
  verbs = {
    'queued-resources create': 'create',
    'queued-resources delete': 'delete',
    'tpu-vm scp': 'copy',
    'worker.sh install': 'install',
    'worker.sh start': 'start',
    'worker.sh stop': 'stop',
  }
  return [verb for call in calls(place) for words, verb in verbs.items() if words in call]


def worker(place, *words, **changes):
  return subprocess.run(
    [SCRIPTS / 'worker.sh', *words],
    env=environment(place) | changes,
    capture_output=True,
    text=True,
    timeout=60,
  )
