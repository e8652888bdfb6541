"""What `capacity` prints: memory by array and program, time by part, assumptions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from exgrpo_jax.capacity import arrays, program_time, step_time
from exgrpo_jax.capacity.arrays import StepArrays, bytes_per_chip
from exgrpo_jax.capacity.chips import GIB
from exgrpo_jax.capacity.programs import Need
from exgrpo_jax.capacity.step_time import Estimate, Estimator, Part, Workload
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import settings

# Held for a part of each step, never both at once; the other arrays are resident for the whole run.
_TRANSIENT = ('gradient', 'decode weights')


class Speed(NamedTuple):
  """How fast training is, as estimated."""

  seconds: float  # a step
  tokens_per_second: float  # of the step's responses, replayed ones included
  chip_hours: float  # 100 steps
  parts: Sequence[Part]  # of the step


# ---- Memory ----


def print_memory(
  rollout: settings.Config,
  shape: model.Config,
  decoding: Mesh,
  held: StepArrays,
  limit: float,
  need_of: Callable[[str], Need],
  keeps_caches: bool = False,
) -> dict[str, float]:
  """Prints what each program of a step needs of a chip.

  Args:
    rollout: of the run.
    shape: the model's.
    decoding: the mesh of sampling.
    held: the step's arrays.
    limit: bytes of a chip that programs can use.
    need_of: the need of a program of `beside`, by its name; may compile it.
    keeps_caches: of episodes between their turns, as many as there are slots.

  Returns:
    Bytes of a chip by program, inf where one does not compile; none where the arrays alone do not
    fit.
  """
  if not _print_arrays(held, limit):
    return {}
  prompts = arrays.prompt_bytes(rollout, shape, decoding)
  slots = arrays.cache_bytes(rollout, shape, decoding)
  parked = slots if keeps_caches else 0
  peaks = {
    name: _print_peak(name, other, need_of, limit)
    for name, other in beside(rollout, held, prompts, parked).items()
  }
  if peaks['decode'] < float('inf'):
    cache = slots + parked
    room = limit - peaks['decode'] + cache
    between = ', half of it for episodes between their turns' if keeps_caches else ''
    print(
      f'  KV cache {cache / GIB:.2f} GiB{between}; the largest that fits is about '
      f'{int(rollout.slots * room / cache):,} slots of {rollout.longest_row:,} tokens'
    )
  return peaks


def beside(
  rollout: settings.Config, held: StepArrays, prompts: int, parked: int = 0
) -> dict[str, int]:
  """Bytes of the arrays that are resident while a program runs and not among its arguments.

  Args:
    rollout: of the run.
    held: the step's arrays.
    prompts: the size of the cache of prefilled prompts, which wait beside the slots.
    parked: the size of the caches of episodes that have no slot between their turns.
  """
  moments, initial = bytes_per_chip(held.state.opt_state), bytes_per_chip(held.initial)
  resident = bytes_per_chip(held.state) + initial
  return {
    'score': moments if held.uses_lora else moments + initial,
    'prefill': resident + parked,
    **({'resume': resident + prompts + parked} if rollout.carry else {}),
    'decode': resident + prompts + parked,
    'update': moments,
    'optimizer': initial,
  }


def _print_arrays(held: StepArrays, limit: float) -> bool:
  """Prints the size of each array, and whether they fit without any program."""
  trees = {
    'adapters' if held.uses_lora else 'parameters': held.state.params,
    'moments': held.state.opt_state,
    'frozen base' if held.uses_lora else 'reference policy': held.initial,
    'gradient': held.gradient,
    'decode weights': held.decode_params,
  }
  sizes = {name: bytes_per_chip(tree) for name, tree in trees.items() if tree is not None}
  for name, size in sizes.items():
    print(f'  {name:<24} {size / GIB:7.2f} GiB', flush=True)
  resident = {name: size for name, size in sizes.items() if name not in _TRANSIENT}
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

  `other` counts resident arrays that are not among the program's arguments.
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


# ---- Time ----


def print_time(estimate: Estimate, work: Workload, num_chips: int, num_steps: int) -> Speed:
  """Prints and returns how long a step takes on `num_chips` chips, and `num_steps` of them."""
  print('a step, estimated, not measured:')
  for part in estimate.parts:
    share = f'{100 * part.share:.0f}% of peak {part.bound}' if part.bound else ''
    print(f'  {part.name:<12} {part.seconds:7.2f} s  {share:<22}  {part.detail}'.rstrip())
  seconds = estimate.seconds
  tokens = sum(work.fresh) + sum(work.replayed)
  speed = Speed(seconds, tokens / seconds, 100 * seconds * num_chips / 3600, estimate.parts)
  print(
    f'  {"sum":<12} {seconds:7.2f} s  {speed.tokens_per_second:,.0f} response tokens per second, '
    f'{speed.chip_hours:,.1f} chip-hours per 100 steps; {num_steps * seconds / 3600:,.1f} hours '
    f'for config.num_steps={num_steps}'
  )
  return speed


def print_partial_rollouts(estimate: Estimate, slots: int, other: Estimate | None) -> None:
  """Prints how old partial rollouts are when trained or, where they are off, what they would bring.

  Args:
    estimate: of the step.
    slots: of the run.
    other: the step with partial rollouts, where `estimate` is without.
  """
  if not other:
    print(f'  {_ages(estimate)}')
    return
  print(
    f'  with config.rollout.carry=True: {other.seconds:.2f} s; decode '
    f'{other.seconds_of("decode"):.2f} s instead of {estimate.seconds_of("decode"):.2f} s, '
    f'resume {other.seconds_of("resume"):.2f} s;\n    {100 * other.live / slots:.0f}% of slots '
    f'busy instead of {100 * estimate.live / slots:.0f}%; {_ages(other)}'
  )


def print_assumptions(estimator: Estimator, work: Workload, lengths: str) -> None:
  """Prints what an estimate rests on; `lengths` says where lengths are from."""
  links, hop = program_time.LINKS, 1e6 * program_time.HOP_SECONDS
  head_size = estimator.spec.model.head_size
  efficiency = 100 * program_time.attention_efficiency(head_size, estimator.chip)
  reading = 100 * program_time.READ_EFFICIENCY
  mean = sum(work.fresh) / len(work.fresh)
  sync, host = 1e3 * step_time.SYNC_SECONDS, step_time.HOST_SECONDS
  print(f"""\
what it rests on:
  compiler: cycles of all operations that it makes itself; shapes that were not compiled take time
    in proportion to their tokens
  formulas: collectives take their bytes over {links} links and {hop:.0f} microsecond a hop, and are
    hidden behind other work where they are asynchronous; resharding takes its bytes over the
    links; attention reaches {efficiency:.0f}% of peak FLOPs in training, and {reading:.0f}% of the
    memory's bandwidth in decoding, where it reads what is written of the cache
  assumed: responses {lengths}
    (mean {mean:,.0f} tokens); prompts of {work.prompt} tokens; replay in full, with
    {len(work.candidates):,} stored responses to choose from; {sync:.0f} ms of the host in each
    sync and {host:.0f} s in each step; no compilation, checkpoint, parity check or preemption""")


def _ages(estimate: Estimate) -> str:
  ages = estimate.ages
  return (
    f'responses up to {ages.max()} steps old as they are trained (mean {ages.mean():.1f}), '
    f'{100 * estimate.carried:.0f}% of their tokens from earlier steps'
  )
