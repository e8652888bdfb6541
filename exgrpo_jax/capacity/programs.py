"""The programs of a training step, compiled at their largest: their memory on a chip, their text.

The memory is the compiler's own count for one chip. Call these functions inside
`jax.set_mesh(spec.mesh)`; the devices of the meshes need not exist.
"""

import functools
import math
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from exgrpo_jax import packing
from exgrpo_jax.algorithm import objective
from exgrpo_jax.capacity import hlo
from exgrpo_jax.capacity.arrays import StepArrays
from exgrpo_jax.learner import gradients
from exgrpo_jax.packing import Segments
from exgrpo_jax.policy import attention, model, sharding
from exgrpo_jax.rollout import decode_loop, filling, scoring, settings, slots, token_sampling
from exgrpo_jax.rollout.slots import insertion_of


class Need(NamedTuple):
  """What a program needs on a chip while it runs, in bytes."""

  arguments: int
  results: int  # without those that reuse the memory of a donated argument
  temporary: int

  @property
  def peak(self) -> int:
    """All of it: the compiler reserves it for as long as the program runs."""
    return self.arguments + self.results + self.temporary


class Program(NamedTuple):
  """One compiled program."""

  module: hlo.Module
  shape: tuple[int, int]  # of what it works on: rows, and their length in tokens
  need: Need


def of_step(
  rollout: settings.Config, spec: gradients.UpdateSpec, decoding: Mesh, arrays: StepArrays
) -> dict[str, Callable[[], Program]]:
  """Functions that compile each program of a step, by its name; `decoding` is the sampling mesh."""
  of_decoding = rollout, spec.model, decoding, arrays.decode_params
  return {
    'score': lambda: score(rollout, spec, arrays.policy),
    'prefill': lambda: prefill(*of_decoding),
    **({'resume': lambda: resume(*of_decoding)} if rollout.carry else {}),
    'decode': lambda: decode(*of_decoding),
    'update': lambda: accumulate(rollout, spec, arrays),
    'optimizer': lambda: _measure(
      gradients.optimizer_step.lower(spec, arrays.state, arrays.gradient)
    ),
  }


def score(rollout: settings.Config, spec: gradients.UpdateSpec, policy: model.Params) -> Program:
  """Scoring as many tokens of written responses as one forward pass takes."""
  budget = spec.gradient.tokens_per_microbatch
  long, _ = scoring.pass_shapes(spec.model, spec.mesh, rollout.longest_row, budget)
  tokens_BT = _tokens(spec.mesh, long.count, long.length)
  segments = Segments(tokens_BT, tokens_BT)
  layout = sharding.batch(spec.mesh, long.count)
  routes_BTLC = _routes(rollout, spec.model, layout, long.count, long.length)
  args = spec.model, policy, tokens_BT, segments, rollout.temperature, rollout.logit_chunk
  args = *args, routes_BTLC
  return _measure(scoring.score_tokens.lower(*args), (long.count, long.length))


def prefill(
  rollout: settings.Config, shape: model.Config, mesh: Mesh, params: model.Params
) -> Program:
  """Prefilling as many tokens of prompts as are prefilled together.

  `params` are in the decode layout, on `mesh`.
  """
  num_prompts, length = prefill_shape(rollout, mesh)
  number_P = jax.ShapeDtypeStruct((num_prompts,), jnp.int32, sharding=sharding.replicated(mesh))
  with jax.set_mesh(mesh):
    _, prompts = _slots_and_prompts(_decode_spec(rollout), shape)
    args = shape, params, prompts, _tokens(mesh, num_prompts, length), number_P, number_P
    return _measure(filling.prefill.lower(*args), (num_prompts, length))


def resume(
  rollout: settings.Config, shape: model.Config, mesh: Mesh, params: model.Params
) -> Program:
  """Prefilling as many tokens of begun responses as are prefilled together; args as `prefill`."""
  num_sequences, length = resume_shape(rollout, mesh)
  rows = slots.packed_rows(num_sequences, rollout.slots)
  nothing = insertion_of([], rollout.slots, rows)
  with jax.set_mesh(mesh):
    state, _ = _slots_and_prompts(_decode_spec(rollout), shape)
    tokens_PT, layout = _tokens(mesh, num_sequences, length), sharding.batch(mesh, num_sequences)
    known = _routes(rollout, shape, layout, num_sequences, length)
    args = shape, params, state, tokens_PT, Segments(tokens_PT, tokens_PT), nothing, known
    return _measure(filling.resume.lower(*args), (num_sequences, length))


def decode(
  rollout: settings.Config, shape: model.Config, mesh: Mesh, params: model.Params
) -> Program:
  """Decoding tokens in all slots, with the longest cache; args as `prefill`."""
  spec = _decode_spec(rollout)
  with jax.set_mesh(mesh):
    state, _ = _slots_and_prompts(spec, shape)
    args = shape, spec.sampling, params, state, 1, 1, rollout.temperature
    return _measure(decode_loop.decode.lower(*args), (rollout.slots, rollout.longest_row))


def accumulate(rollout: settings.Config, spec: gradients.UpdateSpec, arrays: StepArrays) -> Program:
  """Forward and backward passes over a minibatch, each over as many long sequences as one holds."""
  shape, microbatches = update_stack(rollout, spec)
  params = arrays.state.params
  _, sums = jax.eval_shape(functools.partial(gradients.zero_accumulator, spec), params)
  accumulator = arrays.gradient, sums
  args = spec, params, accumulator, microbatches, 1, False, True, arrays.initial
  return _measure(gradients.accumulate.lower(*args), (shape.count, shape.length))


