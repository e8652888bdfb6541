"""Pack rows into sequences of two possible lengths, with little padding. Uses NumPy.

A row is a prompt and its response. A sequence consists of whole rows, one after another. Attention
keeps rows apart by their segment numbers, and each row's positions start at 0. If the attention
backend supports prefixes (`attention.has_prefixes`), rows with the same prompt share a single copy
of the prompt within a sequence. Every forward pass has a fixed number of sequences of equal length,
so rows of any length need only two compiled shapes, or one if the model is tiny (`model.is_tiny`).

Shape letters: R rows to pack, B sequences per pass, T tokens per sequence, W response tokens per
sequence. Logits are computed only for response tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import chex
import numpy as np

from exgrpo_jax.datatypes import Array

# ---- Padding ----

_SMALLEST_BUCKET = 32  # tokens; padding to this length costs less than compiling smaller shapes


def length_bucket(length: int, limit: int | None = None) -> int:
  """Round `length` up to 32, 48, 64, 96, 128, …, but never above `limit`."""
  power = 1 << (length - 1).bit_length()
  three_quarters = power * 3 // 4
  bucket = max(_SMALLEST_BUCKET, three_quarters if length <= three_quarters else power)
  return bucket if limit is None else min(limit, bucket)


def rows_within(num_tokens: int, length: int) -> int:
  """Return how many rows of `length` tokens fit into `num_tokens`; at least one."""
  return max(1, num_tokens // length)


def right_padded(
  rows: Sequence[tuple[np.ndarray, np.ndarray]], limit: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Concatenate each row's (prompt, response), and pad on the right with `pad_id`.

  Returns (tokens_BT int32, response_mask_BT float32). T is the length bucket of the longest row,
  capped at `limit`. No row may be longer than `limit`.
  """
  length = length_bucket(max(len(prompt) + len(response) for prompt, response in rows), limit)
  tokens_BT = np.full((len(rows), length), pad_id, np.int32)
  mask_BT = np.zeros((len(rows), length), np.float32)
  for b, (prompt, response) in enumerate(rows):
    end = len(prompt) + len(response)
    tokens_BT[b, :end] = np.concatenate([prompt, response])
    mask_BT[b, len(prompt) : end] = 1
  return tokens_BT, mask_BT


# A long sequence has room for two of the longest rows if they are short, so that any two rows can
# be paired. If they are longer, attention over such a sequence would cost more than pairing saves.
_PAIRED = 256  # maximum number of tokens in two such rows together
# With prefixes, a long sequence has room for three of the longest rows if they are short. A group
# of eight needs about that much. With room for four, the longest row would fit into a short
# sequence, which must not happen.
_GROUPED = 320  # maximum number of tokens in three such rows together
# A short sequence has 1 / _SHORT_PART of a long sequence's length. If it were shorter, a partly
# filled pass would waste less, but too many rows would need long sequences: with 1/8, padding grows
# by half at 64 shards.
_SHORT_PART = 4
# Aim for at least this many passes per minibatch, even if the budget allows fewer. A partly filled
# pass costs as much as a full one, so with few passes, most tokens would be padding.
_PASSES = 8
# Try at most this many counts of long passes. With many passes, one more or less hardly matters.
_TRIALS = 8

Rows = list[int]  # the rows of one sequence, in order


class Shape(NamedTuple):
  """The shape of a forward pass."""

  count: int  # B, the number of sequences
  length: int  # T, tokens per sequence
  window: int  # W, maximum number of response tokens per sequence; less than T

  @property
  def num_tokens(self) -> int:
    """Return the number of tokens in a pass, including padding."""
    return self.count * self.length


class Pass(NamedTuple):
  """The rows of one forward pass."""

  shape: Shape
  sequences: list[Rows]  # at most shape.count


class Prefixes(NamedTuple):
  """The prefix of each row; within a sequence, rows with the same prefix share one copy of it."""

  name_R: np.ndarray  # int, identifies the prefix: equal only if rows begin with the same tokens
  length_R: np.ndarray  # int, tokens in the prefix; fewer than in the row, the same for equal names


