"""What is saved comes back, whole or not at all."""

import errno
import json
import os
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.datatypes import Cursor, Trajectory
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import buffer_arrays, checkpoint, optimizer
from exgrpo_jax.policy import model, sharding
from tests.helpers import tiny

CONFIG = checkpoint.Config(every=1, keep=2)


def trajectory(*tokens, step=0, reward=1.0):
  return Trajectory(
    np.array(tokens, np.int32), -np.arange(len(tokens), dtype=np.float32) / 3, reward, step
  )


BUFFERS = {
  'empty': Buffer(),
  'started_and_still_empty': Buffer({}, {}, True),
  'a_third': Buffer({7: Entry(1 / 3, 5, (trajectory(1, 2, 3, step=4),))}, {}, True),
  'many': Buffer(
    {
      row: Entry(
        row / 7,
        row,
        tuple(trajectory(*range(row + n + 1), step=n, reward=0.1 * n - 1) for n in range(row + 1)),
      )
      for row in (5, 0, 3)
    },
    {9: 0, 2: 3},
    True,
  ),
  'retired_alone': Buffer({}, {2**40: 1, 4: 0}, False),
  'one_token': Buffer({1: Entry(0.0, 1, (trajectory(0),))}, {0: 2}, True),
}


def assert_same(left, right):
  assert left.started is right.started and left.retired_epoch == right.retired_epoch
  assert set(left.entries) == set(right.entries)
  for row, entry in left.entries.items():
    other = right.entries[row]
    assert (entry.correctness, entry.prompt_length) == (other.correctness, other.prompt_length)
    assert len(entry.trajectories) == len(other.trajectories)
    for mine, theirs in zip(entry.trajectories, other.trajectories):
      assert (mine.step, mine.reward) == (theirs.step, theirs.reward)
      for name in ('tokens', 'logp'):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        assert getattr(mine, name).dtype == getattr(theirs, name).dtype


@pytest.mark.parametrize('buffer', BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_comes_back_exactly_from_flat_arrays(buffer):
  flat = buffer_arrays.flatten(buffer)
  assert all(isinstance(x, np.ndarray) and x.size for x in flat.values())
  assert_same(buffer_arrays.unflatten(flat), buffer)


def test_a_recorded_buffer_comes_back_exactly(recorded):
  for step in recorded.steps.values():
    assert_same(buffer_arrays.unflatten(buffer_arrays.flatten(step.after)), step.after)


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))


def state_of(mesh, value):
  """A train state after one update, every array of it telling `value`."""
  config = optimizer.Config(
    minibatches=1,
    learning_rate=0.1,
    schedule='constant',
    warmup_updates=0,
    b1=0.9,
    b2=0.99,
    epsilon=1e-8,
    weight_decay=0.0,
    moments='float32',
    clip_norm=1.0,
    skip_norm=1e9,
  )
  params = jax.device_put(
    {'a': jnp.full((2, 3), value), 'b': {'c': jnp.full(4, 1 / value)}}, sharding.replicated(mesh)
  )
  state = optimizer.init(config, 9, params)
  return optimizer.apply_gradient(config, 9, state, jax.tree.map(lambda x: value * x, params))[0]


def snapshot(mesh, step, buffer='many'):
  return checkpoint.Snapshot(step, state_of(mesh, step + 1 / 3), BUFFERS[buffer], Cursor(step, 17))


def restored(workdir, mesh, step=None):
  with checkpoint.open_manager(workdir) as manager:
    return checkpoint.restore(
      manager,
      manager.latest_step() if step is None else step,
      checkpoint.abstract(state_of(mesh, 1.0)),
    )


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
def test_a_snapshot_comes_back_bit_for_bit(step, buffer, workdir, mesh):
  found, expected = restored(workdir, mesh, step), snapshot(mesh, step, buffer)
  assert found.step == step and found.cursor == expected.cursor
  assert_same(found.buffer, expected.buffer)
  jax.tree.map(np.testing.assert_array_equal, found.state, expected.state)
  assert jax.tree.map(lambda x: (x.dtype, x.sharding), found.state) == jax.tree.map(
    lambda x: (x.dtype, x.sharding), expected.state
  )
  assert any(leaf.ndim == 0 and leaf == 1 for leaf in jax.tree.leaves(found.state.opt_state))


