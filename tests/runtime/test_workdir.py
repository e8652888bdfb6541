"""Workdirs: each belongs to one config, and a resumed run may change only some settings."""

import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from exgrpo_jax.config import overridden
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import runs
from exgrpo_jax.runtime import workdir
from exgrpo_jax.runtime.replacement import replacing
from exgrpo_jax.runtime.workdir import (
  check_policy,
  check_workdir,
  check_writable,
  claim_workdir,
  read_config,
  release_workdir,
)
from exgrpo_jax.training.checks import check_start


@pytest.fixture
def folder(tmp_path):
  """The workdir of a run that has finished a step."""
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n{"step": 1}\n')
  return tmp_path


def test_the_config_of_an_earlier_version_may_have_removed_settings(config, folder):
  values = config.to_dict()
  values['rollout'] |= {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}
  (folder / 'config.json').write_text(json.dumps(values))
  check_workdir(config, str(folder))
  assert read_config(str(folder)).keys() == values.keys()
  del values['num_epochs']  # earlier versions lack it
  (folder / 'config.json').write_text(json.dumps(values))
  assert read_config(str(folder))['num_epochs'] == 0
  values['rollout']['top_p'] = 0.9
  (folder / 'config.json').write_text(json.dumps(values))
  with pytest.raises(InputError, match=r'config\.rollout\.top_p was 0\.9 and is now None'):
    check_workdir(config, str(folder))


def test_a_run_older_than_a_setting_keeps_its_behavior_when_resumed(config, folder):
  claim_workdir(config, str(folder))
  written = json.loads((folder / 'config.json').read_text())
  del written['grading']['verifier']
  (folder / 'config.json').write_text(json.dumps(written))
  check_workdir(config, str(folder))
  with pytest.raises(InputError, match="verifier was 'built_in' and is now 'math_verify'"):
    check_workdir(overridden(config, {'grading.verifier': 'math_verify'}), str(folder))


@pytest.mark.parametrize(
  ('claimed', 'changes', 'found'),
  [
    ({}, {'seed': 3, 'replay.ratio': 0.25}, ('replay.ratio 0.5 0.25', 'seed 5 3')),
    ({'optimizer.schedule': 'cosine'}, {'num_steps': 99}, ('num_steps 32 99',)),
    (
      {'optimizer.schedule': 'cosine', 'num_epochs': 1.0},
      {'num_epochs': 2.0, 'num_steps': 99},
      ('num_epochs 1.0 2.0',),
    ),
    ({}, {'model.path': '/x'}, ("model.path '' '/x'",)),
    (
      {'model.dtype': 'bfloat16'},
      {'model.dtype': 'float32'},
      ("model.dtype 'bfloat16' 'float32'",),
    ),
  ],
  ids=[
    'all settings',
    'prolonging with a decaying rate',
    'the same in epochs',
    'a text',
    'a dtype',
  ],
)
def test_the_workdir_of_another_config_is_rejected_with_the_differences(
  config, folder, claimed, changes, found
):
  config = overridden(config, claimed)
  claim_workdir(config, str(folder))
  before = (folder / 'config.json').read_text()
  differing = '; '.join('config.{} was {} and is now {}'.format(*text.split()) for text in found)
  advice = 'Choose another --workdir, or restore the config.'
  message = f'{folder} belongs to a run with a different config: {differing}. {advice}'
  with pytest.raises(InputError, match=re.escape(message)):
    check_workdir(overridden(config, changes), str(folder))
  assert (folder / 'config.json').read_text() == before


def test_checkpoints_without_their_config_are_refused(config, folder):
  """Otherwise a run with any config would resume from them."""
  check_workdir(config, str(folder))
  (folder / 'checkpoints' / '4').mkdir(parents=True)
  with pytest.raises(InputError, match=r'contains checkpoints but no config\.json'):
    check_workdir(config, str(folder))


def test_a_config_in_which_a_section_is_a_number_is_compared_all_the_same(config, folder):
  values = config.to_dict() | {'optimizer': 3}
  (folder / 'config.json').write_text(json.dumps(values))
  with pytest.raises(InputError, match=r'config\.optimizer was 3 and is now \{'):
    check_workdir(config, str(folder))


