"""A model's matrix products alone: the rate that the whole program is compared with."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from exgrpo_jax.performance.workload import Workload
from exgrpo_jax.policy import model, sharding


def decode_matrices(config: model.Config, params: model.Params) -> list[jax.Array]:
  """[in, out] of every matrix that a decode step multiplies by; the unembedding is first.

  `params` are in the decode layout. Attention's products with the cache are left out.
  """
  matrices = [model.unembedding(config, params)]
  for layer in params['layers']:
    attention, mlp = layer['attention'], layer['mlp']
    matrices += [
      attention[name].reshape(config.width, -1) for name in ('query_DNH', 'key_DGH', 'value_DGH')
    ]
    matrices += [attention['out_NHD'].reshape(-1, config.width), *mlp.values()]
  return matrices


def decode_products(
  config: model.Config, params: model.Params, num_rows: int, steps: int
) -> tuple[Callable[[], object], int]:
  """The matrix products of decode steps alone; each step reads each matrix once.

  Args:
    config: the model's shape.
    params: in the decode layout.
    num_rows: rows that decode together.
    steps: how many steps one run takes.

  Returns:
    (run, FLOPs of one step).
  """
  matrices = decode_matrices(config, params)
  inputs = {
    size: jnp.ones((num_rows, size), config.dtype)
    for size in {matrix.shape[0] for matrix in matrices}
  }
  products = jax.jit(
    lambda matrices, inputs, scale: [
      (inputs[matrix.shape[0]] * scale) @ matrix for matrix in matrices
    ]
  )
  scale = jnp.ones((), config.dtype)

  def run() -> None:
    for _ in range(steps):
      jax.block_until_ready(products(matrices, inputs, scale))

  return run, 2 * num_rows * sum(matrix.size for matrix in matrices)


def training_products(
  workload: Workload, mesh: Mesh, params: model.Params
) -> tuple[Callable[[], object], int]:
  """The matrix products of a forward and backward pass over all rows, microbatch by microbatch.

  Only response tokens get logits. Every layer multiplies by the matrices of the first, so that the
  others need not be kept.

  Args:
    workload: its rows, their lengths, and the sizes of microbatches and logit chunks.
    mesh: of the parameters.
    params: in the training layout.

  Returns:
    (run, FLOPs of one run).
  """
  config = workload.model
  decode_params = model.decode_layout(config, params, sharding.Meshes(mesh, mesh))
  first_layer = decode_params | {'layers': decode_params['layers'][:1]}
  unembedding, *layer = decode_matrices(config, first_layer)
  length = workload.prompt + workload.response

  @jax.jit
  def multiply_forward_and_backward(
    x: jax.Array, matrix: jax.Array, y: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    return x @ matrix, y @ matrix.T, x.T @ y

  @functools.cache  # allocated in the round that compiles, not while the clock runs
  def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, config.dtype)

  def multiply(matrix: jax.Array, num_tokens: int) -> None:
    x, y = (ones(num_tokens, size) for size in matrix.shape)
    jax.block_until_ready(multiply_forward_and_backward(x, matrix, y))

  room = max(1, workload.microbatch // length)

  def run() -> None:
    for start in range(0, workload.num_rows, room):
      num_rows = min(room, workload.num_rows - start)
      for matrix in layer * config.num_layers:
        multiply(matrix, num_rows * length)
      responses = num_rows * workload.response
      for first in range(0, responses, workload.chunk):
        multiply(unembedding, min(workload.chunk, responses - first))

  layer_size = sum(matrix.size for matrix in layer)
  flops_of_row = config.num_layers * length * layer_size + workload.response * unembedding.size
  return run, 6 * workload.num_rows * flops_of_row
