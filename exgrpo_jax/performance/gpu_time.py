"""How long a training step takes on one GPU, by formula: nothing is compiled or measured.

Products take their FLOPs, and decoding the bytes that it reads, at a share of the GPU's peak.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Pass
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.performance import memory, passes, roofline
from exgrpo_jax.performance.gpus import SHARE_OF_BANDWIDTH, SHARE_OF_FLOPS, Gpu
from exgrpo_jax.performance.memory import bytes_per_chip
from exgrpo_jax.performance.rollout_schedule import Generation
from exgrpo_jax.performance.step_time import (
  Estimate,
  Part,
  Workload,
  decode_parts,
  of_step,
  resumed_rows,
  schedule,
)
from exgrpo_jax.policy import dense_cache
from exgrpo_jax.rollout import settings

ASSUMPTIONS = f"""\
  formulas: products take their FLOPs, padding included, at {100 * SHARE_OF_FLOPS:.0f}% of the peak,
    an update's three times a forward pass's; decoding and the optimizer take what they read and
    write at {100 * SHARE_OF_BANDWIDTH:.0f}% of the memory's bandwidth. No GPU was measured:
    these are the goals of `benchmark all`, which measures one"""


@dataclasses.dataclass(frozen=True)
class Roofline:
  """What turns tokens into seconds."""

  rollout: settings.Config
  spec: gradients.UpdateSpec
  decoding: Mesh
  arrays: memory.StepArrays
  gpu: Gpu

  def estimate(self, work: Workload) -> Estimate:
    """Of a step; see `step_time.of_step`."""
    return of_step(
      work,
      schedule(work, self.rollout, dense_cache.MULTIPLE),
      self._score(work),
      self._generate,
      self._update,
      self._optimizer(),
    )

  def _score(self, work: Workload) -> Part:
    found = passes.of_scoring(self.spec, work.candidates, work.prompt)
    flops = sum(self._forward(one, one.shape.length) for one in found)
    return self._products('score', flops, f'{len(work.candidates):,} stored responses')

  def _update(self, responses: np.ndarray, prompt: int) -> Part:
    minibatches = passes.of_update(self.spec, responses, prompt)
    found = [one for minibatch in minibatches for one in minibatch]
    flops = 3 * sum(self._forward(one, one.shape.window) for one in found)
    detail = f'{len(responses):,} responses in {len(found)} passes'
    return self._products('update', flops, detail)

  def _forward(self, one: Pass, logits: int) -> int:
    """FLOPs of a pass, of each of whose sequences so many tokens get logits."""
    shape = one.shape
    return roofline.forward_flops(
      self.spec.model, shape.num_tokens, shape.length, shape.count * logits
    )

  def _generate(self, generations: Sequence[Generation], prompt: int) -> list[Part]:
    length = length_bucket(prompt, self.rollout.max_prompt)
    num_prompts = sum(each.prompts for each in generations) / len(generations)
    flops = num_prompts * roofline.forward_flops(self.spec.model, length, length, 0)
    detail = f'{num_prompts:,.0f} prompts of {prompt} tokens'
    return [
      self._moved('cast', bytes_per_chip((self.arrays.state.params, self.arrays.decode_params))),
      self._products('prefill', flops, detail),
      *self._resume(generations),
      *self._decode(generations),
    ]

  def _resume(self, generations: Sequence[Generation]) -> list[Part]:
    """Nothing where no response spans steps."""
    resumed = [each.resumed for each in generations]
    if not sum(map(len, resumed)):
      return []
    found = passes.of_resuming(self.rollout, self.decoding, resumed)
    flops = sum(self._forward(one, 0) for one in found) / len(generations)
    return [self._products('resume', flops, resumed_rows(resumed, found))]

  def _decode(self, generations: Sequence[Generation]) -> tuple[Part, Part]:
    """Decode steps, which read weights and what is written of the cache, and syncs with the host.

    With many slots the products take longer than the reading.
    """
    rollout, shape = self.rollout, self.spec.model
    weights = bytes_per_chip(self.arrays.decode_params)
    cache = memory.cache_bytes_per_chip(rollout, shape, self.decoding)
    of_position = cache / (rollout.slots * rollout.longest_row)
    flops = roofline.forward_flops(shape, rollout.slots, 0, rollout.slots)
    products = flops / self.gpu.flops / SHARE_OF_FLOPS
    seconds = 0.0
    for span in itertools.chain.from_iterable(each.spans for each in generations):
      read = (weights + span.positions * of_position) / self.gpu.bandwidth / SHARE_OF_BANDWIDTH
      seconds += span.steps * max(products, read)
    return decode_parts(generations, rollout.slots, seconds)

  def _optimizer(self) -> Part:
    """Reads and writes parameters and moments, and reads the gradient."""
    runs = self.spec.optimizer.minibatches
    state, gradient = map(bytes_per_chip, (self.arrays.state, self.arrays.gradient))
    return self._moved('optimizer', runs * (2 * state + gradient), f'{runs} updates')

  def _products(self, name: str, flops: float, detail: str) -> Part:
    seconds = flops / self.gpu.flops / SHARE_OF_FLOPS
    return Part(name, seconds, SHARE_OF_FLOPS, 'FLOPs', detail)

  def _moved(self, name: str, size: float, detail: str = '') -> Part:
    seconds = size / self.gpu.bandwidth / SHARE_OF_BANDWIDTH
    return Part(name, seconds, SHARE_OF_BANDWIDTH, 'bandwidth', detail)
