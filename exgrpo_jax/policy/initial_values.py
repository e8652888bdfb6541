"""Random initial values of the decoder's matrices."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from exgrpo_jax.policy.shape import Config


def normal(
  config: Config,
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  logical_axes: tuple[str | None, ...],
  scale: float = 1.0,
) -> nnx.Param:
  """A float32 parameter of standard deviation scale / sqrt(width)."""
  std = scale / math.sqrt(config.width)
  value = std * jax.random.normal(rngs(), shape, jnp.float32)
  return nnx.Param(value, logical_axes=logical_axes)


def residual_scale(config: Config) -> float:
  """The scale of projections to the residual stream.

  Two per layer add to it: its variance must not grow with depth.
  """
  return 1 / math.sqrt(2 * config.num_layers)
