"""The decoder: Qwen2.5, Qwen3 and Llama 3 by configuration, with a key/value cache.

Parameters travel as a nested dict of float32 arrays; the Flax modules below give
them names, shapes and logical axes, and the functions at the end are the interface.
In training all layers stand in one array with a leading axis of layers, so that one
layer is compiled and scanned; in the decode layout each stands alone, since a loop
over tokens would copy it out of the stack every time. Further shape letter: F hidden
units of the MLP.

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

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import attention, kv_cache, rotary, sharding
from exgrpo_jax.policy.kv_cache import Cache, LayerCache
from exgrpo_jax.policy.matmul import project
from exgrpo_jax.policy.rotary import Rotation, rotate

Params = dict[str, Any]  # nested, its leaves float32 arrays

# What of a layer's forward pass is computed again in the backward pass.
REMAT = {
  'none': None,
  'all_but_products': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'all': jax.checkpoint_policies.nothing_saveable,
}


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
      raise InputError(
        f'config.model.num_kv_heads={self.num_kv_heads} must divide '
        f'config.model.num_heads={self.num_heads}: '
        'each key/value head serves equally many query heads.'
      )
    if self.head_size % 2:
      raise InputError(
        f'config.model.head_size={self.head_size} must be even: '
        'rotary positions turn pairs of its entries.'
      )


class RMSNorm(nnx.Module):
  """x / rms(x), scaled (arXiv:1910.07467), in float32; returns x's dtype."""

  def __init__(self, size: int, epsilon: float, logical_axis: str):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(size), logical_axes=(logical_axis,))

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
      kernel[...].astype(x_BTD.dtype) for kernel in (self.gate_DF, self.up_DF, self.down_FD)
    )
    return project(_gated(project(x_BTD, gate_DF), project(x_BTD, up_DF)), down_FD)


class Attention(nnx.Module):
  """Causal attention with rotary positions and grouped key/value heads."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
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

  def __call__(self, x_BTD, rotation: Rotation, cache: LayerCache | None, position_BT):
    """With a cache, T is 1; without one, positions are 0 .. T-1. Returns keys and values too."""
    query_BTNH, key_BTGH, value_BTGH = self._project(x_BTD)
    query_BTNH, key_BTGH = rotate(query_BTNH, rotation), rotate(key_BTGH, rotation)
    if cache is None:
      cache = kv_cache.from_sequence(key_BTGH, value_BTGH)
      mixed_BTNH = attention.causal(
        query_BTNH,
        key_BTGH,
        value_BTGH,
        attention.backend_for(sharding.platform(), str(x_BTD.dtype)),
      )
    else:
      position_B = position_BT[:, 0]
      cache = kv_cache.write_token(cache, key_BTGH[:, 0], value_BTGH[:, 0], position_B)
      mixed_BTNH = kv_cache.attend(query_BTNH[:, 0], position_B, cache)[:, None]
    # As one matrix product: for two contracted dimensions XLA's CPU turns the kernel every time.
    out_NHD = self.out_NHD[...].astype(x_BTD.dtype)
    N, H, D = out_NHD.shape
    mixed_BTM = mixed_BTNH.reshape(*x_BTD.shape[:2], N * H)
    return project(mixed_BTM, out_NHD.reshape(N * H, D)), cache

  def _project(self, x_BTD):
    def heads(kernel):
      D, N, H = kernel.shape
      flat = project(x_BTD, kernel[...].astype(x_BTD.dtype).reshape(D, N * H))
      return flat.reshape(*x_BTD.shape[:2], N, H)

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
    self.attention_norm = RMSNorm(config.width, config.norm_epsilon, 'embed')
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config.width, config.norm_epsilon, 'embed')
    self.mlp = MLP(config, rngs)

  def __call__(self, x_BTD, rotation: Rotation, cache: LayerCache | None, position_BT=None):
    mixed_BTD, cache = self.attention(self.attention_norm(x_BTD), rotation, cache, position_BT)
    x_BTD += mixed_BTD
    x_BTD += self.mlp(self.mlp_norm(x_BTD))
    return sharding.constrain(x_BTD, ('batch', None, None)), cache


class Ends(nnx.Module):
  """What stands before and behind the layers."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    V, D = config.vocab_size, config.width
    self.embedding_VD = _normal(config, rngs, (V, D), ('vocab', 'embed'))
    self.final_norm = RMSNorm(config.width, config.norm_epsilon, 'embed')
    if not config.tied_embeddings:
      self.unembedding_DV = _normal(config, rngs, (D, V), ('embed', 'vocab'))