def prefill_shape(rollout: settings.Config, mesh: Mesh) -> tuple[int, int]:
  """(prompts, tokens of each) of the largest prefill."""
  lengths = slots.prefill_lengths(rollout.max_prompt)
  return _largest_prefill(lengths, rollout.prompts, mesh)


def resume_shape(rollout: settings.Config, mesh: Mesh) -> tuple[int, int]:
  """(sequences, tokens of each) of the largest prefill of begun responses."""
  long, short = slots.packed_shapes(rollout.longest_row, rollout.slots, mesh)
  return max((long.count, long.length), (short.count, short.length), key=math.prod)


def update_stack(
  rollout: settings.Config, spec: gradients.UpdateSpec
) -> tuple[packing.Shape, gradients.Microbatch]:
  """The long shape of a microbatch, and a minibatch's microbatches of it as abstract arrays."""
  rows_of_minibatch = rollout.questions * rollout.samples // spec.optimizer.minibatches
  _, num_shards = sharding.split(spec.mesh, 'batch')
  shape, _ = gradients.pass_shapes(spec, num_shards, rows_of_minibatch)
  num_microbatches = gradients.most_passes(rows_of_minibatch, shape.count)
  layout = sharding.named(spec.mesh, (None, 'batch'), (1, shape.count))

  def stack(dtype: Any, width: int) -> Any:  # a shape, in the place of an array
    return jax.ShapeDtypeStruct((num_microbatches, shape.count, width), dtype, sharding=layout)

  shares = attention.has_prefixes(spec.mesh)
  of_tokens, of_targets = stack(jnp.int32, shape.length), stack(jnp.float32, shape.window)
  return shape, gradients.Microbatch(
    tokens_BT=of_tokens,
    segments=Segments(of_tokens, of_tokens, of_tokens if shares else None),
    predictor_BW=stack(jnp.int32, shape.window),
    target_BW=stack(jnp.int32, shape.window),
    inputs=objective.LossInputs(
      mask_BT=of_targets,
      weight_BT=of_targets,
      entropy_weight_BT=of_targets,
      kl_weight_BT=of_targets,
      old_logp_BT=of_targets,
      term_weight_BT=of_targets,
      advantage_BT=of_targets,
      is_replay_BT=stack(jnp.bool_, shape.window),
      is_carried_BT=stack(jnp.bool_, shape.window) if rollout.carry else None,
    ),
    routes_BTLC=_routes(rollout, spec.model, layout, num_microbatches, shape.count, shape.length),
  )


def _largest_prefill(lengths: Sequence[int], most: int, mesh: Mesh) -> tuple[int, int]:
  return max(
    ((slots.prefilled_together(length, most, mesh), length) for length in lengths),
    key=lambda shape: (shape[0] * shape[1], shape[1]),
  )


def _tokens(mesh: Mesh, rows: int, length: int) -> Any:  # a shape, in the place of an array
  return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding.batch(mesh, rows))


def _routes(
  rollout: settings.Config, config: model.Config, layout: NamedSharding, *sizes: int
) -> Any:  # a shape, in the place of an array
  """The routes of tokens; None where they are not kept."""
  if not rollout.router_replay:
    return None
  shape, dtype = (*sizes, *config.route_shape), jnp.dtype(config.route_dtype)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def _decode_spec(rollout: settings.Config) -> decode_loop.DecodeSpec:
  """How a run samples, with any token in place of the tokenizer's special ones."""
  return decode_loop.DecodeSpec(
    distribution=token_sampling.Distribution(rollout.temperature),
    slots=rollout.slots,
    prompts=rollout.prompts,
    max_prompt=rollout.max_prompt,
    max_response=rollout.max_response,
    eos_ids=(0,),
    pad_id=0,
    keeps_routes=rollout.router_replay,
  )


def _slots_and_prompts(
  spec: decode_loop.DecodeSpec, shape: model.Config
) -> tuple[decode_loop.State, decode_loop.Prompts]:
  """Shapes and shardings of the slots, with the longest cache, and of the prompts."""
  args = shape, spec, spec.longest_row
  compiled = decode_loop.empty.lower(*args).compile()
  return jax.tree.map(
    lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
    jax.eval_shape(functools.partial(decode_loop.empty, *args)),
    compiled.output_shardings,
  )


def _measure(lowered: jax.stages.Lowered, shape: tuple[int, int] = (0, 0)) -> Program:
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  assert memory is not None, 'XLA counts the memory of every program'
  return Program(
    module=hlo.parse(_text(lowered, compiled)),
    shape=shape,
    need=Need(
      arguments=memory.argument_size_in_bytes,
      results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
      temporary=memory.temp_size_in_bytes,
    ),
  )


def _text(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> str:
  """The compiled program's text.

  Where JAX cannot read it, libtpu writes it in a second compilation: JAX 0.10.2 fails on some
  programs for v6e ("async-update instruction should have 1 operands").
  """
  try:
    return compiled.as_text() or ''
  except jax.errors.JaxRuntimeError:
    with tempfile.TemporaryDirectory() as folder:
      lowered.compile(compiler_options={'xla_dump_to': folder})
      (path,) = pathlib.Path(folder).glob('*.after_codegen.txt')
      return path.read_text()
