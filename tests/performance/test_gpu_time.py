"""The arithmetic of a step's time on a GPU."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.experiment import experiment
from exgrpo_jax.performance import gpu_time, memory, passes, roofline
from exgrpo_jax.performance.gpus import SHARE_OF_BANDWIDTH, SHARE_OF_FLOPS, Gpu
from exgrpo_jax.performance.step_time import Workload
from exgrpo_jax.policy import dense_cache, sharding
from tests.performance.shapes import SMALL

WORK = Workload(
  prompt=10,
  fresh=np.array([1, 3]),
  groups=[np.array([1, 3])] * 100,
  replayed=np.array([2, 2]),
  candidates=np.array([5, 6, 7]),
  evaluated=np.array([1, 3, 1, 3]),
  evaluation_every=10,
)


@pytest.fixture
def parts(parsed, one_device, monkeypatch):
  """Two slots of rows of 20 tokens: (a GPU's peaks -> seconds by part, spec, arrays)."""
  monkeypatch.setattr(dense_cache, 'MULTIPLE', 1)
  rollout = dataclasses.replace(parsed.rollout, max_prompt=12, max_response=8, slots=2, questions=1)
  spec = dataclasses.replace(
    experiment.update_spec(parsed, SMALL, one_device),
    gradient=dataclasses.replace(parsed.gradient, tokens_per_microbatch=20),
    max_response=8,
    longest_row=20,
  )
  decoding = sharding.make_mesh(
    sharding.DecodingConfig(data=1, tensor=1), list(one_device.devices.flat)
  )
  arrays = memory.step_arrays(spec, decoding)

  def of(flops=1e30, bandwidth=1e30):
    gpu = Gpu('', memory=1, flops=flops, bandwidth=bandwidth)
    found = gpu_time.Roofline(rollout, spec, decoding, arrays, gpu).estimate(WORK).parts
    return {part.name: part.seconds for part in found}

  return of, spec, arrays


def test_decoding_reads_weights_and_what_is_written_of_the_cache(parts):
  """Three steps. The cache has 11 + 11, 12 + 1 and 13 + 1 positions, a free slot's one included."""
  of, _, arrays = parts
  weights = memory.bytes_per_chip(arrays.decode_params)
  position = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_size * 4
  read = 3 * weights + (22 + 13 + 14) * position
  assert of(bandwidth=1e6)['decode'] == pytest.approx(read / 1e6 / SHARE_OF_BANDWIDTH)


def test_with_slow_products_decoding_takes_these(parts):
  of, _, _ = parts
  flops = 3 * roofline.forward_flops(SMALL, 2, 0, 2)
  assert of(flops=1e6)['decode'] == pytest.approx(flops / 1e6 / SHARE_OF_FLOPS)


def test_an_update_takes_three_forward_passes_over_all_tokens_padding_included(parts):
  of, spec, _ = parts
  responses = np.concatenate([WORK.fresh, WORK.replayed])
  shapes = [one.shape for found in passes.of_update(spec, responses, 10) for one in found]
  flops = sum(
    roofline.forward_flops(SMALL, one.num_tokens, one.length, one.count * one.window)
    for one in shapes
  )
  assert sum(one.num_tokens for one in shapes) >= responses.sum() + 4 * 10
  assert of(flops=1e6)['update'] == pytest.approx(3 * flops / 1e6 / SHARE_OF_FLOPS)


def test_the_optimizer_reads_and_writes_the_state_and_reads_the_gradient(parts):
  of, spec, arrays = parts
  moved = 2 * memory.bytes_per_chip(arrays.state) + memory.bytes_per_chip(arrays.gradient)
  expected = spec.optimizer.minibatches * moved / 1e6 / SHARE_OF_BANDWIDTH
  assert of(bandwidth=1e6)['optimizer'] == pytest.approx(expected)
