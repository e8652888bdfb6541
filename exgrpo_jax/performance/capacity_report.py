"""Whether a training step fits on the chips of a slice, and how much memory is to spare."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from exgrpo_jax.learner import gradients
from exgrpo_jax.performance import programs
from exgrpo_jax.performance.chips import GIB, Chip
from exgrpo_jax.performance.memory import (
  StepArrays,
  bytes_per_chip,
  cache_bytes_per_chip,
  step_arrays,
)
from exgrpo_jax.performance.programs import Program
from exgrpo_jax.performance.roofline import step_roofline
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import stages

# Held for a part of each step, never both at once; the other arrays are resident for the whole run.
_TRANSIENT = ('gradient', 'decode weights')


def print_report(
  rollout: stages.Config, spec: gradients.UpdateSpec, decoding: Mesh, chip: Chip
) -> bool:
  """Prints what each part of a step needs of a chip; returns whether all of it fits.

  `decoding` is the mesh of sampling, of the same devices as spec.mesh. Call it inside
  `jax.set_mesh(spec.mesh)`.
  """
  arrays = step_arrays(spec, decoding)
  sizes = _print_sizes(arrays)
  resident = {name: size for name, size in sizes.items() if name not in _TRANSIENT}
  fits = _fit_without_programs(sizes, resident, chip)
  if fits:
    peaks = _print_peaks(rollout, spec, decoding, arrays, sum(resident.values()), chip)
    _print_roofline(rollout, spec, decoding, chip)
    if peaks['decode'] < float('inf'):
      _print_largest_cache(rollout, spec.model, decoding, peaks['decode'], chip)
    fits = max(peaks.values()) <= chip.memory
  print('fits' if fits else 'does not fit')
  return fits


def _print_sizes(arrays: StepArrays) -> dict[str, int]:
  """Prints and returns the bytes per chip of the step's arrays, by name."""
  trees = {
    'parameters': arrays.state.params,
    'moments': arrays.state.opt_state,
    'reference policy': arrays.reference,
    'gradient': arrays.gradient,
    'decode weights': arrays.decode_params,
  }
  sizes = {name: bytes_per_chip(tree) for name, tree in trees.items() if tree is not None}
  for name, size in sizes.items():
    print(f'  {name:<24} {size / GIB:7.2f} GiB', flush=True)
  return sizes


def _fit_without_programs(sizes: dict[str, int], resident: dict[str, int], chip: Chip) -> bool:
  """Whether the arrays fit; if not, prints which of them do not, without compiling anything."""
  for transient in _TRANSIENT:
    size = sum(resident.values()) + sizes[transient]
    if size > chip.memory:
      print(
        f"{', '.join([*resident, transient])} alone take {size / GIB:.2f} GiB of a chip's "
        f'{chip.memory / GIB:.2f}: take more chips, or a mesh that splits them further'
      )
      return False
  return True


def _print_peaks(
  rollout: stages.Config,
  spec: gradients.UpdateSpec,
  decoding: Mesh,
  arrays: StepArrays,
  resident: int,
  chip: Chip,
) -> dict[str, float]:
  """Prints and returns the bytes in use while each program runs, by the program's name."""
  # Resident arrays that a program takes as arguments are already counted there.
  moments, reference = bytes_per_chip(arrays.state.opt_state), bytes_per_chip(arrays.reference)
  params = arrays.state.params
  of_decoding = rollout, spec.model, decoding, arrays.decode_params
  return {
    name: _print_peak(name, beside, compile_program, chip)
    for name, beside, compile_program in (
      ('score', moments + reference, lambda: programs.score(rollout, spec, params)),
      ('prefill', resident, lambda: programs.prefill(*of_decoding)),
      ('decode', resident, lambda: programs.decode(*of_decoding)),
      ('update', moments, lambda: programs.accumulate(rollout, spec, arrays)),
      ('optimizer', reference, lambda: programs.apply_gradient(spec, arrays)),
    )
  }


def _print_peak(
  name: str, beside: int, compile_program: Callable[[], Program], chip: Chip
) -> float:
  """Prints and returns the bytes in use while a program runs; inf if it does not compile.

  `beside` are the bytes of resident arrays that are not among the program's arguments.
  """
  try:
    program = compile_program()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    print(f'  {name:<24} DOES NOT FIT: {str(error).splitlines()[0][:300]}')
    return float('inf')
  peak = beside + program.peak
  spare = 1 - peak / chip.memory
  verdict = 'fits, ' if spare >= 0 else 'DOES NOT FIT: '
  print(
    f'  {name:<24} {peak / GIB:7.2f} GiB at its peak: arguments {program.arguments / GIB:.2f}, '
    f'results {program.results / GIB:.2f}, temporary {program.temporary / GIB:.2f}, other arrays '
    f'{beside / GIB:.2f}; {verdict}{100 * spare:.0f}% to spare',
    flush=True,
  )
  return peak


def _print_roofline(
  rollout: stages.Config, spec: gradients.UpdateSpec, decoding: Mesh, chip: Chip
) -> None:
  step = step_roofline(rollout, spec, decoding, chip)
  print(
    f'  roofline of a step of longest responses: prefill {step.prefill:.0f} s, decode '
    f'{step.decode:.0f} s, update {step.update:.0f} s; update {step.update_flops / 1e15:,.0f} PFLOP'
  )


def _print_largest_cache(
  rollout: stages.Config, shape: model.Config, decoding: Mesh, decode_peak: float, chip: Chip
) -> None:
  cache = cache_bytes_per_chip(rollout, shape, decoding)
  room = chip.memory - decode_peak + cache
  print(
    f'  KV cache {cache / GIB:.2f} GiB; the largest that fits is about '
    f'{int(rollout.slots * room / cache):,} slots of {rollout.longest_row:,} tokens'
  )
