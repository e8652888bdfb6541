"""The arrays that a training step keeps on each chip, as shapes, and their size in bytes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import lora, model, sharding
from exgrpo_jax.rollout import settings


class StepArrays(NamedTuple):
  """Shapes and shardings of what a step keeps between its programs."""

  state: optimizer.TrainState  # what is trained and AdamW's moments, for the whole run
  gradient: model.Params  # during the update
  decode_params: model.Params  # during the rollout, in the decode layout
  policy: model.Params  # what forward passes take: parameters, or LoRA's base and adapters
  initial: model.Params | None  # LoRA's base, or the reference of a KL term, for the whole run

  @property
  def uses_lora(self) -> bool:
    """Whether the policy is more than what is trained."""
    return self.policy is not self.state.params


def step_arrays(spec: gradients.UpdateSpec, decoding: jax.sharding.Mesh) -> StepArrays:
  """The arrays of a run that decodes on the mesh `decoding`; allocates nothing."""
  trained, uses_lora = gradients.trained_shapes(spec), spec.lora.rank > 0
  initial = None
  if uses_lora or spec.objective.kl_coefficient:
    initial = model.shapes(spec.model, spec.mesh, frozen=uses_lora)
  return StepArrays(
    state=optimizer.shapes(spec.optimizer, spec.num_updates, trained),
    gradient=trained,
    decode_params=model.decode_shapes(spec.model, decoding),
    policy=lora.joined(spec.lora, initial, trained),
    initial=initial,
  )


def bytes_per_chip(tree: Any) -> int:
  """The size of one chip's shards of a tree of arrays or shapes; 0 for None."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def cache_bytes(
  rollout: settings.Config, shape: model.Config, mesh: jax.sharding.Mesh, multiple: int = 1
) -> int:
  """One chip's share of the KV cache of all slots, at the longest length, in bytes.

  Positions are rounded up to a multiple.
  """
  return _cache_bytes(rollout.slots, rollout.longest_row, shape, mesh, multiple)


def prompt_bytes(
  rollout: settings.Config, shape: model.Config, mesh: jax.sharding.Mesh, multiple: int = 1
) -> int:
  """One chip's share of the cache of prefilled prompts, in bytes; see `cache_bytes`."""
  return _cache_bytes(rollout.prompts, rollout.max_prompt, shape, mesh, multiple)


def _cache_bytes(
  rows: int, length: int, shape: model.Config, mesh: jax.sharding.Mesh, multiple: int
) -> int:
  axes = ('batch', 'kv_heads', None, None)
  entries = 0
  for positions in shape.layer_lengths(length):
    cache = (rows, shape.num_kv_heads, multiple * math.ceil(positions / multiple), shape.head_size)
    entries += 2 * math.prod(sharding.named(mesh, axes, cache).shard_shape(cache))
  return entries * jnp.dtype(shape.dtype).itemsize
