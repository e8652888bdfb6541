"""Every benchmark runs and prints its lines, on a model of one layer; figures are not tested."""

import dataclasses
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from exgrpo_jax import benchmark
from exgrpo_jax.errors import InputError
from exgrpo_jax.performance import (
  attention_benchmark,
  browser,
  buffer_benchmark,
  carry_benchmark,
  device_benchmark,
  grading_benchmark,
  host_benchmark,
  loss_benchmark,
  measurement,
  own_process,
  parity_benchmark,
  peaks,
  report_benchmark,
  rollout_benchmark,
  roofline,
  smoke_benchmark,
  start_benchmark,
  update_benchmark,
  workload,
)
from exgrpo_jax.performance.peaks import Peaks
from exgrpo_jax.performance.workload import Workload, response_lengths
from exgrpo_jax.policy import attention, kv_cache, model, sharding
from exgrpo_jax.policy.sharding import Meshes
from tests.performance.shapes import SMALL, SMALL_RUN

WORKLOAD = Workload(
  model=dataclasses.replace(SMALL, num_layers=1),
  slots=4,
  questions=3,
  samples=2,
  prompt=16,
  response=16,
  lengths='equal',
  microbatch=80,
  remat='all_but_products',
  chunk=16,
  repeats=1,
)

ARMS = ('carry', 'closing up', 'waiting')  # of the benchmark of carry, on a CPU
PEAKS = Peaks(flops=1e12, bandwidth=1e10, source='measured')


@pytest.fixture
def measured(capsys, mesh):
  """Runs a benchmark; gives the value of each figure by its name, which is printed too."""

  def run(benchmark, *args):
    with jax.set_mesh(mesh):
      found = benchmark(*args)
    assert all(math.isfinite(figure.value) for figure in found)
    assert all(figure.passes is not False for figure in found)
    measurement.print_lines(found)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(figure.name) for line, figure in zip(lines, found, strict=True))
    return {figure.name: figure.value for figure in found}

  return run


def test_rollout(measured, mesh):
  assert list(measured(rollout_benchmark.measure, WORKLOAD, Meshes(mesh, mesh), PEAKS, True)) == [
    'end to end',
    'decode only',
    'decode step',
    'products alone',
    'share of bandwidth',
    'prefill',
    'sampling',
    'attention',
    'resharding',
    'refill',
    'shared',
    'cache limit',
  ]


def test_carry(measured, mesh):
  """Each step trains what its rollout completed; the slots are busier with carry."""
  work = dataclasses.replace(WORKLOAD, response=4, repeats=2)
  found = measured(carry_benchmark.measure, work, Meshes(mesh, mesh))
  assert list(found) == [
    *(f'{arm}: {figure}' for arm in ARMS for figure in ('rollout', 'step', 'busy')),
    *(f'{arm}: gain' for arm in ARMS[1:]),
    'age',
    'resumed',
  ]
  assert found['carry: busy'] > found['waiting: busy'] == found['closing up: busy']
  assert found['carry: step'] / found['waiting: step'] == pytest.approx(found['waiting: gain'])
  assert 0 < found['age'] <= 8 and found['resumed'] > 0


def test_a_decode_step_reads_all_weights_and_the_cache_so_far(mesh):
  """Half of a response of 16 tokens, on average over steps, with its prompt of 16."""
  with jax.set_mesh(mesh):
    params = model.decode_layout(
      WORKLOAD.model, workload.random_params(WORKLOAD, mesh), sharding.Meshes(mesh, mesh)
    )
    engine = rollout_benchmark._Engine(WORKLOAD, Meshes(mesh, mesh), params)
    size = rollout_benchmark._bytes_of_step(engine, [16] * 6)
  # Queries and outputs, keys and values, the MLP, logits, three norms.
  weights = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 128 * 256 + 3 * 128
  cache = 4 * 24 * 2 * 2 * 32  # rows, tokens, keys and values, heads, their size
  assert size == 4 * (weights + cache)


@pytest.mark.parametrize('lengths', ['equal', 'lognormal'])
def test_update(measured, mesh, lengths):
  """Speed and share of FLOPs are of the rows' tokens, whatever is computed beside them."""
  work = dataclasses.replace(WORKLOAD, lengths=lengths)
  found = measured(update_benchmark.measure, work, mesh, PEAKS)
  assert list(found) == ['update', 'speed', 'packing', 'products alone', 'share of FLOPs']
  responses = sum(response_lengths(work))
  tokens = responses + 6 * 16
  assert found['speed'] == pytest.approx(tokens / found['update'])
  flops = 3 * roofline.forward_flops(WORKLOAD.model, tokens, round(tokens / 6), responses)
  assert found['share of FLOPs'] == pytest.approx(100 * flops / found['update'] / 1e12)
  assert 1 <= found['packing'] < 2


