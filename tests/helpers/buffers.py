"""Replay buffers to save, and how two of them are compared."""

import numpy as np

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.datatypes import Trajectory, Turn


def trajectory(*tokens, step=0, reward=1.0, **values):
  logp = -np.arange(len(tokens), dtype=np.float32) / 3
  return Trajectory(np.array(tokens, np.int32), logp, reward=reward, step=step, **values)


def entry(correctness, prompt_length, *trajectories):
  return Entry(correctness, prompt_length, trajectories)


BUFFERS = {
  'empty': Buffer(),
  'started_and_still_empty': Buffer(started=True),
  'a_third': Buffer(entries={7: entry(1 / 3, 5, trajectory(1, 2, 3, step=4))}, started=True),
  'many': Buffer(
    entries={
      row: entry(
        row / 7,
        row,
        *(
          trajectory(
            *range(row + n + 1),
            step=n,
            reward=0.1 * n - 1,
            times_replayed=3 * n,
            correct=n % 3 > 0,
            truncated=n % 4 == 1,
            turns=(Turn(1, n, 0.5),) * (n % 2),
            routes=np.full((row, 2, 3), n, np.uint16) if n % 3 == 1 else None,
          )
          for n in range(row + 1)
        ),
      )
      for row in (5, 0, 3)
    },
    retired_epoch={9: 0, 2: 3},
    started=True,
    history={9: (0.1, 1 / 3), 2: (7.0, 0.5)},
  ),
  'retired_alone': Buffer(retired_epoch={2**40: 1, 4: 0}),
  'one_token': Buffer(
    entries={1: entry(0.0, 1, trajectory(0))}, retired_epoch={0: 2}, started=True
  ),
}


def assert_same(buffer, expected, atol=0.0):
  """To the bit, but for log-probabilities where `atol` allows a difference."""
  assert buffer.started is expected.started and buffer.retired_epoch == expected.retired_epoch
  assert buffer.history == expected.history
  assert set(buffer.entries) == set(expected.entries)
  for row, wanted in expected.entries.items():
    stored = buffer.entries[row]
    assert (stored.correctness, stored.prompt_length) == (wanted.correctness, wanted.prompt_length)
    for left, right in zip(stored.trajectories, wanted.trajectories, strict=True):
      for name, value in vars(right).items():
        found = getattr(left, name)
        if isinstance(value, np.ndarray):
          assert found.dtype == value.dtype
          tolerance = atol if name == 'logp' else 0
          np.testing.assert_allclose(found, value, rtol=0, atol=tolerance, err_msg=name)
        else:
          assert found == value, name


def described(groups):
  """Partial groups in plain values, so that they can be compared."""
  return [
    (
      *(group.question_row, group.drawn, group.is_drawn, group.verdicts),
      [{name: np.array(x).tolist() for name, x in vars(one).items()} for one in group.responses],
    )
    for group in groups
  ]
