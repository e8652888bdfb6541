"""The decoder as pure functions with a key/value cache, for all shapes that shape.py describes.

Parameters are a nested dict of arrays, with the same names and shapes as in the modules of
layers.py. The training layout stacks each layer parameter along a leading axis, so that a single
layer is compiled and scanned. In the decode layout, each layer has its own arrays, because a loop
over tokens would copy every layer out of a stack for every token.

Rows are padded on the right or packed into sequences (see packing.py). Causality hides the padding
from the tokens, so no length mask is needed: `hidden_states` is meaningless at padding positions,
and `decode` overwrites their cache entries with new tokens.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array
from exgrpo_jax.packing import Segments
from exgrpo_jax.policy import kv_cache, lora, matmul, mlp, rotary, sharding
from exgrpo_jax.policy.kv_cache import Cache, LayerCache, NewTokens
from exgrpo_jax.policy.layers import Block, EmbeddingAndHead
from exgrpo_jax.policy.matmul import OutputMajor, from_bits, to_bits
from exgrpo_jax.policy.shape import Kind, ShapeConfig

# ---- Modules without parameters ----


@functools.cache
def abstract_module(
  module: Callable[[ShapeConfig, nnx.Rngs], nnx.Module], config: ShapeConfig
) -> tuple[nnx.GraphDef, nnx.State]:
  """Return a module's structure and its variables, with shapes in place of values."""
  return nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(0))))


def block_module(config: ShapeConfig, params: Any) -> Block:
  """Build a layer from its parameters."""
  return nnx.merge(abstract_module(Block, config)[0], params)


def outer_module(config: ShapeConfig, params: Any) -> EmbeddingAndHead:
  """Build the embedding and head from the model's parameters."""
  outer = {name: value for name, value in params.items() if name != 'layers'}
  return nnx.merge(abstract_module(EmbeddingAndHead, config)[0], outer)


def parameter_shape(
  mesh: Mesh, variable: nnx.Variable, num_layers: int | None = None, dtype: str | None = None
) -> jax.ShapeDtypeStruct:
  """Return the shape and sharding of a variable, or of a layer stack if `num_layers` is given.

  `dtype` applies to matrices, not to vectors.
  """
  axes, sizes = variable.get_metadata('logical_axes'), variable.shape
  if not dtype or len(sizes) == 1:
    dtype = variable.dtype
  if num_layers:
    axes, sizes = (None, *axes), (num_layers, *sizes)
  return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding.named(mesh, axes, sizes))


def rotations_of_kinds(config: ShapeConfig, position_BT: Array) -> dict[Kind, rotary.Rotation]:
  """Compute the rotation at these positions for each kind of layer."""
  size, rotations, scale_BT = config.head_size, {}, None
  if config.query_beta:  # as in Llama 4 and Ministral 3
    periods_BT = jnp.floor(jnp.asarray(position_BT) / config.rope.original_positions)
    scale_BT = 1 + config.query_beta * jnp.log1p(periods_BT)
  for kind in sorted({*config.kinds}):
    rope = config.local_rope if kind.is_local else config.rope
    rotation = (
      rotary.rotations(rope, size, position_BT)
      if kind.has_positions
      else rotary.unrotated(position_BT, size)
    )
    rotations[kind] = rotation._replace(query_scale_BT=scale_BT)
  return rotations


def default_positions(tokens_BT: Array) -> jax.Array:
  """Return positions 0 .. T-1, shared by all rows: [1, T]."""
  return jnp.arange(tokens_BT.shape[1])[None]


UNLIMITED = 2**30  # length of a cache if every layer is local and stores its whole window

Params = dict[str, Any]  # nested; leaves are float32 arrays; for LoRA see lora.py

# Matrix that may become an `OutputMajor` -> how many of its leading dimensions are inputs.
_NUM_INPUTS = {name: count for _, name, count in lora.TARGETS.values()} | {'unembedding_DV': 1}

# Parts of a layer's forward pass that the backward pass recomputes -> `jax.checkpoint` policy.
REMAT = {
  'none': None,
  'all_but_products': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'all': jax.checkpoint_policies.nothing_saveable,
}


def init(config: ShapeConfig, key: jax.Array, mesh: Mesh) -> Params:
  """Draw random parameters in the training layout, with the same values on every mesh.

  Matrices have standard deviation 1/sqrt(width), which equals the usual 0.02 at width 2,500 and
  helps narrow models learn faster. Each layer's two projections into the residual stream are also
  scaled by 1/sqrt(2 * num_layers). Norms start at 1, biases at 0. Each device computes its own
  shards.
  """
  return _init(config, mesh)(key)


