"""Which responses and stored successes the page has token by token."""

import numpy as np

from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.reporting.page import texts
from exgrpo_jax.reporting.page.texts import Group, Size

FULL = 8  # a step after which the recorded run's buffer has questions


def test_whole_stories_of_the_most_visited_questions_are_chosen():
  sizes = {
    Group(1, 0): Size(question=7, tokens=40),
    Group(1, 1): Size(question=8, tokens=50),
    Group(2, 0): Size(question=7, tokens=40),
    Group(3, 0): Size(question=9, tokens=20),
  }
  # 8 no longer fits, and 9 does.
  assert texts.choose(sizes, 100) == {Group(1, 0), Group(2, 0), Group(3, 0)}
  assert texts.choose(sizes, 79) == {Group(1, 1), Group(3, 0)}  # half of a story is none
  assert texts.choose(sizes, 10) == set()


def test_stored_successes_are_those_of_the_newest_checkpoint(recorded, monkeypatch):
  workdir, newest = str(recorded.workdir), FULL
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [4, FULL])
  whole = buffer_files.read(checkpoint.buffer_folder(workdir, newest)).entries
  rows = sorted(whole, reverse=True)
  found = texts.read_stored(workdir, [*rows, 10**6], 10**9)
  assert list(found) == rows and len(rows) == 2
  for row, trajectories in found.items():
    for own, expected in zip(trajectories, whole[row].trajectories, strict=True):
      np.testing.assert_array_equal(own.tokens, expected.tokens)
      np.testing.assert_array_equal(own.logp, expected.logp)
      assert (own.step, own.times_replayed) == (expected.step, expected.times_replayed)
  of_first = sum(len(trajectory.tokens) for trajectory in whole[rows[0]].trajectories)
  assert list(texts.read_stored(workdir, rows, of_first)) == rows[:1]
  assert texts.read_stored(workdir, rows, of_first - 1) == {}


def test_an_older_checkpoint_is_read_where_the_newest_is_gone(recorded, monkeypatch):
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [FULL, 10**6])
  assert texts.read_stored(str(recorded.workdir), range(100), 10**9)
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [10**6])
  assert texts.read_stored(str(recorded.workdir), range(100), 10**9) is None
