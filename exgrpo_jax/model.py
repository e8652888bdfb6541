"""The decoder: Qwen2.5, Qwen3 and Llama 3 by configuration, with a key/value cache.

Parameters travel as a nested dict of float32 arrays; the Flax modules below give
them names, shapes and logical axes, and the functions at the end are the interface.
Further shape letter: F hidden units of the MLP.

Rows are padded on the right. Causality keeps a row's tokens from seeing its
padding, so no mask of lengths is needed: in `hidden_states` what stands at the
padding is meaningless, and in `decode` new tokens overwrite the padding's cache.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from exgrpo_jax import cache as cache_lib
from exgrpo_jax import rotary, sharding
from exgrpo_jax.cache import Cache, LayerCache
from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.rotary import Rotation, rotate

Params = dict[str, Any]  # nested, its leaves float32 arrays


@dataclasses.dataclass(frozen=True)
class Config:
  """The decoder's shape; all of it static."""

  vocab_size: int = setting('[0, inf)', "rows of the embedding; 0 takes the tokenizer's")
  width: int = setting('[1, inf)', 'size of the residual stream')
  num_layers: int = setting('[1, inf)', 'blocks of attention and MLP')
  num_heads: int = setting('[1, inf)', 'query heads')
  num_kv_heads: int = setting('[1, inf)', 'key/value heads, each serving equally many query heads')
  head_size: int = setting('[2, inf)', 'size of one head, even')
  mlp_width: int = setting('[1, inf)', 'hidden units of the MLP')
  rope: rotary.Config
  norm_epsilon: float = setting('(0, inf)', 'added to the mean square before its root')
  attention_bias: bool = setting(None, 'biases on queries, keys and values, as Qwen2 has')
  query_key_norm: bool = setting(None, 'queries and keys are normalised by head, as in Qwen3')
  tied_embeddings: bool = setting(None, 'the unembedding is the transposed embedding')
  dtype: str = setting(('float32', 'bfloat16'), 'of activations; parameters are float32')

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise InputError(f'config.model.num_kv_heads={self.num_kv_heads} must divide '
                       f'config.model.num_heads={self.num_heads}: '
                       'each key/value head serves equally many query heads.')
    if self.head_size % 2:
      raise InputError(f'config.model.head_size={self.head_size} must be even: '
                       'rotary positions turn pairs of its entries.')


class RMSNorm(nnx.Module):
  """x / rms(x), scaled (arXiv:1910.07467), in float32; returns x's dtype."""

  def __init__(self, size: int, epsilon: float):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(size), logical_axes=(None,))

  def __call__(self, x):
    """Over the last axis, of `size` entries."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
    return (normed * self.scale[...]).astype(x.dtype)


class MLP(nnx.Module):
  """SwiGLU (arXiv:2002.05202)."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    D, F = config.width, config.mlp_width
    self.gate_DF = _normal(config, rngs, (D, F), ('embed', 'mlp'))
    self.up_DF = _normal(config, rngs, (D, F), ('embed', 'mlp'))
    self.down_FD = _normal(config, rngs, (F, D), ('mlp', 'embed'), _residual_scale(config))

  def __call__(self, x_BTD):
    gate_DF, up_DF, down_FD = (
        kernel[...].astype(x_BTD.dtype) for kernel in (self.gate_DF, self.up_DF, self.down_FD))
    return (jax.nn.silu(x_BTD @ gate_DF) * (x_BTD @ up_DF)) @ down_FD


