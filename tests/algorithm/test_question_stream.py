"""The stream: in which order questions are read, and which are skipped."""

import numpy as np
import pytest

from exgrpo_jax.algorithm import question_stream
from exgrpo_jax.datatypes import Cursor
from exgrpo_jax.errors import InputError


def order(epoch, size=10, seed=7):
  return question_stream.permutation(seed, epoch, size).tolist()


def take(cursor, count, retired=(), taken=(), size=10, at_once=4):
  return question_stream.take(Cursor(*cursor), count, size, 7, dict(retired), taken, at_once)


def test_an_epoch_is_the_permutation_that_seed_and_epoch_give():
  generator = np.random.default_rng(np.random.SeedSequence(7, spawn_key=(7, 3)))
  assert order(3) == generator.permutation(10).tolist()
  assert sorted(order(3)) == list(range(10))
  assert order(3) != order(4)


def test_the_stream_reads_an_epoch_in_order():
  rows, cursor = take((0, 0), 4)
  assert (rows, cursor) == (order(0)[:4], Cursor(0, 4))
  assert take((0, 4), 4) == (order(0)[4:8], Cursor(0, 8))


def test_a_step_may_end_with_an_epoch_without_leaving_it():
  assert take((0, 6), 4) == (order(0)[6:], Cursor(0, 10))
  assert take((0, 10), 4)[1] == Cursor(1, 4)
  assert take((2, 10), 0, taken=[0, 1, 2, 3]) == ([], Cursor(2, 10))


def test_a_step_crosses_into_the_next_epoch_and_never_repeats_a_question():
  for seed in range(20):
    rows, cursor = question_stream.take(Cursor(0, 7), 8, 10, seed, {}, (), 8)
    assert len(set(rows)) == 8
    last = order(0, seed=seed)[7:]
    fresh = [row for row in order(1, seed=seed) if row not in last][:5]
    assert rows == last + fresh
    assert cursor == Cursor(1, order(1, seed=seed).index(fresh[-1]) + 1)


def test_replayed_questions_are_skipped():
  first = order(0)
  rows, cursor = take((0, 0), 2, taken=[first[0], first[2]])
  assert (rows, cursor) == ([first[1], first[3]], Cursor(0, 4))


def test_a_retired_question_stays_in_its_own_epoch_and_is_out_of_the_next():
  row = order(0)[0]
  assert take((0, 0), 1, retired={row: 0})[0] == [row]
  position = order(1).index(row)
  rows, cursor = take((1, position), 1, retired={row: 0})
  assert (rows, cursor) == ([order(1)[position + 1]], Cursor(1, position + 2))


def test_a_question_retired_in_this_epoch_is_out_once_the_step_has_crossed():
  row = order(1)[0]
  assert take((0, 10), 1, retired={row: 0}) == ([order(1)[1]], Cursor(1, 2))
  assert take((0, 10), 1, retired={row: 1}) == ([row], Cursor(1, 1))


def test_retired_questions_return_when_too_few_others_are_left():
  def reads_retired(epoch):
    return question_stream.reads_retired(epoch, 10, retired, at_once=4)

  retired = dict.fromkeys(range(6), 0)
  assert not reads_retired(1)  # 4 are left, and 4 are needed
  assert sorted(take((1, 0), 4, retired)[0]) == [6, 7, 8, 9]
  retired[6] = 0
  assert reads_retired(1)
  assert take((1, 0), 4, retired) == (order(1)[:4], Cursor(1, 4))
  assert not reads_retired(0)  # in the epoch in which they retired they are still read


def test_where_all_have_retired_those_not_replayed_are_read():
  all_retired = dict.fromkeys(range(4), 0)
  rows, _ = take((1, 0), 2, all_retired, taken=[0, 1], size=4)
  assert sorted(rows) == [2, 3]


def test_reading_in_other_portions_reads_the_same():
  cursor, one_by_one = Cursor(0, 0), []
  for _ in range(10):
    rows, cursor = question_stream.take(cursor, 1, 10, 7, {}, (), 1)
    one_by_one += rows
  assert one_by_one == take((0, 0), 10, at_once=10)[0]


def test_fewer_questions_than_a_step_needs_are_refused():
  with pytest.raises(InputError, match='has 3 questions, and a step works on 4 different'):
    take((0, 0), 1, size=3)


def test_a_step_of_the_paper_is_read_from_46_000_rows_without_delay():
  retired = dict.fromkeys(range(45_800), 0)
  rows, _ = question_stream.take(Cursor(1, 0), 128, 46_000, 0, retired, (), 128)
  assert len(set(rows)) == 128 and min(rows) >= 45_800
