"""A run that is killed again and again, also while it saves, ends as if it had not been."""

import random
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.reporting import step_records
from tests.helpers import buffers, tiny
from tests.helpers.pods import CARRY, Pod

KILLS, STEPS, EVERY = 20, 120, 2
FLAGS = (
  f'--config.num_steps={STEPS}',
  f'--config.checkpoint.every={EVERY}',
  '--config.checkpoint.keep=4',
  '--config.evaluation.every=50',
)


def last_saved(workdir):
  """The step of the newest complete checkpoint, or 0."""
  return max(checkpoint.steps(str(workdir)), default=0)


def last_recorded(workdir):
  """The step of the newest metrics."""
  return tiny.untimed_records(workdir)[-1]['step']


def has_unfinished_checkpoint(workdir):
  return any('tmp' in path.name for path in (workdir / 'checkpoints').iterdir())


def wait_until_it_saves(workdir, seconds):
  deadline = time.monotonic() + seconds
  while not has_unfinished_checkpoint(workdir) and time.monotonic() < deadline:
    time.sleep(0.0005)


def results(workdir):
  """(buffer, state and cursor of the last step; what it carries; metrics; texts; records).

  The metrics are those without times.
  """
  with checkpoint.open_manager(str(workdir)) as manager:
    last = manager.restore(
      STEPS,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(),
        buffer=checkpoint.RestoreFolder(buffer_files.read),
        cursor=ocp.args.JsonRestore(),
        carried=checkpoint.RestoreFolder(checkpoint.read_partial),
      ),
    )
  texts = {
    path.name: path.read_text()
    for folder in ('samples', 'evaluation')
    for path in (workdir / folder).iterdir()
  }
  records = step_records.read(workdir)
  of_last = last['buffer'], (last['state'], last['cursor'])
  carried = buffers.described(last['carried'])
  return *of_last, carried, tiny.untimed_records(workdir), texts, records


@pytest.mark.slow
@pytest.mark.parametrize('more', [(), CARRY], ids=['', 'carry'])
def test_twenty_kills_at_random_moments_change_nothing(more, data, compiled, tmp_path):
  undisturbed, killed = tmp_path / 'undisturbed', tmp_path / 'killed'
  with Pod(undisturbed, (1, 1), data, compiled, *FLAGS, *more) as pod:
    pod.finish()
  rng, kills_while_saving = random.Random(0), 0
  for _ in range(KILLS):
    with Pod(killed, (1, 1), data, compiled, *FLAGS, *more) as pod:
      pod.wait_until(lambda pod=pod: '| reward' in pod.log())
      time.sleep(0.5 * rng.random())
      if rng.random() < 0.5:
        wait_until_it_saves(killed, 5)
        time.sleep(0.02 * rng.random())
    kills_while_saving += has_unfinished_checkpoint(killed)
    # A checkpoint is begun only when the one before it is complete.
    assert last_recorded(killed) - last_saved(killed) <= 2 * EVERY
  with Pod(killed, (1, 1), data, compiled, *FLAGS, *more) as pod:
    pod.finish()
  assert kills_while_saving > KILLS / 4
  expected, of_killed = results(undisturbed), results(killed)
  buffers.assert_same(of_killed[0], expected[0])
  jax.tree.map(np.testing.assert_array_equal, of_killed[1], expected[1])
  assert of_killed[2:] == expected[2:]
  written = [len(one['tokens']) for *_, responses in expected[2] for one in responses]
  assert any(0 < count < tiny.RESPONSE for count in written) == bool(more)
  assert not has_unfinished_checkpoint(killed)  # those left by kills were removed
