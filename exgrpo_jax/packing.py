"""Packing of rows into sequences of one of two lengths, with little padding, in NumPy.

A row is a prompt and its response. Sequences hold whole rows, one after another. Attention
separates the rows of a sequence by their segments, and each row's positions start at 0. If
attention can (`attention.has_prefixes`), rows with the same prompt share it in a sequence, as their
prefix. A forward pass has a fixed number of sequences of one length, so only two shapes are
compiled, whatever the rows' lengths, or one if the model is tiny (`model.is_tiny`). Shape letters:
R rows to pack, B sequences of a pass, T their length, W response tokens of a sequence. Only these
get logits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import chex
import numpy as np

from exgrpo_jax.datatypes import Array

# ---- Padding ----


_SMALLEST_BUCKET = 32  # tokens; below it, compiling another shape costs more than the padding


def length_bucket(length: int, limit: int | None = None) -> int:
  """Round `length` up to the next of 32, 48, 64, 96, 128, …, but at most to `limit`."""
  power = 1 << (length - 1).bit_length()
  three_quarters = power * 3 // 4
  bucket = max(_SMALLEST_BUCKET, three_quarters if length <= three_quarters else power)
  return bucket if limit is None else min(limit, bucket)


def rows_within(num_tokens: int, length: int) -> int:
  """Return how many rows of `length` tokens fit a budget of tokens; at least one."""
  return max(1, num_tokens // length)


def right_padded(
  rows: Sequence[tuple[np.ndarray, np.ndarray]], limit: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Concatenate each row's prompt and response, and pad on the right.

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


# A long sequence holds two of the longest rows if these are short. Otherwise rows of more than half
# its length find no partner. In longer sequences attention costs more than that saves.
_PAIRED = 256  # tokens of both
# With prefixes, a sequence of short rows holds three of the longest, about what a group of eight
# needs. It does not hold four, because none of the longest may fit into a short sequence.
_GROUPED = 320  # tokens of all three
# A short sequence is this fraction of a long one. Shorter ones waste less in a pass that is not
# full, but too many rows fit only long ones: with an eighth, padding grows by half at 64 shards.
_SHORT_PART = 4
# Passes per minibatch if the budget allows fewer: passes are whole, and with few of them most
# tokens are padding.
_PASSES = 8
# At most this many numbers of long passes are tried: of many passes, one more matters little.
_TRIALS = 8

Rows = list[int]  # the rows of one sequence, in order


class Shape(NamedTuple):
  """The shape of a forward pass."""

  count: int  # B, sequences
  length: int  # T, tokens of each
  window: int  # W, response tokens of each at most, below T

  @property
  def num_tokens(self) -> int:
    """Return the tokens of a pass, padding included."""
    return self.count * self.length


class Pass(NamedTuple):
  """The rows of one forward pass."""

  shape: Shape
  sequences: list[Rows]  # at most shape.count


class Prefixes(NamedTuple):
  """The prefixes of rows; a sequence holds a prefix once for all its rows of one name."""

  name_R: np.ndarray  # int, equal only if the rows begin with the same tokens
  length_R: np.ndarray  # int, tokens, equal for rows of one name and fewer than the row's


class Segments(NamedTuple):
  """The row of its sequence that each token belongs to, and its position in that row."""

  segment_BT: Array  # int32, 1, 2, … by row, and by prefix if prefixes are shared; 0 is padding
  position_BT: Array  # int32, from 0 in each row; 0 in the padding
  # int32, the earlier segment that a token continues, or its own segment in a prefix; None if each
  # row is one segment.
  prefix_BT: Array | None = None


class Layout(NamedTuple):
  """The source of each token of a pass."""

  row_BT: np.ndarray  # int64, index of its row; 0 in the padding
  segments: Segments  # NumPy

  def take(self, x_RT: np.ndarray) -> np.ndarray:
    """Gather the rows' values at each token of the pass, 0 in padding: [R, T', …] -> [B, T, …]."""
    taken_BT = x_RT[self.row_BT, self.segments.position_BT]
    taken_BT[np.asarray(self.segments.segment_BT) == 0] = 0
    return taken_BT


def shapes(
  num_shards: int,
  tokens_per_shard: int,
  longest_row: int,
  max_response: int,
  num_rows: int,
  has_prefixes: bool = False,
  are_equal: bool = False,
) -> tuple[Shape, Shape]:
  """Choose the (long, short) shapes of passes, whatever the rows' lengths.

  Args:
    num_shards: shards over which sequences are split evenly.
    tokens_per_shard: budget of a pass of long sequences; each shard has at least one sequence.
    longest_row: tokens of the longest possible row, at least 2.
    max_response: response tokens of the longest possible row.
    num_rows: about how many rows are packed at a time.
    has_prefixes: whether rows with the same prompt share it, so that a sequence has room for more
      responses.
    are_equal: whether the short shape is the long one, so that one program is compiled.
  """
  rows_per_shard = -(-num_rows // num_shards)
  most, limit = (3, _GROUPED) if has_prefixes else (2, _PAIRED)
  # How many of the longest rows a long sequence holds.
  rows = max(1, min(most, rows_per_shard, min(tokens_per_shard, limit) // longest_row))
  length, responses = rows * longest_row, rows * max_response
  if has_prefixes:
    responses = max(length - (longest_row - max_response), length // 2)
  sequences = min(tokens_per_shard // length, -(-rows_per_shard // (rows * _PASSES)))
  count = num_shards * max(1, sequences)

  def shape(size: int) -> Shape:
    window = -(-size * responses // length)
    return Shape(count, size, max(1, min(window, size - 1)))

  return shape(length), shape(length if are_equal else max(2, -(-length // _SHORT_PART)))


def pack(
  length_R: np.ndarray,
  response_R: np.ndarray,
  long: Shape,
  short: Shape,
  prefixes: Prefixes | None = None,
) -> list[Pass]:
  """Pack each row once into passes, in nearly as few tokens as possible; at least one pass.

  Best-fit decreasing: rows go by falling length, with the rows of one prefix together. Each row
  goes where it adds the fewest tokens, and among such places to the fullest sequence with room.
  Several numbers of long passes are tried; the remaining rows go into short ones.

  Args:
    length_R: int, tokens of each row, at most the long shape's length; rows of 0 are left out.
    response_R: int, response tokens of each row, at most the long shape's window.
    long: shape of the first passes.
    short: shape of the other passes.
    prefixes: the rows' prefixes; None shares nothing.
  """
  chex.assert_rank([length_R, response_R], 1)
  chex.assert_equal_shape([length_R, response_R])
  prefixes = prefixes or _no_prefixes(length_R)
  rows = _Rows(length_R, response_R, *prefixes)
  order = _order(rows)
  only_long, _ = _best_fit(order, rows, long, len(order))
  needs_long_R = (length_R > short.length) | (response_R > short.window)
  most = -(-len(only_long) // long.count)
  least = -(-int((length_R - prefixes.length_R)[needs_long_R].sum()) // long.num_tokens)
  best: list[Pass] = _passes(long, only_long)
  for num_long in np.unique(np.linspace(least, most, _TRIALS).astype(int)):
    in_long, rest = _best_fit(order, rows, long, num_long * long.count)
    if needs_long_R[rest].any():
      continue
    in_short, _ = _best_fit(rest, rows, short, len(rest))
    found = _passes(long, in_long) + _passes(short, in_short)
    if not best or _cost(found) < _cost(best):
      best = found
  return best or [Pass(short, [])]


def shared_prompts(
  tokens_RT: np.ndarray, prompt_R: np.ndarray, routes_RTLC: Array | None = None
) -> Prefixes:
  """Find the prefixes that rows share, from the numbers of tokens of their prompts.

  A prompt's last token stays out of the prefix because it predicts a first token in each row. Rows
  whose prompts went to different experts share none.
  """
  names: dict[bytes, int] = {}
  of_rows = (
    b''.join(
      np.asarray(x_RT[row, :prompt]).tobytes()
      for x_RT in (tokens_RT, routes_RTLC)
      if x_RT is not None
    )
    for row, prompt in enumerate(prompt_R)
  )
  name_R = np.array([names.setdefault(of_row, len(names)) for of_row in of_rows], int)
  return Prefixes(name_R, np.maximum(prompt_R - 1, 0))


def layout(
  shape: Shape,
  sequences: Sequence[Rows],
  length_R: np.ndarray,
  prefixes: Prefixes | None = None,
) -> Layout:
  """Lay out the tokens of a pass whose sequences hold these rows."""
  row_BT = np.zeros((shape.count, shape.length), int)
  segment_BT, position_BT, prefix_BT = (np.zeros(row_BT.shape, np.int32) for _ in range(3))
  for b, rows in enumerate(sequences):
    end = 0
    for segment, (row, first, last, prefix) in enumerate(_pieces(rows, length_R, prefixes), 1):
      place = slice(end, end + last - first)
      row_BT[b, place], segment_BT[b, place] = row, segment
      position_BT[b, place] = np.arange(first, last)
      prefix_BT[b, place] = prefix or segment
      end = place.stop
  return Layout(row_BT, Segments(segment_BT, position_BT, prefix_BT if prefixes else None))


def _pieces(
  rows: Rows, length_R: np.ndarray, prefixes: Prefixes | None
) -> Iterator[tuple[int, int, int, int]]:
  """Yield the segments of a sequence: (row, its first token, its last + 1, prefix).

  A prefix is the number of an earlier segment, from 1, and 0 for none.
  """
  count, number_of = 0, dict[int, int]()  # segments; by the name of the prefix
  for row in rows:
    name, shared = (int(x_R[row]) for x_R in prefixes) if prefixes else (0, 0)
    if shared and name not in number_of:
      yield row, 0, shared, 0
      count += 1
      number_of[name] = count
    yield row, shared, int(length_R[row]), number_of[name] if shared else 0
    count += 1


def predictors(is_target_BT: np.ndarray, window: int) -> np.ndarray:
  """Return the positions before each target, and fill up the window with other positions.

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


