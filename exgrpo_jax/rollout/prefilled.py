"""Which prompts are prefilled, and in which places: the host's side of `decode_loop.Prompts`.

As many prompts as `DecodeSpec.prompts` says are kept at once; more go in waves. A prompt is padded
to one of at most three lengths, and each length has a fixed number of prompts in one prefill, so
that a run compiles at most three programs for all of its prompts.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.padding import rows_within
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.rollout.decode_loop import DecodeSpec, Prompts

# In one prefill, on each part of the rows: enough to keep the chips' matrix units busy, and so few
# that a prefill which is not full wastes little.
PREFILL_TOKENS = 512
_SHORTEST = 64  # tokens; below it, compiling another shape costs more than the padding

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
    """Prefills the first prompts of `wanted`, as many as there are places; forgets all others."""
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
    for shortest, length in zip([0, *lengths], lengths):
      group = [
        (new[origin], prompt)
        for origin, prompt in absent.items()
        if shortest < len(prompt) <= length
      ]
      count = prefilled_together(length, spec.prompts, mesh)
      for start in range(0, len(group), count):
        arrays = _arrays(dict(group[start : start + count]), count, length, spec)
        self.prompts = decode_loop.prefill(config, params, self.prompts, *arrays)


def prefill_lengths(max_prompt: int) -> list[int]:
  """What prompts are padded to: the longest, a half and a quarter of it; shortest first."""
  shorter = [-(-max_prompt // share) for share in (4, 2)]
  return [*(length for length in shorter if length >= _SHORTEST), max_prompt]


def prefilled_together(length: int, prompts: int, mesh: Mesh) -> int:
  """How many of the `prompts` that are kept are prefilled together, in rows of `length` tokens."""
  _, num_shards = sharding.split(mesh, 'batch')
  return min(prompts, rows_within(PREFILL_TOKENS, length) * num_shards)


def _arrays(
  prompt_of: Mapping[int, np.ndarray], count: int, length: int, spec: DecodeSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(tokens_PT, lengths_P, place_P) of prompts by place; what is left over has none."""
  tokens_PT = np.full((count, length), spec.pad_id, np.int32)
  lengths_P = np.ones(count, np.int32)
  place_P = np.full(count, spec.prompts, np.int32)
  for index, (place, prompt) in enumerate(prompt_of.items()):
    tokens_PT[index, : len(prompt)] = prompt
    lengths_P[index], place_P[index] = len(prompt), place
  return tokens_PT, lengths_P, place_P
