"""The device memory that a program needs, as reported by the compiler or computed by formula.

The formula adds up all arguments and the largest temporary arrays that exist at the same time. It
derives their sizes from the model's shape. It counts an update's gradient and logits separately; if
they share memory, an update needs up to 20% less. Tests compare the sums with the buffers that XLA
allocates for the CPU and, if the GPU compiler is installed, for an H100. Shape letters are the same
as in layers.py and attention.py.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.capacity.devices import GIB
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import attention, blockwise, logprobs, model
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.runtime.compilations import Program

_ARRAY = jax.Array | jax.ShapeDtypeStruct | np.ndarray
_FLOAT32 = 4  # bytes


class Need(NamedTuple):
  """The memory that a program needs on a device while it runs, in bytes."""

  arguments: int
  results: int  # excluding results that reuse a donated argument's memory
  temporary: int

  @property
  def peak(self) -> int:
    """Return the total memory reserved while the program runs."""
    return self.arguments + self.results + self.temporary


def of_compiled(executable: jax.stages.Compiled) -> Need:
  """Return a program's memory on one device, as reported by the compiler."""
  analysis = executable.memory_analysis()
  assert analysis is not None, 'XLA counts the memory of every program'
  return Need(
    arguments=analysis.argument_size_in_bytes,
    results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    temporary=analysis.temp_size_in_bytes,
  )


def other_arrays(program: Program, held_arrays: Any) -> int:
  """Return how many bytes other arrays occupy on a device while a program runs.

  `held_arrays` is a tree of the arrays that exist during the whole run.
  """
  arguments = {id(leaf) for leaf in _arrays(program.args)}
  leaves = {
    id(leaf): leaf for leaf in _arrays((held_arrays, program.kept)) if id(leaf) not in arguments
  }
  return sum(map(_size, leaves.values()))


def print_peaks(
  programs: Iterable[Program], held_arrays: Any, limit: float, need_of: Callable[[Program], Need]
) -> dict[str, float]:
  """Print the memory that each program of a step needs on a device.

  For `held_arrays`, see `other_arrays`. `limit` is the number of bytes available to programs.
  `need_of` returns a program's memory and may compile it. Returns program name -> highest peak in
  bytes across all sizes of the program, or inf if any size does not compile.
  """
  peaks: dict[str, float] = {}
  for program in programs:
    rows, length = program.size
    name = f'{program.name} {rows:,} x {length:,}' if rows else program.name
    try:
      need = need_of(program)
    except jax.errors.JaxRuntimeError as error:
      print(f'  {name:<24} DOES NOT FIT: {str(error).splitlines()[0][:300]}')
      peaks[program.name] = float('inf')
      continue
    other_bytes = other_arrays(program, held_arrays)
    peak = other_bytes + need.peak
    percent = 100 * peak / limit
    print(
      f'  {name:<24} {peak / GIB:7.2f} GiB at its peak: arguments {need.arguments / GIB:.2f}, '
      f'results {need.results / GIB:.2f}, temporary {need.temporary / GIB:.2f}, other arrays '
      f'{other_bytes / GIB:.2f}; '
      + (
        f'fits, {100 - percent:.0f}% to spare'
        if peak <= limit
        else f'DOES NOT FIT: {percent - 100:.1f}% over the limit'
      ),
      flush=True,
    )
    peaks[program.name] = max(peaks.get(program.name, 0.0), peak)
  return peaks


def size_of(tree: Any) -> int:
  """Return how many bytes a tree of arrays or shapes takes on one device."""
  return sum(map(_size, _arrays(tree)))


def _arrays(tree: Any) -> list[Any]:
  """Return the tree's leaves that are arrays or shapes, skipping static arguments."""
  return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, _ARRAY)]


def _size(leaf: Any) -> int:
  sharding = getattr(leaf, 'sharding', None)
  shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
  return math.prod(shape) * leaf.dtype.itemsize


# ---- By formula ----


@dataclasses.dataclass(frozen=True)
class Platform:
  """The properties of a platform's compiled programs that affect their memory use."""

  # If True, attention scores are stored in float32. If False, attention only stores a mask that
  # separates the rows of a sequence: one number per pair of tokens, in the activations' dtype.
  has_scores: bool
  logit_arrays: int  # number of float32 arrays as large as a chunk's logits in sampling and scoring
  has_new_moments: bool  # True if new moments exist next to old ones; False if updated in place


# Valid for float32 only, because XLA:CPU converts most bfloat16 arrays to float32.
CPU = Platform(has_scores=True, logit_arrays=3, has_new_moments=True)


def of_gpu(dtype: str) -> Platform:
  """Return the GPU platform for a dtype.

  XLA:GPU fuses arrays that XLA:CPU materializes. cuDNN's bfloat16 attention stores no scores.
  """
  has_scores = attention.backend_for('gpu', dtype) != 'cudnn'
  return Platform(has_scores=has_scores, logit_arrays=1, has_new_moments=False)


