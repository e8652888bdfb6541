"""Memory that the programs of a step need on one device, by formula: nothing is compiled.

Arguments are counted from the shapes of the real arrays. Of temporary arrays the largest that exist
at once are counted, by the model's shape. An update's gradient and its logits are counted apart;
where they share memory, an update takes up to a fifth less. Tests hold the sums to the buffers that
XLA allocates for the CPU and, where its compiler is installed, for an H100. Letters as in layers.py
and attention.py.
"""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from exgrpo_jax.capacity import flops, programs
from exgrpo_jax.capacity.arrays import StepArrays, bytes_per_chip, cache_bytes, prompt_bytes
from exgrpo_jax.capacity.programs import Need
from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Shape
from exgrpo_jax.policy import attention, blockwise, dense_cache, logprobs, model
from exgrpo_jax.rollout import decode_loop, scoring, settings

_FLOAT32 = _INT32 = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Platform:
  """Where the programs of one compiler differ from another's."""

  cache_multiple: int  # positions of the cache are rounded up to a multiple
  # Attention scores are float32 arrays; else there is one number for each pair of tokens, the mask
  # that keeps the rows of a sequence apart, in the activations' type.
  has_scores: bool
  logit_arrays: int  # in float32, as large as a chunk's logits, in sampling and scoring
  has_new_moments: bool  # beside the old ones; else they are written in place


# For float32 alone: XLA:CPU converts most of what is bfloat16 to it.
CPU = Platform(cache_multiple=1, has_scores=True, logit_arrays=3, has_new_moments=True)


def of_gpu(dtype: str) -> Platform:
  """XLA:GPU fuses what XLA:CPU writes out; cuDNN's attention, for bfloat16, holds no scores."""
  return Platform(
    cache_multiple=dense_cache.MULTIPLE,
    has_scores=attention.backend_for('gpu', dtype) != 'cudnn',
    logit_arrays=1,
    has_new_moments=False,
  )


def of_step(
  rollout: settings.Config,
  spec: gradients.UpdateSpec,
  decoding: Mesh,
  arrays: StepArrays,
  platform: Platform,
) -> dict[str, Need]:
  """The needs of the programs of `programs.of_step` on one device.

  Call it inside `jax.set_mesh(spec.mesh)`.
  """
  shape, multiple = spec.model, platform.cache_multiple
  prompts = prompt_bytes(rollout, shape, decoding, multiple)
  cache = cache_bytes(rollout, shape, decoding, multiple)
  prefill, resume = (
    _into_cache(rows, size, shape, arrays, platform)
    for rows, size in (
      (programs.prefill_shape(rollout, decoding), prompts),
      (programs.resume_shape(rollout, decoding), cache),
    )
  )
  return {
    'score': _score(rollout, spec, arrays, platform),
    'prefill': prefill,
    **({'resume': resume} if rollout.carry else {}),
    'decode': _decode(rollout, shape, cache, arrays, platform),
    'update': _update(rollout, spec, arrays, platform),
    'optimizer': _optimizer(arrays, platform),
  }


def _score(
  rollout: settings.Config, spec: gradients.UpdateSpec, arrays: StepArrays, platform: Platform
) -> Need:
  shape, tokens_per_pass = spec.model, spec.gradient.tokens_per_microbatch
  long, _ = scoring.pass_shapes(spec.model, spec.mesh, rollout.longest_row, tokens_per_pass)
  # The first position of a sequence is not scored.
  logits = _chunk_tokens(long._replace(window=long.length - 1), rollout.logit_chunk)
  head = (
    _unembedding_copy(shape, arrays.uses_lora)
    + platform.logit_arrays * logits * shape.vocab_size * _FLOAT32
  )
  layer = _forward(shape, long.count, long.length, platform)
  hidden = 2 * long.num_tokens * shape.width * _activation(shape)
  return Need(
    arguments=bytes_per_chip(arrays.policy) + 3 * long.num_tokens * _INT32,
    results=2 * long.num_tokens * _FLOAT32,
    temporary=max(head, layer) + hidden,
  )


def _into_cache(
  rows: tuple[int, int], cache: int, shape: model.Config, arrays: StepArrays, platform: Platform
) -> Need:
  """A prefill of (rows, tokens of each) into a cache of `cache` bytes."""
  count, length = rows
  keys_and_values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
  written = count * length * keys_and_values * _activation(shape)
  used = {name: value for name, value in arrays.decode_params.items() if name != 'unembedding_DV'}
  return Need(
    arguments=bytes_per_chip(used) + cache,
    results=0,
    temporary=_forward(shape, count, length, platform) + written,
  )