def check_mesh(config: Config, mesh: Mesh) -> None:
  """Raises InputError where the mesh's axes do not divide the model's."""
  for axis in ('embed', 'heads', 'kv_heads', 'mlp', 'vocab'):
    field = {
      'embed': 'width',
      'heads': 'num_heads',
      'kv_heads': 'num_kv_heads',
      'mlp': 'mlp_width',
      'vocab': 'vocab_size',
    }[axis]
    names, devices = sharding.split(mesh, axis)
    size = getattr(config, field)
    if size % devices == 0 or (axis == 'kv_heads' and devices % size == 0):
      continue
    rest = f', or {size} {names}' if axis == 'kv_heads' else ''
    raise InputError(
      f'config.mesh.{names}={devices} must divide config.model.{field}={size}: each device holds '
      f'an equal part{rest}.'
    )


def init(config: Config, key: jax.Array, mesh: Mesh) -> Params:
  """Random parameters, each made where it lives; the same values on every mesh.

  Normal with standard deviation 1/sqrt(width), which at the width of 2,500 is the usual
  0.02 and lets narrow models learn faster; the two projections that write to the
  residual stream 1/sqrt(2 * num_layers) of that; norms 1, biases 0.
  """

  def values(key):
    ends_key, layers_key = jax.random.split(key)
    layers = jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(Block(config, nnx.Rngs(key)))))(
      jax.random.split(layers_key, config.num_layers)
    )
    return nnx.to_pure_dict(nnx.state(Ends(config, nnx.Rngs(ends_key)))) | {'layers': layers}

  return jax.jit(values, out_shardings=shardings(config, mesh))(key)


def shapes(config: Config, mesh: Mesh) -> Params:
  """Shape, dtype and sharding of each parameter, in the tree of `init`; allocates nothing."""
  (_, ends), (_, block) = _abstract(Ends, config), _abstract(Block, config)
  stacked = functools.partial(_shape, mesh, num_layers=config.num_layers)
  return nnx.to_pure_dict(ends, functools.partial(_shape, mesh)) | {
    'layers': nnx.to_pure_dict(block, stacked)
  }


def shardings(config: Config, mesh: Mesh) -> Params:
  """Where each parameter lives: NamedShardings in the tree of `init`."""
  return jax.tree.map(lambda shape: shape.sharding, shapes(config, mesh))


def decode_layout(config: Config, params: Params, mesh: Mesh) -> Params:
  """The parameters as decoding reads them: cast, whole over the data axes, layer by layer.

  What the decoder casts to the compute dtype in every step is cast once; the scales
  of its norms, which it uses in float32, stay so. 'layers' is a tuple of L trees.
  """
  return _decode_layout(config, mesh)(params)


@functools.cache
def _decode_layout(config, mesh):
  def cast(leaf):
    return leaf.astype(config.dtype) if leaf.ndim > 1 else leaf

  def own(params, layer):
    return jax.tree.map(lambda stack: cast(stack[layer]), params['layers'])

  def laid_out(params):
    ends = {name: value for name, value in params.items() if name != 'layers'}
    return jax.tree.map(cast, ends) | {
      'layers': tuple(own(params, layer) for layer in range(config.num_layers))
    }

  targets = jax.tree.map(lambda shape: shape.sharding, decode_shapes(config, mesh))
  return jax.jit(laid_out, out_shardings=targets)


def decode_shapes(config: Config, mesh: Mesh) -> Params:
  """Shape, dtype and sharding of each parameter in the decode layout; allocates nothing."""
  (_, ends), (_, block) = _abstract(Ends, config), _abstract(Block, config)
  shape = functools.partial(_shape, mesh, decode_dtype=config.dtype)
  return nnx.to_pure_dict(ends, shape) | {
    'layers': (nnx.to_pure_dict(block, shape),) * config.num_layers
  }


