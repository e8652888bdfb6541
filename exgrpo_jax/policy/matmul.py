"""Products of activations and weights, in the fastest form for each platform.

XLA:CPU uses a core's bfloat16 instructions (AMX, AVX512_BF16) only if the result is float32 and the
left operand is not transposed. In float32 on a CPU without matrix units, XLA reads an [I, O] weight
once for every six rows of activations. Decoding has few rows, so the weight is stored as [O, I] and
used as the left operand, which is read only once. Further shape letters: I input width, O output
width, M rows.
"""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from exgrpo_jax.policy import sharding
from exgrpo_jax.runtime import machine

# With up to this many rows of activations, an [O, I] weight is faster as the left operand: 1.6 to
# 2.4 times as fast with 8 to 32 rows (AVX2, weights larger than the caches), equally fast with 64.
_FEW_ROWS = 48

_Kernel = TypeVar('_Kernel', jax.Array, jax.ShapeDtypeStruct)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajor:
  """A weight stored output-first, for decoding on a CPU without matrix units."""

  kernel_OI: Any  # an array or its shape; outputs and inputs span one or two dimensions each


def is_output_major(platform: str, dtype: str) -> bool:
  """Return True if decoding on `platform` ('cpu', 'gpu' or 'tpu') stores weights output-first."""
  return platform == 'cpu' and dtype == 'float32' and not machine.has_matrix_units()


def output_major(kernel: _Kernel, num_inputs: int) -> OutputMajor:
  """Move the first `num_inputs` dimensions of a weight, or of its shape, to the end."""
  order = (*range(num_inputs, kernel.ndim), *range(num_inputs))
  if isinstance(kernel, jax.Array):
    return OutputMajor(kernel.transpose(order))
  assert isinstance(kernel.sharding, NamedSharding), kernel.sharding
  mesh, axes = kernel.sharding.mesh, kernel.sharding.spec
  layout = NamedSharding(mesh, PartitionSpec(*(axes[dim] for dim in order)))
  shape = tuple(kernel.shape[dim] for dim in order)
  return OutputMajor(jax.ShapeDtypeStruct(shape, kernel.dtype, sharding=layout))


def is_fast_bfloat16(dtype: jnp.dtype) -> bool:
  """Return True if products of this dtype can use a CPU's bfloat16 instructions."""
  is_cpu = sharding.platform() == 'cpu'
  return is_cpu and dtype == jnp.bfloat16 and machine.has_fast_bfloat16()


def transposed(x: jax.Array) -> jax.Array:
  """Swap the last two dimensions in a way that XLA does not fold into a following product."""
  *batch, rows, columns = x.shape
  part = math.gcd(columns, 64)
  *batch_dims, m, i, p = range(x.ndim + 1)
  blocks = x.reshape(*batch, rows, columns // part, part)
  return blocks.transpose(*batch_dims, i, p, m).reshape(*batch, columns, rows)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
  """Compute `x @ y` for operands of the same dtype; the result has the same dtype."""
  if is_fast_bfloat16(x.dtype):
    return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(x.dtype)
  return x @ y


def logits(hidden_BD: jax.Array, unembedding: jax.Array | OutputMajor) -> jax.Array:
  """Compute logits: [B, D], [D, V] or an OutputMajor of [V, D] -> [B, V], float32."""
  if isinstance(unembedding, OutputMajor):
    return project_output_major(hidden_BD[:, None], unembedding.kernel_OI)[:, 0]
  return jnp.dot(hidden_BD, unembedding, preferred_element_type=jnp.float32)


def project_output_major(x_BTI: jax.Array, kernel_OI: jax.Array) -> jax.Array:
  """Multiply by an `OutputMajor` kernel: [B, T, I], [O, I] -> [B, T, O], in their common dtype."""
  x_MI = x_BTI.reshape(-1, x_BTI.shape[-1])
  if len(x_MI) > _FEW_ROWS:
    out_MO = jnp.einsum('MI,OI->MO', x_MI, kernel_OI)
  else:
    # The barrier keeps XLA from rewriting this as the product above, which it considers equivalent.
    out_MO = jax.lax.optimization_barrier(jnp.einsum('OI,MI->OM', kernel_OI, x_MI)).T
  return out_MO.reshape(*x_BTI.shape[:2], -1)


@jax.custom_vjp
def project(x_BTI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
  """Compute [B, T, I] @ [I, O] -> [B, T, O], in their common dtype."""
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
  if is_fast_bfloat16(x_BTI.dtype):
    x_MI, d_out_MO = (x.reshape(-1, x.shape[-1]) for x in (x_BTI, d_out_BTO))
    return product(transposed(x_MI), d_out_MO)
  # Autodiff computes the weight's gradient as (cotangent^T x)^T. XLA:CPU processes a transposed
  # left operand column by column, several times slower, so the narrower operand goes on the left.
  if x_BTI.shape[-1] <= d_out_BTO.shape[-1]:
    return jnp.einsum('BTI,BTO->IO', x_BTI, d_out_BTO)
  return jnp.einsum('BTO,BTI->OI', d_out_BTO, x_BTI).T


project.defvjp(_forward, _backward)


# ---- bfloat16 as raw bits, for arrays that are indexed in a loop on CPU ----

# XLA:CPU lacks bfloat16 gathers, scatters and slice updates: inside a loop it converts the whole
# array to float32, and often back, in every iteration. With integers, it only touches the indexed
# entries.


def storage_dtype(dtype: str) -> str:
  """Return the dtype that stores values of `dtype`: uint16 for bfloat16, otherwise `dtype`."""
  return 'uint16' if dtype == 'bfloat16' else dtype


def to_bits(x: jax.Array) -> jax.Array:
  """Reinterpret bfloat16 as uint16, which stops gradients; return other arrays unchanged."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
  """Undo `to_bits`, assuming that its input was not uint16."""
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
