"""How long a training step takes, by part: its programs' times, and the lengths of its responses.

Estimates, never measurements; program_time.py says where a program's time is from.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Pass
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.performance import (
  carried_schedule,
  memory,
  passes,
  program_time,
  rollout_schedule,
  roofline,
)
from exgrpo_jax.performance.chips import GIB, Chip
from exgrpo_jax.performance.program_time import Seconds
from exgrpo_jax.performance.programs import Program
from exgrpo_jax.performance.rollout_schedule import Generation
from exgrpo_jax.policy import ragged_cache
from exgrpo_jax.rollout import settings

# Assumed, for want of a measurement.
SYNC_SECONDS = 0.003  # of the host between two decode calls, while the device waits
HOST_SECONDS = 1.0  # of the host in a step, while the device waits: verdicts, the batch, logging


@dataclasses.dataclass(frozen=True)
class Workload:
  """What a step works on, in tokens."""

  prompt: int  # of each prompt
  fresh: np.ndarray  # of a step's generated responses, in the order in which they are begun
  groups: Sequence[np.ndarray]  # the same by group, of as many steps as `carried_schedule` asks for
  replayed: np.ndarray  # of those that take part in the update
  candidates: np.ndarray  # of stored responses that are scored to choose the replayed ones
  evaluated: np.ndarray  # of the responses of one evaluation; empty where there is none
  evaluation_every: int  # steps


class Part(NamedTuple):
  """Of a step."""

  name: str
  seconds: float
  share: float = 0.0  # of the peak that bounds it
  bound: str = ''  # which peak that is; '' where there is none
  detail: str = ''


class Schedule(NamedTuple):
  """What is generated, and how old it is when it is trained."""

  generations: list[Generation]  # of training steps, over which a step's time is averaged
  evaluation: Generation
  ages: np.ndarray  # int, of the groups that these steps train; none without carry
  carried: float  # share of the tokens of these groups that earlier steps wrote

  @property
  def live(self) -> float:
    """Slots that are busy, on average over decode steps."""
    return mean_live(self.generations)


class Estimate(NamedTuple):
  """Of a step's time."""

  parts: list[Part]  # in the order in which they run
  schedule: Schedule

  @property
  def seconds(self) -> float:
    """Of the whole step."""
    return sum(part.seconds for part in self.parts)

  def seconds_of(self, name: str) -> float:
    """Of one part; 0 where there is none of that name."""
    return sum(part.seconds for part in self.parts if part.name == name)


