"""Rows are packed whole, into sequences of two lengths, with little padding."""

import numpy as np
import pytest

from exgrpo_jax import packing
from exgrpo_jax.packing import length_bucket, right_padded, rows_within


def long_tailed(seed, rows=512):
  """(tokens, response tokens) of rows: responses of mean 1,500, at most 8,192; prompts of 150."""
  rng = np.random.default_rng(seed)
  response_R = rng.lognormal(np.log(1500) - 0.9**2 / 2, 0.9, rows).astype(int).clip(1, 8192)
  return response_R + rng.normal(150, 40, rows).astype(int).clip(30, 1024), response_R


@pytest.mark.parametrize(('shards', 'most'), [(1, 1.06), (16, 1.1), (64, 1.25)])
def test_rows_of_a_long_tail_are_packed_whole_with_little_padding(shards, most):
  long, short = packing.shapes(shards, 9216, 9216, 8192, 512)
  for seed in range(4):
    length_R, response_R = long_tailed(seed)
    passes = packing.pack(length_R, response_R, long, short)
    packed = sorted(row for one in passes for rows in one.sequences for row in rows)
    assert packed == list(range(512))
    for shape, sequences in passes:
      assert shape in (long, short) and len(sequences) <= shape.count
      for rows in sequences:
        assert length_R[rows].sum() <= shape.length and response_R[rows].sum() <= shape.window
    assert sum(one.shape.num_tokens for one in passes) <= most * length_R.sum()


def test_the_longest_row_fits_a_long_sequence_and_no_rows_are_a_short_pass():
  long, short = packing.shapes(2, 1, 100, 80, 4)
  assert (long, short) == (packing.Shape(2, 100, 80), packing.Shape(2, 25, 20))
  rows = np.array([100, 0]), np.array([80, 0])
  assert packing.pack(*rows, long, short) == [packing.Pass(long, [[0]])]
  assert packing.pack(*(0 * x for x in rows), long, short) == [packing.Pass(short, [])]
  assert packing.shapes(1, 8, 8, 7, 1)[1] == packing.Shape(1, 2, 1)  # a window is below a length


def test_a_sequence_lays_rows_one_after_another_and_positions_begin_again():
  layout = packing.layout(packing.Shape(2, 6, 5), [[1, 0]], np.array([2, 3]))
  assert layout.segments.segment_BT.tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]
  assert layout.segments.position_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
  assert layout.segments.prefix_BT is None
  rows = np.array([[10, 11, 99], [20, 21, 22]])
  assert layout.take(rows).tolist() == [[20, 21, 22, 10, 11, 0], [0] * 6]


def test_rows_of_one_prompt_hold_it_once_in_a_sequence():
  """All but its last token, which predicts a first token of each row."""
  rows = np.array([[5, 6, 7, 10, 11], [5, 6, 7, 20, 0], [5, 9, 30, 31, 0], [8, 40, 0, 0, 0]])
  length_R, response_R = np.array([5, 4, 4, 2]), np.array([2, 1, 2, 1])
  prefixes = packing.shared_prompts(rows, length_R - response_R)
  shape = packing.Shape(2, 11, 6)
  [(_, sequences)] = packing.pack(length_R, response_R, shape, packing.Shape(9, 2, 1), prefixes)
  assert sequences == [[0, 1, 2], [3]]  # the rows of one prompt together, though the last is short
  layout = packing.layout(shape, sequences, length_R, prefixes)
  assert layout.take(rows).tolist() == [[5, 6, 7, 10, 11, 7, 20, 5, 9, 30, 31], [8, 40] + 9 * [0]]
  assert [x_BT.tolist() for x_BT in layout.segments] == [
    [[1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5], [1, 1] + 9 * [0]],
    [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3], [0, 1] + 9 * [0]],
    [[1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4], [1, 1] + 9 * [0]],
  ]
  tight = packing.Shape(1, 7, 6)  # has room for row 1 only because it shares row 0's prefix
  first_two = packing.Prefixes(*(x_R[:2] for x_R in prefixes))
  [(_, sequences)] = packing.pack(length_R[:2], response_R[:2], tight, tight, first_two)
  assert sequences == [[0, 1]]
  # Row 2 joins its prefix, although it fits into the fuller sequence of row 0.
  prefixes, ones = packing.Prefixes(np.array([0, 1, 1]), np.array([3, 7, 7])), np.ones(3, int)
  shapes = packing.Shape(2, 20, 9), packing.Shape(2, 2, 1)
  [(_, sequences)] = packing.pack(np.array([11, 10, 9]), ones, *shapes, prefixes)
  assert sequences == [[0], [1, 2]]


