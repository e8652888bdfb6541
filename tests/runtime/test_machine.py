"""The machine: reuse of freed memory, the share of GPU memory, errors, and environment.json."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types

import jax
import pytest

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime import console, environment, hosts, machine
from exgrpo_jax.runtime.hosts import Meeting

PAGE_FAULTS = """
import resource, sys
from exgrpo_jax.runtime import machine

machine._DEVICE_FILES = {"cuda": (sys.argv[1],)}
machine.keep_pages()
b'x' * 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
  b'x' * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != 'linux', reason='the C library is not glibc')
def test_large_arrays_reuse_freed_pages_unless_there_is_an_accelerator():
  def page_faults(device_file):
    command = [sys.executable, '-c', PAGE_FAULTS, device_file]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

  assert page_faults('/nowhere') < page_faults(sys.executable) / 10


def test_environment_variables_override_the_share(monkeypatch):
  for chosen in ({}, {'XLA_CLIENT_MEM_FRACTION': '.5'}, {'XLA_PYTHON_CLIENT_MEM_FRACTION': '.5'}):
    monkeypatch.setattr(os, 'environ', dict(chosen))
    machine.take_share()
    assert os.environ == (chosen or {'XLA_CLIENT_MEM_FRACTION': '0.9'})


@pytest.mark.parametrize(
  ('error', 'is_full'),
  [
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 128000000000 bytes.'), True),
    (RuntimeError('INTERNAL: std::bad_alloc'), True),
    (MemoryError(), True),
    (RuntimeError('INVALID_ARGUMENT: shapes'), False),
    (ValueError('RESOURCE_EXHAUSTED: of a store'), False),
  ],
)
def test_out_of_memory_errors_name_the_settings_to_lower(error, is_full):
  explained = machine.explained(lambda: 'x=1 needs the most.')
  with pytest.raises(InputError if is_full else type(error)) as raised, explained:
    raise error
  named = 'x=1 needs the most. Lower config.rollout.slots .* config.microbatch.tokens .* --fit`'
  assert bool(re.search(named, str(raised.value))) == is_full


@pytest.mark.parametrize(
  ('flags', 'has_units', 'is_fast'),
  [
    (None, False, False),
    ('avx512f amx_int8', False, False),
    ('avx512f avx512_bf16', False, True),
    ('avx512_bf16 amx_bf16 amx_tile', True, True),
  ],
)
def test_bfloat16_support_is_read_from_the_cpu_flags(
  flags, has_units, is_fast, tmp_path, monkeypatch
):
  if flags:
    (tmp_path / 'cpuinfo').write_text(f'processor : 0\nflags : fpu {flags}\nbugs :\n')
  found = machine.cpu_flags(tmp_path / 'cpuinfo')
  monkeypatch.setattr(machine, 'cpu_flags', lambda: found)
  assert (machine.has_matrix_units(), machine.has_fast_bfloat16()) == (has_units, is_fast)


# ---- environment.json: the machine, versions and command of each start ----


def test_a_run_records_its_machine(recorded):
  (start,) = json.loads((recorded.workdir / 'environment.json').read_text())
  program = console.to_copy(sys.orig_argv[:1])
  assert start['first_step'] == 0 and start['command'].startswith(program)
  assert start['packages']['jax'] == jax.__version__
  assert start['packages']['exgrpo_jax'] == __version__
  assert start['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert (start['device']['platform'], start['hosts']) == ('cpu', 1)
  assert start['device']['count'] == jax.device_count()


def test_the_command_of_a_start_works_in_any_folder(monkeypatch):
  words = '.venv/bin/python -m exgrpo_jax train --config=my/config.py --workdir runs/a'
  monkeypatch.setattr(sys, 'orig_argv', words.split())
  here = os.getcwd()
  assert environment.describe(0)['command'] == (
    f'{here}/.venv/bin/python -m exgrpo_jax train --config={here}/my/config.py '
    f'--workdir={here}/runs/a'
  )


def test_every_start_has_an_entry_and_invalid_json_is_rejected(tmp_path):
  for first_step in (0, 5):
    environment.record_start(str(tmp_path), first_step, {})
  starts = json.loads((tmp_path / 'environment.json').read_text())
  assert [start['first_step'] for start in starts] == [0, 5]
  (tmp_path / 'environment.json').write_text('oops')
  with pytest.raises(InputError, match=r'environment\.json: this file is not valid JSON .*Delete'):
    environment.record_start(str(tmp_path), 0, {})


@pytest.fixture
def clone(tmp_path, monkeypatch):
  """A small clone that contains the running package, as (folder, git)."""

  def git(*words):
    command = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *words]
    return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

  package = tmp_path / 'exgrpo_jax'
  (package / 'runtime').mkdir(parents=True)
  (package / '__init__.py').write_text('')
  shutil.copy(environment.__file__, package / 'runtime')
  monkeypatch.setattr(environment, '__file__', str(package / 'runtime' / 'environment.py'))
  git('init', '-q')
  return package, git