@functools.cache
def _init(config: ShapeConfig, mesh: Mesh) -> Callable[[jax.Array], Params]:
  """Return the jitted `init`, cached because one process may start several runs."""

  def random_params(key: jax.Array) -> Params:
    outer_key, layers_key = jax.random.split(key)
    layers = jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(Block(config, nnx.Rngs(key)))))(
      jax.random.split(layers_key, config.num_layers)
    )
    outer = nnx.to_pure_dict(nnx.state(EmbeddingAndHead(config, nnx.Rngs(outer_key))))
    return outer | {'layers': layers}

  return jax.jit(random_params, out_shardings=shardings(config, mesh))


def shapes(config: ShapeConfig, mesh: Mesh, *, frozen: bool = False) -> Params:
  """Return the shapes, dtypes and shardings of `init`'s parameters without allocating arrays.

  Frozen parameters are never updated. They are stored in the decode layout's dtypes, because every
  forward pass would cast them to these dtypes anyway.
  """
  _, outer = abstract_module(EmbeddingAndHead, config)
  _, block = abstract_module(Block, config)
  shape = functools.partial(parameter_shape, mesh, dtype=config.dtype if frozen else None)
  stack_shape = functools.partial(shape, num_layers=config.num_layers)
  return nnx.to_pure_dict(outer, shape) | {'layers': nnx.to_pure_dict(block, stack_shape)}


def is_tiny(config: ShapeConfig, mesh: Mesh) -> bool:
  """Return True if compiling for an additional shape costs more time than the padding it avoids.

  This is the case below a million parameters on a single CPU device, where compiling takes 5 s and
  the padding in a step takes only milliseconds.
  """
  sizes = (leaf.size for leaf in jax.tree.leaves(shapes(config, mesh)))
  is_one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'
  return is_one_cpu and sum(sizes) < 1_000_000


def frozen(config: ShapeConfig, params: Params, mesh: Mesh) -> Params:
  """Cast parameters to the dtypes of frozen parameters; see `shapes`."""
  return jax.tree.map(
    lambda leaf, like: leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype),
    params,
    shapes(config, mesh, frozen=True),
  )


def shardings(config: ShapeConfig, mesh: Mesh) -> Params:
  """Return each parameter's NamedSharding, in a tree like `init`'s."""
  return jax.tree.map(lambda shape: shape.sharding, shapes(config, mesh))


def decode_layout(config: ShapeConfig, params: Params, meshes: sharding.Meshes) -> Params:
  """Convert parameters to the decode layout: cast, unstacked, and on the decoding mesh.

  Casting to the compute dtype here avoids a cast in every decode step. Norm scales stay float32
  because they are used in float32. 'layers' becomes a tuple of L trees. LoRA adapters are merged
  into their matrices, so they do not slow down decoding. On a CPU without matrix units, matrices
  are stored output-first (`matmul.OutputMajor`).
  """
  return decode_conversion(config, meshes)(params)


@functools.cache
def decode_conversion(config: ShapeConfig, meshes: sharding.Meshes) -> Callable[[Params], Params]:
  """Return the jitted conversion that `decode_layout` applies."""
  conversions = _conversions(config, meshes)

  def convert(params: Params) -> Params:
    decode_params = jax.tree.map(lambda convert, weight: convert(weight), conversions, params)
    return _split_layers(config, decode_params)

  targets = sharding.layout_of(decode_shapes(config, meshes.decoding))
  return jax.jit(convert, out_shardings=targets)


def into_decode_layout(config: ShapeConfig, params: Params, meshes: sharding.Meshes) -> Params:
  """Convert parameters to the decode layout and delete the originals.

  The result is the same as with `decode_layout`, but parameters are converted one at a time, so
  peak memory is only the model plus a copy of its largest parameter. Using an original parameter
  afterwards raises JAX's error for deleted arrays.
  """

  def convert(conversion: Callable[[lora.Weight], Any], weight: lora.Weight) -> Any:
    decode_weight = jax.block_until_ready(jax.jit(conversion)(weight))
    jax.tree.map(lambda leaf: leaf.delete(), weight)
    return decode_weight

  decode_params = jax.tree.map(convert, _conversions(config, meshes), params)
  targets = sharding.layout_of(decode_shapes(config, meshes.decoding))
  return sharding.restore_layout(_split_layers(config, decode_params), targets)


