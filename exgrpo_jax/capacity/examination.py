"""Checks that a config fits on a TPU slice or a GPU, and estimates of its speed on a slice."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from exgrpo_jax.capacity import cycles, devices, fitting, lengths, memory, step
from exgrpo_jax.capacity.devices import GIB, Chip
from exgrpo_jax.capacity.step import Estimate, Part, Step, Workload
from exgrpo_jax.errors import counted
from exgrpo_jax.experiment.settings import RunConfig
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import programs
from exgrpo_jax.rollout.decode_loop import State
from exgrpo_jax.rollout.settings import RolloutConfig
from exgrpo_jax.runtime import machine
from exgrpo_jax.runtime.compilations import Program


class Speed(NamedTuple):
  """The estimated training speed."""

  seconds: float  # per step
  tokens_per_second: float  # response tokens, including replayed ones
  chip_hours: float  # per 100 steps
  parts: Sequence[Part]  # of a step


class Examination(NamedTuple):
  """The memory and speed of a config on a slice or a GPU."""

  fits: bool
  peaks: Mapping[str, float]  # program -> peak bytes on a chip; inf if it does not compile
  speed: Speed | None = None  # only for a slice, and only if all programs compile


def examine(config: RunConfig, topology: str, lengths_spec: str, evaluated: int) -> Examination:
  """Print and return whether a config fits on a slice and, if it compiles, how fast it runs.

  `topology` has the form 'v5e:8x8'. For `lengths_spec`, see `lengths.draw`. `evaluated` is the
  number of evaluation questions, summed over all datasets.
  """
  chip = devices.chip_of(topology)
  work = step.workload(config, lengths_spec, evaluated)  # before anything is compiled
  whole = step.of_config(config, devices.slice_devices(topology))
  mesh, decoding = whole.spec.mesh, whole.meshes.decoding
  print(
    f'{topology}: {counted(mesh.size, "chip")} of {chip.memory / GIB:.2f} GiB, '
    f'training on {dict(mesh.shape)}, decoding on {dict(decoding.shape)}; '
    f'{_parameters(whole)} billion parameters',
    flush=True,
  )
  if not _print_arrays(whole, chip.memory):
    print('use more chips, or a mesh that splits these arrays further')
    return Examination(_print_verdict({}, chip.memory), {})
  modules: dict[tuple[str, tuple[int, int]], cycles.Module] = {}

  def need_of(program: Program) -> memory.Need:
    modules[program.name, program.size] = cycles.module_of(program.lowered, program.executable)
    return memory.of_compiled(program.executable)

  programs = step.listed(whole, work)
  peaks = memory.print_peaks(programs, whole.held, chip.memory, need_of)
  _print_cache(whole, peaks, chip.memory)
  speed = None
  if len(modules) == len({(one.name, one.size) for one in programs}):
    estimate = step.estimate(whole, work, programs, modules, chip)
    speed = _print_time(estimate, work, mesh.size, config)
    _print_alternatives(whole, work, estimate, modules, chip)
    _print_assumptions(work, lengths.describe(lengths_spec, config.rollout.max_response))
    if config.environment.name:
      print("  not counted: episode turns, and the environments' tokens and time")
  return Examination(_print_verdict(peaks, chip.memory), peaks, speed)


def examine_gpu(config: RunConfig, device: str, fit: bool = False) -> Examination:
  """Estimate by formula whether a config fits on one GPU; print and return the result.

  For `device`, see `devices.usable_memory`. If `fit` is True, first finds and prints the most slots
  and microbatch tokens that fit.
  """
  limit = devices.usable_memory(device)
  whole = step.of_config(config)
  devices.check_dtype(device, whole.spec.model.dtype)
  if fit:
    fitted = fitting.fit(config, limit)
    if not fitted:
      print('does not fit, even with the fewest slots and the smallest microbatches')
      _print_advice(config, may_fit=True, is_fitted=True)
      return Examination(fits=False, peaks={})
    print(fitted.flags)
    whole = step.of_config(fitted.applied(config))
  print(
    f'{device}: {limit / GIB:.2f} GiB, {100 * machine.SHARE:.0f}% of its memory; '
    f'{_parameters(whole)} billion parameters'
  )
  peaks: Mapping[str, float] = {}
  if _print_arrays(whole, limit):
    found = step.needed(one for one in fitting.programs(whole) if one.name in memory.KNOWN)
    peaks = memory.print_peaks(found, whole.held, limit, fitting.needs(whole))
    _print_cache(whole, peaks, limit)
  if not peaks or max(peaks.values()) > limit:
    _print_advice(whole.config, may_fit=bool(peaks))
  return Examination(_print_verdict(peaks, limit), peaks)


def _parameters(whole: Step) -> str:
  shapes = model.shapes(whole.spec.model, whole.spec.mesh)
  return f'{sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e9:.2f}'


# ---- Memory ----


def _print_arrays(whole: Step, limit: float) -> bool:
  """Print the arrays' sizes; return True if they fit when no program is running."""
  uses_lora = whole.spec.lora.rank > 0
  resident = {
    'adapters' if uses_lora else 'parameters': whole.state.params,
    'moments': whole.state.opt_state,
    'frozen base' if uses_lora else 'reference policy': whole.initial,
  }
  # Each of these two exists during part of a step, but the two never exist at the same time.
  transient = {'gradient': whole.state.params, 'decode weights': whole.decode_params}
  sizes = {
    name: memory.size_of(tree) for name, tree in (resident | transient).items() if tree is not None
  }
  for name, size in sizes.items():
    print(f'  {name:<16} {size / GIB:6.2f} GiB')
  largest = max(transient, key=lambda name: sizes[name])
  held = [name for name in sizes if name not in transient] + [largest]
  total = sum(sizes[name] for name in held)
  if total > limit:
    print(f'{", ".join(held)} already take {total / GIB:.2f} GiB before any program runs')
  return total <= limit