def test_the_newest_are_kept(workdir):
  with checkpoint.open_manager(workdir) as manager:
    assert sorted(manager.all_steps()) == [2, 5]


def test_what_a_kill_left_unfinished_is_passed_over(workdir, mesh, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  folder = tmp_path / 'run' / 'checkpoints'
  for name in ('9.orbax-checkpoint-tmp', '8.orbax-checkpoint-tmp-1700000000'):
    shutil.copytree(folder / '5', folder / name)
    shutil.rmtree(folder / name / 'buffer')
  assert restored(str(tmp_path / 'run'), mesh).step == 5
  with checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager:
    assert manager.latest_step() == 5
    checkpoint.save(manager, snapshot(mesh, 9))
  assert restored(str(tmp_path / 'run'), mesh).step == 9


def test_a_state_may_be_given_away_while_it_is_written(mesh, tmp_path):
  expected = jax.tree.map(np.array, snapshot(mesh, 1).state)
  grow = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    now = snapshot(mesh, 1)
    checkpoint.save(manager, now)
    state = now.state
    for _ in range(9):
      state = grow(state)
  jax.tree.map(np.testing.assert_array_equal, restored(str(tmp_path), mesh).state, expected)


@pytest.mark.parametrize(
  'error',
  [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'samples/step_000003.jsonl'),
    ValueError('RESOURCE_EXHAUSTED: Error writing local file\nNo space left on device [28]'),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
  ],
)
def test_a_full_disk_is_told_with_what_is_whole(workdir, error):
  with (
    pytest.raises(
      InputError,
      match=r'the disk is full \(.*(No space|quota).*\)\. Complete checkpoints: '
      r'2, 5\. Free some space',
    ),
    checkpoint.explain_full_disk(workdir),
  ):
    raise error


def test_other_errors_are_not_taken_for_a_full_disk(workdir):
  with pytest.raises(ValueError, match='own trouble'), checkpoint.explain_full_disk(workdir):
    raise ValueError('own trouble')


def test_room_for_a_checkpoint_is_told_and_too_little_refused(mesh, tmp_path, monkeypatch, capsys):
  state = state_of(mesh, 1.0)
  checkpoint.check_disk_space(str(tmp_path), state)
  assert re.match(r'a checkpoint takes 0.00 GiB; .* has .* left\n', capsys.readouterr().out)
  needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  for free in (needed, needed - 1):
    monkeypatch.setattr(shutil, 'disk_usage', lambda _, free=free: types.SimpleNamespace(free=free))
    if free == needed:
      checkpoint.check_disk_space(str(tmp_path), checkpoint.abstract(state))
  with pytest.raises(InputError, match='has 0.00 GiB left, and a checkpoint takes 0.00: free'):
    checkpoint.check_disk_space(str(tmp_path), checkpoint.abstract(state))