@dataclasses.dataclass(frozen=True)
class Estimator:
  """What turns tokens into seconds."""

  rollout: settings.Config
  spec: gradients.UpdateSpec
  decoding: Mesh
  chip: Chip
  programs: Mapping[str, Program]  # those of `programs.of_step`; 'resume' may be missing

  def estimate(self, work: Workload) -> Estimate:
    """Of a step; see `of_step`."""
    return of_step(
      work,
      schedule(work, self.rollout, ragged_cache.BLOCK),
      self._score(work),
      self._generate,
      self._update,
      self._optimizer(),
    )

  def _seconds(self, name: str, trips: float = 1) -> Seconds:
    """Of one run of a program; `trips` of its loop over tokens or passes."""
    return program_time.estimate(self.programs[name].module, self.chip, self.spec.mesh.size, trips)

  def _one_trip(self, name: str) -> Seconds:
    return self._seconds(name) + self._seconds(name, 0) * -1

  def _share_of_flops(self, flops: float, seconds: float) -> float:
    return flops / seconds / self.spec.mesh.size / self.chip.flops if seconds else 0.0

  def _generate(self, generations: Sequence[Generation], prompt: int) -> list[Part]:
    return [
      self._reshard(),
      self._prefill(generations, prompt),
      *self._resume(generations),
      *self._decode(generations),
    ]

  def _reshard(self) -> Part:
    """The weights that a chip decodes with come over its links."""
    size = memory.bytes_per_chip(memory.step_arrays(self.spec, self.decoding).decode_params)
    seconds = size / (program_time.LINKS * self.chip.link)
    return Part('reshard', seconds, detail=f'{size / GIB:.2f} GiB to each chip')

  def _prefill(self, generations: Sequence[Generation], prompt: int) -> Part:
    """As many runs of the compiled program as have the tokens."""
    num_prompts = sum(each.prompts for each in generations) / len(generations)
    length = length_bucket(prompt, self.rollout.max_prompt)
    rows, compiled_length = self.programs['prefill'].shape
    runs = num_prompts * length / (rows * compiled_length)
    seconds = runs * self._seconds('prefill').total
    flops = num_prompts * roofline.forward_flops(self.spec.model, prompt, prompt, 1)
    detail = f'{num_prompts:,.0f} prompts of {prompt} tokens'
    return Part('prefill', seconds, self._share_of_flops(flops, seconds), 'FLOPs', detail)

  def _resume(self, generations: Sequence[Generation]) -> list[Part]:
    """Nothing where no response spans steps. Like prefill where it is not compiled itself."""
    resumed = [each.resumed for each in generations]
    if not sum(map(len, resumed)):
      return []
    name = 'resume' if 'resume' in self.programs else 'prefill'
    found = passes.of_resuming(self.rollout, self.decoding, resumed)
    seconds = self._of_passes(name, found, self._seconds(name)) / len(generations)
    rows = np.concatenate(resumed)
    flops = sum(roofline.forward_flops(self.spec.model, int(row), int(row), 1) for row in rows)
    share = self._share_of_flops(flops / len(generations), seconds)
    return [Part('resume', seconds, share, 'FLOPs', resumed_rows(resumed, found))]

  def _decode(self, generations: Sequence[Generation]) -> tuple[Part, Part]:
    """The scheduler's decode steps, and its syncs with the host.

    A step takes as long with a short cache as with a long one, but for the kernel that reads of it
    what is written; and never less than memory takes to give weights and cache.
    """
    rollout = self.rollout
    step, call = self._one_trip('decode'), self._seconds('decode', 0).total
    arrays = memory.step_arrays(self.spec, self.decoding)
    weights = memory.bytes_per_chip(arrays.decode_params)
    cache = memory.cache_bytes_per_chip(rollout, self.spec.model, self.decoding)
    seconds = num_bytes = 0.0
    for span in itertools.chain.from_iterable(each.spans for each in generations):
      of_cache = min(1, span.positions / (rollout.slots * rollout.longest_row))
      read = weights + of_cache * cache
      step_seconds = step.total - (1 - of_cache) * step.kernels
      seconds += call + span.steps * max(step_seconds, read / self.chip.bandwidth)
      num_bytes += span.steps * read
    share = num_bytes / seconds / self.chip.bandwidth
    return decode_parts(generations, rollout.slots, seconds, share, 'bandwidth')

  def _score(self, work: Workload) -> Part:
    found = passes.of_scoring(self.spec, work.candidates, work.prompt)
    seconds = self._of_passes('score', found, self._seconds('score'))
    tokens = int(work.candidates.sum()) + len(work.candidates) * work.prompt
    length = tokens / max(1, len(work.candidates))
    flops = roofline.forward_flops(self.spec.model, tokens, int(length), tokens)
    detail = f'{len(work.candidates):,} stored responses{_padding(found, tokens)}'
    return Part('score', seconds, self._share_of_flops(flops, seconds), 'FLOPs', detail)

  def _update(self, responses: np.ndarray, prompt: int) -> Part:
    """Its share of peak counts the products that training needs, without what remat repeats."""
    minibatches = passes.of_update(self.spec, responses, prompt)
    found = [one for minibatch in minibatches for one in minibatch]
    stacks = sum(len({one.shape for one in minibatch}) for minibatch in minibatches)
    seconds = self._of_passes('update', found, self._one_trip('update'))
    seconds += stacks * self._seconds('update', 0).total
    tokens, num_responses = int(responses.sum()), len(responses)
    rows = tokens + num_responses * prompt
    sizes = rows, rows // num_responses, tokens
    flops = roofline.update_flops(self.spec.model, *sizes, frozen=self.spec.lora.rank > 0)
    detail = f'{num_responses:,} responses in {len(found)} passes{_padding(found, rows)}'
    return Part('update', seconds, self._share_of_flops(flops, seconds), 'FLOPs', detail)

  def _optimizer(self) -> Part:
    """Reads and writes parameters and moments, and reads the gradient."""
    arrays = memory.step_arrays(self.spec, self.decoding)
    runs = self.spec.optimizer.minibatches
    seconds = runs * self._seconds('optimizer').total
    state, gradient = map(memory.bytes_per_chip, (arrays.state, arrays.gradient))
    share = runs * (2 * state + gradient) / seconds / self.chip.bandwidth
    return Part('optimizer', seconds, share, 'bandwidth', f'{runs} updates')

  def _of_passes(self, name: str, found: list[Pass], one: Seconds) -> float:
    """Passes of other shapes than the compiled one: attention by the square of the length."""
    rows, length = self.programs[name].shape
    seconds = 0.0
    for each in found:
      tokens = each.shape.num_tokens / (rows * length)
      seconds += tokens * (one.total - one.kernels * (1 - each.shape.length / length))
    return seconds


