"""Policies that commands ask: what is in memory of them."""

import jax
import numpy as np

from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import open_experiment
from exgrpo_jax.policy import model


def test_a_policy_to_sample_from_is_in_memory_once():
  source = policies.at('shipped:chains')
  experiment = open_experiment(policies.config_values(source), source.path)
  kept = policies.restore(source, experiment).params
  before = {id(x) for x in jax.live_arrays()}
  to_sample = policies.restore_to_sample(source, experiment).params
  new = [x for x in jax.live_arrays() if id(x) not in before]
  assert sum(x.nbytes for x in new) == sum(x.nbytes for x in jax.tree.leaves(kept))
  with jax.set_mesh(experiment.meshes.training):
    expected = model.decode_layout(experiment.model, kept, experiment.meshes)
    assert model.decode_layout(experiment.model, to_sample, experiment.meshes) is to_sample
  jax.tree.map(np.testing.assert_array_equal, to_sample, expected)


def test_a_shipped_model_is_described_by_its_name():
  assert policies.at('shipped:chains').describe() == {'model': 'shipped:chains'}