class Segments(NamedTuple):
  """Each token's row within its sequence, and its position in that row."""

  segment_BT: Array  # int32, 1, 2, … per row, and per prefix if prefixes are shared; 0 is padding
  position_BT: Array  # int32, from 0 in each row; 0 in padding
  # int32, the prefix that the token's segment continues, as a segment number, or the token's own
  # segment if there is no such prefix; None if no prefixes are shared.
  prefix_BT: Array | None = None


class Layout(NamedTuple):
  """The source row of each token in a pass."""

  row_BT: np.ndarray  # int64, index of the token's row; 0 in padding
  segments: Segments  # NumPy

  def take(self, x_RT: np.ndarray) -> np.ndarray:
    """Gather the rows' values for each token, with 0 in padding: [R, T', …] -> [B, T, …]."""
    values_BT = x_RT[self.row_BT, self.segments.position_BT]
    values_BT[np.asarray(self.segments.segment_BT) == 0] = 0
    return values_BT


def shapes(
  num_shards: int,
  tokens_per_shard: int,
  longest_row: int,
  max_response: int,
  num_rows: int,
  has_prefixes: bool = False,
  are_equal: bool = False,
) -> tuple[Shape, Shape]:
  """Choose the (long, short) pass shapes, which do not depend on the rows' actual lengths.

  Args:
    num_shards: number of shards across which sequences are split evenly.
    tokens_per_shard: token budget per shard in a long pass; a shard gets at least one sequence.
    longest_row: number of tokens in the longest possible row, at least 2.
    max_response: number of response tokens in the longest possible row.
    num_rows: approximate number of rows that are packed together.
    has_prefixes: True if rows with the same prompt share it, so that a sequence has room for more
      responses.
    are_equal: True to make the short shape equal to the long one, so that only one program is
      compiled.
  """
  rows_per_shard = -(-num_rows // num_shards)
  max_rows, limit = (3, _GROUPED) if has_prefixes else (2, _PAIRED)
  # The number of longest rows that fit into a long sequence.
  rows = max(1, min(max_rows, rows_per_shard, min(tokens_per_shard, limit) // longest_row))
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
  """Pack rows into passes with nearly as few tokens as possible; return at least one pass.

  Best-fit decreasing: rows are placed from longest to shortest, keeping rows with the same prefix
  together. Each row goes into the sequence where it adds the fewest tokens; ties go to the fullest
  sequence. Different numbers of long passes are tried; the remaining rows go into short passes.

  `length_R` is each row's token count, at most the long shape's length; empty rows are skipped.
  `response_R` is each row's number of response tokens, at most the long shape's window. `prefixes`
  is None if no prefixes are shared.
  """
  chex.assert_rank([length_R, response_R], 1)
  chex.assert_equal_shape([length_R, response_R])
  name_R, shared_R = prefixes or (np.arange(len(length_R)), np.zeros_like(length_R))
  rows = length_R, response_R, name_R, shared_R
  # Sort prefixes by their longest row, and the rows of each prefix by length.
  longest = np.zeros(name_R.max(initial=-1) + 1, int)
  np.maximum.at(longest, name_R, length_R)
  sorted_R = np.lexsort((-length_R, name_R, -longest[name_R]))
  order = sorted_R[length_R[sorted_R] > 0].tolist()
  only_long, _ = _best_fit(order, rows, long, len(order))
  needs_long_R = (length_R > short.length) | (response_R > short.window)
  max_passes = -(-len(only_long) // long.count)
  min_passes = -(-int((length_R - shared_R)[needs_long_R].sum()) // long.num_tokens)
  packings = [_passes(long, only_long)]
  for num_long in np.unique(np.linspace(min_passes, max_passes, _TRIALS).astype(int)):
    in_long, rest = _best_fit(order, rows, long, num_long * long.count)
    if not needs_long_R[rest].any():
      in_short, _ = _best_fit(rest, rows, short, len(rest))
      packings.append(_passes(long, in_long) + _passes(short, in_short))

  def cost(passes: list[Pass]) -> tuple[int, int]:
    return sum(forward_pass.shape.num_tokens for forward_pass in passes), len(passes)

  return min(filter(None, packings), key=cost, default=[Pass(short, [])])


def shared_prompts(
  tokens_RT: np.ndarray, prompt_R: np.ndarray, routes_RTLC: Array | None = None
) -> Prefixes:
  """Find the prefixes that rows share; `prompt_R` is the number of prompt tokens in each row.

  A prompt's last token is not part of the prefix, because it predicts each row's first response
  token. Rows whose prompts were routed to different experts do not share a prefix.
  """
  names: dict[bytes, int] = {}
  keys = (
    b''.join(
      np.asarray(x_RT[row, :prompt]).tobytes()
      for x_RT in (tokens_RT, routes_RTLC)
      if x_RT is not None
    )
    for row, prompt in enumerate(prompt_R)
  )
  name_R = np.array([names.setdefault(key, len(names)) for key in keys], int)
  return Prefixes(name_R, np.maximum(prompt_R - 1, 0))


def layout(
  shape: Shape, sequences: Sequence[Rows], length_R: np.ndarray, prefixes: Prefixes | None = None
) -> Layout:
  """Find the source row and segment of every token in a pass with these sequences."""
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
  """Yield a sequence's segments: (row, first token, last token + 1, prefix).

  `prefix` is the one-based number of the segment that contains the row's prefix, or 0 for none.
  """
  count, number_of = 0, dict[int, int]()  # segments so far; prefix name -> segment number
  for row in rows:
    name, shared = (int(x_R[row]) for x_R in prefixes) if prefixes else (0, 0)
    if shared and name not in number_of:
      yield row, 0, shared, 0
      count += 1
      number_of[name] = count
    yield row, shared, int(length_R[row]), number_of[name] if shared else 0
    count += 1


def predictors(is_target_BT: np.ndarray, window: int) -> np.ndarray:
  """Return the position before each target, padded to length `window` with other positions.

  `is_target_BT` is False at position 0 and marks at most `window` targets per sequence; W < T.
  Returns int32 [B, W], strictly increasing in each sequence, so that gradients never collide.
  """
  chex.assert_rank(is_target_BT, 2)
  # Stable sort: predictors first, then other positions, each in ascending order.
  order_BT = np.argsort(~is_target_BT[:, 1:], axis=1, kind='stable')
  return np.sort(order_BT[:, :window], axis=1).astype(np.int32)


def _best_fit(
  order: Sequence[int], rows: tuple[np.ndarray, ...], shape: Shape, count: int
) -> tuple[list[Rows], Rows]:
  """Pack rows into at most `count` sequences; return (sequences, rows that did not fit).

  `rows` is (length_R, response_R, name_R, shared_R); the last two are prefix names and lengths.
  """
  sequences: list[Rows] = [[] for _ in range(count)]
  tokens = np.full(count, shape.length)  # room left in each sequence
  responses = np.full(count, shape.window)
  no_room = (shape.length + 1) ** 2  # more than the cost of any sequence with room
  holders: dict[int, list[int]] = {}  # prefix name -> sequences that contain the prefix
  remaining: Rows = []
  for row in order:
    length, response, prefix, shared = (int(x_R[row]) for x_R in rows)
    with_prefix = holders.setdefault(prefix, [])
    added_tokens = np.array(length)  # tokens added to a sequence
    if shared and with_prefix:
      added_tokens = np.full(count, length)
      added_tokens[with_prefix] -= shared
    fits = (tokens >= added_tokens) & (responses >= response)
    if not fits.any():
      remaining.append(row)
      continue
    # Minimize the tokens added, then the room left.
    fullest = int(np.where(fits, added_tokens * (shape.length + 1) + tokens, no_room).argmin())
    sequences[fullest].append(row)
    if fullest in with_prefix:
      length -= shared
    else:
      with_prefix.append(fullest)
    tokens[fullest] -= length
    responses[fullest] -= response
  return [rows for rows in sequences if rows], remaining


def _passes(shape: Shape, sequences: list[Rows]) -> list[Pass]:
  return [
    Pass(shape, sequences[start : start + shape.count])
    for start in range(0, len(sequences), shape.count)
  ]
