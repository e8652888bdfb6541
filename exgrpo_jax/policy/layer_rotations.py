"""The rotations of the kinds of layers that a model has."""

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import rotary
from exgrpo_jax.policy.shape import Config, Kind


def of_kinds(config: Config, position_BT: Array) -> dict[Kind, rotary.Rotation]:
  """The rotation of each kind of layer at these positions."""
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


def positions(tokens_BT: Array) -> jax.Array:
  """Positions of rows that start at 0: [1, T], shared by all."""
  return jnp.arange(tokens_BT.shape[1])[None]
