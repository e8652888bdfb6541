"""Formulas: parameters, FLOPs, and the least time that a step can take on given chips.

FLOPs are not the compiler's count, because it counts the body of a loop once.
"""

from typing import NamedTuple

from jax.sharding import Mesh

from exgrpo_jax.learner import gradients
from exgrpo_jax.performance.chips import Chip
from exgrpo_jax.performance.memory import bytes_per_chip, cache_bytes_per_chip
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import stages

# Products with a layer's matrices in training, in multiples of the forward pass.
_TRAINING_PASSES = {'none': 3, 'all_but_products': 3, 'all': 4}


class StepRoofline(NamedTuple):
  """The least time that a step can take."""

  prefill: float  # seconds
  decode: float  # seconds
  update: float  # seconds
  update_flops: float  # on all chips together


def parameter_count(shape: model.Config) -> int:
  """The model's parameters, without biases and norm scales, which are a thousandth of them."""
  embeddings = shape.vocab_size * shape.width * (1 if shape.tied_embeddings else 2)
  return embeddings + shape.num_layers * layer_parameter_count(shape)


def layer_parameter_count(shape: model.Config) -> int:
  """The entries of one layer's matrices."""
  D, H = shape.width, shape.head_size
  return D * H * 2 * (shape.num_heads + shape.num_kv_heads) + 3 * D * shape.mlp_width


def forward_flops(shape: model.Config, num_tokens: int, length: int, num_logits: int) -> int:
  """FLOPs of a forward pass: matrix products, causal attention and the unembedding.

  Args:
    shape: the model's.
    num_tokens: in all rows.
    length: tokens of each row.
    num_logits: tokens that get logits.
  """
  products = 2 * shape.num_layers * layer_parameter_count(shape) * num_tokens
  attention = 2 * shape.num_layers * shape.num_heads * shape.head_size * length * num_tokens
  return products + attention + 2 * shape.width * shape.vocab_size * num_logits


def step_roofline(
  rollout: stages.Config, spec: gradients.UpdateSpec, decoding: Mesh, chip: Chip
) -> StepRoofline:
  """The roofline of a step in which every prompt and response has its longest length.

  Prefill and update are bound by FLOPs, decoding, on the mesh `decoding`, by the bandwidth of the
  memory.
  """
  shape, num_chips = spec.model, spec.mesh.size
  rows, longest = rollout.questions * rollout.samples, rollout.longest_row
  # Forward passes over whole rows that precede the update's own.
  passes_before = (spec.objective.kl_coefficient > 0) + (spec.objective.ratio == 'sequence')
  passes = _TRAINING_PASSES[spec.gradient.remat] + passes_before
  update_flops = passes * forward_flops(shape, rows * longest, longest, 0)
  # The fused loss never recomputes logits.
  update_flops += (3 + passes_before) * forward_flops(shape, 0, 0, rows * rollout.max_response)
  prefill_flops = forward_flops(
    shape, rollout.questions * rollout.max_prompt, rollout.max_prompt, rollout.questions
  )
  # Each decode step of all slots reads a chip's weights and, on average, half of its cache.
  weights = bytes_per_chip(model.decode_shapes(shape, decoding))
  bytes_per_token = weights + cache_bytes_per_chip(rollout, shape, decoding) / 2
  decode_steps = rows / rollout.slots * rollout.max_response
  return StepRoofline(
    prefill=prefill_flops / num_chips / chip.flops,
    decode=decode_steps * bytes_per_token / chip.bandwidth,
    update=update_flops / num_chips / chip.flops,
    update_flops=update_flops,
  )
