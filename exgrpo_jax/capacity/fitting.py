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
  """Find the most slots and microbatch tokens that fit on a GPU, by doubling each while it fits.

  Returns None if even the smallest values do not fit. `limit` is the number of bytes available to
  programs. The slots and microbatch tokens set in `config` are ignored.
  """

  def fits(list_programs: Callable[[Step], Iterable[Program]], slots: int, tokens: int) -> bool:
    program_peaks = peaks(Fitted(slots, tokens).applied(config), list_programs)
    return max(program_peaks.values()) <= (1 - _SPARE) * limit

  def training_programs(training_step: Step) -> Iterator[Program]:
    return itertools.chain(training_step.scoring(), training_step.updating())

  rollout = config.rollout
  row, rows = rollout.longest_row, rollout.questions * rollout.group_size
  max_slots = max(_FEWEST_SLOTS, min(_MOST_SLOTS, 1 << (rows - 1).bit_length()))
  slots = _largest(_FEWEST_SLOTS, max_slots, lambda slots: fits(Step.generating, slots, row))
  max_tokens = max(row, _MOST_TOKENS)
  tokens = _largest(row, max_tokens, lambda tokens: fits(training_programs, _FEWEST_SLOTS, tokens))
  return Fitted(slots, tokens) if slots and tokens else None


def programs(training_step: Step) -> Iterator[Program]:
  """Yield all programs of a step."""
  return itertools.chain(
    training_step.scoring(), training_step.generating(), training_step.updating()
  )


def needs(training_step: Step) -> Callable[[Program], Need]:
  """Return a function that uses a formula to estimate how much GPU memory a program needs."""
  platform = memory.of_gpu(training_step.spec.model.dtype)
  return functools.partial(memory.estimated, spec=training_step.spec, platform=platform)


def peaks(
  config: RunConfig, list_programs: Callable[[Step], Iterable[Program]] = programs
) -> dict[str, int]:
  """Estimate how many bytes are in use on one GPU while each program of a step runs.

  Returns program name -> largest peak, for programs that have a formula.
  """
  training_step = step.of_config(config)
  largest_peaks, need_of = dict[str, int](), needs(training_step)
  for program in list_programs(training_step):
    if program.name in memory.KNOWN:
      peak = memory.other_arrays(program, training_step.held) + need_of(program).peak
      largest_peaks[program.name] = max(largest_peaks.get(program.name, 0), peak)
  return largest_peaks


def _largest(value: int, limit: int, fits: Callable[[int], bool]) -> int:
  """Double `value` while it fits and is at most `limit`; return the last value that fits, or 0."""
  largest = 0
  while value <= limit and fits(value):
    largest, value = value, 2 * value
  return largest