def _print_cache(whole: Step, peaks: Mapping[str, float], limit: float) -> None:
  """Print the cache's size and roughly how many slots would fit."""
  if not peaks['decode'] < float('inf'):
    return
  rollout, keeps = whole.config.rollout, whole.config.environment.keeps_caches
  [decode] = [one for one in whole.generating() if one.name == 'decode']
  [state] = [one for one in decode.args if isinstance(one, State)]
  cache = memory.size_of(state.cache) * (2 if keeps else 1)
  room = max(0.0, limit - peaks['decode'] + cache)
  between = ', half of it for episodes between turns' if keeps else ''
  print(
    f'  KV cache {cache / GIB:.2f} GiB{between}; up to about '
    f'{int(rollout.slots * room / cache):,} slots of {rollout.longest_row:,} tokens would fit'
  )


def _print_verdict(peaks: Mapping[str, float], limit: float) -> bool:
  fits = bool(peaks) and max(peaks.values()) <= limit
  print('fits' if fits else 'does not fit')
  return fits


def _print_advice(config: RunConfig, may_fit: bool, is_fitted: bool = False) -> None:
  """Print ways to reduce a config's memory use on one GPU.

  `may_fit` is True if the model, its moments and its gradient leave memory for other arrays.
  `is_fitted` is True if slots and microbatches are already as small as possible.
  """
  print('to use less memory on one GPU:')
  slots, tokens = config.rollout.slots, config.microbatch.tokens
  if config.environment.keeps_caches:
    print("  drop episodes' caches between turns: config.environment.keep_caches=False")
  if may_fit and not is_fitted:
    print(
      f'  lower config.rollout.slots={slots} and config.microbatch.tokens={tokens}: --fit chooses '
      'both settings, which affect only memory and time'
    )
  if may_fit:
    longest = config.rollout.max_response
    print(f'  lower config.rollout.max_response={longest} to shorten responses')
  if not config.lora.rank:
    if config.objective.kl_coefficient:
      print('  drop the reference policy: config.objective.kl_coefficient=0')
    if (config.optimizer.name, config.optimizer.moment_dtype) == ('adamw', 'float32'):
      print("  halve the moments' memory: config.optimizer.moment_dtype=bfloat16")
    print(
      "  train with LoRA to avoid storing the full model's moments and gradient: "
      'config.lora.rank=32'
    )
  print('  use a smaller model, or a GPU with more memory')


# ---- Time ----


def _print_time(estimate: Estimate, work: Workload, num_chips: int, config: RunConfig) -> Speed:
  """Print and return how long one step and the whole run take."""
  print('time per step (estimated, not measured):')
  for part in estimate.parts:
    print(f'  {part.name:<12} {part.seconds:7.2f} s  {part.detail}'.rstrip())
  seconds, tokens = estimate.seconds, sum(work.fresh) + sum(work.replayed)
  speed = Speed(seconds, tokens / seconds, 100 * seconds * num_chips / 3600, estimate.parts)
  print(
    f'  {"sum":<12} {seconds:7.2f} s  {speed.tokens_per_second:,.0f} response tokens per second, '
    f'{speed.chip_hours:,.1f} chip-hours per 100 steps; {config.num_steps * seconds / 3600:,.1f} '
    f'hours for {config.length}'
  )
  return speed


