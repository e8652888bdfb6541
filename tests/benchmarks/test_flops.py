"""What formulas count is what compiles."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from benchmarks import flops
from exgrpo_jax.algorithm import objective
from exgrpo_jax.configs import llama3_1_8b, qwen2_5_math_1_5b
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.experiment import experiment
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import model, sharding
from tests.helpers.shapes import SMALL


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))


@pytest.fixture(scope='module')
def parsed():
  return parse_config(qwen2_5_math_1_5b.get_config())


@pytest.mark.parametrize(('config', 'billions'), [(qwen2_5_math_1_5b, 1.54), (llama3_1_8b, 8.03)])
def test_parameters_are_counted(config, billions):
  """As on the models' cards; biases and norms, a thousandth, are left out."""
  shape = experiment.model_config(parse_config(config.get_config()))
  assert flops.parameter_count(shape) / 1e9 == pytest.approx(billions, abs=0.01)


def test_flops_by_formula_are_the_compilers(mesh):
  """On two layers, which prefill unrolls; the compiler counts all of attention, not half."""
  tokens_BT = jax.ShapeDtypeStruct((4, 64), 'int32')
  params = model.decode_shapes(SMALL, mesh)
  lengths_B = np.full(4, 64)
  prefill = jax.jit(
    lambda params, tokens_BT: model.prefill(SMALL, params, tokens_BT, lengths_B, 64)
  )
  with jax.set_mesh(mesh):
    compiled = prefill.lower(params, tokens_BT).compile()
  assert compiled.cost_analysis()['flops'] == pytest.approx(
    flops.forward_flops(SMALL, 256, 64, 0), rel=0.1
  )


@pytest.mark.usefixtures('large_passes')
@pytest.mark.parametrize('rank', [0, 1])
def test_training_takes_three_times_the_flops_of_a_forward_pass_and_lora_twice(mesh, parsed, rank):
  """On one layer, since the compiler counts a loop's body once.

  So no gradient of a frozen matrix is computed: neither a layer's nor the unembedding's.
  """
  shape = dataclasses.replace(SMALL, num_layers=1)
  spec = dataclasses.replace(
    experiment.update_spec(parsed, shape, mesh),
    gradient=gradients.Config(tokens_per_microbatch=10**6, remat='none', drop_zero_advantage=False),
    longest_row=64,
    max_response=32,
    lora=dataclasses.replace(parsed.lora, rank=rank),
  )
  mask_BT = np.repeat(np.arange(64) >= 32, 8).reshape(64, 8).T.astype(np.float32)
  batch = Batch(
    tokens_BT=np.zeros((8, 64), np.int32),
    response_mask_BT=mask_BT,
    behaviour_logp_BT=mask_BT,
    advantage_B=np.ones(8, np.float32),
    is_replay_B=np.zeros(8, bool),
    policy_step_B=np.zeros(8, np.int32),
    term_weight_BT=mask_BT,
  )
  inputs = objective.loss_inputs(batch, spec.objective, 32)
  ((count, stack),) = gradients.stack_by_shape(gradients.microbatches(spec, batch, inputs, 1), 8)
  params, initial = gradients.trained_shapes(spec), model.shapes(shape, mesh) if rank else None
  with jax.set_mesh(mesh):
    zero = jax.eval_shape(functools.partial(gradients.zero_accumulator, spec), params)
    compiled = gradients.accumulate.lower(
      spec, params, zero, stack, count, False, True, initial
    ).compile()
  assert compiled.cost_analysis()['flops'] == pytest.approx(
    flops.update_flops(shape, 8 * 64, 64, 8 * 32, frozen=rank > 0), rel=0.1
  )
