"""A layer's MLP, or its experts and the router that chooses among them for each token.

Routing follows Qwen3 MoE, based on arXiv:2101.03961: the router computes a softmax over all experts
and chooses the most probable experts, weighted by their probabilities. No tokens are dropped: the
products are ragged, with one row for each token that is routed to an expert. Further shape letters:
F hidden units, E experts, C experts chosen for a token, M tokens, P pairs of a token and one of its
experts.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.lora import product
from exgrpo_jax.policy.matmul import project
from exgrpo_jax.policy.shape import ShapeConfig

# ---- Initial values ----


def normal(
  config: ShapeConfig,
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  logical_axes: tuple[str | None, ...],
  scale: float = 1.0,
) -> nnx.Param:
  """Draw a float32 parameter with standard deviation scale / sqrt(width)."""
  std = scale / math.sqrt(config.width)
  value = std * jax.random.normal(rngs(), shape, jnp.float32)
  return nnx.Param(value, logical_axes=logical_axes)


def residual_scale(config: ShapeConfig) -> float:
  """Return the initial scale of the projections into the residual stream.

  Each layer adds two projections. Scaling them keeps the stream's variance independent of depth.
  """
  return 1 / math.sqrt(2 * config.num_layers)


class MLP(nnx.Module):
  """A gated MLP, such as SwiGLU, GEGLU or ReGLU (arXiv:2002.05202)."""

  def __init__(self, config: ShapeConfig, rngs: nnx.Rngs) -> None:
    D, F = config.width, config.mlp_width
    self.config = config
    self.gate_DF = normal(config, rngs, (D, F), ('embed', 'mlp'))
    self.up_DF = normal(config, rngs, (D, F), ('embed', 'mlp'))
    self.down_FD = normal(config, rngs, (F, D), ('mlp', 'embed'), residual_scale(config))
    if config.mlp_bias:
      self.gate_bias_F = nnx.Param(jnp.zeros(F), logical_axes=('mlp',))
      self.up_bias_F = nnx.Param(jnp.zeros(F), logical_axes=('mlp',))
      self.down_bias_D = nnx.Param(jnp.zeros(D), logical_axes=('embed',))

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Compute down(activation(gate(x)) * up(x)), in x's dtype."""
    gate_BTF, up_BTF = (product(x_BTD, kernel.get_value()) for kernel in (self.gate_DF, self.up_DF))
    if self.config.mlp_bias:
      gate_BTF += self.gate_bias_F[...].astype(x_BTD.dtype)
      up_BTF += self.up_bias_F[...].astype(x_BTD.dtype)
    out_BTD = product(_gate(self.config.activation, gate_BTF, up_BTF), self.down_FD.get_value())
    if self.config.mlp_bias:
      out_BTD += self.down_bias_D[...].astype(x_BTD.dtype)
    return out_BTD


class Routing(NamedTuple):
  """The router's output for each token in a layer."""

  routes_BTC: jax.Array  # int32, chosen experts, most probable first unless replayed
  probability_BTE: jax.Array  # float32


class Experts(nnx.Module):
  """Expert MLPs, and a router that selects a few experts for each token and sets their weights."""

  def __init__(self, config: ShapeConfig, rngs: nnx.Rngs) -> None:
    D, F, E = config.width, config.mlp_width, config.num_experts
    self.router_DE = normal(config, rngs, (D, E), ('embed', None))
    self.gate_EDF = normal(config, rngs, (E, D, F), ('experts', 'embed', 'mlp'))
    self.up_EDF = normal(config, rngs, (E, D, F), ('experts', 'embed', 'mlp'))
    down_axes, scale = ('experts', 'mlp', 'embed'), residual_scale(config)
    self.down_EFD = normal(config, rngs, (E, F, D), down_axes, scale)
    self.config = config

  def __call__(
    self, x_BTD: jax.Array, routes_BTC: Array | None = None
  ) -> tuple[jax.Array, Routing]:
    """Return the weighted sum of each token's expert outputs, in x's dtype, and the routing.

    Args:
      x_BTD: normalized activations.
      routes_BTC: int, experts that override the router's choice, for example those the sampler
        used (router replay, arXiv:2510.11370). The router still computes the experts' weights,
        and still chooses the experts for tokens whose first entry is at least E. If None, the
        router chooses for all tokens.
    """
    config, dtype = self.config, x_BTD.dtype
    logits_BTE = project(x_BTD, self.router_DE[...].astype(dtype))
    probability_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32))
    _, top_BTC = jax.lax.top_k(probability_BTE, config.experts_per_token)
    if routes_BTC is None:
      routes_BTC = top_BTC
    else:
      routes_BTC = jnp.asarray(routes_BTC).astype(jnp.int32)
      routes_BTC = jnp.where(routes_BTC[..., :1] < config.num_experts, routes_BTC, top_BTC)
    weight_BTC = jnp.take_along_axis(probability_BTE, routes_BTC, axis=-1)
    if config.normalised_experts:
      weight_BTC /= weight_BTC.sum(axis=-1, keepdims=True)
    kernels = self.gate_EDF, self.up_EDF, self.down_EFD
    mixed_BTD = sharding.over_experts(
      functools.partial(_mix_experts, config.activation, config.num_experts),
      (x_BTD, routes_BTC, weight_BTC.astype(dtype)),
      tuple(kernel[...].astype(dtype) for kernel in kernels),
    )
    return mixed_BTD, Routing(routes_BTC, probability_BTE)


