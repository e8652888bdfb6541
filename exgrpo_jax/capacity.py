"""What fits on which TPU slice, on a machine without one: the real programs, compiled for it.

python -m exgrpo_jax.capacity --config=configs/qwen2_5_math_7b.py --topology=v5e:8x8

Needs libtpu (pip install -e '.[tpu]'). Memory is the compiler's count for one chip.
FLOPs are by formula, for the compiler sees the body of a loop once.
"""

import functools
import math
import os
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies

from exgrpo_jax.algorithm import objective
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import CONFIG, Settings, model_shape, run_command, settings
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import decode_loop, scheduler, token_sampling

_TOPOLOGY = flags.DEFINE_string('topology', None, 'TPU generation and slice, e.g. v5e:4x4.')
_GIB = 2**30


class Chip(NamedTuple):
  """One chip: memory as libtpu's messages give it, the rest as Google Cloud's documentation."""

  memory: float  # bytes that programs may use, a little less than the chip has
  flops: float  # a second, in bfloat16
  bandwidth: float  # bytes a second, of its memory


CHIPS = {
  'v5e': Chip(15.75 * _GIB, 197e12, 819e9),
  'v6e': Chip(31.25 * _GIB, 918e12, 1640e9),
}


class Program(NamedTuple):
  """What one compiled program needs of a chip, in bytes."""

  arguments: int
  results: int  # beyond the arguments whose memory they take
  temporary: int

  @property
  def peak(self) -> int:
    return self.arguments + self.results + self.temporary


def main() -> None:
  if not CONFIG.value or not _TOPOLOGY.value:
    raise InputError(
      '--config and --topology are both needed, e.g. '
      '--config=configs/qwen2_5_math_7b.py --topology=v5e:8x8.'
    )
  checked = settings(CONFIG.value)
  shape, chip, devices = model_shape(checked), chip_of(_TOPOLOGY.value), topology(_TOPOLOGY.value)
  mesh = sharding.make_mesh(checked.mesh, devices)
  model.check_mesh(shape, mesh)
  print(
    f'{_TOPOLOGY.value}: {len(devices)} chips of {chip.memory / _GIB:.2f} GiB, mesh '
    f'{dict(mesh.shape)}; {count(shape) / 1e9:.2f} billion parameters',
    flush=True,
  )
  if not report(checked, shape, mesh, chip):
    sys.exit(1)


def chip_of(name: str) -> Chip:
  """The chip of a topology's name, such as 'v5e:4x4'; InputError for an unknown one."""
  generation = name.split(':')[0]
  if generation not in CHIPS or ':' not in name:
    raise InputError(
      f'--topology={name} must be a generation and a slice, such as v5e:4x4; '
      f'generations are {", ".join(CHIPS)}.'
    )
  return CHIPS[generation]


def topology(name: str) -> list[jax.Device]:
  """The devices of a slice, to compile for; InputError without libtpu or for no such slice."""
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # it would ask the cloud about this machine
  # Another process may have it loaded; nothing is run here, so it keeps its chips.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  try:
    import libtpu  # noqa: F401
  except ImportError as error:
    raise InputError(
      'capacity compiles with libtpu, which is not installed: pip install -e '
      "'.[tpu]'. It needs no TPU."
    ) from error
  try:
    return list(topologies.get_topology_desc(platform='tpu', topology_name=name).devices)
  except Exception as error:  # the plugin's own kinds
    raise InputError(
      f'--topology={name}: libtpu does not give this slice ({str(error).splitlines()[0]}).'
    ) from error


def report(checked: Settings, shape: model.Config, mesh: jax.sharding.Mesh, chip: Chip) -> bool:
  """Prints what each part of a step needs of a chip; whether all fit."""
  with jax.set_mesh(mesh):
    fits = _report(checked, shape, mesh, chip)
  print('fits' if fits else 'does not fit')
  return fits


