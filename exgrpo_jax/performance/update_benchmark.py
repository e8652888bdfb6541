"""One update: its time, and how close it comes to the device's rate of matrix products."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Batch
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.performance import passes, roofline
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.peaks import Peaks
from exgrpo_jax.performance.products import training_products
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.performance.workload import (
  NO_LORA,
  OBJECTIVE,
  OPTIMIZER,
  Workload,
  random_batch,
  random_params,
  response_lengths,
)
from exgrpo_jax.policy import model


def measure(workload: Workload, mesh: Mesh, peaks: Peaks) -> list[Measurement]:
  """The time of an update and its utilisation. Call it inside `jax.set_mesh(mesh)`."""
  params = random_params(workload, mesh)
  batch = random_batch(workload, response_lengths(workload))
  spec = update_spec(workload, mesh, longest_row=batch.tokens_BT.shape[1])
  response_B = np.sum(batch.response_mask_BT, axis=1).astype(int)
  responses = int(response_B.sum())
  tokens = responses + workload.num_rows * workload.prompt
  mean = round(tokens / workload.num_rows)
  # Each device's share of the rows; a device would otherwise multiply all of them.
  share = dataclasses.replace(
    workload,
    questions=max(1, workload.questions // mesh.size),
    response=mean - workload.prompt,
    lengths='equal',
  )
  run_products, flops = training_products(share, mesh, params)
  total, products = median_seconds(workload.repeats, _updates(spec, params, batch), run_products)
  # Of a forward and a backward pass; what is recomputed does not count.
  model_flops = roofline.update_flops(workload.model, tokens, mean, responses, frozen=False)
  [minibatch] = passes.of_update(spec, response_B, workload.prompt)
  computed = sum(one.shape.num_tokens for one in minibatch)
  return [
    Measurement(
      'update',
      total,
      's',
      f'{workload.num_rows} rows of {mean:,} tokens on average, at most {spec.longest_row:,}',
    ),
    Measurement(
      'speed', tokens / total, 'tokens/s', f'{flops / 1e12:.2f} TFLOP in the products of a device'
    ),
    Measurement(
      'packing', computed / tokens, 'x', f'tokens computed for each, in {len(minibatch)} passes'
    ),
    Measurement(
      'products alone',
      100 * products / total,
      '%',
      f'of the time; they run at {flops / products / 1e9:,.0f} GFLOP/s',
    ),
    Measurement(
      'share of FLOPs',
      100 * model_flops / total / peaks.flops / mesh.size,
      '%',
      f'of {peaks.note}, {model_flops / 1e12:.2f} TFLOP with attention',
    ),
  ]


def update_spec(workload: Workload, mesh: Mesh, longest_row: int) -> gradients.UpdateSpec:
  """Of updates in one minibatch."""
  return gradients.UpdateSpec(
    gradient=gradients.Config(
      tokens_per_microbatch=workload.microbatch, remat=workload.remat, drop_zero_advantage=False
    ),
    objective=OBJECTIVE,
    optimizer=OPTIMIZER,
    model=workload.model,
    lora=NO_LORA,
    mesh=mesh,
    num_updates=1,
    temperature=1.0,
    longest_row=longest_row,
    max_response=longest_row - workload.prompt,
    logit_chunk=workload.chunk,
  )


def _updates(spec: gradients.UpdateSpec, params: model.Params, batch: Batch) -> Callable[[], None]:
  """A function that makes one update after another on the batch."""
  states = [optimizer.init(OPTIMIZER, 1, params)]  # a list, for each update donates its state

  def run() -> None:
    states.append(update(spec, states.pop(), batch))

  return run


def update(
  spec: gradients.UpdateSpec, state: optimizer.TrainState, batch: Batch
) -> optimizer.TrainState:
  """The state after an update, which is awaited; `state` is donated."""
  gradient, sums = gradients.minibatch_gradient(
    spec, state.params, batch, clip=False, is_first=True
  )
  state, norms = gradients.apply_gradient(spec, state, gradient)
  jax.block_until_ready((sums, norms))
  return state