def test_loss(measured, mesh):
  assert list(measured(loss_benchmark.measure, WORKLOAD, mesh)) == [
    'fused',
    'fused, memory',
    'rematerialised',
    'rematerialised, memory',
    'naive',
    'naive, memory',
    'gradients',
  ]


def test_grading(measured):
  assert list(measured(grading_benchmark.measure, 1, 1, 8)) == ['grading', 'single']


def test_parity(measured, mesh):
  found = measured(parity_benchmark.measure, WORKLOAD, Meshes(mesh, mesh))
  assert 0 < found['mean gap'] < found['largest gap']


def test_parity_sees_a_sampler_that_rounds_otherwise(mesh, monkeypatch):
  convert = model.decode_layout

  def in_bfloat16(config, params, mesh):
    rounded = jax.tree.map(lambda x: x.astype('bfloat16').astype(x.dtype), params)
    return convert(config, rounded, mesh)

  monkeypatch.setattr(model, 'decode_layout', in_bfloat16)
  with jax.set_mesh(mesh):
    found = parity_benchmark.measure(WORKLOAD, Meshes(mesh, mesh))
  assert [figure.passes for figure in found] == [False, False]


def test_attention(measured, mesh):
  found = measured(attention_benchmark.measure_causal, WORKLOAD, mesh, 'blockwise', PEAKS)
  assert list(found)[:4] == ['values', 'gradients', 'values, packed', 'gradients, packed']
  assert found['values'] > 0


def test_decode_attention(measured, mesh):
  found = measured(attention_benchmark.measure_decoding, WORKLOAD, mesh, None, PEAKS)
  assert list(found) == ['values', 'a token', 'share of bandwidth']


def test_attention_that_sees_the_next_token_fails(mesh, monkeypatch):
  attend, see = attention.causal, kv_cache.attend
  monkeypatch.setattr(
    attention,
    'causal',
    lambda q, k, v, **options: attend(q, *(jnp.roll(x, -1, axis=1) for x in (k, v)), **options),
  )
  monkeypatch.setattr(
    kv_cache, 'attend', lambda q, position_B, cache, backend: see(q, position_B + 1, cache, backend)
  )
  with jax.set_mesh(mesh):
    causal = attention_benchmark.measure_causal(WORKLOAD, mesh, 'blockwise', PEAKS)
    decoding = attention_benchmark.measure_decoding(WORKLOAD, mesh, None, PEAKS)
  checks = [figure.passes for figure in (*causal, *decoding) if figure.limit is not None]
  assert checks == [False] * 5


def test_attention_that_sees_other_rows_fails_where_rows_are_packed(mesh, monkeypatch):
  attend = attention.causal
  monkeypatch.setattr(attention, 'causal', lambda *qkv, backend, **_: attend(*qkv, backend))
  with jax.set_mesh(mesh):
    found = attention_benchmark.measure_causal(WORKLOAD, mesh, 'blockwise', PEAKS)
  assert [figure.passes for figure in found[:4]] == [True, True, False, False]


def test_smoke_reads_the_figures_of_a_run(recorded, monkeypatch):
  def train(command, check):
    assert check
    assert command[-1] == '--config.num_steps=3'
    workdir = next(word for word in command if word.startswith('--workdir=')).partition('=')[2]
    shutil.copy(recorded.workdir / 'metrics.jsonl', workdir)

  monkeypatch.setattr(smoke_benchmark.subprocess, 'run', train)
  found = smoke_benchmark.measure(['num_steps=3'])
  assert [figure.name for figure in found] == ['smoke run', 'steps', 'last step', 'speed']
  assert found[1].value == recorded.experiment.config.num_steps
  assert min(figure.value for figure in found) > 0


def test_device(measured):
  assert list(measured(device_benchmark.measure, 'cpu', 'float32')) == ['product', 'copy']


