"""What all scripts of tpu_scripts/ have in common: arguments, variables, --dry_run, errors."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers.stand_ins import (
  RECORD,
  ROOT,
  SCRIPTS,
  VALUES,
  calls,
  dry_run,
  environment,
  fake,
  run,
)

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


def test_shellcheck_has_no_complaints():
  tool = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.defpath}')
  if not tool:
    pytest.skip("shellcheck is not installed; pip install -e '.[test]' installs it.")
  result = subprocess.run(
    [tool, *sorted(SCRIPTS.glob('*.sh')), ROOT / '.ci' / 'run'], capture_output=True, text=True
  )
  assert result.returncode == 0, result.stdout


@pytest.mark.parametrize('script', COMMANDS)
def test_a_dry_run_prints_commands_runs_none_and_refuses_what_it_does_not_know(script, place):
  lines = dry_run(place, script)
  assert {shlex.split(line)[0] for line in lines} <= {'cd', 'gcloud', 'xpk', 'mkdir', 'tar'}
  assert lines and not (place / 'exgrpo_jax_run-1').exists()
  refused = run(place, script, '--dry-run')
  assert refused.returncode == 2 and "unknown argument '--dry-run'" in refused.stderr
  assert not calls(place)


@pytest.mark.full
@pytest.mark.parametrize('script', COMMANDS)
def test_a_variable_that_is_used_must_not_be_empty_and_is_explained(script, place):
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


def test_a_malformed_value_is_refused(place):
  for name, value in (
    *(('SPOT', 'maybe'), ('NAME', 'Run_1'), ('BUCKET', 'gs://my-bucket')),
    *(('RUN', '/runs/first'), ('POLL_SECONDS', 'a minute'), ('MAX_FAILURES', '-1')),
  ):
    result = run(place, 'resume.sh', '--dry_run', **{name: value})
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {name}='{value}' in ")


def test_the_repository_leaves_empty_what_only_the_user_knows(place):
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


def test_commands_of_a_dry_run_do_the_same_when_they_are_pasted(place):
  lines = dry_run(place, 'launch.sh', RUN="it's a run")
  assert run(place, 'launch.sh', RUN="it's a run").returncode == 0
  subprocess.run(['bash', '-c', '\n'.join(lines)], env=environment(place), check=True)
  by_script, pasted = calls(place)
  assert by_script == pasted
  assert "/mnt/my-bucket/it's a run" in shlex.split(pasted.flags['command'])
