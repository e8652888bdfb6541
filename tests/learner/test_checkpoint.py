"""What is saved is restored to the bit, or reported as damaged."""

import json
import os
import re
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.datatypes import Cursor
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import buffer_files, checkpoint, optimizer
from exgrpo_jax.policy import model, sharding
from tests.helpers import tiny
from tests.helpers.buffers import BUFFERS, assert_same

CONFIG = checkpoint.Config(every=1, keep=2)


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))


def make_state(mesh, value):
  """A train state after one update; every array of it depends on `value`."""
  config = optimizer.Config(learning_rate=0.1, weight_decay=0.0, skip_norm=1e9)
  params = jax.device_put(
    {'a': jnp.full((2, 3), value), 'b': {'c': jnp.full(4, 1 / value)}}, sharding.replicated(mesh)
  )
  state = optimizer.init(config, 9, params)
  return optimizer.apply_gradient(config, 9, state, jax.tree.map(lambda x: value * x, params))[0]


def snapshot(mesh, step, buffer='many'):
  return checkpoint.Snapshot(
    step=step,
    state=make_state(mesh, step + 1 / 3),
    buffer=BUFFERS[buffer],
    cursor=Cursor(epoch=step, position=17),
  )


@pytest.fixture(scope='module')
def like(mesh):
  """What states are restored like: their shapes and layout."""
  return checkpoint.abstract(make_state(mesh, 1.0))


def restore(workdir, like, step=None):
  """The snapshot of a step, or the newest."""
  with checkpoint.open_manager(workdir) as manager:
    return checkpoint.restore(manager, manager.latest_step() if step is None else step, like)


@pytest.fixture(scope='module')
def workdir(mesh, tmp_path_factory):
  """Steps 1, 2 and 5 were saved; two are kept."""
  path = str(tmp_path_factory.mktemp('run'))
  with checkpoint.open_manager(path, CONFIG) as manager:
    checkpoint.save(manager, snapshot(mesh, 1))
    checkpoint.save(manager, snapshot(mesh, 2, 'empty'))
    checkpoint.save(manager, snapshot(mesh, 5))
  return path


@pytest.mark.parametrize(('step', 'buffer'), [(2, 'empty'), (5, 'many')])
def test_a_snapshot_is_restored_bit_for_bit(step, buffer, workdir, mesh, like):
  restored, expected = restore(workdir, like, step), snapshot(mesh, step, buffer)
  assert restored.step == step and restored.cursor == expected.cursor
  assert_same(restored.buffer, expected.buffer)
  jax.tree.map(np.testing.assert_array_equal, restored.state, expected.state)
  assert jax.tree.map(lambda x: (x.dtype, x.sharding), restored.state) == jax.tree.map(
    lambda x: (x.dtype, x.sharding), expected.state
  )
  assert any(leaf.ndim == 0 and leaf == 1 for leaf in jax.tree.leaves(restored.state.opt_state))


def test_the_newest_checkpoints_are_kept(workdir):
  with checkpoint.open_manager(workdir) as manager:
    assert sorted(manager.all_steps()) == [2, 5]


