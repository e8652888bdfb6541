"""AdamW with gradient clipping. Updates whose gradient is too large are skipped."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from exgrpo_jax.config import AUTHORS, PAPER, setting
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

# config.optimizer.schedule -> a function from the peak rate and the number of updates after warm-up
# to a schedule of these updates.
SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
  'constant': lambda peak, _: optax.constant_schedule(peak),
  'linear': lambda peak, num_updates: optax.linear_schedule(peak, 0.0, num_updates),
  'cosine': optax.cosine_decay_schedule,
}


def adamw(config: 'OptimizerConfig') -> optax.GradientTransformation:
  """Scale gradients by AdamW's moments (arXiv:1711.05101)."""
  adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon, mu_dtype=config.moment_dtype)
  return _second_moments_in_bfloat16(adam) if config.moment_dtype == 'bfloat16' else adam


# config.optimizer.name -> a function from the OptimizerConfig to the transformation that turns
# clipped gradients into directions. Weight decay and the learning rate are applied to its result.
OPTIMIZERS: dict[str, Callable[['OptimizerConfig'], optax.GradientTransformation]] = {
  'adamw': adamw
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, its schedule, and the gradient norms that trigger clipping or skipping.

  The authors' gradient is 64 times as large as ours. Their code sums over the 64 rows of one GPU's
  share of a minibatch, divides by the response limit and averages over 8 GPUs. Ours averages over
  all 512 rows instead. So our defaults for settings in gradient units are the authors' values
  divided by 64.
  """

  minibatches: int = setting(
    2, '[1, inf)', 'number of updates per epoch; each uses the same number of whole groups', AUTHORS
  )
  epochs: int = setting(
    1,
    '[1, inf)',
    "number of passes over a step's rows; the groups are reshuffled before each subsequent pass",
    AUTHORS,
  )
  max_kl: float = setting(
    float('inf'),
    '(0, inf]',
    "stop a step's updates once KL(old policy, policy), in nats per token, exceeds this value; the "
    "KL is estimated with k3 from the next minibatch's fresh tokens; inf turns this off",
  )
  name: str = setting('adamw', OPTIMIZERS, 'the optimizer; a config file can add its own')
  learning_rate: float = setting(1e-6, '[0, inf)', 'the peak learning rate', PAPER)
  schedule: str = setting(
    'constant',
    SCHEDULES,
    'the learning rate schedule after warm-up: linear and cosine reach 0 after the last update',
    AUTHORS,
  )
  warmup_updates: int = setting(
    0, '[0, inf)', 'number of updates over which the learning rate ramps up', AUTHORS
  )
  b1: float = setting(0.9, '[0, 1)', "the decay of AdamW's first moment", AUTHORS)
  b2: float = setting(0.999, '[0, 1)', "the decay of AdamW's second moment", AUTHORS)
  epsilon: float = setting(
    1.6e-10, '(0, inf)', "AdamW's epsilon, in the gradient's units", f'{AUTHORS}, 1e-8 / 64'
  )
  weight_decay: float = setting(
    0.01, '[0, inf)', 'the decoupled weight decay, applied to every parameter', AUTHORS
  )
  moment_dtype: str = setting(
    'float32', ('float32', 'bfloat16'), "the dtype of AdamW's moments; bfloat16 halves their memory"
  )
  clip_norm: float = setting(
    1 / 64,
    '(0, inf]',
    'gradients with a larger global norm are scaled down to this norm',
    f'{AUTHORS}, 1 / 64',
  )
  skip_above_norm: float = setting(
    7.8,
    '(0, inf]',
    'updates whose gradient has a larger global norm are skipped and counted',
    f'{AUTHORS}, 500 / 64',
  )

  @property
  def updates_per_step(self) -> int:
    """Return the number of updates in a step, unless `max_kl` stops the step early."""
    return self.epochs * self.minibatches

  @property
  def measures_kl(self) -> bool:
    """Return True if updates measure how far the policy has moved since the step began."""
    return self.epochs > 1 or self.max_kl < float('inf')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that an update changes."""

  params: Params
  opt_state: Any


def learning_rate(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
  """Make the schedule, update index -> learning rate: a linear warm-up, then `config.schedule`."""
  peak, warmup = config.learning_rate, config.warmup_updates
  num_remaining = max(1, num_updates - warmup)
  schedule = SCHEDULES[config.schedule](peak, num_remaining)
  # The first update's rate is peak / (warmup + 1), because an update with rate 0 would be wasted.
  rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  return optax.join_schedules([rise, schedule], [warmup]) if warmup else schedule


def make(config: OptimizerConfig, num_updates: int) -> optax.GradientTransformation:
  """Make the optax chain: clip by global norm, then apply the optimizer."""
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    OPTIMIZERS[config.name](config),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(learning_rate(config, num_updates)),
  )


def _second_moments_in_bfloat16(adam: optax.GradientTransformation) -> optax.GradientTransformation:
  """Keep the second moment in bfloat16 with stochastic rounding.

  An update shrinks the second moment by at most a thousandth (1 - b2). Adjacent bfloat16
  values differ by four to eight thousandths, so with rounding to nearest, the moment would never
  decrease. Stochastic rounding is correct on average (arXiv:1502.02551). The first moment changes
  by about a tenth per update and does not need stochastic rounding.
  """

  def init(params: optax.Params) -> Any:
    state: Any = adam.init(params)
    return state._replace(nu=jax.tree.map(lambda nu: nu.astype(jnp.bfloat16), state.nu))

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None
  ) -> tuple[optax.Updates, Any]:
    exact = jax.tree.map(lambda nu: nu.astype(jnp.float32), state.nu)
    updates, state = adam.update(updates, state._replace(nu=exact), params)
    leaves, structure = jax.tree.flatten(state.nu)
    # Use the same key for every seed, because rounding is not part of the experiment.
    key = randomness.key(0, Purpose.STOCHASTIC_ROUNDING, state.count)
    keys = jax.random.split(key, len(leaves))
    return updates, state._replace(nu=structure.unflatten(map(_stochastic_round, leaves, keys)))

  return optax.GradientTransformation(init, update)