class _Rows(NamedTuple):
  """The facts about each row that `pack` uses."""

  length_R: np.ndarray
  response_R: np.ndarray
  prefix_R: np.ndarray  # name
  shared_R: np.ndarray  # tokens of the prefix


def _no_prefixes(length_R: np.ndarray) -> Prefixes:
  return Prefixes(np.arange(len(length_R)), np.zeros_like(length_R))


def _order(rows: _Rows) -> list[int]:
  """Sort the rows with tokens: prefixes by their longest row, then rows by their own length."""
  longest = np.zeros(rows.prefix_R.max(initial=-1) + 1, int)
  np.maximum.at(longest, rows.prefix_R, rows.length_R)
  order = np.lexsort((-rows.length_R, rows.prefix_R, -longest[rows.prefix_R]))
  return order[rows.length_R[order] > 0].tolist()


def _best_fit(
  order: Sequence[int], rows: _Rows, shape: Shape, count: int
) -> tuple[list[Rows], Rows]:
  """Return (the rows of each of at most `count` sequences, rows that did not fit)."""
  sequences: list[Rows] = [[] for _ in range(count)]
  tokens = np.full(count, shape.length)  # room left in each
  responses = np.full(count, shape.window)
  no_room = (shape.length + 1) ** 2  # more than any sequence with room costs
  holders: dict[int, list[int]] = {}  # sequences that hold a prefix
  left: Rows = []
  for row in order:
    length, response, prefix, shared = (int(x_R[row]) for x_R in rows)
    holding = holders.setdefault(prefix, [])
    added = np.array(length)  # tokens, in any sequence
    if shared and holding:
      added = np.full(count, length)
      added[holding] -= shared
    fits = (tokens >= added) & (responses >= response)
    if not fits.any():
      left.append(row)
      continue
    # Minimize the tokens added, then the room left.
    fullest = int(np.where(fits, added * (shape.length + 1) + tokens, no_room).argmin())
    sequences[fullest].append(row)
    if fullest in holding:
      length -= shared
    else:
      holding.append(fullest)
    tokens[fullest] -= length
    responses[fullest] -= response
  return [rows for rows in sequences if rows], left


def _passes(shape: Shape, sequences: list[Rows]) -> list[Pass]:
  return [
    Pass(shape, sequences[start : start + shape.count])
    for start in range(0, len(sequences), shape.count)
  ]


def _cost(passes: Sequence[Pass]) -> tuple[int, int]:
  """Return (tokens, passes)."""
  return sum(one.shape.num_tokens for one in passes), len(passes)