def test_what_a_kill_left_unfinished_is_ignored(workdir, mesh, like, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  folder = tmp_path / 'run' / 'checkpoints'
  for name in ('9.orbax-checkpoint-tmp', '8.orbax-checkpoint-tmp-1700000000'):
    shutil.copytree(folder / '5', folder / name)
    shutil.rmtree(folder / name / 'buffer')
  assert restore(str(tmp_path / 'run'), like).step == 5
  with checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager:
    assert manager.latest_step() == 5
    checkpoint.save(manager, snapshot(mesh, 9))
  assert restore(str(tmp_path / 'run'), like).step == 9


def test_a_state_may_be_donated_while_it_is_written(mesh, like, tmp_path):
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
  return max(
    (path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size
  )


def truncate_a_file(folder):
  path = largest_file(folder / 'state')
  os.truncate(path, path.stat().st_size // 2)


def remove_a_file(folder):
  (folder / 'cursor' / 'metadata').unlink()


def flip_a_bit(path, place=None):
  """In a file on the disk, by default in its middle."""
  place = path.stat().st_size // 2 if place is None else place
  with open(path, 'r+b') as file:
    file.seek(place)
    byte = file.read(1)[0]
    file.seek(place)
    file.write(bytes([byte ^ 4]))


def flip_a_bit_of_the_state(folder):
  flip_a_bit(largest_file(folder / 'state' / 'd'))


def flip_a_bit_of_the_cursor(folder):
  path = folder / 'cursor' / 'metadata'
  flip_a_bit(path, path.read_text().index('17') + 1)
  assert json.loads(path.read_text())['position'] == 13


def flip_a_bit_of_the_buffer(folder):
  flip_a_bit(folder / 'buffer' / 'segment_000005')


def flip_a_bit_of_the_index(folder):
  flip_a_bit(folder / 'buffer' / 'index.npz')


def change_a_checksum(folder):
  """As if a bit of an array had flipped where orbax does not notice it."""
  path = folder / 'sums' / 'metadata'
  sums = json.loads(path.read_text())
  sums[".params['a']"] += 1
  path.write_text(json.dumps(sums))


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [
    (truncate_a_file, ''),
    (remove_a_file, 'cursor/metadata not found'),
    (flip_a_bit_of_the_state, ''),
    (flip_a_bit_of_the_cursor, 'cursor.position: not the bits that were saved'),
    (flip_a_bit_of_the_buffer, 'segment_000005: not the bits that were saved'),
    (flip_a_bit_of_the_index, 'index.npz: not the bits that were saved'),
    (change_a_checksum, "'a'.*: not the bits that were saved"),
  ],
)
def test_where_the_newest_is_damaged_that_is_reported_and_the_one_before_is_used(
  damage, reason, workdir, mesh, like, tmp_path, capsys
):
  shutil.copytree(workdir, tmp_path / 'run')
  damage(tmp_path / 'run' / 'checkpoints' / '5')
  with checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like).step == 2
    assert re.search(
      rf'WARNING: the checkpoint of step 5 is damaged \(.*{reason}.* 2 is used',
      capsys.readouterr().err,
    )
    (moved,) = (tmp_path / 'run' / 'damaged').iterdir()
    assert largest_file(moved)
    checkpoint.save(manager, snapshot(mesh, 5))
    assert checkpoint.restore_newest(manager, like).step == 5
  assert capsys.readouterr().err == ''


def test_where_all_are_damaged_it_is_an_error_and_none_is_moved(workdir, like, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  for step in ('2', '5'):
    remove_a_file(tmp_path / 'run' / 'checkpoints' / step)
  with (
    checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager,
    pytest.raises(InputError, match=r'none of its checkpoints can be read\. Step 5: .* Step 2: '),
  ):
    checkpoint.restore_newest(manager, like)
  assert {'2', '5'} <= {path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()}


@pytest.fixture
def unreadable(workdir, tmp_path):
  """(A copy of the run, a function that mends it): reading a part of step 5 is an I/O error."""
  if not os.path.exists('/proc/self/mem'):
    pytest.skip('needs a file of Linux that cannot be read')
  shutil.copytree(workdir, tmp_path / 'run')
  path = tmp_path / 'run' / 'checkpoints' / '5' / 'buffer' / 'segment_000005'
  path.rename(tmp_path / 'kept')
  path.symlink_to('/proc/self/mem')  # whose first bytes Linux answers with EIO
  return tmp_path / 'run', lambda: (tmp_path / 'kept').replace(path)


def test_where_a_store_fails_that_is_an_error_and_no_damage(unreadable, like, monkeypatch, capsys):
  waits = []
  monkeypatch.setattr(time, 'sleep', waits.append)
  run, _ = unreadable
  with (
    checkpoint.open_manager(str(run), CONFIG) as manager,
    pytest.raises(
      InputError,
      match=r'checkpoints/5 cannot be read \(\[Errno 5\] Input/output error\), not in 4 attempts '
      r'over 15 s\..* nothing was moved',
    ),
  ):
    checkpoint.restore_newest(manager, like)
  assert waits == [1.0, 4.0, 10.0] and capsys.readouterr().err.count('; next attempt in ') == 3
  assert {'2', '5'} <= {path.name for path in (run / 'checkpoints').iterdir()}
  assert not (run / 'damaged').exists()


def test_a_store_that_fails_for_a_while_is_asked_again(unreadable, like, monkeypatch, capsys):
  run, mend = unreadable
  monkeypatch.setattr(time, 'sleep', lambda _: mend())
  with checkpoint.open_manager(str(run), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like).step == 5
  assert capsys.readouterr().err.count('WARNING') == 1


def test_a_checkpoint_of_another_format_is_refused_and_not_called_damaged(workdir, like, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  path = tmp_path / 'run' / 'checkpoints' / '5' / 'sums' / 'metadata'
  sums = json.loads(path.read_text())
  del sums['format']
  path.write_text(json.dumps(sums))
  with (
    checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager,
    pytest.raises(InputError, match=r'checkpoints/5 was written by another version .* format 1,'),
  ):
    checkpoint.restore_newest(manager, like)
  assert not (tmp_path / 'run' / 'damaged').exists()


def test_a_buffer_is_written_while_training_goes_on(mesh, like, tmp_path, monkeypatch):
  write, goes_on = buffer_files.write, threading.Event()

  def wait_and_write(*args):
    assert goes_on.wait(60), 'the caller of save waits for the buffer'
    write(*args)

  monkeypatch.setattr(buffer_files, 'write', wait_and_write)
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    checkpoint.save(manager, snapshot(mesh, 1))
    goes_on.set()
  assert_same(restore(str(tmp_path), like).buffer, BUFFERS['many'])


def test_a_checkpoint_shares_with_the_one_before_what_has_not_changed(mesh, tmp_path):
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    for step in (1, 2):
      checkpoint.save(manager, snapshot(mesh, step))
  one, two = (tmp_path / 'checkpoints' / step / 'buffer' / 'segment_000001' for step in '12')
  assert one.samefile(two) and not (two.parent / 'segment_000002').exists()


def test_where_nothing_was_saved_nothing_is_restored(like, tmp_path):
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like) is None


def test_parameters_alone_are_restored_from_a_step_or_the_newest(workdir, mesh, like):
  for step, expected in ((2, 2), (5, 5), (None, 5)):
    params, restored_step = checkpoint.restore_params(workdir, step, like.params)
    assert restored_step == expected
    jax.tree.map(np.testing.assert_array_equal, params, snapshot(mesh, expected).state.params)


def test_damaged_parameters_are_refused(workdir, like, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  truncate_a_file(tmp_path / 'run' / 'checkpoints' / '5')
  with pytest.raises(InputError, match=r'checkpoints/5 is damaged \(.*\); choose another --step'):
    checkpoint.restore_params(str(tmp_path / 'run'), None, like.params)


def test_parameters_with_another_checksum_are_refused(workdir, like, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  change_a_checksum(tmp_path / 'run' / 'checkpoints' / '5')
  with pytest.raises(InputError, match=r"5/state: .*'a'.*: not the bits that were saved; choose"):
    checkpoint.restore_params(str(tmp_path / 'run'), None, like.params)
  assert checkpoint.restore_params(str(tmp_path / 'run'), 2, like.params)[1] == 2


@pytest.mark.parametrize(
  ('where', 'step', 'message'),
  [
    ('', 3, r'/checkpoints has no step 3; it has: 2, 5\.'),
    ('/nowhere', None, r'/nowhere/checkpoints has no step None; it has: none\.'),
  ],
)
def test_a_missing_step_is_refused_with_those_that_exist(where, step, message, workdir, like):
  with pytest.raises(InputError, match=message):
    checkpoint.restore_params(workdir + where, step, like.params)


def test_a_checkpoint_of_a_run_holds_the_policy_after_its_step(recorded):
  opened = recorded.experiment
  shapes = model.shapes(opened.model, opened.meshes.training)
  params, step = checkpoint.restore_params(str(recorded.workdir), tiny.SAVED_EVERY, shapes)
  # The next step generates with what this one has learnt.
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[step + 1].params)


def test_saved_parameters_are_loaded_bit_for_bit(mesh, tmp_path):
  params = make_state(mesh, 2.0).params
  checkpoint.save_params(str(tmp_path / 'params'), params)
  loaded = checkpoint.load_params(str(tmp_path / 'params'), checkpoint.abstract(params))
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
