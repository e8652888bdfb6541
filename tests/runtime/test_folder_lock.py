"""A folder in which one process at a time may work, whatever becomes of that process."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import workdir

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], 'a+')
fcntl.flock(file, fcntl.LOCK_EX)
file.write(sys.argv[2] + ' process 7 on other, at noon')
file.flush()
print('held', flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold(tmp_path):
  """A function: a process that holds the lock as if it ran on a machine."""
  started = []

  def start(machine):
    process = subprocess.Popen(
      [sys.executable, '-c', HOLD, str(tmp_path / 'lock'), machine], stdout=subprocess.PIPE
    )
    started.append(process)
    process.stdout.readline()
    return process

  yield start
  for process in started:
    process.kill()
    process.communicate()


def held(folder):
  return workdir.folder_held(str(folder), 'lock', 'Wait for it.')


def test_an_owner_is_named_and_its_death_frees_the_folder(hold, tmp_path):
  process = hold(workdir._machine())
  refusal = r'^Wait for it\. The lock was taken by process 7 on other, at noon\.$'
  with pytest.raises(InputError, match=refusal), held(tmp_path):
    pass
  process.kill()
  process.wait()
  with held(tmp_path):
    assert f'process {os.getpid()} on ' in (tmp_path / 'lock').read_text()


def test_the_lock_of_a_machine_that_is_gone_is_waited_for(hold, tmp_path, monkeypatch, capsys):
  """An NFS server keeps it for a while; who restarts preempted machines is not to be refused."""
  process = hold('another')

  def die(_):
    process.kill()
    process.wait()

  monkeypatch.setattr(time, 'sleep', die)
  with held(tmp_path):
    assert 'process 7 on other, at noon; waiting for' in capsys.readouterr().out


def test_another_machine_that_goes_on_is_not_waited_for_forever(hold, tmp_path, monkeypatch):
  hold('another')
  monkeypatch.setattr(workdir, 'LEASE_SECONDS', 0.0)
  with pytest.raises(InputError, match='process 7 on other'), held(tmp_path):
    pass


def test_a_process_that_inherits_the_lock_keeps_it_after_the_owner(tmp_path):
  """As the trials of a sweep that was killed."""
  with held(tmp_path) as descriptor:
    heir = subprocess.Popen(['sleep', '600'], pass_fds=[descriptor])
  try:
    with pytest.raises(InputError), held(tmp_path):
      pass
  finally:
    heir.kill()
    heir.wait()
  with held(tmp_path):
    pass


def test_who_takes_turns_waits_and_says_so(hold, tmp_path, capsys):
  process = hold('here')
  started = time.monotonic()
  threading.Timer(0.2, process.kill).start()
  with workdir.in_turn_of(str(tmp_path), 'lock', 'another run has it'):
    assert time.monotonic() - started >= 0.2
    assert capsys.readouterr().out == 'another run has it\n'
  with workdir.in_turn_of(str(tmp_path), 'lock', 'another run has it'):
    assert capsys.readouterr().out == ''


def test_where_the_file_system_has_no_locks_the_run_goes_on_with_a_warning(
  tmp_path, monkeypatch, capsys
):
  def refuse(*_):
    raise OSError(errno.ENOSYS, 'Function not implemented')

  monkeypatch.setattr(fcntl, 'flock', refuse)
  with held(tmp_path):
    assert 'cannot be locked' in capsys.readouterr().err
