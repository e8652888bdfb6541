"""The decoder's Flax modules: parameters and forward pass of each layer."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from exgrpo_jax.datatypes import Array
from exgrpo_jax.packing import Segments
from exgrpo_jax.policy import attention, kv_cache, sharding
from exgrpo_jax.policy.kv_cache import LayerCache, NewTokens
from exgrpo_jax.policy.lora import product
from exgrpo_jax.policy.mlp import MLP, Experts, Routing, normal, residual_scale
from exgrpo_jax.policy.rotary import Rotation, rotate
from exgrpo_jax.policy.shape import ShapeConfig


class RMSNorm(nnx.Module):
  """RMSNorm (arXiv:1910.07467): scale * x / rms(x), computed in float32, returned in x's dtype."""

  def __init__(self, config: ShapeConfig, size: int, logical_axis: str | None) -> None:
    self.epsilon, self.offset = config.norm_epsilon, float(config.norm_offset)
    self.scale = nnx.Param(
      jnp.full(size, 1 - self.offset, jnp.float32), logical_axes=(logical_axis,)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalize over the last axis, which must have `size` entries."""
    x_float32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x_float32**2, axis=-1, keepdims=True)
    normed = x_float32 * jax.lax.rsqrt(mean_square + self.epsilon)
    scale = self.scale[...]
    return (normed * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class Attention(nnx.Module):
  """Causal attention with rotary positions and grouped key/value heads."""

  def __init__(self, config: ShapeConfig, rngs: nnx.Rngs) -> None:
    D, N, G, H = config.width, config.num_heads, config.num_kv_heads, config.head_size
    self.query_DNH = normal(config, rngs, (D, N, H), ('embed', 'heads', None))
    self.key_DGH = normal(config, rngs, (D, G, H), ('embed', 'kv_heads', None))
    self.value_DGH = normal(config, rngs, (D, G, H), ('embed', 'kv_heads', None))
    self.out_NHD = normal(config, rngs, (N, H, D), ('heads', None, 'embed'), residual_scale(config))
    if config.attention_bias:
      self.query_bias_NH = nnx.Param(jnp.zeros((N, H)), logical_axes=('heads', 'head'))
      self.key_bias_GH = nnx.Param(jnp.zeros((G, H)), logical_axes=('kv_heads', 'head'))
      self.value_bias_GH = nnx.Param(jnp.zeros((G, H)), logical_axes=('kv_heads', 'head'))
    if config.output_bias:
      self.out_bias_D = nnx.Param(jnp.zeros(D), logical_axes=('embed',))
    if config.query_key_norm:
      # A norm over all heads cannot be sharded, because it sums over the heads of all devices.
      sizes = (N * H, G * H) if config.norm_all_heads else (H, H)
      axis = None if config.norm_all_heads else 'head'
      self.query_norm, self.key_norm = (RMSNorm(config, size, axis) for size in sizes)
    self.config = config

  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: Rotation,
    is_local: bool | jax.Array,
    cache: LayerCache | None,
    position_BT: Array | None,
    segments: Segments | None,
  ) -> tuple[jax.Array, LayerCache | NewTokens]:
    """Return the attention output and the layer's cache.

    When decoding several tokens, the second value may be `NewTokens`: see `kv_cache.attend_new`.

    Args:
      x_BTD: normalized activations.
      rotation: the rotation at the T positions.
      is_local: True to attend only to the window; an array is allowed only for whole sequences.
      cache: when decoding, the cache of the earlier tokens; None for whole sequences.
      position_BT: the tokens' positions; needed only with a cache.
      segments: the rows of each whole sequence; None if each sequence is a single row.
    """
    chex.assert_rank(x_BTD, 3)
    query_BTNH, key_BTGH, value_BTGH = self._project(x_BTD)
    query_BTNH, key_BTGH = rotate(query_BTNH, rotation), rotate(key_BTGH, rotation)
    if rotation.query_scale_BT is not None:
      query_BTNH *= rotation.query_scale_BT[:, :, None, None].astype(query_BTNH.dtype)
    config, H = self.config, self.config.head_size
    if config.query_scale not in (0, H):  # the backends divide by sqrt(H)
      query_BTNH *= math.sqrt(H / config.query_scale)
    if cache is None:
      new_cache = kv_cache.from_sequence(key_BTGH, value_BTGH)
      mixed_BTNH = self._attend(query_BTNH, key_BTGH, value_BTGH, is_local, segments)
    else:
      assert position_BT is not None, 'decoding with a cache needs positions'
      assert isinstance(is_local, bool), is_local
      mixed_BTNH, new_cache = self._decode(
        query_BTNH, NewTokens(key_BTGH, value_BTGH), position_BT[:, 0], cache, is_local
      )
    mixed_BTM = mixed_BTNH.reshape(*x_BTD.shape[:2], -1)
    out_BTD = product(mixed_BTM, self.out_NHD.get_value(), num_inputs=2)
    if config.output_bias:
      out_BTD += self.out_bias_D[...].astype(x_BTD.dtype)
    return out_BTD, new_cache

  def _decode(
    self,
    query_BTNH: jax.Array,
    new_tokens: NewTokens,
    position_B: Array,
    cache: LayerCache,
    is_local: bool,
  ) -> tuple[jax.Array, LayerCache | NewTokens]:
    """Attend from each row's new tokens; a single new token is first written to the cache."""
    cap, window = self.config.attention_cap, self.config.window
    if query_BTNH.shape[1] > 1:
      window = window if is_local else 0
      return kv_cache.attend_new(query_BTNH, new_tokens, position_B, cache, window, cap)
    place_B = position_B
    if is_local:
      # The cache is a ring buffer: each new token overwrites the token that leaves the window.
      # Attention reads slots in any order, because keys are already rotated by their positions.
      place_B, position_B = position_B % window, jnp.minimum(position_B, window - 1)
    cache = kv_cache.write_token(
      cache, new_tokens.key_BTGH[:, 0], new_tokens.value_BTGH[:, 0], place_B
    )
    return kv_cache.attend(query_BTNH[:, 0], position_B, cache, cap)[:, None], cache

  def _attend(
    self,
    query_BTNH: jax.Array,
    key_BTGH: jax.Array,
    value_BTGH: jax.Array,
    is_local: bool | jax.Array,
    segments: Segments | None,
  ) -> jax.Array:
    """Attend over whole sequences."""
    H, cap, dtype = self.config.head_size, self.config.attention_cap, str(query_BTNH.dtype)
    backend = attention.backend_for(sharding.platform(), dtype, H, cap)
    limits = (segments.segment_BT, segments.prefix_BT, segments.position_BT) if segments else ()

    def attend(window: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
      return attention.causal(query, key, value, backend, *limits, window=window, cap=cap)

    heads, window = (query_BTNH, key_BTGH, value_BTGH), self.config.window
    if window >= query_BTNH.shape[1]:  # every row fits in the window
      is_local = False
    if isinstance(is_local, bool):
      return attend(window if is_local else 0, *heads)
    attend_window, attend_all = (functools.partial(attend, size) for size in (window, 0))
    return jax.lax.cond(is_local, attend_window, attend_all, *heads)

  def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries, keys and values before rotation."""

    def project_heads(kernel: nnx.Param) -> jax.Array:
      flat = product(x_BTD, kernel.get_value())
      return flat.reshape(*x_BTD.shape[:2], -1, self.config.head_size)

    query_BTNH = project_heads(self.query_DNH)
    key_BTGH = project_heads(self.key_DGH)
    value_BTGH = project_heads(self.value_DGH)
    if self.config.attention_bias:
      query_BTNH += self.query_bias_NH[...].astype(x_BTD.dtype)
      key_BTGH += self.key_bias_GH[...].astype(x_BTD.dtype)
      value_BTGH += self.value_bias_GH[...].astype(x_BTD.dtype)
    if self.config.query_key_norm:
      query_BTNH = self._normed(self.query_norm, query_BTNH)
      key_BTGH = self._normed(self.key_norm, key_BTGH)
    return query_BTNH, key_BTGH, value_BTGH

  def _normed(self, norm: RMSNorm, x_BTNH: jax.Array) -> jax.Array:
    if not self.config.norm_all_heads:
      return norm(x_BTNH)
    return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)


class Block(nnx.Module):
  """A decoder layer: attention, then MLP or experts, each with norms and a residual connection."""

  def __init__(self, config: ShapeConfig, rngs: nnx.Rngs) -> None:
    def norm() -> RMSNorm:
      return RMSNorm(config, config.width, 'embed')

    self.before, self.after = config.norms != 'after', config.norms != 'before'
    if self.before:
      self.attention_norm, self.mlp_norm = norm(), norm()
    if self.after:
      self.attention_post_norm, self.mlp_post_norm = norm(), norm()
    self.attention = Attention(config, rngs)
    self.mlp = Experts(config, rngs) if config.num_experts else MLP(config, rngs)

  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: Rotation,
    is_local: bool | jax.Array,
    cache: LayerCache | None,
    position_BT: Array | None = None,
    segments: Segments | None = None,
    routes_BTC: Array | None = None,
  ) -> tuple[jax.Array, LayerCache | NewTokens, Routing | None]:
    """Return the residual stream after the layer, the layer's cache, and any expert routing.

    See `Attention` and `Experts` for the arguments.
    """
    mixed_BTD, new_cache = self.attention(
      self.attention_norm(x_BTD) if self.before else x_BTD,
      rotation,
      is_local,
      cache,
      position_BT,
      segments,
    )
    x_BTD += self.attention_post_norm(mixed_BTD) if self.after else mixed_BTD
    normed_BTD, routing = self.mlp_norm(x_BTD) if self.before else x_BTD, None
    if isinstance(self.mlp, Experts):
      mixed_BTD, routing = self.mlp(normed_BTD, routes_BTC)
    else:
      mixed_BTD = self.mlp(normed_BTD)
    x_BTD += self.mlp_post_norm(mixed_BTD) if self.after else mixed_BTD
    return sharding.constrain(x_BTD, ('batch', None, None)), new_cache, routing


class EmbeddingAndHead(nnx.Module):
  """The parameters outside the layers: embedding, final norm and, if untied, unembedding."""

  def __init__(self, config: ShapeConfig, rngs: nnx.Rngs) -> None:
    V, D = config.vocab_size, config.width
    self.embedding_VD = normal(config, rngs, (V, D), ('vocab', 'embed'))
    self.final_norm = RMSNorm(config, config.width, 'embed')
    if not config.tied_embeddings:
      self.unembedding_DV = normal(config, rngs, (D, V), ('embed', 'vocab'))
