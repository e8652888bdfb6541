"""Slots and microbatch tokens that fit one GPU, by formula.

Both settings change only memory, time and rounding. Each one decides by itself whether its own
programs fit.
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

_SPARE = 0.05  # share of the memory kept free because the formula is not complete
_FEWEST_SLOTS, _MOST_SLOTS = 8, 1024
_MOST_TOKENS = 32768  # of a microbatch; with more an update is no faster


class Fitted(NamedTuple):
  """Settings that fit."""

  slots: int
  tokens_per_microbatch: int

  @property
  def flags(self) -> str:
    """Return the settings as flags of the command line."""
    return (
      f'--config.rollout.slots={self.slots} --config.microbatch.tokens={self.tokens_per_microbatch}'
    )

  def applied(self, config: RunConfig) -> RunConfig:
    """Return the config with these settings."""
    rollout = dataclasses.replace(config.rollout, slots=self.slots)
    microbatch = dataclasses.replace(config.microbatch, tokens=self.tokens_per_microbatch)
    return dataclasses.replace(config, rollout=rollout, microbatch=microbatch)


def fit(config: RunConfig, limit: float) -> Fitted | None:
  """Double slots and microbatch tokens while they fit a GPU; return the largest that do.

  Returns None if not even the smallest fit. `limit` is the bytes that programs can use. The slots
  and microbatches of `config` are not used.
  """

  def fits(list_programs: Callable[[Step], Iterable[Program]], slots: int, tokens: int) -> bool:
    whole = step.of_config(Fitted(slots, tokens).applied(config))
    return max(_peaks(whole, list_programs(whole)).values()) <= (1 - _SPARE) * limit

  rollout = config.rollout
  row, rows = rollout.longest_row, rollout.questions * rollout.group_size
  most = min(_MOST_SLOTS, 1 << (rows - 1).bit_length())
  slots = _largest(_FEWEST_SLOTS, most, lambda slots: fits(Step.generating, slots, row))
  tokens = _largest(
    row, max(row, _MOST_TOKENS), lambda tokens: fits(_training, _FEWEST_SLOTS, tokens)
  )
  return Fitted(slots, tokens) if slots and tokens else None


def programs(whole: Step) -> Iterator[Program]:
  """Yield all programs of a step."""
  return itertools.chain(whole.scoring(), whole.generating(), whole.updating())


def needs(whole: Step) -> Callable[[Program], Need]:
  """Return the formula for the memory of a step's program on a GPU."""
  platform = memory.of_gpu(whole.spec.model.dtype)
  return functools.partial(memory.estimated, spec=whole.spec, platform=platform)


def peaks(config: RunConfig) -> dict[str, int]:
  """Return the bytes in use while each program of a step runs, by formula, on one GPU."""
  whole = step.of_config(config)
  return _peaks(whole, programs(whole))


def _training(whole: Step) -> Iterator[Program]:
  return itertools.chain(whole.scoring(), whole.updating())


def _peaks(whole: Step, found: Iterable[Program]) -> dict[str, int]:
  """Return the largest peak of each program that has a formula, by name."""
  most, need_of = dict[str, int](), needs(whole)
  for one in found:
    if one.name in memory.KNOWN:
      peak = memory.other_arrays(one, whole.held) + need_of(one).peak
      most[one.name] = max(most.get(one.name, 0), peak)
  return most


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
  """Double `least` up to `most` while it fits; return the last that fits, or 0."""
  found = 0
  while least <= most and fits(least):
    found, least = least, 2 * least
  return found
