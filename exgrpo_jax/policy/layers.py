"""The decoder's Flax modules: names, shapes, logical axes and initial values of its parameters.

Further shape letter: F hidden units of the MLP.
"""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Array
from exgrpo_jax.errors import InputError
from exgrpo_jax.packing import Segments
from exgrpo_jax.policy import attention, kv_cache, rotary, sharding
from exgrpo_jax.policy.kv_cache import LayerCache
from exgrpo_jax.policy.lora import product
from exgrpo_jax.policy.rotary import Rotation, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The decoder's shape, by default Qwen2.5-Math-1.5B's; all of it is static under jit."""

  vocab_size: int = setting(151936, '[0, inf)', "rows of the embedding; 0 takes the tokenizer's")
  width: int = setting(1536, '[1, inf)', 'size of the residual stream')
  num_layers: int = setting(28, '[1, inf)', 'blocks of attention and MLP')
  num_heads: int = setting(12, '[1, inf)', 'query heads')
  num_kv_heads: int = setting(
    2, '[1, inf)', 'key/value heads, each serving equally many query heads'
  )
  head_size: int = setting(128, '[2, inf)', 'size of one head, even')
  mlp_width: int = setting(8960, '[1, inf)', 'hidden units of the MLP')
  rope: rotary.Config = dataclasses.field(default_factory=rotary.Config)
  norm_epsilon: float = setting(1e-6, '(0, inf)', 'added to the mean square before taking the root')
  attention_bias: bool = setting(True, None, 'biases on queries, keys and values, as in Qwen2')
  query_key_norm: bool = setting(
    False, None, 'queries and keys are normalised per head, as in Qwen3'
  )
  tied_embeddings: bool = setting(True, None, 'the unembedding is the transposed embedding')
  dtype: str = setting(
    'bfloat16', ('float32', 'bfloat16'), 'of activations; parameters are float32'
  )

  def __post_init__(self) -> None:
    if self.num_heads % self.num_kv_heads:
      raise InputError(
        f'config.model.num_kv_heads={self.num_kv_heads} must divide '
        f'config.model.num_heads={self.num_heads}: '
        'each key/value head serves equally many query heads.'
      )
    if self.head_size % 2:
      raise InputError(
        f'config.model.head_size={self.head_size} must be even: '
        'the rotary embedding rotates pairs of its entries.'
      )


class RMSNorm(nnx.Module):
  """x / rms(x), scaled (arXiv:1910.07467), computed in float32; returns x's dtype."""

  def __init__(self, size: int, epsilon: float, logical_axis: str) -> None:
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(size), logical_axes=(logical_axis,))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises the last axis, which has `size` entries."""
    x_float32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x_float32**2, axis=-1, keepdims=True)
    normed = x_float32 * jax.lax.rsqrt(mean_square + self.epsilon)
    return (normed * self.scale[...]).astype(x.dtype)


class MLP(nnx.Module):
  """SwiGLU (arXiv:2002.05202)."""

  def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
    D, F = config.width, config.mlp_width
    self.gate_DF = _normal(config, rngs, (D, F), ('embed', 'mlp'))
    self.up_DF = _normal(config, rngs, (D, F), ('embed', 'mlp'))
    self.down_FD = _normal(config, rngs, (F, D), ('mlp', 'embed'), _residual_scale(config))

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)), in x's dtype."""
    gate_DF, up_DF, down_FD = (
      kernel.get_value() for kernel in (self.gate_DF, self.up_DF, self.down_FD)
    )
    return product(_gate(product(x_BTD, gate_DF), product(x_BTD, up_DF)), down_FD)