def _report(checked, shape, mesh, chip):
  state, gradient = _state(checked, shape, mesh)
  decoding = model.decode_shapes(shape, mesh)
  reference = state.params if checked.objective.kl_coefficient else None
  parts = {
    'parameters': state.params,
    'moments': state.opt_state,
    'reference policy': reference,
    'gradient': gradient,
    'weights while decoding': decoding,
  }
  sizes = {name: _bytes(tree) for name, tree in parts.items() if tree is not None}
  for name, size in sizes.items():
    print(f'  {name:<24} {size / _GIB:7.2f} GiB', flush=True)
  stay = [name for name in sizes if name not in ('gradient', 'weights while decoding')]
  for other in ('gradient', 'weights while decoding'):
    names = [*stay, other]
    size = sum(sizes[name] for name in names)
    if size > chip.memory:
      print(
        f"{', '.join(names)} alone take {size / _GIB:.2f} GiB of a chip's "
        f'{chip.memory / _GIB:.2f}: take more chips, or a mesh that splits them further'
      )
      return False
  resident = sum(sizes[name] for name in stay)
  peaks = {
    name: _peak(name, beside, compiled, chip)
    for name, beside, compiled in (
      ('prefill', resident, lambda: prefill(checked, shape, mesh, decoding)),
      ('decode', resident, lambda: decode(checked, shape, mesh, decoding)),
      # The update's own arguments lack the moments, the optimiser's the reference.
      ('update', sizes['moments'], lambda: added(checked, shape, mesh, state, gradient, reference)),
      ('optimizer', _bytes(reference), lambda: applied(checked, shape, mesh, state, gradient)),
    )
  }
  _print_speed(checked, shape, mesh, chip)
  if peaks['decode'] < float('inf'):
    own = cache_bytes(checked, shape, mesh)
    room = chip.memory - peaks['decode'] + own
    print(
      f'  KV cache {own / _GIB:.2f} GiB; the largest that fits is about '
      f'{int(checked.rollout.slots * room / own):,} slots of {_longest(checked):,} tokens'
    )
  return max(peaks.values()) <= chip.memory


def _peak(name, beside, compiled, chip):
  """Prints and returns the bytes in use while a program runs; inf where it does not compile."""
  try:
    own = compiled()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    print(f'  {name:<24} DOES NOT FIT: {str(error).splitlines()[0][:300]}')
    return float('inf')
  peak = beside + own.peak
  left = 1 - peak / chip.memory
  print(
    f'  {name:<24} {peak / _GIB:7.2f} GiB at its peak: beside it {beside / _GIB:.2f}, '
    f'arguments {own.arguments / _GIB:.2f}, results {own.results / _GIB:.2f}, temporary '
    f'{own.temporary / _GIB:.2f}; {"fits, " if left >= 0 else "DOES NOT FIT: "}'
    f'{100 * left:.0f}% to spare',
    flush=True,
  )
  return peak


# ---- Programs ----