def _stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
  """Round float32 randomly to one of its two bfloat16 neighbors, more often to the nearer one."""
  # bfloat16 is float32's upper half; a carry out of the lower half rounds away from 0.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def init(config: OptimizerConfig, num_updates: int, params: Params) -> TrainState:
  """Make a fresh train state with moments sharded like their parameters."""
  # Counts need a layout too: if an update changed their layout, the next update would recompile.
  layout = sharding.layout_of(shapes(config, num_updates, params).opt_state)
  return TrainState(params, jax.jit(make(config, num_updates).init, out_shardings=layout)(params))


def shapes(config: OptimizerConfig, num_updates: int, params: Params) -> TrainState:
  """Return the shapes and shardings of `init`'s state without allocating arrays.

  `params` may be arrays or shapes.
  """
  replicated = sharding.replicated(jax.tree.leaves(params)[0].sharding.mesh)
  named_params = jax.tree_util.tree_leaves_with_path(params)

  def with_sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # A moment's path ends with its parameter's path. Factored moments have other shapes.
    layouts = [
      x.sharding for name, x in named_params if path[-len(name) :] == name and x.shape == leaf.shape
    ]
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=layouts[0] if layouts else replicated
    )

  opt_state = jax.eval_shape(make(config, num_updates).init, params)
  return TrainState(params, jax.tree_util.tree_map_with_path(with_sharding, opt_state))


def apply_gradient(
  config: OptimizerConfig, num_updates: int, state: TrainState, gradient: Params
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Apply one update; skip it if the gradient's norm exceeds `skip_above_norm` or is not finite.

  Returns (state, metrics) with float32 scalars 'gradient_norm', 'skipped' and 'learning_rate'. A
  skipped update does not change the parameters, the moments or the schedule's count.
  """
  norm = optax.tree.norm(gradient)
  is_good = jnp.isfinite(norm) & (norm <= config.skip_above_norm)
  updates, opt_state = make(config, num_updates).update(gradient, state.opt_state, state.params)
  params: Any = optax.apply_updates(state.params, updates)
  new_state = TrainState(params, opt_state)
  next_state = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new_state, state)
  count = state.opt_state[-1].count  # the schedule's count; the schedule is last in the chain
  rate = jnp.float32(learning_rate(config, num_updates)(count))
  return next_state, {'gradient_norm': norm, 'skipped': 1.0 - is_good, 'learning_rate': rate}
