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


def examine(config: RunConfig, topology: str, lengths_spec: str, num_evaluated: int) -> Examination:
  """Print and return whether a config fits on a slice and, if it compiles, how fast it runs.

  `topology` has the form 'v5e:8x8'. For `lengths_spec`, see `lengths.draw`. `num_evaluated` is the
  number of evaluation questions, summed over all datasets.
  """
  chip = devices.chip_of(topology)
  work = step.workload(config, lengths_spec, num_evaluated)  # before anything is compiled
  training_step = step.of_config(config, devices.slice_devices(topology))
  mesh, decoding = training_step.spec.mesh, training_step.meshes.decoding
  print(
    f'{topology}: {counted(mesh.size, "chip")} of {chip.memory / GIB:.2f} GiB, '
    f'training on {dict(mesh.shape)}, decoding on {dict(decoding.shape)}; '
    f'{_billion_parameters(training_step)} billion parameters',
    flush=True,
  )
  if not _print_arrays(training_step, chip.memory):
    print('use more chips, or a mesh that splits these arrays further')
    return Examination(_print_verdict({}, chip.memory), {})
  modules: dict[tuple[str, tuple[int, int]], cycles.Module] = {}

  def need_of(program: Program) -> memory.Need:
    modules[program.name, program.size] = cycles.module_of(program.lowered, program.executable)
    return memory.of_compiled(program.executable)

  step_programs = step.listed(training_step, work)
  peaks = memory.print_peaks(step_programs, training_step.held, chip.memory, need_of)
  _print_cache(training_step, peaks, chip.memory)
  speed = None
  if len(modules) == len({(program.name, program.size) for program in step_programs}):
    estimate = step.estimate(training_step, work, step_programs, modules, chip)
    speed = _print_time(estimate, work, mesh.size, config)
    _print_alternatives(training_step, work, estimate, modules, chip)
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
  training_step = step.of_config(config)
  devices.check_dtype(device, training_step.spec.model.dtype)
  if fit:
    fitted = fitting.fit(config, limit)
    if not fitted:
      print('does not fit, even with the fewest slots and the smallest microbatches')
      _print_advice(config, may_fit=True, is_fitted=True)
      return Examination(fits=False, peaks={})
    print(fitted.flags)
    training_step = step.of_config(fitted.applied(config))
  print(
    f'{device}: {limit / GIB:.2f} GiB, {100 * machine.SHARE:.0f}% of its memory; '
    f'{_billion_parameters(training_step)} billion parameters'
  )
  peaks: Mapping[str, float] = {}
  if _print_arrays(training_step, limit):
    step_programs = fitting.programs(training_step)
    known_programs = step.needed(
      program for program in step_programs if program.name in memory.KNOWN
    )
    need_of = fitting.needs(training_step)
    peaks = memory.print_peaks(known_programs, training_step.held, limit, need_of)
    _print_cache(training_step, peaks, limit)
  if not peaks or max(peaks.values()) > limit:
    _print_advice(training_step.config, may_fit=bool(peaks))
  return Examination(_print_verdict(peaks, limit), peaks)


def _billion_parameters(training_step: Step) -> str:
  shapes = model.shapes(training_step.spec.model, training_step.spec.mesh)
  return f'{sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e9:.2f}'


# ---- Memory ----


def _print_arrays(training_step: Step, limit: float) -> bool:
  """Print the arrays' sizes; return True if they fit when no program is running."""
  uses_lora = training_step.spec.lora.rank > 0
  resident = {
    'adapters' if uses_lora else 'parameters': training_step.state.params,
    'moments': training_step.state.opt_state,
    'frozen base' if uses_lora else 'reference policy': training_step.initial,
  }
  # Each of these two exists during part of a step, but the two never exist at the same time.
  transient = {
    'gradient': training_step.state.params,
    'decode weights': training_step.decode_params,
  }
  sizes = {
    name: memory.size_of(tree) for name, tree in (resident | transient).items() if tree is not None
  }
  for name, size in sizes.items():
    print(f'  {name:<16} {size / GIB:6.2f} GiB')
  largest = max(transient, key=lambda name: sizes[name])
  held_names = [name for name in sizes if name not in transient] + [largest]
  total = sum(sizes[name] for name in held_names)
  if total > limit:
    print(f'{", ".join(held_names)} already take {total / GIB:.2f} GiB before any program runs')
  return total <= limit


