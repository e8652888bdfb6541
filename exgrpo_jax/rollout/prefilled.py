"""Which prompts are prefilled, and where they are kept: the host's side of `decode_loop.Prompts`.

`DecodeSpec.prompts` of them are kept at once; more go in waves. A prompt is padded to one of at
most three lengths, and each length has a fixed number of prompts in one prefill, so that a run
compiles at most three programs for all of its prompts. Responses that are resumed are prefilled
right into slots, by the same rule.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.padding import rows_within
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import filling
from exgrpo_jax.rollout.decode_loop import DecodeSpec, Prompts

# In one prefill, on each part of the rows: enough to keep the chips' matrix units busy, and so few
# that a prefill which is not full wastes little.
PREFILL_TOKENS = 512
_SHORTEST = 64  # tokens; below it, compiling another shape costs more than the padding

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
    for tokens_PT, origins in batches(absent, lengths, spec.prompts, mesh, spec.pad_id):
      lengths_P = np.ones(len(tokens_PT), np.int32)
      place_P = np.full(len(tokens_PT), spec.prompts, np.int32)
      lengths_P[: len(origins)] = [len(absent[origin]) for origin in origins]
      place_P[: len(origins)] = [new[origin] for origin in origins]
      self.prompts = filling.prefill(config, params, self.prompts, tokens_PT, lengths_P, place_P)


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
  return _parts(max_prompt, (4, 2))


def resume_lengths(longest_row: int) -> list[int]:
  """What prompts with responses so far are padded to; shortest first.

  An eighth too, because lengths spread: where they are lognormal with a 99th percentile of 8
  medians, 1.6 tokens are computed for each token, and 2.0 without the eighth.
  """
  return _parts(longest_row, (8, 4, 2))


def _parts(longest: int, divisors: Sequence[int]) -> list[int]:
  """Fractions of a length that are not too short, then all of it."""
  parts = [-(-longest // divisor) for divisor in divisors]
  return [*(length for length in parts if length >= _SHORTEST), longest]


def prefilled_together(length: int, most: int, mesh: Mesh) -> int:
  """How many rows of `length` tokens are prefilled together, of `most` that there may be."""
  _, num_shards = sharding.split(mesh, 'batch')
  return min(most, rows_within(PREFILL_TOKENS, length) * num_shards)