def prefill(checked: Settings, shape: model.Config, mesh, decoding) -> Program:
  """As many of the longest prompts as are prefilled together."""
  length = length_bucket(checked.rollout.max_prompt)
  tokens_PT = _rows(mesh, max(1, scheduler.PREFILL_TOKENS // length), length)
  lengths_P = jax.ShapeDtypeStruct(
    tokens_PT.shape[:1], jnp.int32, sharding=sharding.replicated(mesh)
  )
  return _measured(decode_loop.prefill.lower(shape, decoding, tokens_PT, lengths_P))


def decode(checked: Settings, shape: model.Config, mesh, decoding) -> Program:
  """All slots at the longest cache; without the training state that stays on the chip."""
  sampling = decode_loop.Settings(
    token_sampling.Config(checked.rollout.temperature),
    checked.rollout.slots,
    checked.rollout.max_response,
    (0,),
    0,
  )
  empty = decode_loop.empty.lower(shape, sampling, _longest(checked)).compile()
  state = jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    jax.eval_shape(functools.partial(decode_loop.empty, shape, sampling, _longest(checked))),
    empty.output_shardings,
  )
  return _measured(
    decode_loop.decode.lower(shape, sampling, decoding, jax.eval_shape(jax.random.key, 0), state, 1)
  )


def added(checked: Settings, shape: model.Config, mesh, state, gradient, reference) -> Program:
  """The forward and backward passes of a minibatch of the longest rows."""
  longest = _longest(checked)
  window = length_bucket(checked.rollout.max_response, longest)
  rows = (
    max(1, checked.gradient.tokens_per_microbatch // longest) * sharding.split(mesh, 'batch')[1]
  )
  in_all = checked.rollout.questions * checked.rollout.samples // checked.optimizer.minibatches
  place = sharding.named(mesh, (None, 'batch'), (1, rows))

  def of(dtype, *width):
    return jax.ShapeDtypeStruct((-(-in_all // rows), rows, *width), dtype, sharding=place)

  tokens = objective.LossInputs(
    *(of(jnp.float32, window),) * 6, of(jnp.float32, 1), of(jnp.bool_, 1)
  )
  microbatches = gradients.Microbatch(
    of(jnp.int32, longest), of(jnp.int32), of(jnp.int32, window), tokens
  )
  static = _update_settings(checked, shape, mesh)
  _, sums = jax.eval_shape(functools.partial(gradients.zero_accumulator, static), state.params)
  return _measured(
    gradients.accumulate.lower(
      static, state.params, (gradient, sums), microbatches, 1, False, True, reference
    )
  )


def applied(checked: Settings, shape: model.Config, mesh, state, gradient) -> Program:
  """The optimiser's step."""
  return _measured(
    gradients.apply_gradient.lower(_update_settings(checked, shape, mesh), state, gradient)
  )


def _measured(lowered) -> Program:
  found = lowered.compile().memory_analysis()
  return Program(
    found.argument_size_in_bytes,
    found.output_size_in_bytes - found.alias_size_in_bytes,
    found.temp_size_in_bytes,
  )


def _state(checked, shape, mesh):
  """Shapes of the train state and of a gradient."""
  params = model.shapes(shape, mesh)
  state = optimizer.shapes(checked.optimizer, 1, params)
  return state, params


def _update_settings(checked, shape, mesh):
  return gradients.Settings(
    checked.gradient,
    checked.objective,
    checked.optimizer,
    shape,
    mesh,
    1,
    checked.rollout.temperature,
    checked.rollout.max_response,
    checked.rollout.logit_chunk,
  )


def _rows(mesh, rows, length):
  return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding.batch(mesh, rows))


def _longest(checked):
  return checked.rollout.max_prompt + checked.rollout.max_response


def _bytes(tree) -> int:
  """Of one chip."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


# ---- By formula ----


def count(shape: model.Config) -> int:
  """Parameters."""
  ends = shape.vocab_size * shape.width * (1 if shape.tied_embeddings else 2)
  return ends + shape.num_layers * product_size(shape)


def product_size(shape: model.Config) -> int:
  """Entries of one layer's matrices."""
  D, H = shape.width, shape.head_size
  return D * H * 2 * (shape.num_heads + shape.num_kv_heads) + 3 * D * shape.mlp_width


def forward_flops(shape: model.Config, tokens: int, length: int, logits: int) -> int:
  """Of a forward pass: matrix products, causal attention and the unembedding.

  Args:
    shape: of the model.
    tokens: in all rows.
    length: of a row.
    logits: tokens that get logits.
  """
  products = 2 * shape.num_layers * product_size(shape) * tokens
  attention = 2 * shape.num_layers * shape.num_heads * shape.head_size * length * tokens
  return products + attention + 2 * shape.width * shape.vocab_size * logits


def cache_bytes(checked: Settings, shape: model.Config, mesh) -> int:
  """Of the KV cache of all slots at the longest length, on one chip."""
  axes = ('batch', 'kv_heads', None, None)
  whole = (checked.rollout.slots, shape.num_kv_heads, _longest(checked), shape.head_size)
  own = sharding.named(mesh, axes, whole).shard_shape(whole)
  return 2 * shape.num_layers * math.prod(own) * jnp.dtype(shape.dtype).itemsize


def _print_speed(checked, shape, mesh, chip):
  """A roofline of one step in which every response is as long as may be."""
  rollout, chips = checked.rollout, mesh.size
  rows, longest = rollout.questions * rollout.samples, _longest(checked)
  # Forward passes over whole rows before the update's own.
  before = (checked.objective.kl_coefficient > 0) + (checked.objective.ratio == 'sequence')
  passes = {'none': 3, 'all_but_products': 3, 'all': 4}[checked.gradient.remat] + before
  trained = passes * forward_flops(shape, rows * longest, longest, 0)
  trained += (3 + before) * forward_flops(shape, 0, 0, rows * rollout.max_response)
  prompts = forward_flops(
    shape, rollout.questions * rollout.max_prompt, rollout.max_prompt, rollout.questions
  )
  # Every step of all slots reads a chip's share of the weights, and on average half the cache.
  weights = _bytes(model.decode_shapes(shape, mesh))
  steps = rows / rollout.slots * rollout.max_response
  seconds = {
    'prefill': prompts / chips / chip.flops,
    'decode': steps * (weights + cache_bytes(checked, shape, mesh) / 2) / chip.bandwidth,
    'update': trained / chips / chip.flops,
  }
  print(
    '  roofline of a step of longest responses: '
    + ', '.join(f'{name} {value:.0f} s' for name, value in seconds.items())
    + f'; update {trained / 1e15:,.0f} PFLOP'
  )


if __name__ == '__main__':
  run_command(main)
