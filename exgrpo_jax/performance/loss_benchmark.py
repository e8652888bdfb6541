"""The fused loss beside the two that it replaces: time and temporary memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from exgrpo_jax.algorithm import objective
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.performance.workload import (
  OBJECTIVE,
  Workload,
  random_batch,
  random_params,
  response_lengths,
)
from exgrpo_jax.policy import logprobs, model

# Of the largest difference of a gradient's entries, relative to the largest entry.
_LIMITS = {'bfloat16': 2e-2, 'float32': 1e-4}


def measure(workload: Workload, mesh: Mesh) -> list[Measurement]:
  """Time and memory of three losses. Call it inside `jax.set_mesh(mesh)`.

  'fused' is `logprobs.fused_loss`, 'rematerialised' recomputes the logits chunk by chunk in the
  backward pass, and 'naive' keeps all logits. Each is run with its gradient with respect to the
  hidden states and the unembedding.
  """
  kernel_DV = model.unembedding(workload.model, random_params(workload, mesh))
  batch = random_batch(workload, response_lengths(workload))
  target_BW = batch.tokens_BT[:, workload.prompt :]
  inputs = jax.tree.map(
    lambda x: x[:, workload.prompt :],
    objective.loss_inputs(batch, OBJECTIVE, target_BW.shape[1]),
  )
  token_loss = functools.partial(objective.token_loss, config=OBJECTIVE, clip=False, is_first=True)

  def fused(hidden_BWD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    return logprobs.fused_loss(
      hidden_BWD, kernel_DV, target_BW, inputs, token_loss, temperature=1.0, chunk=workload.chunk
    )[0]

  def by_autodiff(chunk: int, hidden_BWD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    logp_BW, entropy_BW = logprobs.target_logprobs(hidden_BWD, kernel_DV, target_BW, 1.0, chunk)
    return token_loss(logp_BW, entropy_BW, inputs)[0]

  losses = {
    'fused': fused,
    'rematerialised': functools.partial(by_autodiff, workload.chunk),
    'naive': functools.partial(by_autodiff, target_BW.size),
  }
  hidden_BWD = jax.random.normal(
    jax.random.key(0), (*target_BW.shape, workload.model.width), workload.model.dtype
  )
  programs = {
    name: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden_BWD, kernel_DV).compile()
    for name, loss in losses.items()
  }

  def execute(program: Any) -> None:
    jax.block_until_ready(program(hidden_BWD, kernel_DV))

  times = median_seconds(
    workload.repeats, *(functools.partial(execute, program) for program in programs.values())
  )
  found = []
  for (name, program), seconds in zip(programs.items(), times):
    memory = program.memory_analysis()
    assert memory is not None, 'XLA counts the memory of every program'
    found += [
      Measurement(name, seconds, 's', f'{seconds / times[0]:.2f} times the fused loss'),
      Measurement(f'{name}, memory', memory.temp_size_in_bytes / 2**20, 'MiB', 'temporary'),
    ]
  gradients, of_naive = (programs[name](hidden_BWD, kernel_DV)[1] for name in ('fused', 'naive'))
  return [*found, _difference(workload.model.dtype, gradients, of_naive)]


def _difference(dtype: str, gradients: Any, of_naive: Any) -> Measurement:
  value = max(
    float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in zip(gradients, of_naive)
  )
  meaning = "the fused loss's largest difference from the naive one's, of the largest entry"
  return Measurement('gradients', value, 'relative', meaning, limit=_LIMITS[dtype])
