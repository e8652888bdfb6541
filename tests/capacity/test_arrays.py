"""The sizes of abstract arrays are those of real ones."""

import dataclasses
import math

import jax
import pytest

from exgrpo_jax.capacity import arrays as held
from exgrpo_jax.experiment import experiment
from exgrpo_jax.learner import optimizer
from exgrpo_jax.policy import lora, model
from tests.capacity.shapes import SMALL


@pytest.mark.parametrize('rank', [0, 2])
def test_the_abstract_state_has_the_shapes_of_a_real_one(mesh, parsed, rank):
  parsed = dataclasses.replace(parsed, lora=dataclasses.replace(parsed.lora, rank=rank))
  params = model.init(SMALL, jax.random.key(0), mesh)
  trained = lora.init(lora.shapes(parsed.lora, params), jax.random.key(1)) if rank else params
  real = optimizer.init(parsed.optimizer, parsed.num_updates, trained)
  abstract = held.step_arrays(experiment.update_spec(parsed, SMALL, mesh), mesh).state
  assert jax.tree.structure(abstract) == jax.tree.structure(real)
  different = [
    jax.tree_util.keystr(path)
    for (path, shape), leaf in zip(
      jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(real)
    )
    if (shape.shape, shape.dtype) != (leaf.shape, leaf.dtype)
  ]
  assert different == []
  assert held.bytes_per_chip(abstract) == sum(leaf.nbytes for leaf in jax.tree.leaves(real))


def test_with_lora_a_step_keeps_its_base_in_the_compute_dtype(mesh, parsed):
  shape = dataclasses.replace(SMALL, dtype='bfloat16')
  params = model.init(shape, jax.random.key(0), mesh)
  spec = experiment.update_spec(parsed, shape, mesh)
  spec = dataclasses.replace(spec, lora=dataclasses.replace(parsed.lora, rank=2))
  found = held.step_arrays(spec, mesh)
  base = model.frozen(shape, params, mesh)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(base))
  assert held.bytes_per_chip(found.initial) == size
  assert size < 0.51 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  adapters = held.bytes_per_chip(found.state.params)
  assert held.bytes_per_chip(found.gradient) == adapters < 0.05 * size
  assert held.bytes_per_chip(found.policy) == size + adapters
  assert held.step_arrays(experiment.update_spec(parsed, shape, mesh), mesh).initial is None


def test_the_cache_is_counted_where_heads_are_spread(mesh, parsed):
  shape = dataclasses.replace(SMALL, dtype='bfloat16')
  cache = held.cache_bytes(parsed.rollout, shape, mesh)
  # Keys and values, layers, slots, heads, positions, head size, bytes.
  assert cache * mesh.size == math.prod((2, 2, parsed.rollout.slots, 2, 9216, 32, 2))
