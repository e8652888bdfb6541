"""A run that is killed again and again, while it writes too, ends as if it had not been."""

import random
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from exgrpo_jax.learner import checkpoint
from tests.helpers import tiny
from tests.helpers.pods import Pod

KILLS, STEPS, EVERY = 20, 120, 2
FLAGS = (
  f'--config.num_steps={STEPS}',
  f'--config.checkpoint.every={EVERY}',
  '--config.checkpoint.keep=4',
  '--config.evaluation.every=50',
)


def saved(workdir):
  """The step of the newest checkpoint that is whole, or 0."""
  return max(
    (int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit()),
    default=0,
  )


def is_writing(workdir):
  return any('tmp' in path.name for path in (workdir / 'checkpoints').iterdir())


def reached(workdir):
  return tiny.untimed_records(workdir)[-1]['step']


def wait_for_a_write(workdir, seconds):
  limit = time.monotonic() + seconds
  while not is_writing(workdir) and time.monotonic() < limit:
    time.sleep(0.0005)


def what_is_left(workdir):
  """State, buffer and cursor of the last step; all metrics but times; samples and evaluations."""
  with checkpoint.open_manager(str(workdir)) as manager:
    last = manager.restore(
      STEPS,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(),
        buffer=ocp.args.StandardRestore(),
        cursor=ocp.args.JsonRestore(),
      ),
    )
  texts = {
    path.name: path.read_text()
    for folder in ('samples', 'evaluation')
    for path in (workdir / folder).iterdir()
  }
  return dict(last), tiny.untimed_records(workdir), texts


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(data, tmp_path):
  whole, killed, cache = (tmp_path / name for name in ('whole', 'killed', 'cache'))
  with Pod(whole, (1, 1), data, cache, *FLAGS) as pod:
    pod.finish()
  rng, during_a_write = random.Random(0), 0
  for _ in range(KILLS):
    with Pod(killed, (1, 1), data, cache, *FLAGS) as pod:
      pod.wait_until(lambda pod=pod: '| reward' in pod.log())
      time.sleep(0.5 * rng.random())
      if rng.random() < 0.5:
        wait_for_a_write(killed, 5)
        time.sleep(0.02 * rng.random())
    during_a_write += is_writing(killed)
    # A checkpoint is begun when the one before it is whole.
    assert reached(killed) - saved(killed) <= 2 * EVERY
  with Pod(killed, (1, 1), data, cache, *FLAGS) as pod:
    pod.finish()
  assert during_a_write > KILLS / 4
  expected, found = what_is_left(whole), what_is_left(killed)
  jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
  assert found[1:] == expected[1:]
  assert not is_writing(killed)  # what was left unfinished is gone
