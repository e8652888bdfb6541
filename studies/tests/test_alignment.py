"""Gradients of a real step's rows, compared with themselves and with their opposite."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.experiment import experiment
from exgrpo_jax.learner import alignment
from exgrpo_jax.policy import model
from tests.helpers import tiny


@pytest.fixture(scope='module')
def step(recorded):
  """The first step with all three parts."""

  def has_all(batch):
    parts = alignment.parts(batch, tiny.ROLLOUTS).values()
    return all(part.advantage_B.any() for part in parts)

  return next(step for step in recorded.steps.values() if has_all(step.batch))


@pytest.fixture(scope='module')
def policy(recorded, step):
  """The parameters that the step began with: `measure`, and the `norm` of a gradient."""
  opened = recorded.experiment
  spec = experiment.update_spec(opened.config, opened.model, opened.meshes.training)
  params = jax.device_put(step.params, model.shardings(opened.model, opened.meshes.training))

  def measure(batch, held_out):
    with jax.set_mesh(opened.meshes.training), recorded.compiling():
      return alignment.measure(spec, params, batch, tiny.ROLLOUTS, False, held_out)

  def norm(batch):
    with jax.set_mesh(opened.meshes.training), recorded.compiling():
      gradient = alignment.policy_gradient(spec, params, batch, False)
      return math.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(gradient)))

  return types.SimpleNamespace(measure=measure, norm=norm)


def test_a_gradient_lies_along_itself_and_against_its_opposite(policy, step):
  fresh = alignment.parts(step.batch, tiny.ROLLOUTS)['fresh']
  along = policy.measure(fresh, fresh)
  against = policy.measure(fresh, dataclasses.replace(fresh, advantage_B=-2 * fresh.advantage_B))
  assert set(along) == set(against) == {'alignment/fresh', 'alignment/fresh_projection'}
  assert along['alignment/fresh'] == pytest.approx(1, abs=1e-5)
  assert against['alignment/fresh'] == pytest.approx(-1, abs=1e-5)
  # That of the held-out gradient does not count.
  length = along['alignment/fresh_projection']
  assert length > 0 and against['alignment/fresh_projection'] == pytest.approx(-length, rel=1e-4)


def test_the_projections_on_a_steps_own_gradient_add_up_to_its_norm(policy, step):
  found = policy.measure(step.batch, step.batch)
  assert set(found) == {
    f'alignment/{part}{ending}'
    for part in ('fresh', 'replayed', 'fresh_in_mixed_groups')
    for ending in ('', '_projection')
  }
  total = sum(value for name, value in found.items() if name.endswith('_projection'))
  assert total == pytest.approx(policy.norm(step.batch), rel=1e-4)


def test_what_has_no_gradient_is_left_out(policy, step):
  fresh = alignment.parts(step.batch, tiny.ROLLOUTS)['fresh']
  silent = dataclasses.replace(fresh, advantage_B=np.zeros_like(fresh.advantage_B))
  empty = dataclasses.replace(fresh, response_mask_BT=np.zeros_like(fresh.response_mask_BT))
  for nothing in (silent, empty):
    assert policy.measure(nothing, fresh) == policy.measure(fresh, nothing) == {}
