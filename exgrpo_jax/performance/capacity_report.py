"""Whether a training step fits on the chips of a slice, and how much memory is to spare."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from exgrpo_jax.performance.chips import GIB
from exgrpo_jax.performance.memory import (
  Need,
  StepArrays,
  bytes_per_chip,
  cache_bytes_per_chip,
  prompt_bytes_per_chip,
)
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import settings

# Held for a part of each step, never both at once; the other arrays are resident for the whole run.
_TRANSIENT = ('gradient', 'decode weights')


class Findings(NamedTuple):
  """What a step needs of a chip."""

  fits: bool
  peaks: dict[
    str, float
  ]  # in bytes by program, inf where it does not compile; none: arrays alone do not fit


def print_memory(
  rollout: settings.Config,
  shape: model.Config,
  decoding: Mesh,
  arrays: StepArrays,
  limit: float,
  need_of: Callable[[str], Need],
) -> Findings:
  """Prints what each program of a step needs of a chip.

  Args:
    rollout: of the run.
    shape: the model's.
    decoding: the mesh of sampling.
    arrays: of the step.
    limit: bytes of a chip that programs can use.
    need_of: of a program of `beside`, by its name; may compile it.
  """
  sizes = _print_sizes(arrays)
  resident = {name: size for name, size in sizes.items() if name not in _TRANSIENT}
  fits, peaks = _fit_without_programs(sizes, resident, limit), {}
  if fits:
    prompts = prompt_bytes_per_chip(rollout, shape, decoding)
    for name, other in beside(rollout, arrays, prompts).items():
      peaks[name] = _print_peak(name, other, need_of, limit)
    if peaks['decode'] < float('inf'):
      _print_largest_cache(rollout, shape, decoding, peaks['decode'], limit)
    fits = max(peaks.values()) <= limit
  return Findings(fits, peaks)


def beside(rollout: settings.Config, arrays: StepArrays, prompts: int) -> dict[str, int]:
  """The bytes of the arrays that are resident while a program runs and not among its arguments.

  By the program's name. `prompts` is the size of the cache of prefilled prompts, which wait beside
  the slots.
  """
  moments, initial = bytes_per_chip(arrays.state.opt_state), bytes_per_chip(arrays.initial)
  resident = bytes_per_chip(arrays.state) + initial
  return {
    'score': moments if arrays.uses_lora else moments + initial,
    'prefill': resident,
    **({'resume': resident + prompts} if rollout.carry else {}),
    'decode': resident + prompts,
    'update': moments,
    'optimizer': initial,
  }


def _print_sizes(arrays: StepArrays) -> dict[str, int]:
  """Prints and returns the bytes per chip of the step's arrays, by name."""
  trees = {
    'adapters' if arrays.uses_lora else 'parameters': arrays.state.params,
    'moments': arrays.state.opt_state,
    'frozen base' if arrays.uses_lora else 'reference policy': arrays.initial,
    'gradient': arrays.gradient,
    'decode weights': arrays.decode_params,
  }
  sizes = {name: bytes_per_chip(tree) for name, tree in trees.items() if tree is not None}
  for name, size in sizes.items():
    print(f'  {name:<24} {size / GIB:7.2f} GiB', flush=True)
  return sizes


def _fit_without_programs(sizes: dict[str, int], resident: dict[str, int], limit: float) -> bool:
  """Whether the arrays fit; if not, prints which of them do not, without compiling anything."""
  for transient in _TRANSIENT:
    size = sum(resident.values()) + sizes[transient]
    if size > limit:
      print(
        f'{", ".join([*resident, transient])} alone take {size / GIB:.2f} GiB of the '
        f'{limit / GIB:.2f} that there are'
      )
      return False
  return True


def _print_peak(name: str, other: int, need_of: Callable[[str], Need], limit: float) -> float:
  """Prints and returns the bytes in use while a program runs; inf if it does not compile.

  `other` are the bytes of resident arrays that are not among the program's arguments.
  """
  try:
    need = need_of(name)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    print(f'  {name:<24} DOES NOT FIT: {str(error).splitlines()[0][:300]}')
    return float('inf')
  peak = other + need.peak
  spare = 1 - peak / limit
  verdict = 'fits, ' if spare >= 0 else 'DOES NOT FIT: '
  print(
    f'  {name:<24} {peak / GIB:7.2f} GiB at its peak: arguments {need.arguments / GIB:.2f}, '
    f'results {need.results / GIB:.2f}, temporary {need.temporary / GIB:.2f}, other arrays '
    f'{other / GIB:.2f}; {verdict}{100 * spare:.0f}% to spare',
    flush=True,
  )
  return peak


def _print_largest_cache(
  rollout: settings.Config, shape: model.Config, decoding: Mesh, decode_peak: float, limit: float
) -> None:
  cache = cache_bytes_per_chip(rollout, shape, decoding)
  room = limit - decode_peak + cache
  print(
    f'  KV cache {cache / GIB:.2f} GiB; the largest that fits is about '
    f'{int(rollout.slots * room / cache):,} slots of {rollout.longest_row:,} tokens'
  )
