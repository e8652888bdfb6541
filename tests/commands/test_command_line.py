"""The command line: configs by name or path, flags, and refusals in one line."""

import errno
import importlib.util
import pkgutil
import shlex
import signal
import socket
import subprocess
import sys
import types

import pytest

from exgrpo_jax import commands
from exgrpo_jax.__main__ import COMMANDS
from exgrpo_jax.capacity.diagnosis import Finding
from exgrpo_jax.commands import capacity, command_line, doctor, verify
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.errors import InputError
from tests.helpers import cases, forked

NAMES = [name for group in COMMANDS.values() for name in group]


def assert_refused(outcome, message):
  """One line on stderr that begins with 'error:', exit status 2, no traceback."""
  assert outcome.status == 2, outcome.err
  assert 'Traceback' not in outcome.err and outcome.out == ''
  (line,) = [line for line in outcome.err.splitlines() if line.startswith('error:')]
  assert message in line


@pytest.mark.parametrize(
  ('given', 'specs'),
  [
    ('a.jsonl,b:test[:5]', ['a.jsonl', 'b:test[:5]']),
    ('a.csv{question=x,answer=y}[:5],b.csv', ['a.csv{question=x,answer=y}[:5]', 'b.csv']),
    ("reasoning_gym:a(x=[1,2],y=('+',))+b:test,", ["reasoning_gym:a(x=[1,2],y=('+',))+b:test"]),
  ],
)
def test_commas_in_brackets_are_part_of_a_data_spec(given, specs):
  assert command_line._Specs().parse(given) == specs


def test_a_value_may_begin_with_a_dash_that_is_not_ascii():
  command_line._check_names(['--prompt', '— why is 2+2=4?'])


@pytest.mark.full
@pytest.mark.parametrize(
  'command',
  [
    ['check', '--config=smoke', '--workdir=~/damaged'],
    ['check', '--config=~/smoke.py', '--workdir', '~/damaged'],
    ['export', '--checkpoint=~/damaged', '--out=~/policy'],
    ['evaluate', '--compare=x,~/damaged'],
  ],
)
def test_a_tilde_is_the_home_folder_in_every_path_flag(tmp_path, command):
  (tmp_path / 'damaged').mkdir()
  (tmp_path / 'damaged' / 'config.json').write_text('{')
  (tmp_path / 'damaged' / 'metrics.jsonl').write_text('{"step": 1}\n')  # it is a run
  (tmp_path / 'smoke.py').write_text('from exgrpo_jax.configs.smoke import get_config')
  outcome = forked.run_one(command, HOME=str(tmp_path))
  assert_refused(outcome, f"{tmp_path}/damaged/config.json: cannot read the run's config")


@pytest.mark.full
def test_a_bucket_for_prepared_data_is_refused_with_the_name_of_the_variable():
  command = ['check', '--config=smoke', '--workdir=w', '--config.data.cache_dir=']
  assert_refused(forked.run_one(command, TFDS_DATA_DIR='gs://b/x'), 'error: TFDS_DATA_DIR=gs://b/x')


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec('gcsfs') is not None, reason='gcsfs is installed')
def test_a_bucket_without_its_package_is_refused():
  command = ['export', '--model=tests/checkpoints/qwen2_tied', '--out=gs://b/x']
  assert_refused(forked.run_one(command), "gs:// paths need gcsfs. Run pip install -e '.[gcs]'.")


def caused_by(error):
  """A library's own error, raised while it handled this one."""
  found = RuntimeError('in a library')
  found.__context__ = error
  return found


@pytest.mark.parametrize(
  ('given', 'cause', 'status'),
  [
    (0, None, 2),
    (1, None, 1),
    (2, InputError('no network', 1), 2),
    (0, InputError('no network', 1), 1),
    (0, InputError('no such file'), 2),
    (0, PermissionError(errno.EACCES, 'denied'), 2),
    (0, OSError(errno.EIO, 'broken'), 1),
    (0, OSError(errno.ENOSPC, 'full'), 1),
    (0, ConnectionRefusedError(errno.ECONNREFUSED, 'refused'), 1),
    (0, TimeoutError('a worker was too slow'), 2),
    (0, caused_by(ConnectionResetError()), 1),
    (0, caused_by(socket.gaierror(socket.EAI_NONAME, 'no such host')), 1),
  ],
)
def test_a_refusal_is_one_line_and_ends_with_its_status(given, cause, status, capsys):
  error = InputError('x=1: wrong.\n  Fix x.', given)
  error.__cause__ = cause
  with pytest.raises(SystemExit) as ended:
    command_line.refuse(error)
  assert ended.value.code == status
  assert capsys.readouterr().err == 'error: x=1: wrong. Fix x.\n'


@pytest.mark.full
def test_all_commands_can_be_imported_together_for_none_defines_a_flag_at_import():
  names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
  assert set(NAMES) <= set(names)
  script = f"""
from absl import flags
before = set(flags.FLAGS)
import importlib
for name in {names!r}:
  importlib.import_module(f'exgrpo_jax.commands.{{name}}')
# ml_collections and JAX define flags of their own.
ours = [module for module in flags.FLAGS.flags_by_module_dict() if module.startswith('exgrpo_jax')]
assert not ours, ours
"""
  process = subprocess.run([sys.executable, '-c', script], text=True, capture_output=True)
  assert process.returncode == 0, process.stderr


