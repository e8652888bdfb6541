"""A step's estimated time in print: a line for each part, the sum, and what it rests on."""

from typing import NamedTuple

from exgrpo_jax.performance import program_time, step_time
from exgrpo_jax.performance.step_time import Estimate, Estimator, Workload


class Speed(NamedTuple):
  """Of training, as estimated."""

  seconds: float  # of a step
  tokens_per_second: float  # of the step's responses, replayed ones included
  chip_hours: float  # of 100 steps


def print_time(
  estimate: Estimate,
  work: Workload,
  num_chips: int,
  num_steps: int,
  of_carry: str,
  assumptions: str,
) -> Speed:
  """Prints and returns how long a step takes, and so many of them; and what that rests on.

  Args:
    estimate: of a step's time.
    work: that it is of.
    num_chips: that work on it.
    num_steps: of the run.
    of_carry: see `carry_line`.
    assumptions: in words.
  """
  print('a step, estimated, not measured:')
  for part in estimate.parts:
    share = f'{100 * part.share:.0f}% of peak {part.bound}' if part.bound else ''
    print(f'  {part.name:<12} {part.seconds:7.2f} s  {share:<22}  {part.detail}'.rstrip())
  seconds = estimate.seconds
  tokens = sum(work.fresh) + sum(work.replayed)
  speed = Speed(seconds, tokens / seconds, 100 * seconds * num_chips / 3600)
  hours = num_steps * seconds / 3600
  print(
    f'  {"sum":<12} {seconds:7.2f} s  {speed.tokens_per_second:,.0f} response tokens per second, '
    f'{speed.chip_hours:,.1f} chip-hours per 100 steps; {hours:,.1f} hours for '
    f'config.num_steps={num_steps}'
  )
  print(f'{of_carry}\nwhat it rests on:\n{assumptions}')
  return speed


def carry_line(estimate: Estimate, slots: int, with_carry: Estimate | None) -> str:
  """How old responses are that span steps, or, where they do not, what it would bring if they did.

  `with_carry` is the step's estimate if they did, where they do not.
  """
  if not with_carry:
    return f'  {_ages(estimate)}'
  before, after = estimate.schedule.live / slots, with_carry.schedule.live / slots
  return (
    f'  with config.rollout.carry=True: {with_carry.seconds:.2f} s; decode '
    f'{with_carry.seconds_of("decode"):.2f} s instead of {estimate.seconds_of("decode"):.2f} s, '
    f'resume {with_carry.seconds_of("resume"):.2f} s;\n    {100 * after:.0f}% of slots busy '
    f'instead of {100 * before:.0f}%; {_ages(with_carry)}'
  )


def _ages(estimate: Estimate) -> str:
  ages, carried = estimate.schedule.ages, estimate.schedule.carried
  return (
    f'responses up to {ages.max()} steps old as they are trained (mean {ages.mean():.1f}), '
    f'{100 * carried:.0f}% of their tokens from earlier steps'
  )


def of_compiler(estimator: Estimator) -> str:
  """What estimates from compiled programs rest on."""
  links, hop = program_time.LINKS, 1e6 * program_time.HOP_SECONDS
  head_size = estimator.spec.model.head_size
  efficiency = 100 * program_time.attention_efficiency(head_size, estimator.chip)
  reading = 100 * program_time.READ_EFFICIENCY
  return f"""\
  compiler: cycles of all operations that it makes itself; shapes that were not compiled take time
    in proportion to their tokens
  formulas: collectives take their bytes over {links} links and {hop:.0f} microsecond a hop, and are
    hidden behind other work where they are asynchronous; resharding takes its bytes over the
    links; attention reaches {efficiency:.0f}% of peak FLOPs in training, and {reading:.0f}% of the
    memory's bandwidth in decoding, where it reads what is written of the cache"""


def of_workload(work: Workload, lengths: str) -> str:
  """What every estimate assumes of a step; `lengths` says in words where lengths are from."""
  mean = sum(work.fresh) / len(work.fresh)
  sync, host = 1e3 * step_time.SYNC_SECONDS, step_time.HOST_SECONDS
  return f"""\
  assumed: responses {lengths}
    (mean {mean:,.0f} tokens); prompts of {work.prompt} tokens; replay in full, with
    {len(work.candidates):,} stored responses to choose from; {sync:.0f} ms of the host in each
    sync and {host:.0f} s in each step; no compilation, checkpoint, parity check or preemption"""
