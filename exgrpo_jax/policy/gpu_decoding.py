"""cuDNN's flash attention for decoding on NVIDIA GPUs, over the `Dense` layout of a layer's cache.

To the kernel a row and a key/value head are one sequence with R = N/G queries and a single key
head. So the cache is read as it lies; [B, S, G, H], as documented, would take a transposed copy.
Tests run the same call by XLA on a CPU; the kernel itself has not run on a GPU yet.

Shape letters as in kv_cache.py; M = B * G sequences.
"""

import chex
import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import shards
from exgrpo_jax.policy.dense_cache import Dense

_AXES = ('batch', 'kv_heads', None, None)


def takes(H: int, dtype: str) -> bool:
  """Whether the kernel takes heads of size H in this dtype, on every generation of GPUs."""
  return dtype == 'bfloat16' and H % 8 == 0 and H <= 128


def attend(query_BNH: jax.Array, position_B: Array, layer: Dense, cap: float = 0.0) -> jax.Array:
  """Attention of each row's query to positions 0 .. position_B; the kernel has no cap."""
  assert not cap, cap
  chex.assert_rank([query_BNH, position_B], [3, 1])
  B, N, H = query_BNH.shape
  G = layer.key_BGSH.shape[1]

  def attend_shard(
    query_BGRH: jax.Array, key_BGSH: jax.Array, value_BGSH: jax.Array, position_B: jax.Array
  ) -> jax.Array:
    query_MRH, key_MSH, value_MSH = (
      x.reshape(-1, *x.shape[2:]) for x in (query_BGRH, key_BGSH, value_BGSH)
    )
    mixed_M1RH: jax.Array = jax.nn.dot_product_attention(
      query_MRH[:, None],
      key_MSH[:, :, None],
      value_MSH[:, :, None],
      implementation='cudnn',
      key_value_seq_lengths=jnp.repeat(position_B + 1, key_BGSH.shape[1]),
    )
    return mixed_M1RH.reshape(query_BGRH.shape)

  # By key/value heads, so that where the mesh replicates these it replicates their queries.
  per_shard = shards.per_shard(attend_shard, (_AXES, _AXES, _AXES, ('batch',)), _AXES)
  query_BGRH = query_BNH.reshape(B, G, N // G, H)
  mixed_BGRH = per_shard(query_BGRH, layer.key_BGSH, layer.value_BGSH, jnp.asarray(position_B))
  return mixed_BGRH.reshape(B, N, H)
