"""What a program needs of a device's memory: by its compiler, or by formula where there is none.

By formula the arguments are counted as they are. Of temporary arrays the largest that exist at once
are counted, by the model's shape. An update's gradient and its logits are counted apart; where they
share memory, an update takes up to a fifth less. Tests hold the sums to the buffers that XLA
allocates for the CPU and, where its compiler is installed, for an H100. Letters as in layers.py and
attention.py.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.capacity.devices import GIB
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import attention, blockwise, logprobs, model
from exgrpo_jax.rollout import decode_loop
from exgrpo_jax.runtime.compilations import Program

_FLOAT32 = 4  # bytes


class Need(NamedTuple):
  """What a program needs on a device while it runs, in bytes."""

  arguments: int
  results: int  # without those that reuse the memory of a donated argument
  temporary: int

  @property
  def peak(self) -> int:
    """All of it: the compiler reserves it for as long as the program runs."""
    return self.arguments + self.results + self.temporary


def of_compiled(executable: jax.stages.Compiled) -> Need:
  """Return the compiler's own count for one device."""
  analysis = executable.memory_analysis()
  assert analysis is not None, 'XLA counts the memory of every program'
  return Need(
    arguments=analysis.argument_size_in_bytes,
    results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    temporary=analysis.temp_size_in_bytes,
  )


def beside(program: Program, held: Any) -> int:
  """Return the bytes of what a device keeps while a program runs and that is no argument of it.

  `held` are the arrays that a run keeps all the time.
  """
  arguments = {id(leaf) for leaf in _arrays(program.args)}
  kept = {id(leaf): leaf for leaf in _arrays((held, program.kept)) if id(leaf) not in arguments}
  return sum(map(_size, kept.values()))


def print_peaks(
  programs: Iterable[Program], held: Any, limit: float, need_of: Callable[[Program], Need]
) -> dict[str, float]:
  """Print what each program needs of a device.

  Args:
    programs: of a step.
    held: see `beside`.
    limit: bytes that programs can use.
    need_of: may compile the program.

  Returns:
    Bytes of a device by program, of its largest size; inf where one does not compile.
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
    other = beside(program, held)
    spare = 1 - (other + need.peak) / limit
    verdict = 'fits, ' if spare >= 0 else 'DOES NOT FIT: '
    print(
      f'  {name:<24} {(other + need.peak) / GIB:7.2f} GiB at its peak: arguments '
      f'{need.arguments / GIB:.2f}, results {need.results / GIB:.2f}, temporary '
      f'{need.temporary / GIB:.2f}, other arrays {other / GIB:.2f}; {verdict}'
      f'{100 * spare:.0f}% to spare',
      flush=True,
    )
    peaks[program.name] = max(peaks.get(program.name, 0.0), other + need.peak)
  return peaks


def size_of(tree: Any) -> int:
  """Return the bytes of one device's shards of the arrays of a tree, or of their shapes."""
  return sum(map(_size, _arrays(tree)))


def _arrays(tree: Any) -> list[Any]:
  """The leaves that are arrays or their shapes, and no static arguments."""
  return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, 'dtype')]


def _size(leaf: Any) -> int:
  sharding = getattr(leaf, 'sharding', None)
  shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
  return math.prod(shape) * leaf.dtype.itemsize


# ---- By formula ----


@dataclasses.dataclass(frozen=True)
class Platform:
  """Where the programs of one compiler differ from another's."""

  # Attention scores are float32 arrays; else there is one number for each pair of tokens, the mask
  # that keeps the rows of a sequence apart, in the activations' type.
  has_scores: bool
  logit_arrays: int  # in float32, as large as a chunk's logits, in sampling and scoring
  has_new_moments: bool  # beside the old ones; else they are written in place


# For float32 alone: XLA:CPU converts most of what is bfloat16 to it.
CPU = Platform(has_scores=True, logit_arrays=3, has_new_moments=True)


def of_gpu(dtype: str) -> Platform:
  """XLA:GPU fuses what XLA:CPU writes out; cuDNN's attention, for bfloat16, holds no scores."""
  has_scores = attention.backend_for('gpu', dtype) != 'cudnn'
  return Platform(has_scores=has_scores, logit_arrays=1, has_new_moments=False)


def estimated(program: Program, spec: gradients.UpdateSpec, platform: Platform) -> Need:
  """The need of one of the programs that `KNOWN` names, on one device; nothing is compiled."""
  temporary = _TEMPORARY[program.name](_Estimate(program, spec, platform))
  return Need(size_of(program.args), results=0, temporary=temporary)