@pytest.mark.parametrize(
  ('kind', 'flops', 'bandwidth'),
  [
    ('TPU v5 lite', 197e12, 819e9),
    ('TPU v5', 459e12, 2765e9),
    ('TPU v5p', 459e12, 2765e9),
    ('TPU v6 lite', 918e12, 1640e9),
    ('NVIDIA H100 80GB HBM3', 989e12, 3.35e12),
    ('NVIDIA H100 PCIe', 756e12, 2.0e12),
    ('NVIDIA H200', 989e12, 4.8e12),
    ('NVIDIA A100-SXM4-40GB', 312e12, 1.555e12),
    ('NVIDIA A100-SXM4-80GB', 312e12, 2.039e12),
    ('NVIDIA A100 80GB PCIe', 312e12, 1.935e12),
  ],
)
def test_peaks_of_known_devices_are_the_published_ones(kind, flops, bandwidth):
  assert peaks.published(kind) == (flops, bandwidth, 'published')


def test_an_unknown_device_has_no_published_peak():
  assert peaks.published('cpu') is None
  assert peaks.of_devices('bfloat16').source == 'measured'


def test_host(capsys, monkeypatch):
  monkeypatch.setattr(buffer_benchmark, '_in_own_process', lambda run, *args: run(*args))
  monkeypatch.setattr(host_benchmark, '_MEASUREMENTS', (buffer_benchmark.measure,))
  host_benchmark.run((0.01, 0.02))
  lines = capsys.readouterr().out.splitlines()
  assert not [line for line in lines if re.search(r'\b(nan|inf)\b', line)]
  assert [re.split(r' {2,}|\d', line)[0].strip() for line in lines] == [
    "per cent of the paper's scale",
    'questions',
    'buffer, GB',
    'draw, ms',
    'record, ms',
    'first save, s',
    'first save, s that the loop waits',
    'first save, GB held besides the buffer',
    'second save, s',
    'second save, s that the loop waits',
    'second save, GB written',
    'restore, s',
    'restore, GB held besides the buffer',
  ]


def test_report():
  found = report_benchmark.measure(SMALL_RUN)
  loading = [] if browser.missing() else ['loading']
  assert [figure.name for figure in found] == ['page', 'writing', 'memory', *loading]
  assert min(figure.value for figure in found) > 0
  parts = re.findall(r'([a-z]+(-0)?) \d+\.\d+', found[0].meaning)
  assert [name for name, _ in parts] == [
    'page',
    'visits-0',
    'evaluations-0',
    'texts-0',
    'stored-0',
  ]


def test_report_without_a_browser_says_that_loading_is_not_measured(monkeypatch):
  usage = own_process.Usage(2.0, 300.0)
  monkeypatch.setattr(report_benchmark.run_folder, 'write', lambda *_: None)

  def measure(command):
    Path(command[-1].removeprefix('--out=')).write_text('a page')
    return usage

  monkeypatch.setattr(report_benchmark.own_process, 'measure', measure)
  monkeypatch.setattr(browser.shutil, 'which', lambda _: None)
  monkeypatch.setattr(browser.importlib.util, 'find_spec', lambda name: name)
  found = report_benchmark.measure(SMALL_RUN)
  assert [figure.name for figure in found] == ['page', 'writing', 'memory']
  assert 'loading is not measured: no Chromium is installed' in found[0].meaning
  monkeypatch.setattr(browser.importlib.util, 'find_spec', lambda _: None)
  assert browser.missing() == 'the package playwright is not installed'


def test_start():
  figures = start_benchmark.measure(1e-5)
  assert figures['rows'] == 3
  assert min(figures.values()) > 0


def test_lognormal_lengths_have_the_median_and_spread_that_are_promised():
  many = dataclasses.replace(WORKLOAD, questions=20_000, response=128, lengths='lognormal')
  lengths = sorted(response_lengths(many))
  assert lengths[len(lengths) // 2] == pytest.approx(128, rel=0.03)
  assert lengths[int(0.99 * len(lengths))] == pytest.approx(8 * 128, rel=0.1)


def test_an_implementation_that_does_not_run_here_is_refused():
  benchmark.check_backend('blockwise', 'attention', 'cpu', 'float32')
  benchmark.check_backend(None, 'decode_attention', 'cpu', 'float32')
  with pytest.raises(InputError, match='--backend=ragged must be one of blockwise, with which att'):
    benchmark.check_backend('ragged', 'attention', 'cpu', 'float32')
  with pytest.raises(InputError, match='--backend=splash must be one of dense, cudnn, pallas, wi'):
    benchmark.check_backend('splash', 'decode_attention', 'gpu', 'bfloat16')