def largest(folder):
  return max(
    (path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size
  )


def cut(folder):
  path = largest(folder / 'state')
  os.truncate(path, path.stat().st_size // 2)


def lose_a_file(folder):
  (folder / 'buffer' / '_METADATA').unlink()


def change_a_sum(folder):
  """As if an array's bits had changed, which orbax does not notice."""
  path = folder / 'sums' / 'metadata'
  sums = json.loads(path.read_text())
  sums[".params['a']"] += 1
  path.write_text(json.dumps(sums))


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [(cut, ''), (lose_a_file, '_METADATA'), (change_a_sum, "'a'.*: not the bits that were saved")],
)
def test_a_damaged_newest_one_is_told_and_the_one_before_taken(
  damage, reason, workdir, mesh, tmp_path, capsys
):
  shutil.copytree(workdir, tmp_path / 'run')
  damage(tmp_path / 'run' / 'checkpoints' / '5')
  like = checkpoint.abstract(state_of(mesh, 1.0))
  with checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, like).step == 2
    assert re.search(
      rf'WARNING: the checkpoint of step 5 is damaged \(.*{reason}.* 2 is used',
      capsys.readouterr().err,
    )
    (moved,) = (tmp_path / 'run' / 'damaged').iterdir()
    assert largest(moved)
    checkpoint.save(manager, snapshot(mesh, 5))
    assert checkpoint.restore_newest(manager, like).step == 5
  assert capsys.readouterr().err == ''


def test_where_none_is_whole_it_is_an_error_and_nothing_moves(workdir, mesh, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  for step in ('2', '5'):
    lose_a_file(tmp_path / 'run' / 'checkpoints' / step)
  with (
    checkpoint.open_manager(str(tmp_path / 'run'), CONFIG) as manager,
    pytest.raises(InputError, match='none of its checkpoints can be read. Step 5: .* Step 2: '),
  ):
    checkpoint.restore_newest(manager, checkpoint.abstract(state_of(mesh, 1.0)))
  assert {'2', '5'} <= {path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()}


def test_where_nothing_was_saved_nothing_comes_back(mesh, tmp_path):
  with checkpoint.open_manager(str(tmp_path), CONFIG) as manager:
    assert checkpoint.restore_newest(manager, checkpoint.abstract(state_of(mesh, 1.0))) is None


def test_parameters_alone_come_back_from_a_step_or_the_newest(workdir, mesh):
  like = checkpoint.abstract(state_of(mesh, 1.0).params)
  for step, expected in ((2, 2), (5, 5), (None, 5)):
    params, found = checkpoint.restore_params(workdir, step, like)
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, params, snapshot(mesh, expected).state.params)


def test_parameters_of_other_bits_are_refused(workdir, mesh, tmp_path):
  shutil.copytree(workdir, tmp_path / 'run')
  change_a_sum(tmp_path / 'run' / 'checkpoints' / '5')
  like = checkpoint.abstract(state_of(mesh, 1.0).params)
  with pytest.raises(InputError, match=r"5/state: .*'a'.*: not the bits that were saved; choose"):
    checkpoint.restore_params(str(tmp_path / 'run'), None, like)
  assert checkpoint.restore_params(str(tmp_path / 'run'), 2, like)[1] == 2


@pytest.mark.parametrize(
  ('where', 'step', 'message'),
  [
    ('', 3, r'/checkpoints has no step 3; it has: 2, 5\.'),
    ('/nowhere', None, r'/nowhere/checkpoints has no step None; it has: none\.'),
  ],
)
def test_a_step_that_is_not_there_is_named_with_those_that_are(where, step, message, workdir, mesh):
  with pytest.raises(InputError, match=message):
    checkpoint.restore_params(
      workdir + where, step, checkpoint.abstract(state_of(mesh, 1.0).params)
    )


def test_a_checkpoint_of_a_run_holds_the_policy_of_its_step(recorded):
  owner = recorded.experiment
  like = checkpoint.abstract(
    jax.device_put(recorded.steps[1].params, model.shardings(owner.model, owner.mesh))
  )
  params, step = checkpoint.restore_params(str(recorded.workdir), tiny.SAVED_EVERY, like)
  # The next step acts with what this one left.
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[step + 1].params)


def test_saved_parameters_come_back(mesh, tmp_path):
  params = state_of(mesh, 2.0).params
  checkpoint.save_params(str(tmp_path / 'params'), params)
  found = checkpoint.load_params(str(tmp_path / 'params'), checkpoint.abstract(params))
  jax.tree.map(np.testing.assert_array_equal, found, params)