def _conversions(config: ShapeConfig, meshes: sharding.Meshes) -> Params:
  """Return a tree with a conversion function per parameter; layer stacks become tuples."""

  def conversion(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> Callable[..., Any]:
    def convert(weight: lora.Weight) -> jax.Array | OutputMajor:
      leaf = lora.merged(weight)
      cast = leaf.astype(config.dtype) if leaf.ndim > 1 else leaf
      return _decode_form(config, meshes.decoding, path, sharding.gathered(cast, axes, meshes))

    def convert_stack(stack: lora.Weight) -> tuple[jax.Array | OutputMajor, ...]:
      return tuple(
        convert(jax.tree.map(operator.itemgetter(layer), stack))
        for layer in range(config.num_layers)
      )

    return convert_stack if path[0].key == 'layers' else convert

  def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    return tuple(variable.get_metadata('logical_axes'))

  outer, block = (
    nnx.to_pure_dict(abstract_module(module, config)[1], logical_axes)
    for module in (EmbeddingAndHead, Block)
  )
  return jax.tree_util.tree_map_with_path(conversion, outer | {'layers': block}, is_leaf=_is_tuple)


def _split_layers(config: ShapeConfig, params: Params) -> Params:
  """Turn 'layers' from a tree of L-tuples into a tuple of L trees."""
  layers = tuple(
    jax.tree.map(operator.itemgetter(layer), params['layers'], is_leaf=_is_tuple)
    for layer in range(config.num_layers)
  )
  return params | {'layers': layers}


def _is_tuple(node: Any) -> bool:
  return isinstance(node, tuple)


def decode_shapes(config: ShapeConfig, mesh: Mesh) -> Params:
  """Return the shapes, dtypes and shardings of the decode layout without allocating arrays."""
  _, outer = abstract_module(EmbeddingAndHead, config)
  _, block = abstract_module(Block, config)
  shape = functools.partial(parameter_shape, mesh, dtype=config.dtype)
  layers = (nnx.to_pure_dict(block, shape),) * config.num_layers
  return jax.tree_util.tree_map_with_path(
    functools.partial(_decode_form, config, mesh),
    nnx.to_pure_dict(outer, shape) | {'layers': layers},
  )


def _decode_form(config: ShapeConfig, mesh: Mesh, path: tuple[Any, ...], kernel: Any) -> Any:
  """Convert a parameter, or its shape, to the form that the mesh's platform uses for decoding."""
  num_inputs = _NUM_INPUTS.get(path[-1].key)
  if num_inputs and matmul.is_output_major(mesh.devices.flat[0].platform, config.dtype):
    return matmul.output_major(kernel, num_inputs)
  return kernel


def hidden_states(
  config: ShapeConfig,
  params: Params,
  tokens_BT: Array,
  segments: Segments | None = None,
  routes_BTLC: Array | None = None,
) -> jax.Array:
  """Compute the hidden states after the final norm; see `hidden_states_and_balance`."""
  return hidden_states_and_balance(config, params, tokens_BT, segments, routes_BTLC=routes_BTLC)[0]


def hidden_states_and_balance(
  config: ShapeConfig,
  params: Params,
  tokens_BT: Array,
  segments: Segments | None = None,
  remat: str = 'none',
  routes_BTLC: Array | None = None,
  counted: mlp.Counted | None = None,
) -> tuple[jax.Array, mlp.Balance | None]:
  """Compute the hidden states after the final norm, in the compute dtype, and the load balance.

  `params` are in the training layout (see `init`). `segments` are the rows of packed sequences, or
  None if each sequence is one row at positions 0 .. T-1. `remat`, one of REMAT, chooses the parts
  that the backward pass recomputes. `routes_BTLC` are the experts to use for each token in each
  layer (see `mlp.Experts`), and `counted` are the tokens to count in the experts' load balance.

  Returns (hidden states [B, T, D], load balance stacked over layers). The load balance is None if
  the model has no experts or `counted` is None.
  """
  chex.assert_rank(tokens_BT, 2)
  rotation_by_kind = rotations_of_kinds(
    config, segments.position_BT if segments else default_positions(tokens_BT)
  )
  kinds, rotations = list(rotation_by_kind), list(rotation_by_kind.values())
  number_L, rotation_stack = None, None
  if len(kinds) > 1:  # one program for all layers; each layer selects its kind's tables
    number_L = jnp.array([kinds.index(kind) for kind in config.kinds])
    rotation_stack = jax.tree.map(lambda *tables: jnp.stack(tables), *rotations)

  def apply_layer(
    x_BTD: jax.Array, inputs: tuple[Params, Array | None, Array | None]
  ) -> tuple[jax.Array, mlp.Balance | None]:
    layer, number, routes_BTC = inputs
    rotation, is_local = rotations[0], kinds[0].is_local
    if number is not None:
      rotation = jax.tree.map(lambda table: table[number], rotation_stack)
      if len({kind.is_local for kind in kinds}) > 1:
        is_local = jnp.array([kind.is_local for kind in kinds])[number]
    x_BTD, _, routing = block_module(config, layer)(
      x_BTD, rotation, is_local, None, segments=segments, routes_BTC=routes_BTC
    )
    return x_BTD, mlp.balance_of_layer(config, routing, counted) if routing and counted else None

  if remat != 'none':
    # No CSE barrier is needed: XLA does not merge a scan's body with the code around it.
    apply_layer = jax.checkpoint(apply_layer, policy=REMAT[remat], prevent_cse=False)
  # Start from the embedding table's layout. From there, one all-to-all along fsdp makes whole rows,
  # and another returns the gradient. Otherwise XLA would gather all rows on every device.
  x_BTD = sharding.constrain(_embed(config, params, tokens_BT), ('outer_batch', None, 'embed'))
  x_BTD = sharding.constrain(x_BTD, ('batch', None, None))
  routes_LBTC = None if routes_BTLC is None else jnp.moveaxis(routes_BTLC, 2, 0)
  x_BTD, balance = jax.lax.scan(apply_layer, x_BTD, (params['layers'], number_L, routes_LBTC))
  return outer_module(config, params).final_norm(x_BTD), balance


def copied(params: Params) -> Params:
  """Copy parameters without compiling, so that donating the copies leaves the originals intact."""
  return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), params)


