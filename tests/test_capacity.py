"""What is counted by formula is what compiles; a small config compiles for a TPU slice."""

import dataclasses
import functools
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from exgrpo_jax.configs import llama3_1_8b, qwen2_5_math_1_5b

from exgrpo_jax import capacity, experiment
from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import model, sharding
from tests.helpers.tiny import ROPE

SMALL = model.Config(
  vocab_size=256,
  width=128,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_size=32,
  mlp_width=256,
  rope=ROPE,
  norm_epsilon=1e-6,
  attention_bias=False,
  query_key_norm=False,
  tied_embeddings=False,
  dtype='float32',
)


@pytest.mark.parametrize('config, billions', [(qwen2_5_math_1_5b, 1.54), (llama3_1_8b, 8.03)])
def test_parameters_are_counted(config, billions):
  """As the models' cards have them; biases and norms, a thousandth, are left out."""
  shape = capacity.model_shape(experiment.parse_config(config.get_config()))
  assert capacity.count(shape) / 1e9 == pytest.approx(billions, abs=0.01)


def test_flops_by_formula_are_the_compilers():
  """On two layers, which prefill unrolls; the compiler counts all of attention, not half."""
  tokens = jax.ShapeDtypeStruct((4, 64), 'int32')
  shapes = model.decode_shapes(
    SMALL, sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  )
  compiled = (
    jax.jit(lambda params, tokens_BT: model.prefill(SMALL, params, tokens_BT, 64))
    .lower(shapes, tokens)
    .compile()
  )
  found = compiled.cost_analysis()['flops']
  assert found == pytest.approx(capacity.forward_flops(SMALL, 256, 64, 0), rel=0.1)


def test_training_takes_three_times_the_forward_passs_flops():
  """On one layer, since the compiler counts a loop's body once."""
  config = dataclasses.replace(SMALL, num_layers=1)
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  checked = experiment.parse_config(qwen2_5_math_1_5b.get_config())
  settings = dataclasses.replace(
    capacity._update_settings(checked, config, mesh),
    gradient=gradients.Config(10**6, 'none', False),
    max_response=32,
  )
  mask_BT = np.repeat(np.arange(64) >= 32, 8).reshape(64, 8).T.astype(np.float32)
  batch = Batch(
    np.zeros((8, 64), np.int32),
    mask_BT,
    mask_BT,
    np.ones(8, np.float32),
    np.zeros(8, bool),
    np.zeros(8, np.int32),
    mask_BT,
  )
  tokens = objective.loss_inputs(batch, settings.objective, 32)
  ((number, rows_M),) = gradients.stack_by_shape(
    gradients.microbatches(settings.gradient, batch, tokens, 1), 8
  )
  params = model.shapes(config, mesh)
  with jax.set_mesh(mesh):
    nothing = jax.eval_shape(functools.partial(gradients.zero_accumulator, settings), params)
    compiled = gradients.accumulate.lower(
      settings, params, nothing, rows_M, number, False, True, None
    ).compile()
  assert compiled.cost_analysis()['flops'] == pytest.approx(
    3 * capacity.forward_flops(config, 8 * 64, 64, 8 * 32), rel=0.1
  )


def test_shapes_of_the_state_are_those_of_a_real_one():
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  config = experiment.parse_config(qwen2_5_math_1_5b.get_config()).optimizer
  real = optimizer.init(config, 1, model.init(SMALL, jax.random.key(0), mesh))
  found = optimizer.shapes(config, 1, model.shapes(SMALL, mesh))
  jax.tree.map(
    lambda ours, theirs: (
      (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) or pytest.fail(f'{ours} {theirs}')
    ),
    found,
    real,
  )
  assert jax.tree.structure(found) == jax.tree.structure(real)
  assert capacity._bytes(found) == sum(leaf.nbytes for leaf in jax.tree.leaves(real))


@pytest.mark.parametrize('name', ['v9:2x2', 'v5e', ''])
def test_an_unknown_slice_is_refused(name):
  with pytest.raises(InputError, match='generations are v5e, v6e'):
    capacity.chip_of(name)


def test_the_cache_is_counted_where_heads_are_spread():
  values = qwen2_5_math_1_5b.get_config()
  checked = experiment.parse_config(values)
  shape = dataclasses.replace(SMALL, dtype='bfloat16')
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  assert capacity.cache_bytes(checked, shape, mesh) * mesh.size == math.prod(
    (2, 2, 128, 2, 9216, 32, 2)
  )


def test_a_small_config_compiles_for_a_slice():
  """And one far too large says what does not fit; in processes of their own, for libtpu's sake."""
  pytest.importorskip('libtpu')

  def run(*changes):
    return subprocess.run(
      [
        sys.executable,
        '-m',
        'exgrpo_jax.capacity',
        '--config=configs/qwen2_5_math_1_5b.py',
        '--topology=v5e:2x2',
        *changes,
      ],
      capture_output=True,
      text=True,
      check=False,
    )

  small = run(
    '--config.model.num_layers=2',
    '--config.model.width=256',
    '--config.model.mlp_width=512',
    '--config.model.vocab_size=512',
    '--config.rollout.max_response=1024',
    '--config.rollout.slots=8',
  )
  assert small.returncode == 0, small.stderr
  assert small.stdout.splitlines()[-1] == 'fits'
  large = run(
    '--config.model.num_layers=200',
    '--config.model.width=3072',
    '--config.objective.kl_coefficient=.1',
  )
  assert large.returncode == 1
  assert 'parameters, moments, reference policy, gradient alone take' in large.stdout
  assert large.stdout.splitlines()[-1] == 'does not fit'