class Attention(nnx.Module):
  """Causal attention with rotary positions and grouped key/value heads."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    D, N, G, H = config.width, config.num_heads, config.num_kv_heads, config.head_size
    self.query_DNH = _normal(config, rngs, (D, N, H), ('embed', 'heads', None))
    self.key_DGH = _normal(config, rngs, (D, G, H), ('embed', 'kv_heads', None))
    self.value_DGH = _normal(config, rngs, (D, G, H), ('embed', 'kv_heads', None))
    self.out_NHD = _normal(
        config, rngs, (N, H, D), ('heads', None, 'embed'), _residual_scale(config))
    if config.attention_bias:
      self.query_bias_NH = nnx.Param(jnp.zeros((N, H)), logical_axes=('heads', None))
      self.key_bias_GH = nnx.Param(jnp.zeros((G, H)), logical_axes=('kv_heads', None))
      self.value_bias_GH = nnx.Param(jnp.zeros((G, H)), logical_axes=('kv_heads', None))
    if config.query_key_norm:
      self.query_norm = RMSNorm(H, config.norm_epsilon)
      self.key_norm = RMSNorm(H, config.norm_epsilon)
    self.has_bias, self.has_norm = config.attention_bias, config.query_key_norm

  def __call__(self, x_BTD, position_BT, rotation: Rotation, cache: LayerCache | None):
    """With a cache, T is 1; without one, positions are 0 .. T-1. Returns keys and values too."""
    query_BTNH, key_BTGH, value_BTGH = self._project(x_BTD)
    query_BTNH, key_BTGH = rotate(query_BTNH, rotation), rotate(key_BTGH, rotation)
    if cache is None:
      cache = cache_lib.of_sequence(key_BTGH, value_BTGH)
      mixed_BTNH = jax.nn.dot_product_attention(query_BTNH, key_BTGH, value_BTGH, is_causal=True)
    else:
      position_B = position_BT[:, 0]
      cache = cache_lib.written(cache, key_BTGH[:, 0], value_BTGH[:, 0], position_B)
      mixed_BTNH = cache_lib.attend(query_BTNH[:, 0], position_B, cache)[:, None]
    # As one matrix product: for two contracted dimensions XLA's CPU turns the kernel every time.
    out_NHD = self.out_NHD[...].astype(x_BTD.dtype)
    N, H, D = out_NHD.shape
    mixed_BTM = mixed_BTNH.reshape(*x_BTD.shape[:2], N * H)
    return mixed_BTM @ out_NHD.reshape(N * H, D), cache

  def _project(self, x_BTD):
    def heads(kernel):
      return jnp.einsum('BTD,DNH->BTNH', x_BTD, kernel[...].astype(x_BTD.dtype))

    query_BTNH, key_BTGH, value_BTGH = map(heads, (self.query_DNH, self.key_DGH, self.value_DGH))
    if self.has_bias:
      query_BTNH += self.query_bias_NH[...].astype(x_BTD.dtype)
      key_BTGH += self.key_bias_GH[...].astype(x_BTD.dtype)
      value_BTGH += self.value_bias_GH[...].astype(x_BTD.dtype)
    if self.has_norm:
      query_BTNH, key_BTGH = self.query_norm(query_BTNH), self.key_norm(key_BTGH)
    return query_BTNH, key_BTGH, value_BTGH


class Block(nnx.Module):
  """One layer: attention, then the MLP, each normalised before and added after."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config.width, config.norm_epsilon)
    self.mlp = MLP(config, rngs)

  def __call__(self, x_BTD, position_BT, rotation: Rotation, cache: LayerCache | None):
    mixed_BTD, cache = self.attention(self.attention_norm(x_BTD), position_BT, rotation, cache)
    x_BTD += mixed_BTD
    x_BTD += self.mlp(self.mlp_norm(x_BTD))
    return sharding.constrain(x_BTD, ('batch', None, None)), cache