@pytest.mark.full
def test_a_closed_stream_is_replaced_so_that_no_file_gets_its_number(tmp_path):
  script = (
    'from exgrpo_jax.__main__ import prepare_process; prepare_process()\n'
    'import subprocess, sys\n'
    f'assert open({str(tmp_path / "file")!r}, "w").fileno() > 2\n'
    'assert not sys.stdout.isatty() and not sys.stderr.isatty()\n'
    'subprocess.run(["sh", "-c", "echo 1; echo 2 >&2"], check=True)\n'
  )
  command = f'{shlex.quote(sys.executable)} -c {shlex.quote(script)} <&- >&- 2>&-'
  assert subprocess.run(command, shell=True).returncode == 0


def test_an_argument_that_is_not_utf_8_is_rejected():
  words = [sys.executable, '-m', 'exgrpo_jax', 'report', b'h\xe9']
  run = subprocess.run(words, capture_output=True, text=True)
  assert run.returncode == 2 and run.stderr.startswith(
    "error: 'h\\udce9': this argument is not valid UTF-8 text. Set your terminal"
  )


def test_help_has_the_flags_of_each_command():
  flags = {
    'capacity': {'config', 'device', 'evaluated', 'fit', 'lengths', 'topology'},
    'check': {'config', 'workdir', 'num_processes'},
    'evaluate': {'config', 'checkpoint', 'step', 'data', 'samples', 'temperature', 'out'},
    'export': {'checkpoint', 'step', 'out', 'dtype', 'push', 'public'},
    'sweep': {'config', 'workdir', 'sweep', 'parallel', 'launcher'},
    'train': {'config', 'workdir', 'num_processes'},
    'verify': {'response', 'answer', 'file'},
  }
  for name, outcome in zip(NAMES, forked.run([name, '--help'] for name in NAMES)):
    text = outcome.out
    assert outcome.status == 0, name
    assert f'exgrpo {name}' in text, name
    for flag in flags.get(name, ()):
      assert f'--{flag}' in text.replace('--[no]', '--'), (name, flag)


def test_the_list_of_commands_ends_quietly_if_nobody_reads_it():
  outcome = forked.run_one(['--help'], has_reader=False)
  assert (outcome.status, outcome.err) == (-signal.SIGPIPE, '')


@pytest.mark.full
def test_without_a_command_all_are_listed_and_a_typo_gets_a_suggestion():
  listed, slip = forked.run([['exgrpo_jax.__main__'], ['trian']])
  assert listed.status == 0
  for purpose, commands_of_it in COMMANDS.items():
    assert purpose in listed.out and all(f'  {name} ' in listed.out for name in commands_of_it)
  assert (slip.status, slip.out) == (2, '') and 'Did you mean train?' in slip.err


# ---- The flags of `capacity` ----


def arguments(**changes):
  """The flags of `capacity` for the smallest model on the smallest GPU."""
  given = dict(config=one_gpu.get_config(), topology=None, device='l4', fit=False)
  return types.SimpleNamespace(**given | changes)


def test_a_config_that_does_not_fit_ends_with_status_1(capsys):
  capacity.main(arguments())
  assert capsys.readouterr().out.endswith('\nfits\n')
  with pytest.raises(SystemExit) as exit:
    capacity.main(arguments(device='4gb'))
  assert exit.value.code == 1


# ---- `doctor` prints its findings, and ends with status 1 if training cannot start ----


def test_a_problem_is_marked_and_ends_with_status_1(capsys, monkeypatch):
  found = [Finding('host', 'is fine')]
  monkeypatch.setattr(doctor.diagnosis, 'findings', lambda: found)
  doctor.main(None)
  printed = capsys.readouterr().out
  assert printed.startswith('  host') and 'exgrpo train --config=' in printed
  found.append(Finding('devices', 'are not', is_problem=True))
  with pytest.raises(SystemExit) as exit:
    doctor.main(None)
  assert exit.value.code == 1 and '\n! devices' in capsys.readouterr().out


# ---- The command that explains verdicts ----


@pytest.mark.parametrize(
  ('flags', 'verdict'),
  [
    ((r'--response=\boxed{5}', '--answer=6'), 'wrong'),
    ((r'--response=\boxed{0.5}', '--answer=1/2'), 'correct'),
    (('--response=5', '--answer=5', '--require', 'box'), 'no answer'),
    (('--response=5', '--answer=5', '--require', 'think'), 'no answer'),
    ((r'--response=\boxed{D}', '--answer=d', '--kind=text'), 'correct'),
    (('--response=5', '--answer=8', '--verifier=tests.helpers.chance:Chance'), 'correct'),
  ],
)
def test_one_response_is_judged(flags, verdict, capsys):
  verify.main(list(flags))
  assert capsys.readouterr().out.endswith(f'verdict    {verdict}\n')


def test_a_file_is_scored(capsys):
  verify.main([f'--file={cases.RESPONSES}'])
  count = len(cases.rows('grading', 'responses.jsonl'))
  assert capsys.readouterr().out.endswith(f'; {count} as expected\n')


def test_the_command_imports_no_jax():
  program = (
    'import sys; from exgrpo_jax import __main__; '
    'sys.argv = ["exgrpo", "verify", "--response=5", "--answer=5"]; __main__.main(); '
    'assert not {"jax", "jaxlib", "flax", "numpy"} & set(sys.modules)'
  )
  run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert run.stdout.endswith('verdict    correct\n')
