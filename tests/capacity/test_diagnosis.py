"""What is found about a machine, and the run that is proposed."""

import types

import jax
import pytest

from exgrpo_jax.capacity import diagnosis


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
  monkeypatch.setattr(diagnosis.machine, 'platforms', list)


def problems():
  return [finding.text for finding in diagnosis.findings() if finding.is_problem]


def gpu(memory, kind='NVIDIA GeForce RTX 6090'):
  """As JAX describes one, of whose memory it took nine tenths."""
  stats = {'bytes_limit': int(0.9 * memory)}
  return types.SimpleNamespace(platform='gpu', device_kind=kind, memory_stats=lambda: stats)


def test_a_machine_without_accelerator_is_offered_a_run_on_its_cpu():
  texts = [finding.text for finding in diagnosis.findings()]
  assert problems() == []
  assert any(f'jax {jax.__version__}, ' in text for text in texts)
  assert any('GB free' in text for text in texts)
  suggested = diagnosis.suggestion(jax.devices('cpu')[0])
  assert suggested == 'exgrpo train --config=chains --workdir=/tmp/chains'


@pytest.mark.parametrize(
  ('platform', 'driver', 'environment', 'words'),
  [
    ('cuda', '535.104.05', '', "pip install -e '.[cuda12]'"),
    ('cuda', '580.65', '', "pip install -e '.[cuda13]'"),
    ('cuda', '', '', "NVIDIA's driver is not loaded"),
    ('cuda', '580.65', 'cpu', 'JAX_PLATFORMS=cpu'),
    ('tpu', '', '', "pip install -e '.[tpu]'"),
    ('rocm', '', '', 'AMD GPUs'),
  ],
)
def test_an_accelerator_that_jax_does_not_use_is_a_problem(
  platform, driver, environment, words, monkeypatch
):
  monkeypatch.setattr(diagnosis.machine, 'platforms', lambda: [platform])
  monkeypatch.setattr(diagnosis.machine, 'nvidia_driver', lambda: driver)
  monkeypatch.setenv('JAX_PLATFORMS', environment)
  [problem] = problems()
  assert words in problem


def test_a_plugin_for_another_jaxlib_is_a_problem(monkeypatch):
  versions = {'jax': '0.10.2', 'jaxlib': '0.10.2', 'jax-cuda12-pjrt': '0.9.0'}
  monkeypatch.setattr(diagnosis.environment, 'versions', lambda: versions)
  [problem] = problems()
  assert 'jax-cuda12-pjrt 0.9.0 is not for jaxlib 0.10.2' in problem


@pytest.mark.parametrize(
  ('memory', 'config'),
  [
    (84.9e9, 'one_gpu:qwen3_1_7b,80gb,gsm8k '),
    (42.3e9, 'one_gpu:qwen3_1_7b,40gb,gsm8k '),
    (23.6e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k '),
    (14e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k --config.rollout.slots='),
    (8e9, 'smoke_gpu '),
  ],
)
def test_a_gpu_is_offered_the_largest_model_that_fits_in_full(memory, config):
  assert f'--config={config}' in diagnosis.suggestion(gpu(memory))


@pytest.mark.parametrize('kind', ['Tesla T4', 'Tesla V100-SXM2-16GB'])
def test_a_gpu_without_bfloat16_is_offered_a_run_in_float32(kind):
  suggested = diagnosis.suggestion(gpu(16.1e9, kind))
  assert suggested == 'exgrpo train --config=one_gpu:qwen2_5_0_5b,t4,gsm8k --workdir=/tmp/run'