def schedule(work: Workload, rollout: settings.Config, block: int) -> Schedule:
  """What is generated in a step, or in several of the steady state where responses span steps.

  `block` is that of `rollout_schedule.decoded`.
  """

  def at_once(lengths: np.ndarray, num_prompts: int) -> Generation:
    return rollout_schedule.generation(lengths, num_prompts, work.prompt, rollout.slots, block)

  evaluation = at_once(work.evaluated, len(work.evaluated))
  if not rollout.carry:
    generations = [at_once(work.fresh, rollout.questions)]
    return Schedule(generations, evaluation, ages=np.zeros(0, int), carried=0.0)
  steps = carried_schedule.steady(work.groups, rollout, work.prompt, block)
  trained = sum(int(lengths.sum()) for step in steps for lengths in step.trained)
  return Schedule(
    generations=[step.generation for step in steps],
    evaluation=evaluation,
    ages=np.concatenate([step.ages for step in steps]),
    carried=sum(step.carried for step in steps) / trained,
  )


def of_step(
  work: Workload,
  schedule: Schedule,
  score: Part,
  generate: Callable[[Sequence[Generation], int], list[Part]],
  update: Callable[[np.ndarray, int], Part],
  optimizer: Part,
) -> Estimate:
  """The parts of a step in the order in which they run; it has its share of an evaluation.

  Args:
    work: what the step works on.
    schedule: of its responses.
    score: the part that scores stored responses.
    generate: of (what is generated, by step; tokens of each prompt); of a step on average.
    update: of (lengths of responses, tokens of each prompt).
    optimizer: the part of the updates that has no responses.
  """
  found = [
    score,
    *generate(schedule.generations, work.prompt),
    update(np.concatenate([work.fresh, work.replayed]), work.prompt),
    optimizer,
    Part('host', HOST_SECONDS, detail='assumed'),
  ]
  if len(work.evaluated):
    generated = generate([schedule.evaluation], work.prompt)
    found.append(_share_of_evaluation(generated, work))
  return Estimate(found, schedule)


def decode_parts(
  generations: Sequence[Generation], slots: int, seconds: float, share: float = 0.0, bound: str = ''
) -> tuple[Part, Part]:
  """Decoding and its syncs, of a step on average, where all take so many seconds."""
  decode_steps = sum(each.decode_steps for each in generations)
  syncs = sum(len(each.spans) for each in generations) / len(generations)
  live = mean_live(generations)
  detail = (
    f'{decode_steps / len(generations):,.0f} decode steps of {1e3 * seconds / decode_steps:.2f} '
    f'ms, on average {live:.0f} of {slots:,} slots live ({100 * live / slots:.0f}%)'
  )
  decode = Part('decode', seconds / len(generations), share, bound, detail)
  return decode, Part('syncs', syncs * SYNC_SECONDS, detail=f'{syncs:,.0f} with the host')


def resumed_rows(resumed: Sequence[np.ndarray], found: Sequence[Pass]) -> str:
  """Of a step on average, in words."""
  rows = np.concatenate(resumed)
  return (
    f'{len(rows) / len(resumed):,.0f} begun responses of {rows.mean():,.0f} tokens, prompt '
    f'included{_padding(found, int(rows.sum()))}'
  )


def mean_live(generations: Sequence[Generation]) -> float:
  """Slots that are busy, on average over decode steps."""
  tokens = sum(each.tokens for each in generations)
  return tokens / sum(each.decode_steps for each in generations)


def _share_of_evaluation(generated: Sequence[Part], work: Workload) -> Part:
  """A step's part of an evaluation whose responses are generated so."""
  seconds = sum(part.seconds for part in generated)
  detail = (
    f'{len(work.evaluated):,} responses in {seconds:.0f} s every {work.evaluation_every} steps'
  )
  return Part('evaluation', seconds / work.evaluation_every, detail=detail)


def _padding(found: Sequence[Pass], tokens: int) -> str:
  if not tokens:
    return ''
  return f'; {sum(one.shape.num_tokens for one in found) / tokens:.2f} tokens computed for each'
