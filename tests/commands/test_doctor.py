"""What doctor finds, and the run that it proposes."""

import re
import types

import jax
import pytest

from exgrpo_jax.commands import doctor
from exgrpo_jax.runtime import machine


def gpu(memory):
  """As JAX describes one, of whose memory it took nine tenths."""
  stats = {'bytes_limit': int(0.9 * memory)}
  return types.SimpleNamespace(platform='gpu', memory_stats=lambda: stats)


def test_a_machine_without_accelerator_is_offered_a_run_on_its_cpu(capsys, monkeypatch):
  monkeypatch.setattr(machine, 'platforms', list)
  doctor.main(None)
  printed = capsys.readouterr().out
  assert f'jax {jax.__version__}, ' in printed and 'GB free' in printed
  assert printed.splitlines()[-1] == ('exgrpo train --config=chains --workdir=/tmp/chains')
  assert not [line for line in printed.splitlines() if line.startswith('!')]


@pytest.mark.parametrize(
  ('platform', 'driver', 'environment', 'words'),
  [
    ('cuda', '535.104.05', '', "an NVIDIA GPU is here, .*: pip install -e '.\\[cuda12\\]'"),
    ('cuda', '580.65', '', "pip install -e '.\\[cuda13\\]'"),
    ('cuda', '', '', "NVIDIA's driver is not loaded"),
    ('cuda', '580.65', 'cpu', 'JAX_PLATFORMS=cpu says so; unset it'),
    ('tpu', '', '', "a TPU is here, .*: pip install -e '.\\[tpu\\]'"),
    ('rocm', '', '', 'AMD GPUs have not been tried'),
  ],
)
def test_an_accelerator_that_jax_does_not_use_is_a_problem(
  platform, driver, environment, words, capsys, monkeypatch
):
  monkeypatch.setattr(machine, 'platforms', lambda: [platform])
  monkeypatch.setattr(machine, 'nvidia_driver', lambda: driver)
  monkeypatch.setenv('JAX_PLATFORMS', environment)
  with pytest.raises(SystemExit) as exit:
    doctor.main(None)
  (problem,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('!')]
  assert exit.value.code == 1
  assert re.search(words, problem), problem


def test_a_plugin_for_another_jaxlib_is_a_problem(capsys, monkeypatch):
  monkeypatch.setattr(machine, 'platforms', list)
  versions = {'jax': '0.10.2', 'jaxlib': '0.10.2', 'jax-cuda12-pjrt': '0.9.0'}
  monkeypatch.setattr(doctor.environment, 'versions', lambda: versions)
  with pytest.raises(SystemExit):
    doctor.main(None)
  assert 'jax-cuda12-pjrt 0.9.0 is not for jaxlib 0.10.2' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('memory', 'config'),
  [
    (84.9e9, 'one_gpu:qwen3_1_7b,80gb,gsm8k '),
    (79e9, 'one_gpu:qwen3_1_7b,80gb,gsm8k '),
    (42.3e9, 'one_gpu:qwen3_1_7b,40gb,gsm8k '),
    (23.6e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k '),
    (16e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k '),
    (14e9, 'one_gpu:qwen2_5_0_5b,24gb,gsm8k --config.rollout.slots='),
    (8e9, 'smoke_gpu '),
  ],
)
def test_a_gpu_is_offered_the_largest_model_that_fits_in_full(memory, config):
  assert f'--config={config}' in doctor.suggestion(gpu(memory))
