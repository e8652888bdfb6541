"""Fakes of gcloud, xpk and the programs that a worker calls, for the tests of tpu_scripts/."""

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

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
  ENV_FILE='',
  PYTHON='local_python',
)


@dataclasses.dataclass(frozen=True)
class Call:
  """A command that was run or printed. The order of its flags does not matter."""

  tool: str
  words: tuple[str, ...]  # arguments other than flags
  flags: Mapping[str, str]  # of --name=value; '' for a --name without a value
  cwd: str = dataclasses.field(default='', compare=False)  # where it was run


def parse(command: Sequence[str], cwd='') -> Call:
  tool, *arguments = command
  words = tuple(argument for argument in arguments if not argument.startswith('--'))
  flags = [argument[2:].partition('=') for argument in arguments if argument.startswith('--')]
  values = {name: value for name, _, value in flags}
  assert len(values) == len(flags), f'{command} repeats a flag'
  return Call(tool=tool, words=words, flags=values, cwd=cwd)


LOCATION = {'project': 'my-project', 'zone': 'us-west4-a'}
CREATE = Call(
  tool='gcloud',
  words=('compute', 'tpus', 'queued-resources', 'create', 'run-1'),
  flags=LOCATION
  | {
    'node-id': 'run-1',
    'accelerator-type': 'v5litepod-16',
    'runtime-version': 'v2-alpha-tpuv5-lite',
    'service-account': 'trainer@my-project.iam.gserviceaccount.com',
  },
)
CREATE_SPOT = dataclasses.replace(CREATE, flags={**CREATE.flags, 'spot': ''})
DELETE = Call(
  tool='gcloud',
  words=('compute', 'tpus', 'queued-resources', 'delete', 'run-1'),
  flags=LOCATION | {'force': '', 'quiet': ''},
)


def training(run='runs/first') -> Call:
  """The command that must reach every worker."""
  return Call(
    tool='python',
    words=('-m', 'exgrpo_jax', 'train'),
    flags={
      'config': 'configs/qwen2_5_math_1_5b.py',
      'workdir': f'/mnt/my-bucket/{run}',
      'config.compilation_cache': '/mnt/my-bucket/compiled',
      'config.model.path': 'gs://my-bucket/Qwen2.5-Math-1.5B',
      'config.data.validation': '("gs://my-bucket/valid.parquet",)',
    },
  )


# Records a call: folder, tool and arguments, separated by the ASCII character for that.
RECORD = r"""
record=("$PWD" "${0##*/}" "$@")
(IFS=$'\x1f'; printf '%s\n' "${record[*]}" >>"$FAKE/calls")
"""
# Records a call and answers questions from files, one line per call. The last line is repeated, and
# a line that begins with ! is an error message.
FAKE = (
  RECORD
  + r"""
answer() {
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
  *'queued-resources describe'*) answer requests ;;
  *'tpu-vm describe'*) answer nodes ;;
  *'tpu-vm ssh'*'worker.sh status'*) answer statuses ;;
  'storage ls'*) answer checkpoints ;;
esac
"""
)
# What the fake answers about a slice that does not exist.
NO_SLICE = '!ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: no run-1'
# A gcloud whose slice has two workers, which are the folders 0 and 1 and exist while it does.
CLOUD = (
  RECORD
  + r"""
command='' archive='' target='' workers='0 1'
for word in "$@"; do
  case $word in
    --command=*) command=${word#*=} ;;
    --worker=all) ;;
    --worker=*) workers=${word#*=} ;;
    /*) archive=$word ;;
    run-1:*) target=${word#*:} ;;
  esac
done
case "$*" in
  *'queued-resources create'*) mkdir "$FAKE/0" "$FAKE/1" && echo ACTIVE >"$FAKE/state" ;;
  *'queued-resources delete'*)
    for worker in 0 1; do
      kill -KILL -- "-$(<"$FAKE/$worker/exgrpo/pid")"
    done
    rm -r "$FAKE/0" "$FAKE/1" "$FAKE/state" && touch "$FAKE/deleted" ;;
  *'queued-resources describe'*) cat "$FAKE/state" || { echo NOT_FOUND >&2; exit 1; } ;;
  *'tpu-vm describe'*) echo READY ;;
  *'tpu-vm scp'*)
    for worker in $workers; do
      cp "$archive" "$FAKE/$worker/$target" || exit
    done ;;
  *'tpu-vm ssh'*)
    for worker in $workers; do
      (cd "$FAKE/$worker" && HOME=$PWD bash -c "$command") || exit
    done ;;
  'storage ls'*) exit 1 ;;
esac
"""
)