def _mix_experts(
  activation: str,
  num_experts: int,
  rows: tuple[jax.Array, jax.Array, jax.Array],
  kernels: tuple[jax.Array, jax.Array, jax.Array],
  first_expert: jax.Array | int,
) -> jax.Array:
  """Compute one device's part of `sharding.over_experts`; its experts start at `first_expert`."""
  x_BTD, routes_BTC, weight_BTC = rows
  gate_EDF, up_EDF, down_EFD = kernels
  x_MD, C, E = x_BTD.reshape(-1, x_BTD.shape[-1]), routes_BTC.shape[-1], len(gate_EDF)
  expert_P = routes_BTC.reshape(-1) - first_expert
  # Pairs with other devices' experts come last and are not computed.
  expert_P = jnp.where((expert_P >= 0) & (expert_P < E), expert_P, E)
  order_P = jnp.argsort(expert_P, stable=True)
  place_P = jnp.argsort(order_P)
  size_E = jnp.bincount(expert_P, length=E + 1)[:E].astype(jnp.int32)

  def zero_others(x_PN: jax.Array) -> jax.Array:
    """Zero the rows of pairs whose expert is on another device; their products are undefined."""
    if num_experts == E:
      return x_PN
    return jnp.where(jnp.arange(len(x_PN))[:, None] < size_E.sum(), x_PN, 0)

  x_PD = zero_others(_permute(jnp.repeat(x_MD, C, axis=0), order_P, place_P))
  gate_PF, up_PF = (jax.lax.ragged_dot(x_PD, kernel, size_E) for kernel in (gate_EDF, up_EDF))
  hidden_PF = _gate(activation, gate_PF, up_PF)
  out_PD = zero_others(jax.lax.ragged_dot(hidden_PF, down_EFD, size_E))
  out_MCD = _permute(out_PD, place_P, order_P).reshape(-1, C, x_MD.shape[1])
  return jnp.einsum('MCD,MC->MD', out_MCD, weight_BTC.reshape(-1, C)).reshape(x_BTD.shape)


@jax.custom_vjp
def _permute(x_PD: jax.Array, order_P: jax.Array, _inverse_P: jax.Array) -> jax.Array:
  """Return x[order]; the gradient is a gather by the inverse order, not autodiff's scatter."""
  return x_PD[order_P]


_permute.defvjp(
  lambda x_PD, order_P, inverse_P: (x_PD[order_P], inverse_P),
  lambda inverse_P, d_out_PD: (d_out_PD[inverse_P], None, None),
)


# Hidden activations are the widest arrays, so the backward pass keeps only `gate` and `up`.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _gate(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
  return _ACTIVATIONS[activation](gate) * up


_ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': functools.partial(jax.nn.gelu, approximate=True),
  'exact_gelu': functools.partial(jax.nn.gelu, approximate=False),
  'relu': jax.nn.relu,
}


# ---- Load balance of the experts ----

# The sequence-wise auxiliary loss of DeepSeek-V3 (arXiv:2412.19437, eq. 17 to 20): for each row,
# each expert's share of the choices times its mean probability, summed over experts and scaled so
# that even routing gives 1. A row's loss is independent of other rows, so it does not depend on how
# rows are packed or minibatches are split. The loss of Switch Transformers (arXiv:2101.03961) does
# depend on them, because it is computed over all tokens of a batch.


class Counted(NamedTuple):
  """The tokens that count toward the load balance, and their weights."""

  weight_BT: Array  # float32, weight in the mean over tokens; 0 if a token does not count
  row_BT: Array  # int32 in 0 … T, the row of each token


class Balance(NamedTuple):
  """The experts' load balance in one layer, or stacked over layers."""

  loss: jax.Array  # float32, the weighted mean over tokens of their rows' losses
  count_E: jax.Array  # float32, number of counted tokens routed to each expert


def balance_of_layer(config: ShapeConfig, routing: Routing, counted: Counted) -> Balance:
  """Compute a layer's load balance; gradients flow only through the probabilities."""
  counts_BT = counted.weight_BT > 0
  choices_BTE = jax.nn.one_hot(routing.routes_BTC, config.num_experts).sum(axis=-2)
  choices_BTE *= counts_BT[..., None]
  row_choices_BTE = jax.vmap(
    lambda x_TE, row_T: jax.ops.segment_sum(x_TE, row_T, len(row_T) + 1)[row_T]
  )(choices_BTE, counted.row_BT)
  share_BTE = row_choices_BTE / jnp.maximum(row_choices_BTE.sum(axis=-1, keepdims=True), 1)
  loss_BT = config.num_experts * jnp.sum(share_BTE * routing.probability_BTE, axis=-1)
  return Balance(jnp.sum(counted.weight_BT * loss_BT), choices_BTE.sum(axis=(0, 1)))


def counted_balance(position_BW: Array, weight_BW: Array, row_BT: Array) -> Counted:
  """Scatter weights to their tokens; positions must be unique within each sequence."""
  number_B1 = jnp.arange(len(row_BT))[:, None]
  weight_BT = jnp.zeros(row_BT.shape, jnp.float32).at[number_B1, position_BW].set(weight_BW)
  return Counted(weight_BT, row_BT)


def balance_sums(load: Balance | None) -> dict[str, jax.Array]:
  """Return the sums for a step's load-balance metrics; {} for a model without experts."""
  return {} if load is None else {'balance': load.loss.mean(), 'choices_LE': load.count_E}


def zero_balance_sums(config: ShapeConfig) -> dict[str, jax.Array]:
  """Return the initial `balance_sums`, before any tokens are added."""
  loss_L = jnp.zeros(config.num_layers, jnp.float32)
  count_LE = jnp.zeros((config.num_layers, config.num_experts), jnp.float32)
  return balance_sums(Balance(loss_L, count_LE)) if config.num_experts else {}
