"""Padding: rows are padded to one of a few lengths, so that few shapes are compiled."""

from collections.abc import Sequence

import numpy as np

_SMALLEST_BUCKET = 32  # tokens; below it, compiling another shape costs more than the padding


def length_bucket(length: int, limit: int | None = None) -> int:
  """`length` rounded up to the next of 32, 48, 64, 96, 128, …, but at most `limit`."""
  power = 1 << (length - 1).bit_length()
  three_quarters = power * 3 // 4
  bucket = max(_SMALLEST_BUCKET, three_quarters if length <= three_quarters else power)
  return bucket if limit is None else min(limit, bucket)


def rows_within(num_tokens: int, length: int) -> int:
  """How many rows of `length` tokens fit a budget of tokens; at least one."""
  return max(1, num_tokens // length)


def right_padded(
  rows: Sequence[tuple[np.ndarray, np.ndarray]], limit: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Concatenates each row's prompt and response, and pads on the right.

  Args:
    rows: (prompt, response) token arrays.
    limit: the largest T; no row is longer.
    pad_id: the padding token.

  Returns:
    (tokens_BT int32, response_mask_BT float32). T is the length bucket of the longest row, at most
    `limit`.
  """
  length = length_bucket(max(len(prompt) + len(response) for prompt, response in rows), limit)
  tokens_BT = np.full((len(rows), length), pad_id, np.int32)
  mask_BT = np.zeros((len(rows), length), np.float32)
  for b, (prompt, response) in enumerate(rows):
    end = len(prompt) + len(response)
    tokens_BT[b, :end] = np.concatenate([prompt, response])
    mask_BT[b, len(prompt) : end] = 1
  return tokens_BT, mask_BT
