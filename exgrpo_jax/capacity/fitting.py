"""Slots and microbatch tokens that fit one GPU, and what to change where nothing does.

Both settings change nothing but memory, time and rounding, and each alone decides whether its
programs fit.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from exgrpo_jax.capacity import arrays, formula, report
from exgrpo_jax.experiment.settings import Config
from exgrpo_jax.learner import gradients
from exgrpo_jax.rollout import settings

_SPARE = 0.05  # of the memory, for what the formula leaves out
_FEWEST_SLOTS, _MOST_SLOTS = 8, 1024
_MOST_TOKENS = 32768  # of a microbatch; with more an update is no faster


class Fitted(NamedTuple):
  """Settings that fit."""

  slots: int
  tokens_per_microbatch: int

  @property
  def flags(self) -> str:
    """For the command line."""
    return (
      f'--config.rollout.slots={self.slots} '
      f'--config.gradient.tokens_per_microbatch={self.tokens_per_microbatch}'
    )

  def applied(self, config: Config) -> Config:
    """A config with these settings."""
    rollout = dataclasses.replace(config.rollout, slots=self.slots)
    gradient = dataclasses.replace(
      config.gradient, tokens_per_microbatch=self.tokens_per_microbatch
    )
    return dataclasses.replace(config, rollout=rollout, gradient=gradient)


def fit(
  rollout: settings.Config,
  spec: gradients.UpdateSpec,
  decoding: Mesh,
  limit: float,
  keeps_caches: bool = False,
) -> Fitted | None:
  """The most slots and the most microbatch tokens that fit a GPU, each doubled while it fits.

  None where not even the fewest do. Call it inside `jax.set_mesh(spec.mesh)`.

  Args:
    rollout: of the run; its slots are not used.
    spec: of its updates; its microbatches are not used.
    decoding: the mesh of sampling, of one device.
    limit: bytes that programs can use.
    keeps_caches: of episodes between their turns, as many as there are slots.
  """

  def fits(names: tuple[str, ...], slots: int, tokens: int) -> bool:
    trial = dataclasses.replace(rollout, slots=slots)
    gradient = dataclasses.replace(spec.gradient, tokens_per_microbatch=tokens)
    found = peaks(trial, dataclasses.replace(spec, gradient=gradient), decoding, keeps_caches)
    return max(found[name] for name in names) <= (1 - _SPARE) * limit

  row = rollout.longest_row
  rows = rollout.questions * rollout.samples
  generating = ('prefill', 'decode', *(('resume',) if rollout.carry else ()))
  slots = _largest(
    _FEWEST_SLOTS,
    min(_MOST_SLOTS, 1 << (rows - 1).bit_length()),
    lambda slots: fits(generating, slots, row),
  )
  tokens = _largest(
    row,
    max(row, _MOST_TOKENS),
    lambda tokens: fits(('score', 'update', 'optimizer'), _FEWEST_SLOTS, tokens),
  )
  return Fitted(slots, tokens) if slots and tokens else None


def advice(
  rollout: settings.Config, spec: gradients.UpdateSpec, may_fit: bool, is_fitted: bool
) -> Iterator[str]:
  """Yields what makes a config smaller for one GPU, line by line.

  Args:
    rollout: of the run.
    spec: of its updates.
    may_fit: whether the model alone, with its moments and gradient, leaves room.
    is_fitted: whether slots and microbatches are already the smallest.
  """
  if may_fit and not is_fitted:
    tokens = spec.gradient.tokens_per_microbatch
    yield (
      f'--fit: fewer than config.rollout.slots={rollout.slots} and shorter microbatches than '
      f'config.gradient.tokens_per_microbatch={tokens}, which change nothing but memory and time'
    )
  if may_fit:
    yield f'shorter responses than config.rollout.max_response={rollout.max_response}'
  if not spec.lora.rank:
    if spec.objective.kl_coefficient:
      yield 'no reference policy: config.objective.kl_coefficient=0'
    if spec.optimizer.moments == 'float32':
      yield 'moments of half the size: config.optimizer.moments=bfloat16'
    yield 'LoRA, without moments and gradient of the whole model: config.lora.rank=32'
  yield 'a smaller model, or a GPU of more memory'


def peaks(
  rollout: settings.Config,
  spec: gradients.UpdateSpec,
  decoding: Mesh,
  keeps_caches: bool = False,
) -> dict[str, int]:
  """Bytes in use while each program of a step runs, by formula, on one GPU; args as `fit`."""
  held, platform = arrays.step_arrays(spec, decoding), formula.of_gpu(spec.model.dtype)
  needs = formula.of_step(rollout, spec, decoding, held, platform)
  prompts = arrays.prompt_bytes(rollout, spec.model, decoding)
  parked = arrays.cache_bytes(rollout, spec.model, decoding) if keeps_caches else 0
  beside = report.beside(rollout, held, prompts, parked)
  return {name: beside[name] + need.peak for name, need in needs.items()}


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
  """The largest of `least`, twice as many, … up to `most` that fits; 0 if none does."""
  found = 0
  while least <= most and fits(least):
    found, least = least, 2 * least
  return found