def test_the_commit_of_a_clone_and_whether_it_was_changed(clone):
  package, git = clone
  git('add', '.')
  git('commit', '-qm', 'first')
  commit = {'hash': git('rev-parse', 'HEAD'), 'has_uncommitted_changes': False}
  assert environment.describe(0)['commit'] == commit
  (package / '__init__.py').write_text('changed')
  assert environment.describe(0)['commit'] == commit | {'has_uncommitted_changes': True}


def test_without_git_and_within_another_projects_clone_there_is_no_commit(clone, monkeypatch):
  _, git = clone
  git('commit', '-qm', 'of another project', '--allow-empty')
  assert environment.describe(0)['commit'] is None
  monkeypatch.setenv('PATH', '')
  assert environment.describe(0)['commit'] is None


def test_peak_memory_is_in_gib_and_taken_from_the_fullest_device(monkeypatch):
  assert set(environment.peak_memory()) == {'memory/host_peak'}  # CPUs report no peak
  assert 0.05 < environment.peak_memory()['memory/host_peak'] < 100
  devices = [
    types.SimpleNamespace(memory_stats=lambda peak=peak: {'peak_bytes_in_use': peak * 2**30})
    for peak in (2, 3)
  ]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  assert environment.peak_memory()['memory/device_peak'] == 3


def test_every_step_has_the_time_the_memory_and_the_learning_rate(recorded):
  records = metrics.read(recorded.workdir)
  times = [record['timestamp'] for record in records]
  assert times == sorted(times) and times[0] > 1.7e9
  for record in records[1:]:
    assert {'memory/host_peak', 'learning_rate', 'reward_std', 'reward_std_within'} <= set(record)
  # Warm-up over 2 updates to 3e-3, two updates per step: mean factor (1 + 2) / 3 / 2, then 1.
  config = recorded.experiment.config.optimizer
  assert (config.warmup_updates, config.minibatches, config.learning_rate) == (2, 2, 3e-3)
  rates = [record['learning_rate'] for record in records[1:3]]
  assert rates == pytest.approx([1.5e-3, 3e-3])


# ---- A single host, and how several connect; tests/processes/ tests the rest ----


def test_a_single_host_does_all_the_work_and_never_waits():
  with hosts.joined(Meeting(num_processes=1)):
    assert hosts.is_first() and hosts.is_own_share(1)
  assert hosts.all_gather([1]) == [[1]] and hosts.broadcast_from_first('a') == 'a'
  assert hosts.merge_shares([1, 2]) == [1, 2]
  with hosts.first_host_first('x'):
    hosts.barrier('y')
  hosts.check_shared('/nowhere')


@pytest.mark.parametrize(
  ('meeting', 'message'),
  [
    (Meeting(process_id=0), 'must be set together'),
    (Meeting(coordinator_address='localhost:1'), 'must be set together'),
    (Meeting('localhost:1', 2, 2), '--process_id=2: the value must be below --num_processes=2'),
    (Meeting('localhost', 2, 1), '--coordinator_address=localhost: the value must be host:port'),
    (Meeting('localhost:65536', 2, 1), '--coordinator_address=localhost:65536: the value must be'),
  ],
)
def test_incomplete_or_wrong_meetings_are_rejected(meeting, message):
  with pytest.raises(InputError, match=re.escape(message)), hosts.joined(meeting):
    pass


def test_a_port_in_use_is_rejected():
  with socket.create_server(('', 0)) as taken:
    address = f'localhost:{taken.getsockname()[1]}'
    with pytest.raises(InputError, match=f'address={address}: host 0 cannot listen'):
      hosts.joined(Meeting(address, 2, 0)).__enter__()


def test_jax_errors_while_hosts_connect_are_input_errors(monkeypatch):
  def fail(**_):
    raise jax.errors.JaxRuntimeError('UNAVAILABLE: a reason')

  monkeypatch.setattr(jax.distributed, 'initialize', fail)
  for meeting, place in (
    (Meeting('nowhere:1', 2, 1), '--coordinator_address=nowhere:1: '),
    (Meeting(), ''),
  ):
    with pytest.raises(InputError, match=f'^{place}the hosts of the run cannot connect .*a reason'):
      hosts.joined(meeting).__enter__()
