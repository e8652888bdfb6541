"""How long a training step takes, by part: its programs' times, and the lengths of its responses.

Estimates, never measurements; program_time.py says where a program's time is from.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Pass
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.performance import memory, passes, program_time, rollout_schedule, roofline
from exgrpo_jax.performance.chips import GIB, Chip
from exgrpo_jax.performance.program_time import Seconds
from exgrpo_jax.performance.programs import Program
from exgrpo_jax.policy import ragged_cache
from exgrpo_jax.rollout import stages

# Assumed, for want of a measurement.
SYNC_SECONDS = 0.003  # of the host between two decode calls, while the device waits
HOST_SECONDS = 1.0  # of the host in a step, while the device waits: verdicts, the batch, logging


@dataclasses.dataclass(frozen=True)
class Workload:
  """What a step works on, in tokens."""

  prompt: int  # of each prompt
  fresh: np.ndarray  # of generated responses, in the order in which they are begun
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


@dataclasses.dataclass(frozen=True)
class Estimator:
  """What turns tokens into seconds."""

  rollout: stages.Config
  spec: gradients.UpdateSpec
  decoding: Mesh
  chip: Chip
  programs: Mapping[str, Program]  # 'score', 'prefill', 'decode', 'update', 'optimizer'

  def parts(self, work: Workload) -> list[Part]:
    """Of a step; see `of_step`."""
    return of_step(
      work,
      self.rollout.questions,
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

  def _generate(self, lengths: np.ndarray, num_prompts: int, prompt: int) -> list[Part]:
    return [
      self._reshard(),
      self._prefill(num_prompts, prompt),
      *self._decode(lengths, prompt),
    ]

  def _reshard(self) -> Part:
    """The weights that a chip decodes with come over its links."""
    size = memory.bytes_per_chip(memory.step_arrays(self.spec, self.decoding).decode_params)
    seconds = size / (program_time.LINKS * self.chip.link)
    return Part('reshard', seconds, detail=f'{size / GIB:.2f} GiB to each chip')

  def _prefill(self, num_prompts: int, prompt: int) -> Part:
    """As many runs of the compiled program as have the tokens."""
    length = length_bucket(prompt, self.rollout.max_prompt)
    rows, compiled_length = self.programs['prefill'].shape
    runs = num_prompts * length / (rows * compiled_length)
    seconds = runs * self._seconds('prefill').total
    flops = roofline.forward_flops(self.spec.model, num_prompts * prompt, prompt, num_prompts)
    detail = f'{num_prompts:,} prompts of {prompt} tokens'
    return Part('prefill', seconds, self._share_of_flops(flops, seconds), 'FLOPs', detail)

  def _decode(self, lengths: np.ndarray, prompt: int) -> tuple[Part, Part]:
    """The scheduler's decode steps, and its syncs with the host.

    A step takes as long with a short cache as with a long one, but for the kernel that reads of it
    what is written; and never less than memory takes to give weights and cache.
    """
    rollout = self.rollout
    spans = rollout_schedule.spans(lengths, prompt, rollout.slots, ragged_cache.BLOCK)
    step, call = self._one_trip('decode'), self._seconds('decode', 0).total
    arrays = memory.step_arrays(self.spec, self.decoding)
    weights = memory.bytes_per_chip(arrays.decode_params)
    cache = memory.cache_bytes_per_chip(rollout, self.spec.model, self.decoding)
    seconds = num_bytes = 0.0
    for span in spans:
      of_cache = min(1, span.positions / (rollout.slots * rollout.longest_row))
      read = weights + of_cache * cache
      step_seconds = step.total - (1 - of_cache) * step.kernels
      seconds += call + span.steps * max(step_seconds, read / self.chip.bandwidth)
      num_bytes += span.steps * read
    steps = sum(span.steps for span in spans)
    share = num_bytes / seconds / self.chip.bandwidth
    detail = (
      f'{steps:,} decode steps of {1e3 * seconds / steps:.2f} ms, on average '
      f'{lengths.sum() / steps:.0f} of {rollout.slots:,} slots live'
    )
    waiting = Part('syncs', len(spans) * SYNC_SECONDS, detail=f'{len(spans):,} with the host')
    return Part('decode', seconds, share, 'bandwidth', detail), waiting

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


def of_step(
  work: Workload,
  questions: int,
  score: Part,
  generate: Callable[[np.ndarray, int, int], list[Part]],
  update: Callable[[np.ndarray, int], Part],
  optimizer: Part,
) -> list[Part]:
  """The parts of a step in the order in which they run; it has its share of an evaluation.

  Args:
    work: what the step works on.
    questions: of the step.
    score: the part that scores stored responses.
    generate: of (lengths of responses, how many prompts, tokens of each).
    update: of (lengths of responses, tokens of each prompt).
    optimizer: the part of the updates that has no responses.
  """
  found = [
    score,
    *generate(work.fresh, questions, work.prompt),
    update(np.concatenate([work.fresh, work.replayed]), work.prompt),
    optimizer,
    Part('host', HOST_SECONDS, detail='assumed'),
  ]
  if len(work.evaluated):
    generated = generate(work.evaluated, len(work.evaluated), work.prompt)
    found.append(_share_of_evaluation(generated, work))
  return found


def _share_of_evaluation(generated: Sequence[Part], work: Workload) -> Part:
  """A step's part of an evaluation whose responses are generated so."""
  seconds = sum(part.seconds for part in generated)
  detail = (
    f'{len(work.evaluated):,} responses in {seconds:.0f} s every {work.evaluation_every} steps'
  )
  return Part('evaluation', seconds / work.evaluation_every, detail=detail)


def _padding(found: list[Pass], tokens: int) -> str:
  if not tokens:
    return ''
  return f'; {sum(one.shape.num_tokens for one in found) / tokens:.2f} tokens computed for each'