def _print_alternatives(
  whole: Step, work: Workload, estimate: Estimate, modules: step.Modules, chip: Chip
) -> None:
  """Print how busy the slots are, and how other settings would change the step time.

  Compiles any additional programs that these settings need.
  """
  config, slots = whole.config, whole.config.rollout.slots
  print(f'  {100 * estimate.live / slots:.0f}% of {slots:,} slots busy')
  if config.rollout.partial:
    print(f'  {_ages(estimate)}')
  if config.rollout.is_dynamic:
    factor = config.rollout.dynamic_sampling
    print(
      f'  not counted: dynamic sampling, which may generate up to {factor:g} times as many '
      'responses'
    )
  known = dict(modules)
  for name, rollout in _alternatives(config.rollout):
    changed = dataclasses.replace(whole, config=dataclasses.replace(config, rollout=rollout))
    listed = step.listed(changed, work)
    try:
      for one in listed:
        if one.name in ('resume', 'decode') and (one.name, one.size) not in known:
          known[one.name, one.size] = cycles.module_of(one.lowered, one.executable)
    except jax.errors.JaxRuntimeError as error:
      print(f'  {name} does not fit: {str(error).splitlines()[0][:300]}')
      continue
    other = step.estimate(changed, work, listed, known, chip)
    resume = f', resume {other.seconds_of("resume"):.2f} s' if rollout.partial else ''
    print(
      f'  with {name}: {other.seconds:.2f} s; decode {other.seconds_of("decode"):.2f} s instead of '
      f'{estimate.seconds_of("decode"):.2f} s{resume}'
    )
    if rollout.partial > config.rollout.partial and rollout.drafts == config.rollout.drafts:
      print(f'    {100 * other.live / slots:.0f}% of slots busy; {_ages(other)}')


def _alternatives(rollout: RolloutConfig) -> Iterator[tuple[str, RolloutConfig]]:
  """Yield (name, config) for each disabled feature that may shorten the rollout."""
  partial, name = programs.with_partial_rollouts(rollout), 'config.rollout.partial=True'
  drafts = {'drafts': step.DRAFTS}
  if not rollout.partial:
    yield name, partial
  if rollout.drafts == '0':
    with_drafts = f'config.rollout.drafts={step.DRAFTS}'
    yield with_drafts, dataclasses.replace(rollout, **drafts)
    if not rollout.partial:
      yield f'{name} and {with_drafts}', dataclasses.replace(partial, **drafts)


def _ages(estimate: Estimate) -> str:
  ages = estimate.ages
  return (
    f'responses up to {ages.max()} steps old when trained on (mean {ages.mean():.1f}), '
    f'{100 * estimate.carried:.0f}% of their tokens from earlier steps'
  )


def _print_assumptions(work: Workload, described: str) -> None:
  """Print an estimate's assumptions; `described` says where the response lengths come from."""
  links, hop = cycles.LINKS, 1e6 * cycles.HOP_SECONDS
  mean = sum(work.fresh) / len(work.fresh)
  sync, host = 1e3 * step.SYNC_SECONDS, step.HOST_SECONDS
  print(f"""\
assumptions:
  compiler: its own cycle estimates for all operations except Pallas kernels and collectives
  formulas: collectives use {links} links, have a latency of {hop:.0f} microsecond per hop, and
    overlap with other work if they are asynchronous; attention reaches at most
    {100 * cycles.ATTENTION_EFFICIENCY:.0f}% of peak FLOPs in training, and \
{100 * cycles.READ_EFFICIENCY:.0f}% of the memory bandwidth in
    decoding, where it reads only the filled part of the cache
  assumed: responses {described}
    (mean {mean:,.0f} tokens); prompts of {work.prompt} tokens; full replay, with
    {len(work.candidates):,} stored responses to choose from; {sync:.0f} ms of host time per
    sync and {host:.0f} s per step; no compilation, checkpoint, preemption or
    comparison of log-probabilities; {step.TOKENS_PER_PASS} tokens per row per pass with drafts""")
