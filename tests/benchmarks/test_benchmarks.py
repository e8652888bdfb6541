"""Every benchmark runs at the smallest size; its checks see a wrong result."""

import dataclasses
import importlib
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attention, buffer, frame, parity, report, rollout, start
from benchmarks.__main__ import BENCHMARKS
from exgrpo_jax.policy import kv_cache

STARTS_PROCESSES = ('report', 'smoke')
TIMES_AND_RATES = ('s', 'ms', 'tokens/s', 'responses/s', 'x')


@pytest.fixture(scope='module')
def bench():
  return frame.open_bench(frame.SIZES['tiny'])


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
    assert math.isfinite(figure.value) and figure.passes, figure
    # Decoding alone is a difference of two times, which noise can turn round at this size.
    is_time = figure.unit in TIMES_AND_RATES and figure.name != 'decode only'
    assert figure.value > 0 or not is_time, figure
    assert str(figure).startswith(figure.name)


def test_parity_sees_a_sampler_that_rounds_otherwise(bench):
  rounded = dataclasses.replace(bench)
  rounded.__dict__['decode_params'] = jax.tree.map(
    lambda x: x.astype('bfloat16').astype(x.dtype), bench.decode_params
  )
  assert [figure.passes for figure in parity.measure(rounded)] == [False, False]


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