def folder(tmp_path):
  """Yields a folder with fake tools, for use as a home; ends processes that a test left there."""
  (tmp_path / 'bin').mkdir()
  for tool in ('gcloud', 'xpk', 'gsutil', 'kubectl', 'sudo', 'curl', 'gcsfuse', 'uv'):
    fake(tmp_path, tool, FAKE)
  fake(tmp_path, 'local_python', RECORD)
  yield tmp_path
  for home in (tmp_path, tmp_path / '0', tmp_path / '1'):
    if (home / 'exgrpo' / 'pid').exists():
      worker(tmp_path, 'stop', STOP_SECONDS='0', HOME=str(home))


def fake(place, tool, *lines):
  path = place / 'bin' / tool
  path.write_text('\n'.join(('#!/usr/bin/env bash', *lines, '')))
  path.chmod(0o755)


def fake_cloud(place, train=RECORD):
  """Replaces gcloud by CLOUD; on its workers `python` is the script `train`."""
  fake(place, 'gcloud', CLOUD)
  fake(place, 'python', train)
  fake(place, 'pip', RECORD)
  fake(place, 'mountpoint', 'exit 1')
  fake(
    place,
    'uv',
    RECORD,
    'mkdir -p "$HOME/exgrpo/venv/bin"',
    'cp "$FAKE/bin/python" "$FAKE/bin/pip" "$HOME/exgrpo/venv/bin"',
  )


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
  """The commands that a script prints, one per line; checks that it runs none of the tools."""
  result = run(place, script, '--dry_run', *arguments, **changes)
  assert result.returncode == 0, result.stderr
  assert not calls(place)
  return result.stdout.splitlines()


def dry_calls(place, script, *arguments, **changes):
  """The commands that a script prints, parsed."""
  return [parse(shlex.split(line)) for line in dry_run(place, script, *arguments, **changes)]


def calls(place, tool=''):
  """What the fakes were asked to do, in order; only of one `tool` if it is named."""
  path = place / 'calls'
  records = [line.split('\x1f') for line in path.read_text().splitlines()] if path.exists() else []
  return [parse(command, cwd) for cwd, *command in records if not tool or command[0] == tool]


def answer(place, **answers):
  for name, lines in dict(checkpoints=['!none'], **answers).items():
    (place / name).write_text(''.join(f'{line}\n' for line in lines))


def actions(commands: Sequence[Call]):
  """What some gcloud commands do to the slice and to its workers, in order."""
  names = []
  for call in commands:
    match call.words[2:4]:
      case ('queued-resources', verb):
        names.append(verb)
      case ('tpu-vm', 'scp'):
        names.append('copy')
      case ('tpu-vm', 'ssh'):
        names += re.findall(r'worker\.sh (\w+)', call.flags['command'])
  return names


def changes_by(place):
  """What a run did to the slice and to its workers, in order, without questions."""
  changes = ('create', 'delete', 'copy', 'install', 'start', 'stop')
  return [name for name in actions(calls(place, 'gcloud')) if name in changes]


def worker(place, *words, **changes):
  return subprocess.run(
    [SCRIPTS / 'worker.sh', *words],
    env=environment(place) | changes,
    capture_output=True,
    text=True,
    timeout=60,
  )


@contextlib.contextmanager
def background(place, command, **options):
  """A command that runs beside the block; at its end it is killed, with all that it started."""
  process = subprocess.Popen(
    command, env=environment(place), start_new_session=True, text=True, **options
  )
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_until(condition, what=str, seconds=60):
  """Polls until `condition()` is true; fails with `what()` after a while."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, what()
    time.sleep(0.05)