class Attention(nnx.Module):
  """Causal attention with rotary positions and grouped key/value heads."""

  def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
    D, N, G, H = config.width, config.num_heads, config.num_kv_heads, config.head_size
    self.query_DNH = _normal(config, rngs, (D, N, H), ('embed', 'heads', None))
    self.key_DGH = _normal(config, rngs, (D, G, H), ('embed', 'kv_heads', None))
    self.value_DGH = _normal(config, rngs, (D, G, H), ('embed', 'kv_heads', None))
    self.out_NHD = _normal(
      config, rngs, (N, H, D), ('heads', None, 'embed'), _residual_scale(config)
    )
    if config.attention_bias:
      self.query_bias_NH = nnx.Param(jnp.zeros((N, H)), logical_axes=('heads', 'head'))
      self.key_bias_GH = nnx.Param(jnp.zeros((G, H)), logical_axes=('kv_heads', 'head'))
      self.value_bias_GH = nnx.Param(jnp.zeros((G, H)), logical_axes=('kv_heads', 'head'))
    if config.query_key_norm:
      self.query_norm = RMSNorm(H, config.norm_epsilon, 'head')
      self.key_norm = RMSNorm(H, config.norm_epsilon, 'head')
    self.has_bias, self.has_norm = config.attention_bias, config.query_key_norm
    self.head_size = H

  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: Rotation,
    cache: LayerCache | None,
    position_BT: Array | None,
    segments: Segments | None,
  ) -> tuple[jax.Array, LayerCache]:
    """The attention's output, and the layer's keys and values.

    Args:
      x_BTD: normalised activations.
      rotation: of the T positions.
      cache: of the tokens so far when decoding, with T = 1; None for whole sequences.
      position_BT: only needed with a cache.
      segments: of whole sequences that hold several rows; None is one row each.
    """
    chex.assert_rank(x_BTD, 3)
    query_BTNH, key_BTGH, value_BTGH = self._project(x_BTD)
    query_BTNH, key_BTGH = rotate(query_BTNH, rotation), rotate(key_BTGH, rotation)
    if cache is None:
      cache = kv_cache.from_sequence(key_BTGH, value_BTGH)
      backend = attention.backend_for(sharding.platform(), str(x_BTD.dtype))
      seen = (segments.segment_BT, segments.prefix_BT) if segments else ()
      mixed_BTNH = attention.causal(query_BTNH, key_BTGH, value_BTGH, backend, *seen)
    else:
      assert position_BT is not None, 'decoding with a cache needs positions'
      position_B = position_BT[:, 0]
      cache = kv_cache.write_token(cache, key_BTGH[:, 0], value_BTGH[:, 0], position_B)
      mixed_BTNH = kv_cache.attend(query_BTNH[:, 0], position_B, cache)[:, None]
    mixed_BTM = mixed_BTNH.reshape(*x_BTD.shape[:2], -1)
    return product(mixed_BTM, self.out_NHD.get_value(), num_inputs=2), cache

  def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values before rotation."""

    def project_heads(kernel: nnx.Param) -> jax.Array:
      flat = product(x_BTD, kernel.get_value())
      return flat.reshape(*x_BTD.shape[:2], -1, self.head_size)

    query_BTNH = project_heads(self.query_DNH)
    key_BTGH = project_heads(self.key_DGH)
    value_BTGH = project_heads(self.value_DGH)
    if self.has_bias:
      query_BTNH += self.query_bias_NH[...].astype(x_BTD.dtype)
      key_BTGH += self.key_bias_GH[...].astype(x_BTD.dtype)
      value_BTGH += self.value_bias_GH[...].astype(x_BTD.dtype)
    if self.has_norm:
      query_BTNH, key_BTGH = self.query_norm(query_BTNH), self.key_norm(key_BTGH)
    return query_BTNH, key_BTGH, value_BTGH


class Block(nnx.Module):
  """One layer: attention, then the MLP, each with a norm before and a residual connection."""

  def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
    self.attention_norm = RMSNorm(config.width, config.norm_epsilon, 'embed')
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config.width, config.norm_epsilon, 'embed')
    self.mlp = MLP(config, rngs)

  def __call__(
    self,
    x_BTD: jax.Array,
    rotation: Rotation,
    cache: LayerCache | None,
    position_BT: Array | None = None,
    segments: Segments | None = None,
  ) -> tuple[jax.Array, LayerCache]:
    """The residual stream after the layer, and the layer's cache; see `Attention`."""
    mixed_BTD, cache = self.attention(
      self.attention_norm(x_BTD), rotation, cache, position_BT, segments
    )
    x_BTD += mixed_BTD
    x_BTD += self.mlp(self.mlp_norm(x_BTD))
    return sharding.constrain(x_BTD, ('batch', None, None)), cache


class EmbeddingAndHead(nnx.Module):
  """The parameters outside the layers: embedding, final norm and, if untied, unembedding."""

  def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
    V, D = config.vocab_size, config.width
    self.embedding_VD = _normal(config, rngs, (V, D), ('vocab', 'embed'))
    self.final_norm = RMSNorm(config.width, config.norm_epsilon, 'embed')
    if not config.tied_embeddings:
      self.unembedding_DV = _normal(config, rngs, (D, V), ('embed', 'vocab'))


# Hidden activations of the MLP are the widest of all: the backward pass keeps only these two.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _gate(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
  return jax.nn.silu(gate_BTF) * up_BTF


def _normal(
  config: Config,
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  logical_axes: tuple[str | None, ...],
  scale: float = 1.0,
) -> nnx.Param:
  std = scale / math.sqrt(config.width)
  value = std * jax.random.normal(rngs(), shape, jnp.float32)
  return nnx.Param(value, logical_axes=logical_axes)


def _residual_scale(config: Config) -> float:
  # Two projections per layer add to the residual stream: its variance must not grow with depth.
  return 1 / math.sqrt(2 * config.num_layers)