def hidden_states(
  config: Config, params: Params, tokens_BT: jax.Array, remat: str = 'none'
) -> jax.Array:
  """After the final norm, in the compute dtype; positions are 0 .. T-1.

  Args:
    config: the decoder's shape.
    params: in the layout of `init`.
    tokens_BT: int32 [B, T].
    remat: what the backward pass computes again, one of REMAT.

  Returns:
    [B, T, D].
  """
  rotation = _rotation(config, _positions(tokens_BT))

  def layer(x_BTD, own):
    x_BTD, _ = _block(config, own)(x_BTD, rotation, None)
    return x_BTD, None

  if remat != 'none':
    # A scan's body is not merged with what is around it, so nothing needs a barrier.
    layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
  # First as the table lies: from there to whole rows, and back for the gradient, is one exchange
  # along fsdp, where XLA would else gather all rows on every device.
  x_BTD = sharding.constrain(_embedded(config, params, tokens_BT), ('outer_batch', None, 'embed'))
  x_BTD = sharding.constrain(x_BTD, ('batch', None, None))
  x_BTD, _ = jax.lax.scan(layer, x_BTD, params['layers'])
  return _ends(config, params).final_norm(x_BTD)


def unembedding(config: Config, params: Params) -> jax.Array:
  """[D, V] in the compute dtype: logits = hidden @ unembedding."""
  kernel_DV = params['embedding_VD'].T if config.tied_embeddings else params['unembedding_DV']
  return kernel_DV.astype(config.dtype)


def init_cache(config: Config, num_rows: int, length: int) -> Cache:
  """An empty cache for `length` positions of each row."""
  return kv_cache.empty(
    config.num_layers, num_rows, config.num_kv_heads, config.head_size, length, config.dtype
  )


def prefill(
  config: Config, params: Params, tokens_BT: jax.Array, cache_length: int
) -> tuple[jax.Array, Cache]:
  """The hidden states, and a cache of `cache_length` >= T positions that holds the first T.

  `params` in the decode layout. int32 [B, T] -> [B, T, D].
  """
  hidden_BTD, computed = _through(
    config, params, tokens_BT, _positions(tokens_BT), (None,) * config.num_layers
  )
  return hidden_BTD, tuple(kv_cache.resized(layer, cache_length) for layer in computed)


def decode(
  config: Config, params: Params, tokens_B: jax.Array, position_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
  """One token per row, each at its own position.

  Writes keys and values at position_B, which must lie below the cache's length,
  and attends to positions 0 .. position_B: whatever a row's cache holds beyond is
  not seen. `params` in the decode layout. int32 [B], int32 [B] -> [B, D].
  """
  hidden_BTD, cache = _through(config, params, tokens_B[:, None], position_B[:, None], cache)
  return hidden_BTD[:, 0], cache


def _through(config, params, tokens_BT, position_BT, cache):
  """All layers one after the other, in the decode layout."""
  x_BTD = sharding.constrain(_embedded(config, params, tokens_BT), ('batch', None, None))
  rotation = _rotation(config, position_BT)
  filled = []
  for own, layer_cache in zip(params['layers'], cache, strict=True):
    x_BTD, layer_cache = _block(config, own)(x_BTD, rotation, layer_cache, position_BT)
    filled.append(layer_cache)
  return _ends(config, params).final_norm(x_BTD), tuple(filled)


# Of the MLP's inside, the widest there is, the backward pass keeps these two alone.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate_BTF, up_BTF):
  return jax.nn.silu(gate_BTF) * up_BTF


def _embedded(config, params, tokens_BT):
  return params['embedding_VD'][tokens_BT].astype(config.dtype)


def _rotation(config, position_BT):
  return rotary.rotations(config.rope, config.head_size, position_BT)


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
def _abstract(module, config):
  """The module's structure and its variables without values."""
  return nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(0))))


def _block(config, params):
  return nnx.merge(_abstract(Block, config)[0], params)


def _ends(config, params):
  return nnx.merge(
    _abstract(Ends, config)[0], {name: own for name, own in params.items() if name != 'layers'}
  )


def _shape(mesh, variable, num_layers=None, decode_dtype=None):
  """Of one variable, or of a stack of it."""
  axes, shape, dtype = variable.get_metadata('logical_axes'), variable.shape, variable.dtype
  if num_layers:
    axes, shape = (None, *axes), (num_layers, *shape)
  if decode_dtype and len(shape) > 1:
    dtype = decode_dtype
  return jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding.named(mesh, axes, shape, decoding=bool(decode_dtype))
  )
