"""Policies that are opened to be asked."""

import gc

import jax
import numpy as np
import pytest

from exgrpo_jax.evaluation import responses
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import load_weights, open_experiment
from exgrpo_jax.policy import model
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.runtime import activity
from tests.helpers.paths import CHECKPOINTS

FOLDER = str(CHECKPOINTS / 'qwen2_tied')


def live_bytes():
  gc.collect()
  return sum(array.nbytes for array in jax.live_arrays())


def test_loading_is_announced(monkeypatch):
  said, arrange = [], model.into_decode_layout
  monkeypatch.setattr(
    model, 'into_decode_layout', lambda *args: said.append(activity.now()) or arrange(*args)
  )
  policies.open_policy(FOLDER)
  assert said[0].startswith(f'loading {FOLDER} (')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sampling_holds_the_weights_once(monkeypatch, dtype):
  """At most 1.1 times their bytes in the compute dtype; a second copy would be 2."""
  before, held = live_bytes(), []

  def generate(_, params, __):
    held.append(live_bytes() - before)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    raise StopIteration(weights)

  monkeypatch.setattr(SlotEngine, 'generate', generate)
  policy = policies.open_policy(FOLDER, {'model.dtype': dtype})
  with pytest.raises(StopIteration) as caught:
    responses.sample(policy, ['1+1?'])
  assert held[0] <= 1.1 * caught.value.value


def test_converting_holds_one_parameter_twice():
  values = policies.suited_to(FOLDER)
  values.model.dtype = 'float32'
  experiment = open_experiment(values, FOLDER)
  params = load_weights(experiment)
  largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
  before, held = live_bytes(), []
  wait = jax.block_until_ready

  def measured(arrays):
    held.append(live_bytes() - before)
    return wait(arrays)

  expected = jax.device_get(model.decode_layout(experiment.model, params, experiment.meshes))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'block_until_ready', measured)
    decode_params = model.into_decode_layout(experiment.model, params, experiment.meshes)
  assert len(held) == len(jax.tree.leaves(params)) and 0 < max(held) <= largest
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
  jax.tree.map(np.testing.assert_array_equal, decode_params, expected)


def test_a_shipped_model_is_described_by_its_name():
  assert policies.at('shipped:chains').describe() == {'model': 'shipped:chains'}
