"""The rotations of the kinds of layers that a model has."""

import jax
import jax.numpy as jnp

from exgrpo_jax.datatypes import Array
from exgrpo_jax.policy import rotary
from exgrpo_jax.policy.shape import Config, Kind


def of_kinds(config: Config, position_BT: Array) -> dict[Kind, rotary.Rotation]:
  """The rotation of each kind of layer at these positions."""
  size, rotations = config.head_size, {}
  for kind in sorted({*config.kinds}):
    rope = config.local_rope if kind.is_local else config.rope
    rotations[kind] = (
      rotary.rotations(rope, size, position_BT)
      if kind.has_positions
      else rotary.unrotated(position_BT, size)
    )
  return rotations


def positions(tokens_BT: Array) -> jax.Array:
  """Positions of rows that start at 0: [1, T], shared by all."""
  return jnp.arange(tokens_BT.shape[1])[None]