@dataclasses.dataclass(frozen=True)
class _Estimate:
  """Temporary arrays of one program, in bytes."""

  program: Program
  spec: gradients.UpdateSpec
  platform: Platform

  @property
  def shape(self) -> model.Config:
    return self.spec.model

  @property
  def c(self) -> int:
    """Bytes of an activation's number."""
    return jnp.dtype(self.shape.dtype).itemsize

  @property
  def tokens(self) -> int:
    count, length = self.program.size
    return count * length

  @property
  def projections(self) -> int:
    """Entries of a token's queries, keys and values."""
    return (self.shape.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_size

  @property
  def hidden(self) -> int:
    """Hidden units of a token in a layer, in all of its experts."""
    return max(1, self.shape.experts_per_token) * self.shape.mlp_width

  @property
  def unembedding(self) -> int:
    """The unembedding's copy: the embedding transposed, or cast from float32."""
    if not self.shape.tied_embeddings and (self.spec.lora.rank or self.shape.dtype == 'float32'):
      return 0
    return self.shape.width * self.shape.vocab_size * self.c

  def logits(self, window: int) -> int:
    """Entries of the logits that exist at once."""
    count, _ = self.program.size
    _, size = logprobs.chunk_sizes(count, window, self.spec.logit_chunk)
    return count * size * self.shape.vocab_size

  @property
  def pairs(self) -> int:
    """One number for each pair of tokens: the scores of all heads, or the mask."""
    count, length = self.program.size
    if not self.platform.has_scores:
      return count * length**2 * self.c
    return count * self.shape.num_heads * blockwise.scores_at_once(length) * _FLOAT32

  @property
  def forward(self) -> int:
    """A layer's forward pass: attention or the MLP, beside three arrays of width D."""
    attend = self.c * self.tokens * self.projections + self.pairs
    mlp = 3 * self.c * self.tokens * self.hidden
    return 3 * self.c * self.tokens * self.shape.width + max(attend, mlp)

  def score(self) -> int:
    _, length = self.program.size  # the first position of a sequence is not scored
    logits = self.platform.logit_arrays * self.logits(length - 1) * _FLOAT32
    states = 2 * self.tokens * self.shape.width * self.c
    return max(self.unembedding + logits, self.forward) + states

  def into_cache(self) -> int:
    """Beside a forward pass, the keys and values of all layers."""
    entries = 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_size
    return self.forward + self.tokens * entries * self.c

  def decode(self) -> int:
    slots, length = self.program.size
    logits = self.platform.logit_arrays * slots * self.shape.vocab_size * _FLOAT32
    scores = 2 * self.shape.num_heads * slots * length * _FLOAT32
    head = self.unembedding if self.shape.tied_embeddings else 0
    layer = slots * self.c * (3 * self.hidden + 3 * self.shape.width)
    written = 3 * decode_loop.TOKENS_PER_SYNC * slots * _FLOAT32
    return head + logits + layer + written + (scores if self.platform.has_scores else 0)

  def update(self) -> int:
    """A microbatch's gradient exists beside the sum of those before."""
    shape, c, tokens, (count, length) = self.shape, self.c, self.tokens, self.program.size
    window = min(length - 1, -(-length * self.spec.max_response // self.spec.longest_row))
    (gradient, _), layers = self.program.args[2], model.shapes(shape, self.spec.mesh)['layers']
    of_unembedding = shape.width * shape.vocab_size * _FLOAT32
    if self.spec.lora.rank or not shape.tied_embeddings:
      of_unembedding = 0  # it is frozen, or counted in `gradient`
    head = self.logits(window) * (_FLOAT32 + c) + 3 * count * window * shape.width * c
    scores = (2 if self.platform.has_scores else 1) * self.pairs  # and their gradients
    # What a backward pass computes again, each with its gradient: gate and up, the residual stream
    # and its norms, queries, keys and values.
    entries = 4 * self.hidden + 6 * shape.width + 2 * self.projections
    matrices = c * sum(leaf.size for leaf in jax.tree.leaves(layers)) // shape.num_layers
    backward = matrices + c * tokens * entries + scores
    residuals = 3 * self.hidden + 4 * shape.width + 2 * self.projections
    kept = {  # of a layer, from the forward to the backward pass
      'all': 0,
      'all_but_products': c * tokens * (self.projections + 2 * self.hidden),
      'none': c * tokens * residuals + scores,
    }[self.spec.gradient.remat]
    of_layers = shape.num_layers * (c * tokens * shape.width + kept)
    most = max(self.unembedding + head, backward)
    return size_of(gradient) + of_unembedding + of_layers + most

  def optimizer(self) -> int:
    return 2 * size_of(self.program.args[2]) if self.platform.has_new_moments else 0


_TEMPORARY: Mapping[str, Callable[[_Estimate], int]] = {
  'score': _Estimate.score,
  'prefill': _Estimate.into_cache,
  'resume': _Estimate.into_cache,
  'decode': _Estimate.decode,
  'update': _Estimate.update,
  'optimizer': _Estimate.optimizer,
}
KNOWN = tuple(_TEMPORARY)  # the others need no more than what their callers keep
