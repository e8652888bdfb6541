"""Whether a training step fits on the chips of a slice, and how much memory is to spare."""

from collections.abc import Callable
from typing import NamedTuple

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
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import stages

# Held for a part of each step, never both at once; the other arrays are resident for the whole run.
_TRANSIENT = ('gradient', 'decode weights')


class Findings(NamedTuple):
  """What a step needs of a chip."""

  fits: bool
  peaks: dict[str, float]  # bytes in use by program; inf where it does not compile
  programs: dict[str, Program]  # those that compile


def print_memory(
  rollout: stages.Config, spec: gradients.UpdateSpec, decoding: Mesh, chip: Chip
) -> Findings:
  """Compiles the programs of a step, and prints what each needs of a chip.

  `decoding` is the mesh of sampling, of the same devices as spec.mesh. Call it inside
  `jax.set_mesh(spec.mesh)`.
  """
  arrays = step_arrays(spec, decoding)
  sizes = _print_sizes(arrays)
  resident = {name: size for name, size in sizes.items() if name not in _TRANSIENT}
  fits, peaks, compiled = _fit_without_programs(sizes, resident, chip), {}, {}
  if fits:
    peaks, compiled = _print_peaks(rollout, spec, decoding, arrays, sum(resident.values()), chip)
    if 'decode' in compiled:
      _print_largest_cache(rollout, spec.model, decoding, peaks['decode'], chip)
    fits = max(peaks.values()) <= chip.memory
  return Findings(fits, peaks, compiled)


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
) -> tuple[dict[str, float], dict[str, Program]]:
  """Prints and returns the bytes in use while each program runs, and the program, by its name."""
  # Resident arrays that a program takes as arguments are already counted there.
  moments, reference = bytes_per_chip(arrays.state.opt_state), bytes_per_chip(arrays.reference)
  params = arrays.state.params
  of_decoding = rollout, spec.model, decoding, arrays.decode_params
  # Prefilled prompts wait beside the slots.
  positions = rollout.prompts * rollout.max_prompt / (rollout.slots * rollout.longest_row)
  prompts = int(positions * cache_bytes_per_chip(rollout, spec.model, decoding))
  peaks, compiled = {}, {}
  for name, beside, compile_program in (
    ('score', moments + reference, lambda: programs.score(rollout, spec, params)),
    ('prefill', resident, lambda: programs.prefill(*of_decoding)),
    ('decode', resident + prompts, lambda: programs.decode(*of_decoding)),
    ('update', moments, lambda: programs.accumulate(rollout, spec, arrays)),
    ('optimizer', reference, lambda: programs.apply_gradient(spec, arrays)),
  ):
    peaks[name], program = _print_peak(name, beside, compile_program, chip)
    if program is not None:
      compiled[name] = program
  return peaks, compiled


def _print_peak(
  name: str, beside: int, compile_program: Callable[[], Program], chip: Chip
) -> tuple[float, Program | None]:
  """Prints and returns the bytes in use while a program runs; (inf, None) if it does not compile.

  `beside` are the bytes of resident arrays that are not among the program's arguments.
  """
  try:
    program = compile_program()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    print(f'  {name:<24} DOES NOT FIT: {str(error).splitlines()[0][:300]}')
    return float('inf'), None
  peak = beside + program.peak
  spare = 1 - peak / chip.memory
  verdict = 'fits, ' if spare >= 0 else 'DOES NOT FIT: '
  print(
    f'  {name:<24} {peak / GIB:7.2f} GiB at its peak: arguments {program.arguments / GIB:.2f}, '
    f'results {program.results / GIB:.2f}, temporary {program.temporary / GIB:.2f}, other arrays '
    f'{beside / GIB:.2f}; {verdict}{100 * spare:.0f}% to spare',
    flush=True,
  )
  return peak, program


def _print_largest_cache(
  rollout: stages.Config, shape: model.Config, decoding: Mesh, decode_peak: float, chip: Chip
) -> None:
  cache = cache_bytes_per_chip(rollout, shape, decoding)
  room = chip.memory - decode_peak + cache
  print(
    f'  KV cache {cache / GIB:.2f} GiB; the largest that fits is about '
    f'{int(rollout.slots * room / cache):,} slots of {rollout.longest_row:,} tokens'
  )