def _print_cache(training_step: Step, peaks: Mapping[str, float], limit: float) -> None:
  """Print the cache's size and roughly how many slots would fit."""
  if not peaks['decode'] < float('inf'):
    return
  rollout, keeps = training_step.config.rollout, training_step.config.environment.keeps_caches
  [decode] = [program for program in training_step.generating() if program.name == 'decode']
  [state] = [argument for argument in decode.args if isinstance(argument, State)]
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
  training_step: Step, work: Workload, estimate: Estimate, modules: step.Modules, chip: Chip
) -> None:
  """Print how busy the slots are, and how other settings would change the step time.

  Compiles any additional programs that these settings need.
  """
  config, slots = training_step.config, training_step.config.rollout.slots
  print(f'  {100 * estimate.live / slots:.0f}% of {slots:,} slots busy')
  if config.rollout.partial:
    print(f'  {_describe_ages(estimate)}')
  if config.rollout.is_dynamic:
    factor = config.rollout.dynamic_sampling
    print(
      f'  not counted: dynamic sampling, which may generate up to {factor:g} times as many '
      'responses'
    )
  all_modules = dict(modules)
  for name, rollout in _alternatives(config.rollout):
    alternative_config = dataclasses.replace(config, rollout=rollout)
    alternative_step = dataclasses.replace(training_step, config=alternative_config)
    step_programs = step.listed(alternative_step, work)
    try:
      for program in step_programs:
        key = program.name, program.size
        if program.name in ('resume', 'decode') and key not in all_modules:
          all_modules[key] = cycles.module_of(program.lowered, program.executable)
    except jax.errors.JaxRuntimeError as error:
      print(f'  {name} does not fit: {str(error).splitlines()[0][:300]}')
      continue
    other = step.estimate(alternative_step, work, step_programs, all_modules, chip)
    resume = f', resume {other.seconds_of("resume"):.2f} s' if rollout.partial else ''
    print(
      f'  with {name}: {other.seconds:.2f} s; decode {other.seconds_of("decode"):.2f} s instead of '
      f'{estimate.seconds_of("decode"):.2f} s{resume}'
    )
    if rollout.partial > config.rollout.partial and rollout.drafts == config.rollout.drafts:
      print(f'    {100 * other.live / slots:.0f}% of slots busy; {_describe_ages(other)}')


def _alternatives(rollout: RolloutConfig) -> Iterator[tuple[str, RolloutConfig]]:
  """Yield each disabled feature that may shorten the rollout, and a config that enables it."""
  partial, name = programs.with_partial_rollouts(rollout), 'config.rollout.partial=True'
  drafts = {'drafts': step.DRAFTS}
  if not rollout.partial:
    yield name, partial
  if rollout.drafts == '0':
    with_drafts = f'config.rollout.drafts={step.DRAFTS}'
    yield with_drafts, dataclasses.replace(rollout, **drafts)
    if not rollout.partial:
      yield f'{name} and {with_drafts}', dataclasses.replace(partial, **drafts)


def _describe_ages(estimate: Estimate) -> str:
  ages = estimate.ages
  return (
    f'responses up to {ages.max()} steps old when trained on (mean {ages.mean():.1f}), '
    f'{100 * estimate.carried:.0f}% of their tokens from earlier steps'
  )


def _print_assumptions(work: Workload, length_text: str) -> None:
  """Print an estimate's assumptions; `length_text` says where the response lengths come from."""
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
  assumed: responses {length_text}
    (mean {mean:,.0f} tokens); prompts of {work.prompt} tokens; full replay, with
    {len(work.candidates):,} stored responses to choose from; {sync:.0f} ms of host time per
    sync and {host:.0f} s per step; no compilation, checkpoint, preemption or
    comparison of log-probabilities; {step.TOKENS_PER_PASS} tokens per row per pass with drafts""")
