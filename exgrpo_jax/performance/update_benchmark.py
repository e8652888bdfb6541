"""One update: its time, and how close it comes to the rate of its matrix products."""

import jax
from jax.sharding import Mesh

from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.performance.products import training_products
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.performance.workload import (
  OBJECTIVE,
  OPTIMIZER,
  Workload,
  random_batch,
  random_params,
)


def run(workload: Workload, mesh: Mesh) -> None:
  """Prints the time of an update and its utilisation. Call it inside `jax.set_mesh(mesh)`."""
  params = random_params(workload, mesh)
  batch = random_batch(workload)
  spec = gradients.UpdateSpec(
    gradient=gradients.Config(
      tokens_per_microbatch=workload.microbatch, remat=workload.remat, drop_zero_advantage=False
    ),
    objective=OBJECTIVE,
    optimizer=OPTIMIZER,
    model=workload.model,
    mesh=mesh,
    num_updates=1,
    temperature=1.0,
    max_response=workload.response,
    logit_chunk=workload.chunk,
  )
  states = [optimizer.init(OPTIMIZER, 1, params)]  # a list, for each update donates its state

  def update() -> None:
    state = states.pop()
    gradient, sums = gradients.minibatch_gradient(
      spec, state.params, batch, clip=False, is_first=True
    )
    state, norms = gradients.apply_gradient(spec, state, gradient)
    jax.block_until_ready((sums, norms))
    states.append(state)

  run_products, flops = training_products(workload, mesh, params)
  total, products = median_seconds(workload.repeats, update, run_products)
  print(
    f'update       {total:9.2f} s   {batch.tokens_BT.size / total:,.0f} tokens/s, '
    f'{flops / 1e12:.2f} TFLOP in matrix products'
  )
  print(
    f'utilisation  {100 * products / total:9.0f}%   of the rate at which these products alone run: '
    f'{flops / products / 1e9:.0f} GFLOP/s'
  )
