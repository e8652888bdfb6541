"""LoRA (arXiv:2106.09685): train a product of two thin matrices on top of each frozen matrix W.

A forward pass computes x W + s (x A) B, with s = alpha / rank, and does not merge the matrices.
They are merged (`merged`) for sampling, which uses each matrix many times, and for exports. A is
initialized randomly and B to zero, so training starts from the frozen model. There are three
parameter trees, all in the training layout:

  base      the whole model, which is never updated (see `model.shapes`)
  adapters  A and B of each target, float32; only these are trained and checkpointed
  policy    base and adapters `joined`; the input of every forward pass

Without LoRA, the policy itself is trained. Shape letters: I stands for a matrix's input dimensions
and O for its output dimensions (one or two of each), and R stands for the rank.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from exgrpo_jax.config import check_known, setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy.matmul import OutputMajor, project, project_output_major


class Target(NamedTuple):
  """A matrix that can have an adapter, identified by its path within a layer."""

  module: str
  name: str
  num_inputs: int = 1  # how many of its leading dimensions are inputs


TARGETS = {
  'q_proj': Target('attention', 'query_DNH'),
  'k_proj': Target('attention', 'key_DGH'),
  'v_proj': Target('attention', 'value_DGH'),
  'o_proj': Target('attention', 'out_NHD', num_inputs=2),
  'gate_proj': Target('mlp', 'gate_DF'),
  'up_proj': Target('mlp', 'up_DF'),
  'down_proj': Target('mlp', 'down_FD'),
}

Params = dict[str, Any]  # nested; leaves are arrays or their shapes


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """LoRA settings: which matrices get adapters, and the rank and scale of the adapters."""

  rank: int = setting(
    0,
    '[0, inf)',
    'rank of the adapters to train on the frozen model, typically 8 to 64; 0 trains the whole '
    'model',
  )
  alpha: float = setting(32.0, '(0, inf)', "the adapters' products are scaled by alpha / rank")
  targets: tuple[str, ...] = setting(
    tuple(TARGETS), None, 'the matrices that get adapters, in every layer'
  )

  def __post_init__(self) -> None:
    for target in self.targets:
      check_known(target, TARGETS, 'config.lora.targets')
    if len(set(self.targets)) < len(self.targets) or not self.targets:
      raise InputError(
        f'config.lora.targets={self.targets}: the list must contain at least one name and no '
        'duplicates. List each matrix only once.'
      )

  @property
  def scale(self) -> float:
    """Return alpha / rank, the factor that scales the adapters' products."""
    return self.alpha / self.rank


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=('kernel', 'a', 'b'), meta_fields=('scale',)
)
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A matrix with its adapter: kernel + scale * a b. The arrays may be stacked over layers."""

  kernel: jax.Array  # [I, O]
  a: jax.Array  # [I, R] float32
  b: jax.Array  # [R, O] float32
  scale: float


Weight = jax.Array | Adapted


def shapes(config: LoraConfig, params: Params) -> Params:
  """Return the trained parameters' shapes, dtypes and shardings without allocating arrays.

  A and B are sharded like their matrix; the rank dimension is not sharded. `params` are the whole
  model's shapes (`model.shapes`), which are returned unchanged if the rank is 0.
  """
  if not config.rank:
    return params
  layers: Params = {}
  for name in config.targets:
    target = TARGETS[name]
    if target.name not in params['layers'][target.module]:
      raise InputError(
        f"config.lora.targets={config.targets}: '{name}' belongs to the experts, which do not "
        'support adapters. Leave out all MLP projections.'
      )
    a, b = _shapes(config, name, params['layers'][target.module][target.name])
    layers.setdefault(target.module, {})[target.name] = {'a': a, 'b': b}
  return {'layers': layers}


def _shapes(
  config: LoraConfig, name: str, kernel: jax.ShapeDtypeStruct
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
  """Return the stacked shapes of A and B; raise InputError if the rank is too large."""
  stack, *sizes = kernel.shape
  assert isinstance(kernel.sharding, NamedSharding), kernel.sharding
  mesh, (stack_axis, *axes) = kernel.sharding.mesh, kernel.sharding.spec
  count = TARGETS[name].num_inputs
  max_rank = min(math.prod(sizes[:count]), math.prod(sizes[count:]))
  if config.rank > max_rank:
    raise InputError(
      f'config.lora.rank={config.rank}: the rank must be at most {max_rank}, the smaller dimension '
      f"of {name}. Lower config.lora.rank, or leave '{name}' out of config.lora.targets."
    )

  def shape(sizes: list[int], axes: list[Any]) -> jax.ShapeDtypeStruct:
    layout = NamedSharding(mesh, PartitionSpec(stack_axis, *axes))
    return jax.ShapeDtypeStruct((stack, *sizes), jnp.float32, sharding=layout)

  return (
    shape([*sizes[:count], config.rank], [*axes[:count], None]),
    shape([config.rank, *sizes[count:]], [None, *axes[count:]]),
  )


def init(shapes: Params, key: jax.Array) -> Params:
  """Initialize adapters that leave the model unchanged, with the same values on every mesh.

  A is uniform within ±1 / sqrt(I) as in PEFT, so PEFT's learning rates apply here; B is 0.
  """

  def random_adapters(key: jax.Array) -> Params:
    layers: Params = {}
    for index, target in enumerate(TARGETS.values()):
      module_shapes = shapes['layers'].get(target.module, {})
      if target.name in module_shapes:
        a, b = module_shapes[target.name]['a'], module_shapes[target.name]['b']
        limit = 1 / math.sqrt(math.prod(a.shape[1:-1]))
        layers.setdefault(target.module, {})[target.name] = {
          'a': jax.random.uniform(
            jax.random.fold_in(key, index), a.shape, a.dtype, minval=-limit, maxval=limit
          ),
          'b': jnp.zeros(b.shape, b.dtype),
        }
    return {'layers': layers}

  layout = jax.tree.map(lambda shape: shape.sharding, shapes)
  return jax.jit(random_adapters, out_shardings=layout)(key)


def joined(config: LoraConfig, base: Params | None, trained_params: Params) -> Params:
  """Return the policy: the base joined with its adapters or, without LoRA, `trained_params` itself.

  Does not copy anything. Works on arrays, tracers and shapes.
  """
  if not config.rank:
    return trained_params
  assert base is not None, 'adapters need their base'
  layers = dict(base['layers'])
  for name in config.targets:
    module, matrix, _ = TARGETS[name]
    adapter = trained_params['layers'][module][matrix]
    weight = Adapted(layers[module][matrix], adapter['a'], adapter['b'], config.scale)
    layers[module] = layers[module] | {matrix: weight}
  return base | {'layers': layers}


def product(x_BTI: jax.Array, weight: Weight | OutputMajor, num_inputs: int = 1) -> jax.Array:
  """Multiply by a weight whose first `num_inputs` dimensions are inputs: [B, T, O]."""

  # Flatten to one matrix, because XLA:CPU transposes a weight on every call to contract two
  # dimensions.
  def times(x_BTI: jax.Array, kernel: jax.Array, num_inputs: int) -> jax.Array:
    sizes = math.prod(kernel.shape[:num_inputs]), math.prod(kernel.shape[num_inputs:])
    return project(x_BTI, kernel.astype(x_BTI.dtype).reshape(sizes))

  if isinstance(weight, OutputMajor):
    inputs = math.prod(weight.kernel_OI.shape[-num_inputs:])
    return project_output_major(x_BTI, weight.kernel_OI.reshape(-1, inputs))
  if not isinstance(weight, Adapted):
    return times(x_BTI, weight, num_inputs)
  x_BTR = weight.scale * times(x_BTI, weight.a, num_inputs)
  return times(x_BTI, weight.kernel, num_inputs) + times(x_BTR, weight.b, 1)


def merged(weight: Weight) -> jax.Array:
  """Merge a layer's weight and its adapter in float32; leave weights without adapters unchanged."""
  if not isinstance(weight, Adapted):
    return weight
  rank = weight.a.shape[-1]
  delta_IO = jnp.matmul(
    weight.a.reshape(-1, rank),
    weight.b.reshape(rank, -1),
    precision=jax.lax.Precision.HIGHEST,  # by default TPUs multiply in bfloat16
  )
  return weight.kernel.astype(jnp.float32) + weight.scale * delta_IO.reshape(weight.kernel.shape)
