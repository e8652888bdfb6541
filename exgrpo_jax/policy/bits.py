"""Storage of bfloat16 arrays as raw bits, for arrays that are indexed in a loop on CPU.

XLA:CPU lacks bfloat16 gathers, scatters and slice updates: inside a loop it converts the whole
array to float32, and often back, in every iteration. With integers it only touches indexed entries.
"""

import jax
import jax.numpy as jnp


def dtype_of(dtype: str) -> str:
  """Return the dtype that stores values of `dtype`: uint16 for bfloat16, else `dtype`."""
  return 'uint16' if dtype == 'bfloat16' else dtype


def to_bits(x: jax.Array) -> jax.Array:
  """Reinterpret bfloat16 as uint16, which stops gradients; return other arrays unchanged."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
  """Undo `to_bits`, whose input must not have been a uint16 array."""
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
