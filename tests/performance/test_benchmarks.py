"""Every benchmark runs and prints its lines, on a model of one layer; figures are not tested."""

import dataclasses
import re

import jax
import pytest

from exgrpo_jax.performance import (
  buffer_benchmark,
  grading_benchmark,
  host_benchmark,
  loss_benchmark,
  rollout_benchmark,
  start_benchmark,
  update_benchmark,
)
from exgrpo_jax.performance.workload import Workload, response_lengths
from tests.performance.shapes import SMALL

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


@pytest.fixture
def printed(capsys, mesh):
  """Runs a benchmark; gives the label of each line."""

  def run(benchmark, *args):
    with jax.set_mesh(mesh):
      benchmark(*args)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if re.search(r'\b(nan|inf)\b', line)]
    return [re.split(r' {2,}|\d', line)[0].strip() for line in lines]

  return run


def test_rollout(printed, mesh):
  assert printed(rollout_benchmark.run, WORKLOAD, mesh, 'small') == [
    'small on',
    'end to end',
    'decode only',
    'roofline',
    'prefill',
    'sampling',
    'attention',
    'resharding',
    'refill',
    'shared',
    'cache limit',
  ]


def test_update(printed, mesh):
  assert printed(update_benchmark.run, WORKLOAD, mesh) == ['update', 'utilisation']


def test_loss(printed, mesh):
  assert printed(loss_benchmark.run, WORKLOAD, mesh) == ['fused', 'rematerialised', 'naive']


def test_grading(printed):
  assert printed(grading_benchmark.run, 1, 1, 8) == ['grading', 'single']


def test_host(printed, monkeypatch):
  monkeypatch.setattr(buffer_benchmark, '_in_own_process', lambda run, *args: run(*args))
  monkeypatch.setattr(host_benchmark, '_MEASUREMENTS', (buffer_benchmark.measure,))
  assert printed(host_benchmark.run, (0.01, 0.02)) == [
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


def test_start():
  figures = start_benchmark.measure(1e-5)
  assert figures['rows'] == 3
  assert min(figures.values()) > 0


def test_lognormal_lengths_have_the_median_and_spread_that_are_promised():
  many = dataclasses.replace(WORKLOAD, questions=20_000, response=128, lengths='lognormal')
  lengths = sorted(response_lengths(many))
  assert lengths[len(lengths) // 2] == pytest.approx(128, rel=0.03)
  assert lengths[int(0.99 * len(lengths))] == pytest.approx(8 * 128, rel=0.1)
