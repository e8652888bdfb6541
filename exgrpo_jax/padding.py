"""Padding: every array of rows gets one of a few lengths, so that few shapes are compiled."""

import math
from collections.abc import Sequence

import numpy as np

_SMALLEST_BUCKET = 32  # tokens; below it, compiling costs more than the padding


def length_bucket(length: int, limit: float = math.inf) -> int:
  """The next of 32, 48, 64, 96, 128 …, at most `limit`."""
  power = 1 << (length - 1).bit_length()
  between = power * 3 // 4
  return min(limit, max(_SMALLEST_BUCKET, between if length <= between else power))


def right_padded(
  rows: Sequence[tuple[np.ndarray, np.ndarray]], limit: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Rows of (prompt, response) side by side: tokens_BT int32, response_mask_BT float32.

  T is the length bucket of the longest row, at most `limit`.
  """
  length = length_bucket(max(len(prompt) + len(response) for prompt, response in rows), limit)
  tokens_BT = np.full((len(rows), length), pad_id, np.int32)
  mask_BT = np.zeros((len(rows), length), np.float32)
  for b, (prompt, response) in enumerate(rows):
    stop = len(prompt) + len(response)
    tokens_BT[b, :stop] = np.concatenate([prompt, response])
    mask_BT[b, len(prompt) : stop] = 1
  return tokens_BT, mask_BT
