"""A folder that one process at a time may work in, whatever becomes of that process."""

import json
import os
import subprocess
import sys
import time

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import folder_lock

HOLD = """
import fcntl, json, sys, time
file = open(sys.argv[1], 'a+')
fcntl.flock(file, fcntl.LOCK_EX)
file.write(sys.argv[2])
file.flush()
print('held', flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold(tmp_path):
  """A function: a process that holds the lock as if it ran on a machine."""
  started = []

  def start(machine):
    owner = {'pid': 7, 'host': 'other', 'since': 'noon', 'machine': machine}
    process = subprocess.Popen(
      [sys.executable, '-c', HOLD, str(tmp_path / 'lock'), json.dumps(owner)],
      stdout=subprocess.PIPE,
    )
    started.append(process)
    process.stdout.readline()
    return process

  yield start
  for process in started:
    process.kill()
    process.communicate()


def held(folder):
  return folder_lock.held(str(folder), 'lock', 'Wait for it.')


def test_an_owner_is_named_and_its_death_frees_the_folder(hold, tmp_path):
  process = hold(folder_lock._machine())
  refusal = r'^Wait for it\. The lock was taken by process 7 on other, at noon\.$'
  with pytest.raises(InputError, match=refusal), held(tmp_path):
    pass
  process.kill()
  process.wait()
  with held(tmp_path):
    assert json.loads((tmp_path / 'lock').read_text())['pid'] == os.getpid()


def test_the_lock_of_a_machine_that_is_gone_is_waited_for(hold, tmp_path, monkeypatch, capsys):
  """An NFS server keeps it for a while; who restarts preempted machines is not to be refused."""
  process = hold('another')

  def die(_):
    process.kill()
    process.wait()

  monkeypatch.setattr(time, 'sleep', die)
  with held(tmp_path):
    assert 'taken by process 7 on other, at noon; waiting for' in capsys.readouterr().out


def test_another_machine_that_goes_on_is_not_waited_for_forever(hold, tmp_path, monkeypatch):
  hold('another')
  monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', 0.0)
  with pytest.raises(InputError, match='process 7 on other'), held(tmp_path):
    pass


def test_a_process_that_inherits_the_lock_keeps_it(tmp_path):
  """As the trials of a sweep that was killed."""
  command = [sys.executable, '-c', 'import time; time.sleep(600)']
  with held(tmp_path) as descriptor:
    heir = subprocess.Popen(command, pass_fds=[descriptor])
  try:
    with pytest.raises(InputError), held(tmp_path):
      pass
  finally:
    heir.kill()
    heir.wait()
  with held(tmp_path):
    pass


def test_where_the_file_system_has_no_locks_the_run_goes_on_with_a_warning(
  tmp_path, monkeypatch, capsys
):
  def refuse(*_):
    raise OSError(folder_lock.errno.ENOSYS, 'Function not implemented')

  monkeypatch.setattr(folder_lock.fcntl, 'flock', refuse)
  with held(tmp_path):
    assert 'cannot be locked' in capsys.readouterr().err
