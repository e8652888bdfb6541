"""How evenly a router spreads tokens over its experts.

The sequence-wise auxiliary loss of DeepSeek-V3 (arXiv:2412.19437, eq. 17 to 20): in each row, for
each expert, its share of the choices times its mean probability, summed and scaled so that even
routing has 1. A row's loss needs no other row, so it is the same however rows are packed and
minibatches are cut; that of Switch Transformers (arXiv:2101.03961), over all tokens of a batch, is
not. Shape letters as in mlp.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy.mlp import Routing
from exgrpo_jax.policy.shape import Config


class Counted(NamedTuple):
  """Which tokens count, and how much."""

  weight_BT: Array  # float32, in the mean over tokens; 0 where one does not count
  row_BT: Array  # int32 in 0 … T, equal for tokens of one row


class Balance(NamedTuple):
  """Of one layer, or stacked over layers."""

  loss: jax.Array  # float32, the weighted mean over tokens of their rows' losses
  count_E: jax.Array  # float32, how often counted tokens chose each expert


def of_layer(config: Config, routing: Routing, counted: Counted) -> Balance:
  """The balance of the tokens that count; its gradient is that of their probabilities alone."""
  counts_BT = counted.weight_BT > 0
  chosen_BTE = jax.nn.one_hot(routing.chosen_BTC, config.num_experts).sum(axis=-2)
  chosen_BTE *= counts_BT[..., None]
  of_row_BTE = jax.vmap(_row_sums)(chosen_BTE, counted.row_BT)
  share_BTE = of_row_BTE / jnp.maximum(of_row_BTE.sum(axis=-1, keepdims=True), 1)
  loss_BT = config.num_experts * jnp.sum(share_BTE * routing.probability_BTE, axis=-1)
  return Balance(jnp.sum(counted.weight_BT * loss_BT), chosen_BTE.sum(axis=(0, 1)))


def counted(position_BW: Array, weight_BW: Array, row_BT: Array) -> Counted:
  """The tokens at these positions, no two of a sequence alike."""
  number_B1 = jnp.arange(len(row_BT))[:, None]
  weight_BT = jnp.zeros(row_BT.shape, jnp.float32).at[number_B1, position_BW].set(weight_BW)
  return Counted(weight_BT, row_BT)


def sums(load: Balance | None) -> dict[str, jax.Array]:
  """What a step's metrics are made of, from all layers; nothing of a model without experts."""
  return {} if load is None else {'balance': load.loss.mean(), 'choices_LE': load.count_E}


def zero_sums(config: Config) -> dict[str, jax.Array]:
  """`sums` of no token."""
  layers = jnp.zeros(config.num_layers, jnp.float32)
  of_experts = jnp.zeros((config.num_layers, config.num_experts), jnp.float32)
  return sums(Balance(layers, of_experts)) if config.num_experts else {}


def _row_sums(x_TE: jax.Array, row_T: Array) -> jax.Array:
  return jax.ops.segment_sum(x_TE, row_T, len(row_T) + 1)[row_T]
