"""The sizes of abstract arrays are those of real ones."""

import dataclasses
import math

import jax

from exgrpo_jax import experiment
from exgrpo_jax.learner import optimizer
from exgrpo_jax.performance import memory
from exgrpo_jax.policy import model
from tests.performance.shapes import SMALL


def test_the_abstract_state_has_the_shapes_of_a_real_one(mesh, parsed):
  params = model.init(SMALL, jax.random.key(0), mesh)
  real = optimizer.init(parsed.optimizer, parsed.num_updates, params)
  abstract = memory.step_arrays(experiment.update_spec(parsed, SMALL, mesh), mesh).state
  assert jax.tree.structure(abstract) == jax.tree.structure(real)
  different = [
    jax.tree_util.keystr(path)
    for (path, shape), leaf in zip(
      jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(real)
    )
    if (shape.shape, shape.dtype) != (leaf.shape, leaf.dtype)
  ]
  assert different == []
  assert memory.bytes_per_chip(abstract) == sum(leaf.nbytes for leaf in jax.tree.leaves(real))


def test_the_cache_is_counted_where_heads_are_spread(mesh, parsed):
  shape = dataclasses.replace(SMALL, dtype='bfloat16')
  cache = memory.cache_bytes_per_chip(parsed.rollout, shape, mesh)
  # Keys and values, layers, slots, heads, positions, head size, bytes.
  assert cache * mesh.size == math.prod((2, 2, parsed.rollout.slots, 2, 9216, 32, 2))
