"""Every benchmark runs at the smallest size; its checks see a wrong result."""

import dataclasses
import functools
import importlib
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, buffer, flops, frame, parity, report, rollout, start
from benchmarks.__main__ import BENCHMARKS
from exgrpo_jax.algorithm import objective
from exgrpo_jax.configs import llama3_1_8b, qwen2_5_math_1_5b
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.experiment import experiment
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import kv_cache, model, sharding
from tests.helpers.tiny import SMALL

STARTS_PROCESSES = ('report', 'smoke')
TIMES_AND_RATES = ('s', 'ms', 'tokens/s', 'responses/s', 'x')


@pytest.fixture(scope='module')
def bench():
  return frame.open_bench(frame.SIZES['tiny'])


@pytest.mark.full
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.full] * (name in STARTS_PROCESSES)) for name in BENCHMARKS
  ],
)
def test_a_benchmark_finds_figures_that_pass_its_checks(bench, name, monkeypatch):
  for each in (buffer, report, start):
    monkeypatch.setattr(each, 'in_own_process', lambda function, *args: function(*args))
  found = importlib.import_module(f'benchmarks.{name}').measure(bench)
  assert found
  for figure in found:
    # The memory is this process's, and includes what it did before.
    is_within = figure.passes or figure.name == 'memory'
    assert math.isfinite(figure.value) and is_within, figure
    # Decoding alone is a difference of two times, which noise can turn round at this size.
    is_time = figure.unit in TIMES_AND_RATES and figure.name != 'decode only'
    assert figure.value > 0 or not is_time, figure
    assert str(figure).startswith(figure.name)


@pytest.mark.full
def test_parity_sees_a_sampler_that_rounds_otherwise(bench):
  rounded = dataclasses.replace(bench)
  rounded.__dict__['decode_params'] = jax.tree.map(
    lambda x: x.astype('bfloat16').astype(x.dtype), bench.decode_params
  )
  assert [figure.passes for figure in parity.measure(rounded)] == [False, False]


@pytest.mark.full
def test_attention_that_sees_the_next_token_fails(bench, monkeypatch):
  attend, see = attention.attention.causal, kv_cache.attend
  monkeypatch.setattr(
    attention.attention,
    'causal',
    lambda q, k, v, **options: attend(q, *(jnp.roll(x, -1, axis=1) for x in (k, v)), **options),
  )
  monkeypatch.setattr(kv_cache, 'attend', lambda q, at_B, cache: see(q, at_B + 1, cache))
  found = attention.measure(bench)
  assert [figure.passes for figure in found if figure.limit is not None] == [False, False]


def test_attention_that_sees_other_rows_fails(bench, monkeypatch):
  attend = attention.attention.causal
  monkeypatch.setattr(
    attention.attention, 'causal', lambda *qkv, backend, **_: attend(*qkv, backend)
  )
  assert not attention.measure(bench)[0].passes


def test_a_decode_step_reads_all_weights_and_the_cache_so_far(bench):
  """Of 4 rows with 24 positions each, in float32."""
  shape = bench.model
  D, H, F, V = shape.width, shape.head_size, shape.mlp_width, shape.vocab_size
  N, G = shape.num_heads, shape.num_kv_heads
  weights = D * H * 2 * (N + G) + 3 * D * F + D * V + 3 * D  # the last are norms
  assert rollout._bytes_of_step(bench, 4, 24) == 4 * (weights + 4 * 24 * 2 * G * H)


def test_settings_and_sizes_reach_the_bench():
  changed = frame.open_bench(frame.SIZES['tiny'], ['rollout.slots=3', 'model.dtype=bfloat16'])
  assert (changed.config.rollout.slots, changed.model.dtype) == (3, 'bfloat16')


def test_a_check_that_fails_is_said():
  failed = frame.Figure('gap', float('nan'), 'nats', 'of tokens', limit=0.5)
  assert not failed.passes and 'FAILED, must be at most 0.5' in str(failed)


@pytest.mark.full
def test_the_bare_command_lists_the_benchmarks():
  done = subprocess.run([sys.executable, '-m', 'benchmarks'], capture_output=True, text=True)
  assert done.returncode == 0
  assert [name for name in BENCHMARKS if f'\n  {name} ' in done.stdout] == list(BENCHMARKS)


# ---- What formulas count is what compiles ----


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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
@pytest.mark.parametrize('rank', [0, 1])
def test_training_takes_three_times_the_flops_of_a_forward_pass_and_lora_twice(mesh, parsed, rank):
  """On one layer, since the compiler counts a loop's body once.

  So no gradient of a frozen matrix is computed: neither a layer's nor the unembedding's.
  """
  shape = dataclasses.replace(SMALL, num_layers=1)
  spec = dataclasses.replace(
    experiment.update_spec(parsed, shape, mesh),
    microbatch=gradients.MicrobatchConfig(tokens=10**6, remat='none', drop_zero_advantage=False),
    longest_row=64,
    max_response=32,
    lora=dataclasses.replace(parsed.lora, rank=rank),
  )
  mask_BT = np.repeat(np.arange(64) >= 32, 8).reshape(64, 8).T.astype(np.float32)
  batch = Batch(
    tokens_BT=np.zeros((8, 64), np.int32),
    response_mask_BT=mask_BT,
    old_logp_BT=mask_BT,
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
