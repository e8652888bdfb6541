"""The modules of layers.py without their parameters, which functions take as nested dicts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from exgrpo_jax.policy import sharding
from exgrpo_jax.policy.layers import Block, EmbeddingAndHead
from exgrpo_jax.policy.shape import Config


@functools.cache
def abstract(
  module: Callable[[Config, nnx.Rngs], nnx.Module], config: Config
) -> tuple[nnx.GraphDef, nnx.State]:
  """A module's structure, and its variables with shapes in place of values."""
  return nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(0))))


def block(config: Config, params: Any) -> Block:
  """One layer with these parameters."""
  return nnx.merge(abstract(Block, config)[0], params)


def embedding_and_head(config: Config, params: Any) -> EmbeddingAndHead:
  """What is outside the layers, with its part of these parameters."""
  outer = {name: value for name, value in params.items() if name != 'layers'}
  return nnx.merge(abstract(EmbeddingAndHead, config)[0], outer)


def shape(
  mesh: Mesh,
  variable: nnx.Variable,
  num_layers: int | None = None,
  dtype: str | None = None,
) -> jax.ShapeDtypeStruct:
  """Shape of one variable or of a stack; `dtype` overrides that of matrices, not of vectors."""
  axes, sizes = variable.get_metadata('logical_axes'), variable.shape
  if not dtype or len(sizes) == 1:
    dtype = variable.dtype
  if num_layers:
    axes, sizes = (None, *axes), (num_layers, *sizes)
  return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding.named(mesh, axes, sizes))