def test_groups_of_short_rows_take_half_of_their_tokens():
  """Twelve groups of eight, as a step of SmolLM2 has them: prompts of 47, responses of 6 to 32."""
  rng = np.random.default_rng(0)
  response_R = rng.integers(6, 33, 96)
  tokens_RT = np.tile(np.arange(12).repeat(8)[:, None], 47)
  prefixes = packing.shared_prompts(tokens_RT, np.full(96, 47))
  long, short = packing.shapes(1, 2048, 96, 32, 96, has_prefixes=True)
  passes = packing.pack(response_R + 47, response_R, long, short, prefixes)
  assert sorted(row for one in passes for rows in one.sequences for row in rows) == list(range(96))
  assert sum(one.shape.num_tokens for one in passes) < 0.6 * (response_R + 47).sum()
  for shape, sequences in passes:
    packing.layout(shape, sequences, response_R + 47, prefixes)  # all of it fits
    assert all(response_R[rows].sum() <= shape.window for rows in sequences)


def test_predictors_stand_before_their_targets_and_never_twice():
  is_target_BT = np.array([[0, 0, 1, 0, 1, 1], [0] * 6]) > 0
  assert packing.predictors(is_target_BT, 4).tolist() == [[0, 1, 3, 4], [0, 1, 2, 3]]


def test_short_rows_are_packed_two_and_more_to_a_sequence_in_several_passes():
  """On one device with a budget for all rows at once, where one whole pass would be padding."""
  rng = np.random.default_rng(0)
  response_R = rng.integers(16, 65, 64)
  length_R = response_R + 24
  long, short = packing.shapes(1, 32768, 88, 64, 64)
  assert (long, short) == (packing.Shape(4, 176, 128), packing.Shape(4, 44, 32))
  assert packing.shapes(1, 32768, 129, 64, 64)[0].length == 129  # two would exceed _PAIRED
  passes = packing.pack(length_R, response_R, long, short)
  assert sum(one.shape.num_tokens for one in passes) <= 1.2 * length_R.sum()


# ---- Padding: to which lengths rows are padded, and where the padding is ----


def test_lengths_are_rounded_up_to_powers_of_two_and_their_middles():
  expected = {
    (1, 512): 32,
    (32, 512): 32,
    (33, 512): 48,
    (48, 512): 48,
    (49, 512): 64,
    (65, 512): 96,
    (300, 512): 384,
    (385, 512): 512,
    (385, 400): 400,
    (20, 20): 20,
    (385, None): 512,
  }
  assert {(length, limit): length_bucket(length, limit) for length, limit in expected} == expected


def test_a_budget_has_room_for_at_least_one_row():
  assert [rows_within(9216, length) for length in (1024, 6144, 9216, 20_000)] == [9, 1, 1, 1]


def test_rows_are_padded_on_the_right_and_the_mask_is_1_on_responses():
  rows = [(np.array([3, 4]), np.array([5, 6, 7])), (np.array([8]), np.array([9]))]
  tokens_BT, mask_BT = right_padded(rows, limit=6, pad_id=1)
  assert tokens_BT.tolist() == [[3, 4, 5, 6, 7, 1], [8, 9, 1, 1, 1, 1]]
  assert mask_BT.tolist() == [[0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
  assert (tokens_BT.dtype, mask_BT.dtype) == (np.int32, np.float32)


def test_rows_are_padded_to_the_bucket_of_the_longest():
  rows = [(np.zeros(20, int), np.zeros(13, int)), (np.zeros(1, int), np.zeros(1, int))]
  assert right_padded(rows, limit=512, pad_id=0)[0].shape == (2, 48)