class Decoder(nnx.Module):
  """Tokens to hidden states; `unembedding` makes logits of these."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    V, D = config.vocab_size, config.width
    self.config = config
    self.embedding_VD = _normal(config, rngs, (V, D), ('vocab', 'embed'))
    # Strings, because Orbax would turn integer keys into them anyway.
    self.layers = nnx.Dict({str(layer): Block(config, rngs) for layer in range(config.num_layers)})
    self.final_norm = RMSNorm(config.width, config.norm_epsilon)
    if not config.tied_embeddings:
      self.unembedding_DV = _normal(config, rngs, (D, V), ('embed', 'vocab'))

  def __call__(self, tokens_BT, position_BT, cache: Cache | None):
    x_BTD = self.embedding_VD[...][tokens_BT].astype(self.config.dtype)
    x_BTD = sharding.constrain(x_BTD, ('batch', None, None))
    rotation = rotary.rotations(self.config.rope, self.config.head_size, position_BT)
    new_cache = []
    for layer in range(self.config.num_layers):  # not .values(), which puts '10' before '2'
      layer_cache = None if cache is None else cache[layer]
      x_BTD, layer_cache = self.layers[str(layer)](x_BTD, position_BT, rotation, layer_cache)
      new_cache.append(layer_cache)
    return self.final_norm(x_BTD), tuple(new_cache)


def init(config: Config, key: jax.Array, mesh: Mesh) -> Params:
  """Random parameters, each made where it lives; the same values on every mesh.

  Normal with standard deviation 1/sqrt(width), which at the width of 2,500 is the usual
  0.02 and lets narrow models learn faster; the two projections that write to the
  residual stream 1/sqrt(2 * num_layers) of that; norms 1, biases 0.
  """
  def values(key):
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(key))))

  return jax.jit(values, out_shardings=shardings(config, mesh))(key)


def shapes(config: Config, mesh: Mesh) -> Params:
  """Shape, dtype and sharding of each parameter, in the tree of `init`; allocates nothing."""
  _, state = _abstract(config)
  return nnx.to_pure_dict(state, lambda variable: jax.ShapeDtypeStruct(
      variable.shape, variable.dtype, sharding=sharding.named(
          mesh, variable.get_metadata('logical_axes'), variable.shape)))


def shardings(config: Config, mesh: Mesh) -> Params:
  """Where each parameter lives: NamedShardings in the tree of `init`."""
  return jax.tree.map(lambda shape: shape.sharding, shapes(config, mesh))


def decode_layout(config: Config, params: Params, mesh: Mesh) -> Params:
  """The parameters as decoding reads them: cast, and whole over the data axes.

  What the decoder casts to the compute dtype in every step is cast once; the scales
  of its norms, which it uses in float32, stay so. What needs neither cast nor move is
  not copied.
  """
  _, state = _abstract(config)
  layout = nnx.to_pure_dict(state, lambda variable: sharding.named(
      mesh, variable.get_metadata('logical_axes'), variable.shape, decoding=True))

  def moved(leaf, target):
    return jax.device_put(leaf.astype(config.dtype) if leaf.ndim > 1 else leaf, target)

  return jax.tree.map(moved, params, layout)


def hidden_states(config: Config, params: Params, tokens_BT: jax.Array) -> jax.Array:
  """After the final norm, in the compute dtype; positions are 0 .. T-1.

  int32 [B, T] -> [B, T, D].
  """
  hidden_BTD, _ = _decoder(config, params)(tokens_BT, _positions(tokens_BT), None)
  return hidden_BTD


def unembedding(config: Config, params: Params) -> jax.Array:
  """[D, V] in the compute dtype: logits = hidden @ unembedding."""
  kernel_DV = params['embedding_VD'].T if config.tied_embeddings else params['unembedding_DV']
  return kernel_DV.astype(config.dtype)


def init_cache(config: Config, num_rows: int, length: int) -> Cache:
  """An empty cache for `length` positions of each row."""
  return cache_lib.empty(config.num_layers, num_rows, config.num_kv_heads, config.head_size,
                         length, config.dtype)


def prefill(
    config: Config, params: Params, tokens_BT: jax.Array, cache_length: int
) -> tuple[jax.Array, Cache]:
  """`hidden_states`, and a cache of `cache_length` >= T positions that holds the first T."""
  hidden_BTD, computed = _decoder(config, params)(tokens_BT, _positions(tokens_BT), None)
  cache = tuple(cache_lib.resized(layer, cache_length) for layer in computed)
  return hidden_BTD, cache


def decode(
    config: Config, params: Params, tokens_B: jax.Array, position_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
  """One token per row, each at its own position.

  Writes keys and values at position_B, which must lie below the cache's length,
  and attends to positions 0 .. position_B: whatever a row's cache holds beyond is
  not seen. int32 [B], int32 [B] -> [B, D].
  """
  hidden_BTD, cache = _decoder(config, params)(tokens_B[:, None], position_B[:, None], cache)
  return hidden_BTD[:, 0], cache


def _positions(tokens_BT):
  return jnp.arange(tokens_BT.shape[1])[None]  # [1, T], one for all rows


def _normal(config, rngs, shape, logical_axes, scale=1.0):
  std = scale / math.sqrt(config.width)
  value = std * jax.random.normal(rngs(), shape, jnp.float32)
  return nnx.Param(value, logical_axes=logical_axes)


def _residual_scale(config):
  # Two projections a layer write to the stream: its variance then does not grow with depth.
  return 1 / math.sqrt(2 * config.num_layers)


@functools.cache
def _abstract(config):
  """The module's structure and its variables without values."""
  return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))


def _decoder(config, params):
  graph, _ = _abstract(config)
  return nnx.merge(graph, params)