def decode_unembedding(config: ShapeConfig, params: Params) -> jax.Array | OutputMajor:
  """Return the unembedding for `matmul.logits`, from parameters in the decode layout."""
  if matmul.is_output_major(sharding.platform(), config.dtype):
    return (
      OutputMajor(params['embedding_VD']) if config.tied_embeddings else params['unembedding_DV']
    )
  return unembedding(config, params)


def unembedding(config: ShapeConfig, params: Params) -> jax.Array:
  """Return the unembedding [D, V] in the compute dtype; `params` must not be output-first."""
  kernel_DV = params['embedding_VD'].T if config.tied_embeddings else params['unembedding_DV']
  return kernel_DV.astype(config.dtype)


def init_cache(config: ShapeConfig, num_rows: int, length: int) -> Cache:
  """Make an empty cache with `length` positions per row, or at most `window` in local layers."""
  G, H = config.num_kv_heads, config.head_size
  return tuple(
    kv_cache.empty(num_rows, G, H, size, config.dtype) for size in config.layer_lengths(length)
  )


def cache_length(config: ShapeConfig, cache: Cache) -> int:
  """Return a cache's number of positions; UNLIMITED if every layer stores its whole window."""
  full_lengths = [
    kv_cache.length(layer) for layer, kind in zip(cache, config.kinds) if not kind.is_local
  ]
  longest = max(full_lengths or map(kv_cache.length, cache))
  return longest if full_lengths or longest < config.window else UNLIMITED


