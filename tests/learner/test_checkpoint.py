"""Checkpoints are restored bit for bit, or reported as damaged."""

import errno
import json
import os
import re
import shutil
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from exgrpo_jax.datatypes import Cursor
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import buffer_files, checkpoint, optimizer, storage
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.training import loop
from tests.helpers import tiny
from tests.helpers.buffers import BUFFERS, assert_same
from tests.helpers.stand_ins import wait_until

CONFIG = checkpoint.CheckpointConfig(every=1, keep=2)
OPTIMIZER = optimizer.OptimizerConfig()
DIFFERS = 'the data differs from what was saved'


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))


def make_state(mesh, value):
  """Make a train state after one update; all its arrays depend on `value`."""
  params = jax.device_put(
    {'a': jnp.full((2, 3), value), 'b': {'c': jnp.full(4, 1 / value)}}, sharding.replicated(mesh)
  )
  state = optimizer.init(OPTIMIZER, 9, params)
  gradient = jax.tree.map(lambda x: value * x / 100, params)
  return optimizer.apply_gradient(OPTIMIZER, 9, state, gradient)[0]


def snapshot(mesh, step, buffer='many'):
  state, cursor = make_state(mesh, step + 1 / 3), Cursor(epoch=step, position=17)
  return checkpoint.Snapshot(step, state, BUFFERS[buffer], cursor)


@pytest.fixture(scope='module')
def like(mesh):
  """The shapes and layout for restoring states."""
  return checkpoint.abstract(make_state(mesh, 1.0))


def restore(workdir, like, step=None):
  """Restore the snapshot of a step, by default the newest."""
  with checkpoint.open_manager(workdir) as manager:
    return checkpoint.restore(manager, manager.latest_step() if step is None else step, like)


@pytest.fixture(scope='module')
def saved(mesh, tmp_path_factory):
  """A run that saved steps 1, 2 and 5 and kept two of them. Do not modify it."""
  path = str(tmp_path_factory.mktemp('run'))
  with checkpoint.open_manager(path, CONFIG) as manager:
    checkpoint.save(manager, snapshot(mesh, 1))
    checkpoint.save(manager, snapshot(mesh, 2, 'empty'))
    checkpoint.save(manager, snapshot(mesh, 5))
  return path


@pytest.fixture
def workdir(saved, tmp_path):
  """A copy of `saved`."""
  return shutil.copytree(saved, tmp_path / 'run')


@pytest.mark.parametrize(('step', 'buffer'), [(2, 'empty'), (5, 'many')])
def test_a_snapshot_is_restored_bit_for_bit(step, buffer, saved, mesh, like):
  restored, expected = restore(saved, like, step), snapshot(mesh, step, buffer)
  assert restored.step == step and restored.cursor == expected.cursor
  assert_same(restored.buffer, expected.buffer)
  jax.tree.map(np.testing.assert_array_equal, restored.state, expected.state)
  found, wanted = map(checkpoint.abstract, (restored.state, expected.state))
  assert found == wanted  # dtypes and shardings
  assert any(leaf.ndim == 0 and leaf == 1 for leaf in jax.tree.leaves(restored.state.opt_state))


def test_the_newest_are_kept_and_unfinished_checkpoints_are_ignored(workdir, mesh, like):
  folder = workdir / 'checkpoints'
  for name in ('9.orbax-checkpoint-tmp', '8.orbax-checkpoint-tmp-1700000000'):
    shutil.copytree(folder / '5', folder / name)
    shutil.rmtree(folder / name / 'buffer')
  assert restore(str(workdir), like).step == 5
  with checkpoint.open_manager(str(workdir), CONFIG) as manager:
    assert sorted(manager.all_steps()) == [2, 5]
    checkpoint.save(manager, snapshot(mesh, 9))
  assert restore(str(workdir), like).step == 9


def test_a_failed_write_ends_the_run_at_the_next_step_without_waiting(mesh, tmp_path, monkeypatch):
  proceed = threading.Event()

  def fail(*_):
    proceed.wait(60)
    raise os_error(errno.ENOSPC)

  monkeypatch.setattr(buffer_files, 'write', fail)
  manager = checkpoint.open_manager(str(tmp_path), CONFIG)
  config = types.SimpleNamespace(checkpoint=checkpoint.CheckpointConfig(every=9))
  opened = types.SimpleNamespace(config=config)
  run = types.SimpleNamespace(checkpoints=manager, experiment=opened, told_to_stop=lambda: '')
  checkpoint.save(manager, snapshot(mesh, 1))
  loop.save(run, snapshot(mesh, 2), is_last=False)
  proceed.set()
  wait_until(lambda: not manager.is_saving_in_progress())
  with pytest.raises(OSError, match='No space left'):
    loop.save(run, snapshot(mesh, 3), is_last=False)