def estimated(program: Program, spec: gradients.UpdateSpec, platform: Platform) -> Need:
  """Estimate the memory of a program in `KNOWN` on one device, without compiling it."""
  temporary = _temporary_of_update if program.name == 'update' else _temporary_of_others
  with jax.set_mesh(program.mesh):
    return Need(size_of(program.args), results=0, temporary=temporary(program, spec, platform))


KNOWN = ('score', 'prefill', 'resume', 'decode', 'update', 'optimizer')
# The other programs need no memory beyond the arrays that their callers keep.


def _temporary_of_others(program: Program, spec: gradients.UpdateSpec, platform: Platform) -> int:
  """Return the size in bytes of the temporary arrays in a program other than 'update'."""
  if program.name == 'optimizer':
    return 2 * size_of(program.args[2]) if platform.has_new_moments else 0
  shape, (count, length) = spec.model, program.size
  layer, c = _Layer.of(program, spec, platform), jnp.dtype(shape.dtype).itemsize
  if program.name == 'decode':
    logits = platform.logit_arrays * count * shape.vocab_size * _FLOAT32
    scores = 2 * shape.num_heads * count * length * _FLOAT32 * platform.has_scores
    head = layer.unembedding if shape.tied_embeddings else 0
    outputs = 3 * decode_loop.TOKENS_PER_SYNC * count * _FLOAT32
    return head + logits + scores + outputs + count * c * 3 * (layer.hidden + shape.width)
  tokens = count * length
  mlp, attend = 3 * c * tokens * layer.hidden, c * tokens * layer.projections + layer.pairs
  forward = 3 * c * tokens * shape.width + max(attend, mlp)
  if program.name == 'score':  # the first position of a sequence is not scored
    logits = platform.logit_arrays * layer.logits(length - 1) * _FLOAT32
    return max(layer.unembedding + logits, forward) + 2 * tokens * shape.width * c
  cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
  return forward + tokens * cache * c  # the keys and values of all layers


def _temporary_of_update(program: Program, spec: gradients.UpdateSpec, platform: Platform) -> int:
  """Return the size in bytes of an update's temporary arrays.

  A microbatch's gradient exists at the same time as the sum of the earlier gradients.
  """
  shape, (count, length) = spec.model, program.size
  tokens, layer = count * length, _Layer.of(program, spec, platform)
  c = jnp.dtype(shape.dtype).itemsize
  window = min(length - 1, -(-length * spec.max_response // spec.longest_row))
  unembedding_gradient = shape.width * shape.vocab_size * _FLOAT32
  if spec.lora.rank or not shape.tied_embeddings:
    unembedding_gradient = 0  # it is frozen, or counted in the gradient
  head = layer.logits(window) * (_FLOAT32 + c) + 3 * count * window * shape.width * c
  scores = (2 if platform.has_scores else 1) * layer.pairs  # and their gradients
  # Recomputed by the backward pass, each with its gradient: gate and up, the residual stream and
  # its norms, and queries, keys and values.
  entries = 4 * layer.hidden + 6 * shape.width + 2 * layer.projections
  layers = jax.tree.leaves(model.shapes(shape, spec.mesh)['layers'])
  matrices = sum(leaf.size for leaf in layers) // shape.num_layers
  backward = c * (matrices + tokens * entries) + scores
  residuals = 3 * layer.hidden + 4 * shape.width + 2 * layer.projections
  layer_residuals = {  # per layer, from the forward to the backward pass
    'all': 0,
    'all_but_products': c * tokens * (layer.projections + 2 * layer.hidden),
    'none': c * tokens * residuals + scores,
  }[spec.microbatch.remat]
  layer_bytes = shape.num_layers * (c * tokens * shape.width + layer_residuals)
  gradient, _ = program.args[2]
  largest = max(layer.unembedding + head, backward)
  return size_of(gradient) + unembedding_gradient + layer_bytes + largest


class _Layer(NamedTuple):
  """Sizes that are used in the estimates for several programs."""

  projections: int  # entries of a token's queries, keys and values
  hidden: int  # a token's hidden units in a layer, summed over its experts
  unembedding: int  # bytes of the unembedding's copy, transposed or cast from float32
  pairs: int  # bytes for all pairs of tokens: the scores of all heads, or the mask
  logits: Callable[[int], int]  # window of a sequence -> logits that exist at once

  @classmethod
  def of(cls, program: Program, spec: gradients.UpdateSpec, platform: Platform) -> '_Layer':
    """Compute the sizes for a program."""
    shape, (count, length) = spec.model, program.size
    c = jnp.dtype(shape.dtype).itemsize
    is_as_it_is = not shape.tied_embeddings and (spec.lora.rank or shape.dtype == 'float32')
    pairs = count * length**2 * c
    if platform.has_scores:
      pairs = count * shape.num_heads * blockwise.scores_at_once(length) * _FLOAT32
    return cls(
      projections=(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size,
      hidden=max(1, shape.experts_per_token) * shape.mlp_width,
      unembedding=0 if is_as_it_is else shape.width * shape.vocab_size * c,
      pairs=pairs,
      logits=lambda window: (
        count * logprobs.chunk_sizes(count, window, spec.logit_chunk)[1] * shape.vocab_size
      ),
    )
