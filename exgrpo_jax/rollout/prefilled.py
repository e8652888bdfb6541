"""Which prompts are prefilled, and where they are kept: the host's side of `decode_loop.Prompts`.

`DecodeSpec.prompts` of them are kept at once; more go in waves. A prompt is padded to one of at
most three lengths, and each length has a fixed number of prompts in one prefill, so that a run
compiles at most three programs for all of its prompts. Responses that are resumed are prefilled
right into slots, packed into sequences of two lengths (see packing.py).
"""

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax import packing
from exgrpo_jax.errors import counted
from exgrpo_jax.packing import Segments, Shape
from exgrpo_jax.padding import rows_within
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import filling
from exgrpo_jax.rollout.decode_loop import DecodeSpec, Prompts
from exgrpo_jax.runtime import activity

# In one prefill, on each part of the rows: enough to keep the chips' matrix units busy, and so few
# that a prefill which is not full wastes little.
PREFILL_TOKENS = 512
_SHORTEST = 64  # tokens; below it, compiling another shape costs more than the padding
# Responses that are resumed in one sequence, at most. Lognormal lengths with a 99th percentile of 8
# medians then have 1.02 tokens computed for each; four in one 1.04, three 1.10.
_ROWS_OF_SEQUENCE = 8

_Name = TypeVar('_Name', bound=Hashable)

Origin = tuple[int, bytes]  # a question's row and its prompt's tokens: what equal prompts share


@dataclasses.dataclass
class Prefilled:
  """The prompts that are prefilled, and the place of each."""

  prompts: Prompts
  places: dict[Origin, int] = dataclasses.field(default_factory=dict)

  def take_in(
    self,
    config: model.Config,
    spec: DecodeSpec,
    params: model.Params,
    mesh: Mesh,
    wanted: Iterable[tuple[Origin, np.ndarray]],
  ) -> None:
    """Prefills the first prompts of `wanted`, as many as fit; drops all others."""
    wave: dict[Origin, np.ndarray] = {}
    for origin, prompt in wanted:
      wave.setdefault(origin, prompt)
      if len(wave) == spec.prompts:
        break
    self.places = {origin: place for origin, place in self.places.items() if origin in wave}
    absent = {origin: prompt for origin, prompt in wave.items() if origin not in self.places}
    free = sorted({*range(spec.prompts)} - {*self.places.values()})
    self.places |= (new := dict(zip(absent, free)))
    lengths = prefill_lengths(spec.max_prompt)
    done = 0
    with activity.doing(lambda: f'{done} of {counted(len(absent), "prompt")} read'):
      for tokens_PT, origins in batches(absent, lengths, spec.prompts, mesh, spec.pad_id):
        lengths_P = np.ones(len(tokens_PT), np.int32)
        place_P = np.full(len(tokens_PT), spec.prompts, np.int32)
        lengths_P[: len(origins)] = [len(absent[origin]) for origin in origins]
        place_P[: len(origins)] = [new[origin] for origin in origins]
        self.prompts = filling.prefill(config, params, self.prompts, tokens_PT, lengths_P, place_P)
        # So that the progress is true. What the device waits for the next prompts is little.
        jax.block_until_ready(self.prompts.hidden_WD)
        done += len(origins)


def batches(
  rows: Mapping[_Name, np.ndarray], lengths: Sequence[int], most: int, mesh: Mesh, pad_id: int
) -> Iterator[tuple[np.ndarray, list[_Name]]]:
  """(tokens_PT, names of its first rows) of what is prefilled together, int32.

  Args:
    rows: their tokens by name.
    lengths: what rows are padded to, shortest first.
    most: rows that there may be at once.
    mesh: of decoding.
    pad_id: any valid token.
  """
  for shorter, length in zip([0, *lengths], lengths):
    alike = [name for name, tokens in rows.items() if shorter < len(tokens) <= length]
    count = prefilled_together(length, most, mesh)
    for start in range(0, len(alike), count):
      names = alike[start : start + count]
      tokens_PT = np.full((count, length), pad_id, np.int32)
      for row_T, name in zip(tokens_PT, names):
        row_T[: len(rows[name])] = rows[name]
      yield tokens_PT, names


