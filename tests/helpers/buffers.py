"""Replay buffers to save, and how two of them are compared."""

import numpy as np

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.datatypes import Trajectory, Turn


def trajectory(*tokens, step=0, reward=1.0, times_replayed=0, correct=True, turns=(), routes=None):
  return Trajectory(
    tokens=np.array(tokens, np.int32),
    logp=-np.arange(len(tokens), dtype=np.float32) / 3,
    reward=reward,
    step=step,
    times_replayed=times_replayed,
    correct=correct,
    turns=turns,
    routes=routes,
  )


def entry(correctness, prompt_length, *trajectories):
  return Entry(
    correctness=correctness, prompt_length=prompt_length, trajectories=tuple(trajectories)
  )


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
  ),
  'retired_alone': Buffer(retired_epoch={2**40: 1, 4: 0}),
  'one_token': Buffer(
    entries={1: entry(0.0, 1, trajectory(0))}, retired_epoch={0: 2}, started=True
  ),
}


def assert_same(buffer, expected, atol=0.0):
  """To the bit, but for log-probabilities where `atol` allows a difference."""
  assert buffer.started is expected.started and buffer.retired_epoch == expected.retired_epoch
  assert set(buffer.entries) == set(expected.entries)
  for row, wanted in expected.entries.items():
    stored = buffer.entries[row]
    assert (stored.correctness, stored.prompt_length) == (wanted.correctness, wanted.prompt_length)
    for left, right in zip(stored.trajectories, wanted.trajectories, strict=True):
      assert (left.step, left.reward) == (right.step, right.reward)
      assert (left.times_replayed, left.correct) == (right.times_replayed, right.correct)
      assert left.turns == right.turns
      assert (left.routes is None) == (right.routes is None)
      if right.routes is not None:
        assert left.routes.dtype == right.routes.dtype
        np.testing.assert_array_equal(left.routes, right.routes)
      assert left.tokens.dtype == right.tokens.dtype and left.logp.dtype == right.logp.dtype
      np.testing.assert_array_equal(left.tokens, right.tokens)
      np.testing.assert_allclose(left.logp, right.logp, rtol=0, atol=atol)


def described(groups):
  """Partial groups in plain values, so that they can be compared."""
  return [
    (
      *(group.question_row, group.drawn, group.is_drawn, group.verdicts),
      [{name: np.array(x).tolist() for name, x in vars(one).items()} for one in group.responses],
    )
    for group in groups
  ]
