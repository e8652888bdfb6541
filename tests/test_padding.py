"""Padding: to which lengths rows are padded, and where the padding is."""

import numpy as np

from exgrpo_jax.packing import length_bucket, right_padded, rows_within


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
