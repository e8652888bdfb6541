"""How long a training step takes, by part: its programs' times, and the lengths of its responses.

Estimates, never measurements; program_time.py says where a program's time is from.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.capacity import arrays, flops, passes, program_time, schedule
from exgrpo_jax.capacity.chips import GIB, Chip
from exgrpo_jax.capacity.program_time import Seconds
from exgrpo_jax.capacity.programs import Program
from exgrpo_jax.capacity.schedule import Generation
from exgrpo_jax.errors import counted
from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Pass, length_bucket
from exgrpo_jax.policy import ragged_cache, sharding
from exgrpo_jax.rollout import settings

# Assumed, for want of a measurement: what the device waits for the host.
SYNC_SECONDS = 0.003  # between two decode calls
HOST_SECONDS = 1.0  # in a step, for verdicts, the batch and logging


@dataclasses.dataclass(frozen=True)
class Workload:
  """What a step works on, in tokens."""

  prompt: int  # of each prompt
  fresh: np.ndarray  # of a step's generated responses, in the order in which they are begun
  groups: Sequence[np.ndarray]  # the same by group, for `schedule.num_groups` groups
  replayed: np.ndarray  # of replayed responses in the update
  candidates: np.ndarray  # of stored responses that are scored to choose the replayed ones
  evaluated: np.ndarray  # of the responses of one evaluation; empty where there is none
  evaluation_every: int  # steps


class Part(NamedTuple):
  """A part of a step."""

  name: str
  seconds: float
  share: float = 0.0  # of the peak that bounds it
  bound: str = ''  # which peak that is; '' where there is none
  detail: str = ''


class Estimate(NamedTuple):
  """A step's time, and what is generated in it."""

  parts: list[Part]  # in the order in which they run
  live: float  # busy slots, mean over decode steps
  ages: np.ndarray  # int, steps, of the groups it trains; empty without partial rollouts
  carried: float  # share of these groups' tokens that earlier steps wrote

  @property
  def seconds(self) -> float:
    """The whole step."""
    return sum(part.seconds for part in self.parts)

  def seconds_of(self, name: str) -> float:
    """One part; 0 where there is none of that name."""
    return sum(part.seconds for part in self.parts if part.name == name)