def _decode(
  rollout: settings.Config, shape: model.Config, cache: int, arrays: StepArrays, platform: Platform
) -> Need:
  slots = rollout.slots
  logits = platform.logit_arrays * slots * shape.vocab_size * _FLOAT32
  scores = 2 * shape.num_heads * slots * rollout.longest_row * _FLOAT32
  head = _unembedding_copy(shape) if shape.tied_embeddings else 0
  layer = slots * _activation(shape) * (3 * flops.hidden_units(shape) + 3 * shape.width)
  written = 3 * decode_loop.TOKENS_PER_SYNC * slots * _FLOAT32
  return Need(
    arguments=bytes_per_chip(arrays.decode_params) + cache,
    results=written,
    temporary=head + logits + layer + (scores if platform.has_scores else 0),
  )


def _update(
  rollout: settings.Config, spec: gradients.UpdateSpec, arrays: StepArrays, platform: Platform
) -> Need:
  """A microbatch's gradient exists beside the sum of those before."""
  shape, c = spec.model, _activation(spec.model)
  long, stack = programs.update_stack(rollout, spec)
  gradient = bytes_per_chip(arrays.gradient)
  unembedding_gradient = shape.width * shape.vocab_size * _FLOAT32
  if arrays.uses_lora or 'unembedding_DV' in arrays.gradient:
    unembedding_gradient = 0  # it is frozen, or counted in `gradient`
  logits = _chunk_tokens(long, spec.logit_chunk) * shape.vocab_size * (_FLOAT32 + c)
  states = 3 * long.count * long.window * shape.width * c
  head = logits + states + _unembedding_copy(shape, arrays.uses_lora)
  backward = _backward(shape, long, platform)
  products = c * long.num_tokens * (_projections(shape) + 2 * flops.hidden_units(shape))
  kept = {  # of a layer, from the forward to the backward pass
    'all': 0,
    'all_but_products': products,
    'none': _residuals(shape, long, platform),
  }[spec.gradient.remat]
  inputs = c * long.num_tokens * shape.width
  arguments = arrays.state.params, arrays.gradient, stack, arrays.initial
  return Need(
    arguments=sum(map(bytes_per_chip, arguments)),
    results=0,
    temporary=gradient
    + unembedding_gradient
    + shape.num_layers * (inputs + kept)
    + max(head, backward),
  )


def _optimizer(arrays: StepArrays, platform: Platform) -> Need:
  gradient = bytes_per_chip(arrays.gradient)
  return Need(
    arguments=bytes_per_chip(arrays.state) + gradient,
    results=0,
    temporary=2 * gradient if platform.has_new_moments else 0,
  )


# ---- One layer ----


def _forward(shape: model.Config, count: int, length: int, platform: Platform) -> int:
  """Bytes of a layer's forward pass: attention or the MLP, beside three arrays of width D."""
  c, tokens = _activation(shape), count * length
  attend = c * tokens * _projections(shape) + _pairs(shape, count, length, platform)
  return 3 * c * tokens * shape.width + max(attend, 3 * c * tokens * flops.hidden_units(shape))


def _residuals(shape: model.Config, long: Shape, platform: Platform) -> int:
  """Bytes that a layer's backward pass keeps of the forward pass if it recomputes nothing."""
  entries = 3 * flops.hidden_units(shape) + 4 * shape.width + 2 * _projections(shape)
  return _activation(shape) * long.num_tokens * entries + _attention(shape, long, platform)


def _backward(shape: model.Config, long: Shape, platform: Platform) -> int:
  """Bytes of a layer's backward pass, what it recomputes included.

  The layer's matrices in the activations' type and, each with its gradient: gate and up, the
  residual stream and its norms, queries, keys and values, scores.
  """
  c = _activation(shape)
  matrices = c * flops.layer_parameter_count(shape)
  entries = 4 * flops.hidden_units(shape) + 6 * shape.width + 2 * _projections(shape)
  return matrices + c * long.num_tokens * entries + _attention(shape, long, platform)


def _attention(shape: model.Config, long: Shape, platform: Platform) -> int:
  """Scores and their gradients, or the mask."""
  return (2 if platform.has_scores else 1) * _pairs(shape, long.count, long.length, platform)


def _pairs(shape: model.Config, count: int, length: int, platform: Platform) -> int:
  """One number for each pair of tokens: the scores of all heads, or the mask."""
  if not platform.has_scores:
    return count * length**2 * _activation(shape)
  return count * shape.num_heads * blockwise.scores_at_once(length) * _FLOAT32


def _projections(shape: model.Config) -> int:
  """Entries of a token's queries, keys and values."""
  return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size


# ---- Small parts ----


def _unembedding_copy(shape: model.Config, is_frozen: bool = False) -> int:
  """Bytes of the unembedding's copy: the embedding transposed, or cast from float32."""
  if not shape.tied_embeddings and (is_frozen or shape.dtype == 'float32'):
    return 0
  return shape.width * shape.vocab_size * _activation(shape)


def _chunk_tokens(long: Shape, chunk: int) -> int:
  """Tokens whose logits exist at once."""
  _, size = logprobs.chunk_sizes(long.count, long.window, chunk)
  return long.count * size


def _activation(shape: model.Config) -> int:
  return jnp.dtype(shape.dtype).itemsize
