"""Packs rows into sequences of one of two lengths, so that little is padding; pure NumPy.

A row is a prompt and its response. Sequences hold whole rows, one after another; attention keeps
the rows of a sequence apart by their segments, and each row's positions start at 0. A forward pass
has a fixed number of sequences of one length, so only two shapes are compiled, whatever the rows'
lengths. Shape letters: R rows to pack, B sequences of a pass, T their length, W response tokens of
a sequence, which alone get logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import chex
import numpy as np

from exgrpo_jax.datatypes import Array

# A long sequence holds two of the longest rows if these are short: otherwise rows of more than half
# its length find no partner. In longer sequences attention costs more than that saves.
_PAIRED = 256  # tokens of both
# A short sequence is this fraction of a long one. Shorter ones waste less in a pass that is not
# full, but too many rows fit only long ones: with an eighth, padding grows by half at 64 shards.
_SHORT_PART = 4
# Passes per minibatch where the budget allows fewer: passes are whole, and few of them are mostly
# padding.
_PASSES = 8
# Numbers of long passes to try at most: with many passes, one more or less matters little.
_TRIALS = 8

Rows = list[int]  # of one sequence, in their order


class Shape(NamedTuple):
  """The shape of a forward pass."""

  count: int  # B, sequences
  length: int  # T, tokens of each
  window: int  # W, response tokens of each at most, below T

  @property
  def num_tokens(self) -> int:
    """Tokens of a pass, padding included."""
    return self.count * self.length


class Pass(NamedTuple):
  """The rows of one forward pass."""

  shape: Shape
  sequences: list[Rows]  # at most shape.count


class Segments(NamedTuple):
  """Which row of its sequence a token belongs to, and where it stands in that row."""

  segment_BT: Array  # int32, 1, 2, … by row; 0 is padding
  position_BT: Array  # int32, from 0 in each row; 0 in the padding


class Layout(NamedTuple):
  """Where each token of a pass comes from."""

  row_BT: np.ndarray  # int64, index of its row; 0 in the padding
  segments: Segments  # NumPy

  def take(self, x_RT: np.ndarray) -> np.ndarray:
    """What the rows hold at each token of the pass, 0 in the padding: [R, T'] -> [B, T]."""
    is_token_BT = np.asarray(self.segments.segment_BT) > 0
    return np.where(is_token_BT, x_RT[self.row_BT, self.segments.position_BT], x_RT.dtype.type(0))


def shapes(
  num_shards: int, tokens_per_shard: int, longest_row: int, max_response: int, num_rows: int
) -> tuple[Shape, Shape]:
  """The (long, short) shapes of passes, whatever the rows' lengths.

  Args:
    num_shards: over which sequences are split evenly.
    tokens_per_shard: budget of a pass of long sequences; each shard has at least one sequence.
    longest_row: tokens of the longest possible row, at least 2.
    max_response: response tokens of the longest possible row.
    num_rows: packed at a time, about.
  """
  rows_per_shard = -(-num_rows // num_shards)
  is_paired = 2 * longest_row <= min(tokens_per_shard, _PAIRED) and rows_per_shard > 1
  rows = 2 if is_paired else 1  # of the longest, in a long sequence
  length, responses = rows * longest_row, rows * max_response
  sequences = min(tokens_per_shard // length, -(-rows_per_shard // (rows * _PASSES)))
  count = num_shards * max(1, sequences)

  def shape(size: int) -> Shape:
    window = -(-size * responses // length)
    return Shape(count, size, max(1, min(window, size - 1)))

  return shape(length), shape(max(2, -(-length // _SHORT_PART)))


def pack(length_R: np.ndarray, response_R: np.ndarray, long: Shape, short: Shape) -> list[Pass]:
  """Passes that hold each row once, in nearly as few tokens as possible; at least one pass.

  Best-fit decreasing: rows by falling length, each to the fullest sequence with room. Tries several
  numbers of long passes; the remaining rows go into short ones.

  Args:
    length_R: int, tokens of each row, at most the long shape's length; rows of 0 are left out.
    response_R: int, response tokens of each row, at most the long shape's window.
    long: shape of the first passes.
    short: shape of the others.
  """
  chex.assert_rank([length_R, response_R], 1)
  chex.assert_equal_shape([length_R, response_R])
  order = np.argsort(-length_R, kind='stable')[: np.count_nonzero(length_R)].tolist()
  only_long, _ = _best_fit(order, length_R, response_R, long, len(order))
  needs_long_R = (length_R > short.length) | (response_R > short.window)
  most = -(-len(only_long) // long.count)
  least = -(-int(length_R[needs_long_R].sum()) // long.num_tokens)
  best: list[Pass] = _passes(long, only_long)
  for num_long in np.unique(np.linspace(least, most, _TRIALS).astype(int)):
    in_long, rest = _best_fit(order, length_R, response_R, long, num_long * long.count)
    if needs_long_R[rest].any():
      continue
    in_short, _ = _best_fit(rest, length_R, response_R, short, len(rest))
    found = _passes(long, in_long) + _passes(short, in_short)
    if not best or _cost(found) < _cost(best):
      best = found
  return best or [Pass(short, [])]


def layout(shape: Shape, sequences: Sequence[Rows], length_R: np.ndarray) -> Layout:
  """Lays out the tokens of a pass whose sequences hold these rows."""
  row_BT = np.zeros((shape.count, shape.length), int)
  segment_BT, position_BT = (np.zeros(row_BT.shape, np.int32) for _ in range(2))
  for b, rows in enumerate(sequences):
    start = 0
    for segment, row in enumerate(rows, 1):
      place = slice(start, start + length_R[row])
      row_BT[b, place], segment_BT[b, place] = row, segment
      position_BT[b, place] = np.arange(length_R[row])
      start = place.stop
  return Layout(row_BT, Segments(segment_BT, position_BT))


def predictors(is_target_BT: np.ndarray, window: int) -> np.ndarray:
  """Positions that predict the targets, one before each; other positions fill up the window.

  Args:
    is_target_BT: bool, False at position 0; at most `window` targets in a sequence.
    window: W, fewer than T.

  Returns:
    int32 [B, W], rising in each sequence without repetition, so that gradients never collide.
  """
  chex.assert_rank(is_target_BT, 2)
  # Stable sort: predictors first, then positions that predict nothing, each in order.
  order_BT = np.argsort(~is_target_BT[:, 1:], axis=1, kind='stable')
  return np.sort(order_BT[:, :window], axis=1).astype(np.int32)


def _best_fit(
  order: Sequence[int],
  length_R: np.ndarray,
  response_R: np.ndarray,
  shape: Shape,
  count: int,
) -> tuple[list[Rows], Rows]:
  """(the rows of each of at most `count` sequences, rows that did not fit)."""
  sequences: list[Rows] = [[] for _ in range(count)]
  tokens = np.full(count, shape.length)  # room left in each
  responses = np.full(count, shape.window)
  left: Rows = []
  for row in order:
    length, response = int(length_R[row]), int(response_R[row])
    room = np.where((tokens >= length) & (responses >= response), tokens, shape.length + 1)
    fullest = int(room.argmin()) if count else 0
    if not count or room[fullest] > shape.length:
      left.append(row)
      continue
    sequences[fullest].append(row)
    tokens[fullest] -= length
    responses[fullest] -= response
  return [rows for rows in sequences if rows], left


def _passes(shape: Shape, sequences: list[Rows]) -> list[Pass]:
  return [
    Pass(shape, sequences[start : start + shape.count])
    for start in range(0, len(sequences), shape.count)
  ]


def _cost(passes: Sequence[Pass]) -> tuple[int, int]:
  """(tokens, passes)."""
  return sum(one.shape.num_tokens for one in passes), len(passes)