@dataclasses.dataclass(frozen=True)
class Estimator:
  """Turns tokens into seconds, by the compiled programs of a step.

  Call its methods inside `jax.set_mesh(spec.mesh)`.
  """

  rollout: settings.Config
  spec: gradients.UpdateSpec
  decoding: Mesh
  chip: Chip
  programs: Mapping[str, Program]  # of `programs.of_step`; 'resume' may be missing

  def estimate(self, work: Workload) -> Estimate:
    """A step with its share of an evaluation; with partial rollouts an average steady one."""
    if self.rollout.carry:
      steps = schedule.steady(work.groups, self.rollout, work.prompt, ragged_cache.BLOCK)
    else:
      whole = self._at_once(work, work.fresh, self.rollout.questions)
      steps = [schedule.Step(whole, [], ages=np.zeros(0, int), carried=0)]
    generations = [step.generation for step in steps]
    parts = [
      self._score(work),
      *self._generate(generations, work.prompt),
      self._update(np.concatenate([work.fresh, work.replayed]), work.prompt),
      self._optimizer(),
      Part('host', HOST_SECONDS, detail='assumed'),
    ]
    if len(work.evaluated):
      parts.append(self._evaluation(work))
    trained = sum(int(lengths.sum()) for step in steps for lengths in step.trained)
    return Estimate(
      parts=parts,
      live=_mean_live(generations),
      ages=np.concatenate([step.ages for step in steps]),
      carried=sum(step.carried for step in steps) / max(1, trained),
    )

  def _at_once(self, work: Workload, lengths: np.ndarray, num_prompts: int) -> Generation:
    slots, block = self.rollout.slots, ragged_cache.BLOCK
    return schedule.generation(lengths, num_prompts, work.prompt, slots, block)

  @functools.cached_property
  def _arrays(self) -> arrays.StepArrays:
    return arrays.step_arrays(self.spec, self.decoding)

  def _seconds(self, name: str, trips: float = 1) -> Seconds:
    """One run of a program, with `trips` of its loop over tokens or passes."""
    return program_time.estimate(self.programs[name].module, self.chip, self.spec.mesh.size, trips)

  def _one_trip(self, name: str) -> Seconds:
    return self._seconds(name) + self._seconds(name, 0) * -1

  def _share_of_flops(self, count: float, seconds: float) -> float:
    return count / seconds / self.spec.mesh.size / self.chip.flops if seconds else 0.0

  def _generate(self, generations: Sequence[Generation], prompt: int) -> list[Part]:
    return [
      self._reshard(),
      self._prefill(generations, prompt),
      *self._resume(generations),
      *self._decode(generations),
    ]

  def _reshard(self) -> Part:
    """The weights that a chip decodes with come over its links."""
    size = arrays.bytes_per_chip(self._arrays.decode_params)
    seconds = size / (program_time.LINKS * self.chip.link)
    return Part('reshard', seconds, detail=f'{size / GIB:.2f} GiB to each chip')

  def _prefill(self, generations: Sequence[Generation], prompt: int) -> Part:
    """The compiled program, run as often as the tokens need it."""
    num_prompts = sum(each.prompts for each in generations) / len(generations)
    length = length_bucket(prompt, self.rollout.max_prompt)
    rows, compiled_length = self.programs['prefill'].shape
    runs = num_prompts * length / (rows * compiled_length)
    seconds = runs * self._seconds('prefill').total
    count = num_prompts * flops.forward_flops(self.spec.model, prompt, prompt, 1)
    detail = f'{num_prompts:,.0f} prompts of {prompt} tokens'
    return Part('prefill', seconds, self._share_of_flops(count, seconds), 'FLOPs', detail)

  def _resume(self, generations: Sequence[Generation]) -> list[Part]:
    """None without partial rollouts. Timed like prefill where it is not compiled itself."""
    resumed = [each.resumed for each in generations]
    if not sum(map(len, resumed)):
      return []
    name = 'resume' if 'resume' in self.programs else 'prefill'
    found = passes.of_resuming(self.rollout, self.decoding, resumed)
    rows = np.concatenate(resumed)
    _, shards = sharding.split(self.decoding, 'batch')
    own = len(rows) / len(found) / shards  # that a device copies in a pass
    seconds = self._of_passes(name, found, self._seconds(name, own)) / len(generations)
    count = sum(flops.forward_flops(self.spec.model, int(row), int(row), 1) for row in rows)
    detail = (
      f'{len(rows) / len(resumed):,.0f} begun responses of {rows.mean():,.0f} tokens, prompt '
      f'included{_padding(found, int(rows.sum()))}'
    )
    share = self._share_of_flops(count / len(generations), seconds)
    return [Part('resume', seconds, share, 'FLOPs', detail)]

  def _decode(self, generations: Sequence[Generation]) -> tuple[Part, Part]:
    """The scheduler's decode steps, and its syncs with the host.

    A step takes as long with a short cache as with a long one, but for the kernel, which reads
    only what is written of it; and never less than memory takes to read weights and cache.
    """
    rollout, count = self.rollout, len(generations)
    step, call = self._one_trip('decode'), self._seconds('decode', 0).total
    weights = arrays.bytes_per_chip(self._arrays.decode_params)
    cache = arrays.cache_bytes(rollout, self.spec.model, self.decoding)
    seconds = num_bytes = 0.0
    for span in itertools.chain.from_iterable(each.spans for each in generations):
      of_cache = min(1, span.positions / (rollout.slots * rollout.longest_row))
      read = weights + of_cache * cache
      step_seconds = step.total - (1 - of_cache) * step.kernels
      seconds += call + span.steps * max(step_seconds, read / self.chip.bandwidth)
      num_bytes += span.steps * read
    decode_steps = sum(each.decode_steps for each in generations)
    syncs = sum(len(each.spans) for each in generations) / count
    live, slots = _mean_live(generations), rollout.slots
    detail = (
      f'{decode_steps / count:,.0f} decode steps of {1e3 * seconds / decode_steps:.2f} '
      f'ms, on average {live:.0f} of {slots:,} slots live ({100 * live / slots:.0f}%)'
    )
    share = num_bytes / seconds / self.chip.bandwidth
    return (
      Part('decode', seconds / count, share, 'bandwidth', detail),
      Part('syncs', syncs * SYNC_SECONDS, detail=f'{syncs:,.0f} with the host'),
    )

  def _score(self, work: Workload) -> Part:
    found = passes.of_scoring(self.spec, work.candidates, work.prompt)
    seconds = self._of_passes('score', found, self._seconds('score'))
    tokens = int(work.candidates.sum()) + len(work.candidates) * work.prompt
    length = tokens / max(1, len(work.candidates))
    count = flops.forward_flops(self.spec.model, tokens, int(length), tokens)
    detail = f'{counted(len(work.candidates), "stored response")}{_padding(found, tokens)}'
    return Part('score', seconds, self._share_of_flops(count, seconds), 'FLOPs', detail)

  def _update(self, responses: np.ndarray, prompt: int) -> Part:
    """Its share of peak counts the products that training needs, not what remat repeats."""
    minibatches = passes.of_update(self.spec, responses, prompt)
    found = [one for minibatch in minibatches for one in minibatch]
    stacks = sum(len({one.shape for one in minibatch}) for minibatch in minibatches)
    seconds = self._of_passes('update', found, self._one_trip('update'))
    seconds += stacks * self._seconds('update', 0).total
    tokens, num_responses = int(responses.sum()), len(responses)
    rows = tokens + num_responses * prompt
    sizes = rows, rows // num_responses, tokens
    count = flops.update_flops(self.spec.model, *sizes, frozen=self.spec.lora.rank > 0)
    detail = f'{num_responses:,} responses in {len(found)} passes{_padding(found, rows)}'
    return Part('update', seconds, self._share_of_flops(count, seconds), 'FLOPs', detail)

  def _optimizer(self) -> Part:
    """Reads and writes parameters and moments, and reads the gradient."""
    runs = self.spec.optimizer.minibatches
    seconds = runs * self._seconds('optimizer').total
    state, gradient = map(arrays.bytes_per_chip, (self._arrays.state, self._arrays.gradient))
    share = runs * (2 * state + gradient) / seconds / self.chip.bandwidth
    return Part('optimizer', seconds, share, 'bandwidth', counted(runs, 'update'))

  def _evaluation(self, work: Workload) -> Part:
    """A step's share of an evaluation."""
    generation = self._at_once(work, work.evaluated, len(work.evaluated))
    seconds = sum(part.seconds for part in self._generate([generation], work.prompt))
    every = work.evaluation_every
    detail = f'{len(work.evaluated):,} responses in {seconds:.0f} s every {counted(every, "step")}'
    return Part('evaluation', seconds / every, detail=detail)

  def _of_passes(self, name: str, found: list[Pass], one: Seconds) -> float:
    """Passes of other shapes than the compiled one: attention by the square of the length."""
    rows, length = self.programs[name].shape
    seconds = 0.0
    for each in found:
      tokens = each.shape.num_tokens / (rows * length)
      seconds += tokens * (one.total - one.kernels * (1 - each.shape.length / length))
    return seconds


def _mean_live(generations: Sequence[Generation]) -> float:
  tokens = sum(each.tokens for each in generations)
  return tokens / sum(each.decode_steps for each in generations)


def _padding(found: Sequence[Pass], tokens: int) -> str:
  if not tokens:
    return ''
  return f'; {sum(one.shape.num_tokens for one in found) / tokens:.2f} tokens computed for each'