def test_scores_on_other_questions_are_not_compared(config, folder):
  config = overridden(config, {'data.validation': ('a',), 'export.best': True})
  claim_workdir(config, str(folder))
  without = overridden(config, {'export.best_without': ('x',)})
  check_workdir(without, str(folder))  # there are no scores yet
  (folder / 'export' / 'best').mkdir(parents=True)
  stops = {'export.best': False, 'evaluation.patience': 1, 'data.validation': ('b',)}
  for changed in (without, overridden(config, stops)):
    with pytest.raises(InputError, match='but new scores would be compared with earlier ones'):
      check_workdir(changed, str(folder))


@pytest.mark.parametrize(
  ('settings', 'ignored'),
  [
    ({'environment.name': 'guess'}, {'verifier.require': ('box',), 'grading.weights': (2.0,)}),
    ({'objective.importance_correction': False}, {'objective.m2po_threshold': 0.1}),
    ({'optimizer.max_kl': 0.1}, {'microbatch.drop_zero_advantage': True}),
  ],
)
def test_a_run_older_than_a_check_resumes_without_the_ignored_setting(
  config, folder, settings, ignored
):
  config = overridden(config, settings)
  claim_workdir(overridden(config, ignored), str(folder))
  check_workdir(config, str(folder))


def test_only_the_model_settings_of_a_policy_must_match(config, folder):
  claim_workdir(config, str(folder))
  check_policy(overridden(config, {'seed': 3, 'model.width': 64}), str(folder), ('lora', 'prompt'))
  message = r': config\.model\.width is 64, but the run was trained with 32\. Leave out --config'
  with pytest.raises(InputError, match=message):
    check_policy(overridden(config, {'model.width': 64}), str(folder), ('model', 'lora'))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32', 'auto'])
def test_the_dtype_auto_matches_any_dtype_of_the_run(config, folder, dtype):
  claim_workdir(overridden(config, {'model.dtype': dtype}), str(folder))
  given = overridden(config, {'model.dtype': 'auto'})
  assert check_workdir(given, str(folder)) == ''
  check_policy(given, str(folder), ('model',))


def test_a_resumed_run_may_change_length_records_and_meshes(config, folder):
  claim_workdir(config, str(folder))
  changes = {'num_steps': 99, 'evaluation.every': 1, 'checkpoint.keep': 1, 'rollout.slots': 3}
  changes |= {'metrics.sampled_rows': 0, 'data.validation': ('arithmetic:test',)}
  changes |= {'rollout.drafts': '3', 'environment.keep_caches': False, 'logprob_check.every': 1}
  changes |= {'evaluation.patience': 2}  # there are no scores to compare with
  check_workdir(overridden(config, changes), str(folder))


def test_with_epochs_the_number_of_steps_is_not_compared(config, folder):
  config = overridden(config, {'num_epochs': 1.0})
  claim_workdir(overridden(config, {'num_steps': 2}), str(folder))
  assert check_workdir(config, str(folder)) == ''
  changes = check_workdir(overridden(config, {'num_epochs': 2.0}), str(folder))
  assert changes.endswith('settings: config.num_epochs was 1.0 and is now 2.0')
  assert 'num_steps was 2 and is now 32' in check_workdir(
    overridden(config, {'num_epochs': 0.0}), str(folder)
  )


@pytest.mark.parametrize('evaluated', [False, True])
def test_any_config_may_use_the_workdir_of_a_start_that_finished_no_step(
  config, tmp_path, evaluated, capsys
):
  claim_workdir(config, str(tmp_path))
  (tmp_path / 'tokenizer').mkdir()
  (tmp_path / 'environment.json').write_text('[]')
  (tmp_path / 'console.log').write_text('of the earlier start')
  if evaluated:
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "validation/score": 0.5}\n')
    (tmp_path / 'evaluation').mkdir()
    (tmp_path / 'evaluation' / 'step_000000_sums.jsonl').write_text('{}\n')
  other = overridden(config, {'seed': 3})
  release_workdir(config, str(tmp_path))  # the same config may resume
  assert (tmp_path / 'config.json').exists() and capsys.readouterr().out == ''
  check_workdir(other, str(tmp_path))
  release_workdir(other, str(tmp_path))
  assert 'replacing an earlier run that never finished a step' in capsys.readouterr().out
  assert [path.name for path in tmp_path.iterdir()] == ['console.log']