def prefill(
  config: ShapeConfig,
  params: Params,
  tokens_BT: Array,
  length_B: Array,
  cache_length: int,
  routes_BTLC: Array | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Run whole sequences through the model and fill a cache.

  `params` are in the decode layout. Each row has `length_B` tokens (int32), at least 1; the rest is
  padding. The first T of the `cache_length` positions are written. For the routes, see
  `hidden_states_and_balance`.

  Returns:
    (hidden states [B, T, D], cache, chosen experts [B, T, L, C] or None).
  """
  chex.assert_rank(tokens_BT, 2)
  positions, no_caches = default_positions(tokens_BT), (None,) * config.num_layers
  hidden_BTD, cache, routes_BTLC = apply_layers(
    config, params, tokens_BT, positions, no_caches, routes_BTLC=routes_BTLC
  )
  cache = kv_cache.fitted(cache, config.layer_lengths(cache_length), length_B)
  return hidden_BTD, cache, routes_BTLC


def decode(
  config: ShapeConfig, params: Params, tokens_B: Array, position_B: Array, cache: Cache
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Decode one token per row, each at its own position.

  Writes keys and values at position_B, which must be below the cache's length. Attends only to
  positions 0 .. position_B, regardless of the cache's contents at later positions. `params` are in
  the decode layout; `tokens_B` and `position_B` are int32.

  Returns:
    (hidden states [B, D], updated cache, chosen experts [B, 1, L, C] or None).
  """
  chex.assert_rank([tokens_B, position_B], 1)
  hidden_BTD, cache, routes_BTLC = apply_layers(
    config, params, tokens_B[:, None], position_B[:, None], cache
  )
  return hidden_BTD[:, 0], cache, routes_BTLC


def decode_new(
  config: ShapeConfig, params: Params, tokens_BT: Array, position_B: Array, cache: Cache
) -> tuple[jax.Array, tuple[LayerCache | NewTokens, ...], jax.Array | None]:
  """Decode T > 1 tokens per row, starting at each row's own position.

  The arguments are as in `decode`.

  Returns:
    (hidden states [B, T, D], each layer's input to `keep`, chosen experts [B, T, L, C] or None).
  """
  chex.assert_rank([tokens_BT, position_B], [2, 1])
  position_BT = jnp.asarray(position_B)[:, None] + jnp.arange(tokens_BT.shape[1])
  return apply_layers(config, params, tokens_BT, position_BT, cache)


def keep(
  config: ShapeConfig,
  cache: Cache,
  new_layers: tuple[LayerCache | NewTokens, ...],
  position_B: jax.Array,
  count_B: jax.Array,
) -> Cache:
  """Write each row's first `count_B` tokens (1 to T) from `decode_new` to the cache.

  Position position_B + count_B - 1 must be below the cache's length.
  """

  def write(number: jax.Array, cache: Cache) -> Cache:
    number_B = jnp.minimum(number, count_B - 1)  # rows with fewer tokens rewrite their last
    place_B = position_B + number_B

    def select_token(x_BTGH: jax.Array) -> jax.Array:
      return jnp.take_along_axis(x_BTGH, number_B[:, None, None, None], axis=1)[:, 0]

    return tuple(
      kv_cache.write_token(
        layer,
        select_token(tokens.key_BTGH),
        select_token(tokens.value_BTGH),
        place_B % config.window if kind.is_local else place_B,
      )
      if isinstance(tokens, NewTokens)
      else layer
      for layer, tokens, kind in zip(cache, new_layers, config.kinds, strict=True)
    )

  pairs = zip(cache, new_layers, strict=True)
  cache = tuple(layer if isinstance(tokens, NewTokens) else tokens for layer, tokens in pairs)
  return jax.lax.fori_loop(0, jnp.max(count_B), write, cache)


def apply_layers(
  config: ShapeConfig,
  params: Params,
  tokens_BT: Array,
  position_BT: Array,
  cache: tuple[LayerCache | None, ...],
  segments: Segments | None = None,
  routes_BTLC: Array | None = None,
  store: Callable[[int, jax.Array, LayerCache], tuple[jax.Array, LayerCache]] | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Apply all layers, unrolled, in the decode layout.

  If given, `store(number, output, cache)` returns replacements for a layer's output and new cache.
  """
  x_BTD = sharding.constrain(_embed(config, params, tokens_BT), ('batch', None, None))
  rotations = rotations_of_kinds(config, position_BT)
  new_cache, routes = [], []
  layers = zip(params['layers'], cache, config.kinds, strict=True)
  for number, (layer, layer_cache, kind) in enumerate(layers):
    routes_BTC = None if routes_BTLC is None else routes_BTLC[:, :, number]
    x_BTD, new_layer_cache, routing = block_module(config, layer)(
      x_BTD, rotations[kind], kind.is_local, layer_cache, position_BT, segments, routes_BTC
    )
    if store and not isinstance(new_layer_cache, NewTokens):
      x_BTD, new_layer_cache = store(number, x_BTD, new_layer_cache)
    new_cache.append(new_layer_cache)
    routes += [routing.routes_BTC] if routing else []
  hidden_BTD = outer_module(config, params).final_norm(x_BTD)
  return hidden_BTD, tuple(new_cache), jnp.stack(routes, axis=2) if routes else None


def _embed(config: ShapeConfig, params: Params, tokens_BT: Array) -> jax.Array:
  embedding_VD = params['embedding_VD']
  if sharding.platform() == 'cpu':  # no gradient is lost: bfloat16 tables are not trained
    x_BTD = from_bits(to_bits(embedding_VD)[tokens_BT]).astype(config.dtype)
  else:
    x_BTD = embedding_VD[tokens_BT].astype(config.dtype)
  return x_BTD * jnp.sqrt(config.width).astype(config.dtype) if config.scaled_embeddings else x_BTD
