"""The matrix product of activations and a weight, in the form that each platform is fast with.

XLA:CPU uses a core's matrix units (AMX) for bfloat16 only where the product's result is float32 and
the left operand is not transposed. Further shape letters: I input width, O output width, M rows.
"""

import math

import jax
import jax.numpy as jnp

from exgrpo_jax.policy import sharding
from exgrpo_jax.runtime import machine


def on_matrix_units(dtype: jnp.dtype) -> bool:
  """Whether a product of this dtype runs on the matrix units of a CPU that has them."""
  is_cpu = sharding.platform() == 'cpu'
  return is_cpu and dtype == jnp.bfloat16 and machine.has_bfloat16_units()


def transposed(x: jax.Array) -> jax.Array:
  """The last two dimensions swapped, in a form that XLA does not fold back into a product."""
  *batch, rows, columns = x.shape
  part = math.gcd(columns, 64)
  *kept, m, i, p = range(x.ndim + 1)
  split = x.reshape(*batch, rows, columns // part, part)
  return split.transpose(*kept, i, p, m).reshape(*batch, columns, rows)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
  """`x @ y` of one dtype, in that dtype."""
  if on_matrix_units(x.dtype):
    return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(x.dtype)
  return x @ y


@jax.custom_vjp
def project(x_BTI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
  """[B, T, I] @ [I, O] -> [B, T, O], in their common dtype."""
  return product(x_BTI, kernel_IO)


def _forward(
  x_BTI: jax.Array, kernel_IO: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return product(x_BTI, kernel_IO), (x_BTI, kernel_IO)


def _backward(
  residuals: tuple[jax.Array, jax.Array], d_out_BTO: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_BTI, kernel_IO = residuals
  d_kernel_IO = _kernel_gradient(x_BTI, d_out_BTO)
  return product(d_out_BTO, kernel_IO.T), d_kernel_IO


def _kernel_gradient(x_BTI: jax.Array, d_out_BTO: jax.Array) -> jax.Array:
  if on_matrix_units(x_BTI.dtype):
    x_MI, d_out_MO = (x.reshape(-1, x.shape[-1]) for x in (x_BTI, d_out_BTO))
    return product(transposed(x_MI), d_out_MO)
  # Autodiff gives the weight's gradient as (cotangent^T x)^T. XLA:CPU computes a transposed left
  # operand column by column, several times slower, so the narrower operand goes on the left.
  if x_BTI.shape[-1] <= d_out_BTO.shape[-1]:
    return jnp.einsum('BTI,BTO->IO', x_BTI, d_out_BTO)
  return jnp.einsum('BTO,BTI->OI', d_out_BTO, x_BTI).T


project.defvjp(_forward, _backward)