@pytest.mark.parametrize('text', ['', '3', '{"a": 1}'])
def test_a_config_that_is_no_runs_is_ignored(config, tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  check_workdir(config, str(tmp_path))


@pytest.mark.parametrize('finished', ['checkpoints/1', 'export/last'])
def test_a_checkpoint_or_a_policy_keeps_the_workdir(config, tmp_path, finished):
  claim_workdir(config, str(tmp_path))
  (tmp_path / finished).mkdir(parents=True)
  other = overridden(config, {'seed': 3})
  for check in (check_workdir, release_workdir):
    with pytest.raises(InputError, match='belongs to a run with a different config'):
      check(other, str(tmp_path))
  assert (tmp_path / 'config.json').exists()


def test_a_missing_workdir_is_created_and_an_unwritable_one_is_rejected(tmp_path):
  check_writable(str(tmp_path / 'new' / 'run'))
  assert list((tmp_path / 'new' / 'run').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(InputError, match=r'--workdir=.*file/run: cannot write .*Not a directory'):
    check_writable(str(tmp_path / 'file' / 'run'))


def test_a_path_that_is_too_long_is_rejected(config, tmp_path):
  with pytest.raises(InputError, match=r'--workdir=.*x: cannot read .*File name too long'):
    check_workdir(config, str(tmp_path / ('x' * 300)))


@pytest.mark.parametrize(
  ('name', 'is_folder'),
  [
    *((name, True) for name in ('metrics.jsonl', 'run.lock', 'console.log', 'environment.json')),
    *((name, False) for name in ('tensorboard', 'samples', 'records', 'checkpoints', 'export')),
  ],
)
def test_a_folder_in_place_of_a_file_and_the_reverse_are_rejected(config, folder, name, is_folder):
  claim_workdir(config, str(folder))
  (folder / name).unlink(missing_ok=True)
  if is_folder:
    (folder / name).mkdir()
    problem = f'{folder / name}: a run needs a file here, but this is a folder. Move or rename'
  else:
    (folder / name).write_text('')
    problem = f'{folder / name}: a run needs a folder here, but this is a file. Move or rename'
  for read in (lambda: check_workdir(config, str(folder)), lambda: read_config(str(folder))):
    with pytest.raises(InputError, match=re.escape(problem)):
      read()
  with pytest.raises(InputError, match=re.escape(problem)):
    runs.read_metrics(str(folder))


def test_a_file_of_another_user_is_rejected(folder, monkeypatch):
  monkeypatch.setattr(os, 'access', lambda path, _: not path.endswith('metrics.jsonl'))
  with pytest.raises(InputError, match=r'metrics\.jsonl: the current user cannot write to'):
    check_writable(str(folder))


def test_changed_settings_are_printed_only_under_the_lock(config, folder, capsys):
  claim_workdir(config, str(folder))
  changed = overridden(config, {'num_steps': 99})
  check_start(changed, str(folder))
  assert capsys.readouterr().out == ''
  release_workdir(changed, str(folder))
  assert 'resuming with changed settings: config.num_steps was 32 and is now 99' in (
    capsys.readouterr().out
  )
  with pytest.raises(InputError, match=r'different config: config\.seed was'):
    # Another run claimed the workdir between the check and the lock.
    release_workdir(overridden(config, {'seed': 3}), str(folder))


# ---- Locks of folders, also after their owner dies ----


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
  """Return a function that starts a process that holds the lock as if it ran on `machine`."""
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


def test_a_run_waits_for_the_lock_of_a_dead_machine_to_expire(hold, tmp_path, monkeypatch, capsys):
  """An NFS server keeps such a lock for a while. A restart after a preemption must not fail."""
  process = hold('another')

  def die(_):
    process.kill()
    process.wait()

  monkeypatch.setattr(time, 'sleep', die)
  with held(tmp_path):
    assert 'process 7 on other, at noon. Waiting up to' in capsys.readouterr().out


def test_a_run_does_not_wait_forever_for_the_lock_of_a_live_machine(hold, tmp_path, monkeypatch):
  hold('another')
  monkeypatch.setattr(workdir, 'LEASE_SECONDS', 0.0)
  with pytest.raises(InputError, match='process 7 on other'), held(tmp_path):
    pass


def test_a_process_that_inherits_the_lock_keeps_it_after_its_parent_dies(tmp_path):
  """The trials of a killed sweep do this."""
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


def test_in_turn_of_waits_and_says_so(hold, tmp_path, capsys):
  process = hold('here')
  started = time.monotonic()
  threading.Timer(0.2, process.kill).start()
  turn = (str(tmp_path), 'lock', 'another run has it')
  with workdir.in_turn_of(*turn):
    assert time.monotonic() - started >= 0.2
    assert capsys.readouterr().out == 'another run has it\n'
  with workdir.in_turn_of(*turn):
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('take', [workdir.folder_held, workdir.in_turn_of])
def test_a_run_without_file_locks_continues_with_a_warning(take, tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise OSError(errno.ENOSYS, 'Function not implemented')

  monkeypatch.setattr(fcntl, 'flock', refuse)
  with take(str(tmp_path), 'lock', 'Wait for it.'):
    assert 'cannot be locked' in capsys.readouterr().err


# ---- A file or a folder is written completely or not at all ----


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
  path = tmp_path / 'made' / 'file.txt'
  for text in ('old', 'new'):
    with replacing(path) as unfinished:
      unfinished.write_text(text)
      assert not path.exists() or path.read_text() == 'old'
  assert path.read_text() == 'new' and names(path.parent) == ['file.txt']


def test_a_block_that_fails_or_writes_nothing_changes_nothing(tmp_path):
  path = tmp_path / 'file.txt'
  path.write_text('old')

  def interrupted():
    with replacing(path) as unfinished:
      unfinished.write_text('half')
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  with replacing(path):
    pass
  assert path.read_text() == 'old' and names(tmp_path) == ['file.txt']


def test_a_new_folder_contains_nothing_from_a_killed_writer(tmp_path):
  path = tmp_path / 'folder'
  with replacing(path) as unfinished:
    left = unfinished
    unfinished.mkdir()
  left.mkdir()
  (left / 'half').touch()
  with replacing(path) as unfinished:
    unfinished.mkdir()
    (unfinished / 'whole').touch()
  assert names(path) == ['whole'] and names(tmp_path) == ['folder']


@pytest.mark.parametrize('killed_at', ['first rename', 'second rename', 'removal'])
def test_a_folder_is_complete_wherever_its_writer_is_killed(killed_at, tmp_path, monkeypatch):
  path = tmp_path / 'folder'

  def write(version):
    with replacing(path) as unfinished:
      unfinished.mkdir()
      for name in ('a', 'b'):
        (unfinished / name).write_text(version)

  def killed(*_, **__):
    raise KeyboardInterrupt

  def killed_at_second(source, target):
    return rename(source, target) if source == path else killed()

  rename = pathlib.Path.rename
  write('old')
  with monkeypatch.context() as patch:
    if killed_at == 'removal':
      patch.setattr(shutil, 'rmtree', killed)
    else:
      patch.setattr(
        pathlib.Path, 'rename', {'first rename': killed}.get(killed_at, killed_at_second)
      )
    with pytest.raises(KeyboardInterrupt):
      write('new')
  with replacing(path):
    pass
  expected = 'new' if killed_at == 'removal' else 'old'
  assert [(path / name).read_text() for name in ('a', 'b')] == [expected] * 2


def test_the_first_of_several_writers_of_a_folder_wins(tmp_path):
  path = tmp_path / 'folder'
  with replacing(path, shared=True) as first, replacing(path, shared=True) as second:
    assert first != second
    for unfinished in (first, second):
      unfinished.mkdir()
      (unfinished / 'of').write_text(unfinished.name)
  assert (path / 'of').read_text() == second.name and names(tmp_path) == ['folder']


def test_a_folder_that_cannot_be_renamed_into_place_is_an_error(tmp_path):
  (tmp_path / 'folder').write_text('a file')
  with pytest.raises(NotADirectoryError), replacing(tmp_path / 'folder', shared=True) as unfinished:
    unfinished.mkdir()
  assert names(tmp_path) == ['folder']