def prefill_lengths(max_prompt: int) -> list[int]:
  """What prompts are padded to: the longest, a half and a quarter of it; shortest first."""
  parts = [-(-max_prompt // divisor) for divisor in (4, 2)]
  return [*(length for length in parts if length >= _SHORTEST), max_prompt]


def packed(
  rows: Mapping[_Name, np.ndarray],
  longest_row: int,
  most: int,
  mesh: Mesh,
  routes_RTLC: np.ndarray | None = None,
  alone: bool = False,
) -> Iterator[tuple[np.ndarray, Segments, list[tuple[_Name, int]], np.ndarray | None]]:
  """(tokens_PT int32, segments, (name, first of the P * T tokens) of their rows, routes_PTLC).

  Args:
    rows: their tokens by name.
    longest_row: tokens of the longest that there may be.
    most: rows that there may be at once.
    mesh: of decoding.
    routes_RTLC: of the rows, at least as long (see routes.py); None where they are not kept.
    alone: see `packed_passes`.
  """
  if not rows:
    return
  names, length_R = list(rows), np.array([len(tokens) for tokens in rows.values()])
  tokens_RT = np.zeros((len(rows), length_R.max()), np.int32)
  for row_T, tokens in zip(tokens_RT, rows.values()):
    row_T[: len(tokens)] = tokens
  for shape, sequences in packed_passes(length_R, longest_row, most, mesh, alone):
    laid_out = packing.layout(shape, sequences, length_R)
    starts = [
      (names[row], number * shape.length + int(start))
      for number, own in enumerate(sequences)
      for row, start in zip(own, np.cumsum([0, *length_R[own]]))
    ]
    routes_PTLC = None if routes_RTLC is None else laid_out.take(routes_RTLC)
    yield laid_out.take(tokens_RT), laid_out.segments, starts, routes_PTLC


def packed_passes(
  length_R: np.ndarray, longest_row: int, most: int, mesh: Mesh, alone: bool = False
) -> list[packing.Pass]:
  """The passes over rows of these lengths; arguments as in `packed`.

  With `alone` each row has a sequence of its own, whose length follows from the row's: where the
  clock decides which rows are resumed together, rounding must not depend on that.
  """
  long, short = packed_shapes(longest_row, most, mesh)
  if not alone:
    return packing.pack(length_R, np.ones_like(length_R), long, short)
  is_short_R = length_R <= short.length
  return [
    packing.Pass(shape, [[row] for row in rows[start : start + shape.count]])
    for shape, rows in (
      (short, np.flatnonzero(is_short_R).tolist()),
      (long, np.flatnonzero(~is_short_R).tolist()),
    )
    for start in range(0, len(rows), shape.count)
  ]


def packed_shapes(longest_row: int, most: int, mesh: Mesh) -> tuple[Shape, Shape]:
  """The (long, short) shapes in which responses are resumed; W is how many a sequence holds."""
  short = -(-longest_row // 4)
  long, short = (
    Shape(prefilled_together(length, most, mesh), length, _ROWS_OF_SEQUENCE)
    for length in (longest_row, short if short >= _SHORTEST else longest_row)
  )
  return long, short


def packed_rows(num_sequences: int, most: int) -> int:
  """How many rows so many sequences resume at most."""
  return min(most, num_sequences * _ROWS_OF_SEQUENCE)


def prefilled_together(length: int, most: int, mesh: Mesh) -> int:
  """How many rows of `length` tokens are prefilled together, of `most` that there may be."""
  _, num_shards = sharding.split(mesh, 'batch')
  return min(most, rows_within(PREFILL_TOKENS, length) * num_shards)
