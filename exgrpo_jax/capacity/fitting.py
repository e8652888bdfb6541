"""Search for the most slots and microbatch tokens that fit on one GPU, by formula.

Both settings affect only memory, time and rounding. The search treats them independently, because
they affect different programs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from exgrpo_jax.capacity import memory, step
from exgrpo_jax.capacity.memory import Need
from exgrpo_jax.capacity.step import Step
from exgrpo_jax.experiment.settings import RunConfig
from exgrpo_jax.runtime.compilations import Program

_SPARE = 0.05  # fraction of memory to keep free, because the formula is incomplete
_FEWEST_SLOTS, _MOST_SLOTS = 8, 1024
_MOST_TOKENS = 32768  # per microbatch; larger microbatches are no faster


class Fitted(NamedTuple):
  """The numbers of slots and microbatch tokens that fit."""

  slots: int
  tokens_per_microbatch: int

  @property
  def flags(self) -> str:
    """Return the settings as command-line flags."""
    tokens = self.tokens_per_microbatch
    return f'--config.rollout.slots={self.slots} --config.microbatch.tokens={tokens}'

  def applied(self, config: RunConfig) -> RunConfig:
    """Return the config with these settings."""
    rollout = dataclasses.replace(config.rollout, slots=self.slots)
    microbatch = dataclasses.replace(config.microbatch, tokens=self.tokens_per_microbatch)
    return dataclasses.replace(config, rollout=rollout, microbatch=microbatch)


def fit(config: RunConfig, limit: float) -> Fitted | None:
  """Double slots and microbatch tokens while they fit on a GPU; return the largest values that fit.

  Returns None if even the smallest values do not fit. `limit` is the number of bytes available to
  programs. The slots and microbatch tokens set in `config` are ignored.
  """

  def fits(list_programs: Callable[[Step], Iterable[Program]], slots: int, tokens: int) -> bool:
    found = peaks(Fitted(slots, tokens).applied(config), list_programs)
    return max(found.values()) <= (1 - _SPARE) * limit

  def training(whole: Step) -> Iterator[Program]:
    return itertools.chain(whole.scoring(), whole.updating())

  rollout = config.rollout
  row, rows = rollout.longest_row, rollout.questions * rollout.group_size
  most = max(_FEWEST_SLOTS, min(_MOST_SLOTS, 1 << (rows - 1).bit_length()))
  slots = _largest(_FEWEST_SLOTS, most, lambda slots: fits(Step.generating, slots, row))
  most = max(row, _MOST_TOKENS)
  tokens = _largest(row, most, lambda tokens: fits(training, _FEWEST_SLOTS, tokens))
  return Fitted(slots, tokens) if slots and tokens else None


def programs(whole: Step) -> Iterator[Program]:
  """Yield all programs of a step."""
  return itertools.chain(whole.scoring(), whole.generating(), whole.updating())


def needs(whole: Step) -> Callable[[Program], Need]:
  """Return a function that estimates a program's memory on a GPU by formula."""
  platform = memory.of_gpu(whole.spec.model.dtype)
  return functools.partial(memory.estimated, spec=whole.spec, platform=platform)


def peaks(
  config: RunConfig, list_programs: Callable[[Step], Iterable[Program]] = programs
) -> dict[str, int]:
  """Estimate how many bytes are in use on one GPU while each of a step's programs runs.

  Returns program name -> largest peak, for programs that have a formula.
  """
  whole = step.of_config(config)
  most, need_of = dict[str, int](), needs(whole)
  for one in list_programs(whole):
    if one.name in memory.KNOWN:
      peak = memory.other_arrays(one, whole.held) + need_of(one).peak
      most[one.name] = max(most.get(one.name, 0), peak)
  return most


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
  """Double `least` while it fits and is at most `most`; return the last value that fits, or 0."""
  found = 0
  while least <= most and fits(least):
    found, least = least, 2 * least
  return found
