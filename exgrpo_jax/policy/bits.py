"""bfloat16 as its bits, for arrays that a loop on CPU indexes.

XLA:CPU has no gather, scatter or slice update of bfloat16: inside a loop it converts the whole
array to float32, and often back, at every iteration. On integers they touch only what they index.
"""

import jax
import jax.numpy as jnp


def dtype_of(dtype: str) -> str:
  """The dtype that keeps values of `dtype`: uint16 for bfloat16, else the same."""
  return 'uint16' if dtype == 'bfloat16' else dtype


def to_bits(x: jax.Array) -> jax.Array:
  """bfloat16 as uint16, which has no gradient; all other arrays as they are."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
  """What `to_bits` was given, which was no array of uint16."""
  return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