def test_a_state_may_be_donated_while_it_is_saved(mesh, like, tmp_path):
  expected = jax.tree.map(np.array, snapshot(mesh, 1).state)
  increment = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    saved = snapshot(mesh, 1)
    checkpoint.save(manager, saved)
    state = saved.state
    for _ in range(9):
      state = increment(state)
  jax.tree.map(np.testing.assert_array_equal, restore(str(tmp_path), like).state, expected)


def largest_file(folder):
  files = (path for path in folder.rglob('*') if path.is_file())
  return max(files, key=lambda path: path.stat().st_size)


def truncate_a_file(folder):
  path = largest_file(folder / 'state' / 'd')
  os.truncate(path, path.stat().st_size // 2)


def remove_a_file(folder):
  (folder / 'cursor' / 'metadata').unlink()


def flip_a_bit(path, place=None):
  """Flip a bit in a file, by default in the middle."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2 if place is None else place] ^= 4
  path.write_bytes(content)


def flip_a_bit_of_the_cursor(folder):
  path = folder / 'cursor' / 'metadata'
  flip_a_bit(path, path.read_text().index('17') + 1)
  assert json.loads(path.read_text())['position'] == 13


def change_sums(folder, change):
  path = folder / 'sums' / 'metadata'
  sums = json.loads(path.read_text())
  change(sums)
  path.write_text(json.dumps(sums))


def change_a_checksum(folder):
  """Simulate a flipped bit in an array that orbax does not notice."""
  change_sums(folder, lambda sums: sums.update({".params['a']": sums[".params['a']"] + 1}))


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [
    (truncate_a_file, ''),
    (remove_a_file, 'cursor/metadata not found'),
    (lambda folder: flip_a_bit(largest_file(folder / 'state' / 'd')), ''),
    (flip_a_bit_of_the_cursor, f'cursor.position: {DIFFERS}'),
    (lambda folder: flip_a_bit(folder / 'buffer' / 'segment_000005'), f'segment_000005: {DIFFERS}'),
    (lambda folder: flip_a_bit(folder / 'buffer' / 'index.npz'), f'index.npz: {DIFFERS}'),
    (change_a_checksum, f"'a'.*: {DIFFERS}"),
  ],
  ids=['short', 'missing', 'state', 'cursor', 'buffer', 'index', 'checksum'],
)
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_is_used(
  damage, reason, workdir, mesh, like, capsys
):
  damage(workdir / 'checkpoints' / '5')
  with checkpoint.open_manager(str(workdir), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like).step == 2
    printed = capsys.readouterr().err
    assert re.search(rf'the checkpoint from step 5 is damaged \(.*{reason}.* from step 2', printed)
    (moved,) = (workdir / 'damaged').iterdir()
    assert largest_file(moved)
    checkpoint.save(manager, snapshot(mesh, 5))
    assert checkpoint.restore_newest(manager, like).step == 5
    assert capsys.readouterr().err == ''
    remove_a_file(workdir / 'checkpoints' / '5')
    assert checkpoint.restore_newest(manager, like).step == 2
  assert len([*(workdir / 'damaged').iterdir()]) == 2


def assert_refused(workdir, like, message, status=2):
  """Check that restoring raises an error and moves nothing."""
  with (
    checkpoint.open_manager(str(workdir), CONFIG) as manager,
    pytest.raises(InputError, match=message) as refused,
  ):
    checkpoint.restore_newest(manager, like)
  assert refused.value.status == status
  assert {'2', '5'} <= {path.name for path in (workdir / 'checkpoints').iterdir()}
  assert not (workdir / 'damaged').exists()


def test_if_all_checkpoints_are_damaged_an_error_is_raised_and_none_is_moved(workdir, like):
  for step in ('2', '5'):
    remove_a_file(workdir / 'checkpoints' / step)
  assert_refused(workdir, like, r'none of the checkpoints can be read\. Step 5: .* Step 2: ')


def test_a_checkpoint_in_another_format_is_refused_but_not_reported_as_damaged(workdir, like):
  change_sums(workdir / 'checkpoints' / '5', lambda sums: sums.pop('format'))
  assert_refused(workdir, like, r'checkpoints/5 was written by a different version .* format 1,')


@pytest.fixture
def repair(workdir, tmp_path):
  """Make a file of step 5 unreadable (an I/O error), and return a function that repairs it."""
  if not os.path.exists('/proc/self/mem'):
    pytest.skip('needs an unreadable file of Linux')
  path = workdir / 'checkpoints' / '5' / 'buffer' / 'segment_000005'
  path.rename(tmp_path / 'kept')
  path.symlink_to('/proc/self/mem')  # on Linux, reading its first bytes gives EIO
  return lambda: (tmp_path / 'kept').replace(path)


@pytest.mark.usefixtures('repair')
def test_a_storage_failure_is_an_error_but_not_damage(workdir, like, monkeypatch, capsys):
  waits = []
  monkeypatch.setattr(time, 'sleep', waits.append)
  message = r'checkpoints/5 could not be read after 4 attempts .*\[Errno 5\]'
  assert_refused(workdir, like, message, status=1)
  assert waits == [1.0, 4.0, 10.0] and capsys.readouterr().err.count('; next attempt in ') == 3


def test_reading_is_retried_after_a_temporary_failure(workdir, repair, like, monkeypatch, capsys):
  monkeypatch.setattr(time, 'sleep', lambda _: repair())
  with checkpoint.open_manager(str(workdir), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like).step == 5
  assert capsys.readouterr().err.count('WARNING') == 1


def test_a_buffer_is_written_while_training_continues(mesh, like, tmp_path, monkeypatch):
  write, goes_on = buffer_files.write, threading.Event()

  def wait_and_write(*args, **kwargs):
    assert goes_on.wait(60), 'the caller of save waits for the buffer'
    write(*args, **kwargs)

  monkeypatch.setattr(buffer_files, 'write', wait_and_write)
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    checkpoint.save(manager, snapshot(mesh, 1))
    goes_on.set()
  assert_same(restore(str(tmp_path), like).buffer, BUFFERS['many'])


def test_a_checkpoint_links_unchanged_segments_of_the_previous_one(mesh, tmp_path):
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    for step in (1, 2):
      checkpoint.save(manager, snapshot(mesh, step))
  one, two = (tmp_path / 'checkpoints' / step / 'buffer' / 'segment_000001' for step in '12')
  assert one.samefile(two) and not (two.parent / 'segment_000002').exists()


def test_only_parameters_are_restored_from_a_step_or_the_newest(saved, mesh, like):
  for step, expected in ((2, 2), (5, 5), (None, 5)):
    params, restored_step = checkpoint.restore_params(saved, step, like.params)
    assert restored_step == expected
    jax.tree.map(np.testing.assert_array_equal, params, snapshot(mesh, expected).state.params)


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [
    (truncate_a_file, r'5 is damaged \(.*/state/.* for value of size \d+\)'),
    (change_a_checksum, rf"5/state is damaged \(.*'a'.*: {DIFFERS}\)"),
  ],
)
def test_damaged_parameters_are_refused(workdir, damage, reason, like):
  damage(workdir / 'checkpoints' / '5')
  with pytest.raises(InputError, match=rf'checkpoints/{reason}\. Choose another --step'):
    checkpoint.restore_params(str(workdir), None, like.params)
  assert checkpoint.restore_params(str(workdir), 2, like.params)[1] == 2


def test_reads_that_end_after_their_checkpoint_was_refused_are_not_reported(
  workdir, like, monkeypatch
):
  printed = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda it: printed.append(str(it.exc_value)))
  truncate_a_file(workdir / 'checkpoints' / '5')
  with pytest.raises(InputError):
    checkpoint.restore_params(str(workdir), None, like.params)
  for text in ('Event loop is closed', 'See full TensorStore details: …', 'another error'):
    sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
  assert printed == ['another error']


def test_nothing_is_restored_if_nothing_was_saved(like, tmp_path):
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like) is None


def test_a_missing_step_is_refused_and_the_saved_steps_are_listed(saved, tmp_path, like):
  with pytest.raises(InputError, match=r'has no checkpoint for step 3\. Saved steps: 2, 5\.'):
    checkpoint.restore_params(saved, 3, like.params)
  with pytest.raises(InputError, match=r'/checkpoints contains no complete checkpoint\.'):
    checkpoint.restore_params(str(tmp_path), None, like.params)


def test_a_checkpoint_contains_the_policy_after_its_step(recorded):
  opened = recorded.experiment
  shapes = model.shapes(opened.model, opened.meshes.training)
  params, step = checkpoint.restore_params(str(recorded.workdir), tiny.SAVED_EVERY, shapes)
  # The next step generates with this step's updated parameters.
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[step + 1].params)


def test_saved_parameters_are_loaded_bit_for_bit(mesh, tmp_path):
  params = make_state(mesh, 2.0).params
  checkpoint.save_params(str(tmp_path / 'params'), params)
  loaded = checkpoint.load_params(str(tmp_path / 'params'), checkpoint.abstract(params))
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


# ---- Messages about the disk ----


@pytest.fixture
def short_of_space(tmp_path, monkeypatch):
  """A workdir with checkpoints of steps 2 and 5. Hooks left by a failure are removed."""
  log = logging.get_absl_handler()
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  monkeypatch.setattr(log, 'filters', list(log.filters))
  for step in (2, 5):
    (tmp_path / 'checkpoints' / str(step)).mkdir(parents=True)
  return str(tmp_path)


def os_error(number):
  return OSError(number, os.strerror(number))


def behind(error):
  """Return an error that was raised while `error` was handled."""
  wrapped = RuntimeError('the writer is closed')
  wrapped.__context__ = error
  return wrapped


FULL, FAILED = 'the disk is full', 'the disk failed'


@pytest.mark.parametrize(
  ('error', 'what'),
  [
    *[(os_error(number), FULL) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)],
    (ValueError('RESOURCE_EXHAUSTED: Error writing file\nNo space left on device [28]'), FULL),
    *[(os_error(number), FAILED) for number in (errno.EIO, errno.EROFS)],
    (ValueError(f'INTERNAL: {"x" * 1000}: Input/output error [5]'), FAILED),
    (behind(os_error(errno.EIO)), FAILED),
    (os_error(errno.EMFILE), "the process has reached the system's limit on open files"),
  ],
)
def test_a_full_or_failing_disk_is_reported_with_the_complete_checkpoints(
  short_of_space, error, what
):
  message = rf'{what} \(.{{1,300}}\)\. Complete checkpoints: 2, 5\.'
  with (
    pytest.raises(InputError, match=message) as raised,
    checkpoint.explain_failure(short_of_space),
  ):
    raise error
  assert raised.value.status == 1


@pytest.mark.parametrize(
  'error', [ValueError('another error'), InputError('data.jsonl: No space left in the cache')]
)
def test_other_errors_are_not_attributed_to_the_disk(short_of_space, error):
  before = sys.unraisablehook
  with pytest.raises(type(error)) as raised, checkpoint.explain_failure(short_of_space):
    raise error
  assert raised.value is error and sys.unraisablehook is before


def test_log_records_of_a_failing_disk_are_dropped(short_of_space, capsys):
  """The raised error already says it in one line."""

  def is_logged(error):
    record = logging.get_absl_logger().makeRecord(
      'absl', logging.ERROR, __file__, 1, 'a thread', (), (type(error), error, None)
    )
    return bool(logging.get_absl_handler().filter(record))

  closed = types.SimpleNamespace(exc_value=RuntimeError('Event loop is closed'))
  with checkpoint.explain_failure(short_of_space):
    assert not is_logged(os_error(errno.ENOSPC)) and is_logged(ValueError('another error'))
    sys.unraisablehook(closed)
  assert capsys.readouterr().err == '' and is_logged(os_error(errno.ENOSPC))


def test_space_for_a_checkpoint_is_printed_and_too_little_is_refused(tmp_path, monkeypatch, capsys):
  state = TrainState({'a': jnp.ones((2, 3))}, {})
  checkpoint.check_space(str(tmp_path), state)
  printed = capsys.readouterr().out
  assert re.match(r'a checkpoint takes 24 bytes; .* has [\d.]+ [kMGT]B left\n', printed)
  usage = types.SimpleNamespace(free=24)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
  checkpoint.check_space(str(tmp_path), checkpoint.abstract(jax.device_put(state)))
  usage.free = 23
  message = 'has 23 bytes left, but a checkpoint takes 24 bytes'
  with pytest.raises(InputError, match=message) as refused:
    checkpoint.check_space(str(tmp_path), state)
  assert refused.value.status == 1


def test_a_folder_that_cannot_be_read_is_not_taken_for_a_run_without_checkpoints(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(storage, 'WAITS', ())
  assert checkpoint.steps(str(tmp_path)) == []
  (tmp_path / 'checkpoints').symlink_to('checkpoints')  # reading fails; os.path.exists is False
  with pytest.raises(InputError, match=r'checkpoints could not be read .*symbolic links'):
    checkpoint.steps(str(tmp_path))
