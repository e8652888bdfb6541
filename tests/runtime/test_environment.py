"""What a run says of the machine, the versions and the command of each start."""

import json
import shutil
import subprocess
import sys
import types

import jax
import pytest

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime import environment


def test_a_run_says_what_it_runs_on(recorded):
  (start,) = json.loads((recorded.workdir / 'environment.json').read_text())
  assert start['first_step'] == 0 and start['command'].startswith(sys.orig_argv[0])
  assert start['packages']['jax'] == jax.__version__
  assert start['packages']['exgrpo_jax'] == __version__
  assert start['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert (start['device']['platform'], start['hosts']) == ('cpu', 1)
  assert start['device']['count'] == jax.device_count()


def test_every_start_has_an_entry_and_what_is_not_json_is_refused(tmp_path):
  for first_step in (0, 5):
    environment.record_start(str(tmp_path), first_step)
  starts = json.loads((tmp_path / 'environment.json').read_text())
  assert [start['first_step'] for start in starts] == [0, 5]
  (tmp_path / 'environment.json').write_text('oops')
  with pytest.raises(InputError, match=r'environment\.json is not JSON .* delete it'):
    environment.record_start(str(tmp_path), 0)


@pytest.fixture
def clone(tmp_path, monkeypatch):
  """A small clone whose package is the one that runs; gives (folder, git)."""

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


def test_the_peaks_of_memory_are_in_gib_and_the_devices_is_the_largest(monkeypatch):
  assert set(environment.peak_memory()) == {'memory/host_peak'}  # a CPU does not say
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
  # A warm-up over 2 updates to 3e-3, two updates in a step: (1 + 2) / 3 / 2 of it, then all.
  config = recorded.experiment.config.optimizer
  assert (config.warmup_updates, config.minibatches, config.learning_rate) == (2, 2, 3e-3)
  rates = [record['learning_rate'] for record in records[1:3]]
  assert rates == pytest.approx([1.5e-3, 3e-3])
