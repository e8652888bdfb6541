"""A diagnosis of this machine: hardware, versions, problems, and a config that fits."""

import importlib
import importlib.util
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import huggingface_hub
import jax
from huggingface_hub import constants

from exgrpo_jax.capacity import devices, fitting
from exgrpo_jax.errors import counted
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.runtime import environment, machine

_GB = 1e9
_CUDA_13_DRIVER = 580  # the first NVIDIA driver for CUDA 13
_NAMES = {'cuda': 'an NVIDIA GPU', 'tpu': 'a TPU', 'rocm': 'an AMD GPU'}
_OPTIONAL = {
  'wandb': "config.metrics.wandb_project, run pip install -e '.[wandb]'",
  'gcsfs': "gs:// paths, run pip install -e '.[gcs]'",
}


class Finding(NamedTuple):
  """One line of the diagnosis."""

  name: str
  text: str
  is_problem: bool = False  # True if training cannot start


def findings() -> Iterator[Finding]:
  """Yield everything worth knowing about the machine before starting a run."""
  yield from _host()
  yield from _versions()
  yield from _devices()
  for package, use in _OPTIONAL.items():
    is_here = importlib.util.find_spec(package) is not None
    yield Finding(package, 'installed' if is_here else f'not installed. To use {use}.')
  has_token = huggingface_hub.get_token() is not None
  without = 'no token found. To use gated models, run hf auth login.'
  yield Finding('hub', 'token found' if has_token else without)


def suggestion(device: Any) -> str:
  """Return a train command that fits the device."""
  if device.platform in ('gpu', 'cuda'):
    config, workdir = _for_gpu(device), 'run'
  else:
    config = workdir = 'smoke' if device.platform == 'tpu' else 'chains'
  return f'exgrpo train --config={config} --workdir=/tmp/{workdir}'


def _host() -> Iterator[Finding]:
  memory = machine.physical_memory()
  yield Finding('host', f'{counted(os.cpu_count() or 1, "core")}, {memory / _GB:.0f} GB of memory')
  defaults: Any = config_files.load_config('base')
  for name, folder in (
    ('programs', defaults.compilation_cache),
    ('data', defaults.data.cache_dir),
    ('models', constants.HF_HUB_CACHE),
  ):
    path = pathlib.Path(folder).expanduser().absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    yield Finding(name, f'{folder}, {shutil.disk_usage(existing).free / _GB:.0f} GB free')


def _versions() -> Iterator[Finding]:
  versions = environment.versions()
  all_versions = {'python': platform.python_version()} | versions
  text = ', '.join(f'{name} {version}' for name, version in all_versions.items())
  yield Finding('versions', text)
  for plugin in ('jax-cuda12-pjrt', 'jax-cuda13-pjrt'):
    if versions.get(plugin, versions['jaxlib']) != versions['jaxlib']:
      text = f'{plugin} {versions[plugin]} does not match jaxlib {versions["jaxlib"]}.'
      yield Finding('plugin', f'{text} Reinstall both.', is_problem=True)


def _devices() -> Iterator[Finding]:
  """Yield the devices that JAX uses, and any accelerators that it ignores."""
  try:
    devices = jax.devices()
  except RuntimeError as error:
    yield Finding('devices', f'JAX found no devices: {str(error).splitlines()[0]}', is_problem=True)
    return
  device, driver = devices[0], machine.nvidia_driver()
  stats = device.memory_stats() or {}
  memory_text = f', {stats["bytes_limit"] / _GB:.1f} GB for JAX' if 'bytes_limit' in stats else ''
  driver_text = f', driver {driver}' if driver else ''
  yield Finding('devices', f'{len(devices)} {device.device_kind}{memory_text}{driver_text}')
  if device.platform == 'cpu':
    for name in machine.platforms():
      text = f'this machine has {_NAMES[name]}, but JAX uses the CPU. {_remedy(name, driver)}'
      yield Finding('devices', text, is_problem=True)


def _remedy(name: str, driver: str) -> str:
  """Return a hint on how to make JAX use the devices of a platform: 'cuda', 'tpu' or 'rocm'."""
  if os.environ.get('JAX_PLATFORMS'):
    return f'JAX_PLATFORMS={os.environ["JAX_PLATFORMS"]} is set. Unset it.'
  if name == 'rocm':
    return 'This code has not been tested on AMD GPUs.'
  if name == 'tpu':
    return "Run pip install -e '.[tpu]'."
  if not driver:
    return 'The NVIDIA driver is not loaded. Install it first.'
  cuda = 13 if int(driver.split('.')[0]) >= _CUDA_13_DRIVER else 12
  return f"Run pip install -e '.[cuda{cuda}]'."


def _for_gpu(device: Any) -> str:
  """Return the largest non-LoRA config that fits on the GPU, plus any flags it needs to fit."""
  one_gpu = importlib.import_module('exgrpo_jax.configs.one_gpu')
  limit = (device.memory_stats() or {}).get('bytes_limit', 0)
  has_bfloat16 = devices.has_bfloat16(device.device_kind)
  for model in reversed(one_gpu.MODELS):
    memories = [
      memory
      for memory in one_gpu.MEMORIES
      if devices.has_bfloat16(memory) == has_bfloat16
      and one_gpu.FITS.get((model, memory, 'gsm8k'), (0, 0, one_gpu.LORA))[2] != one_gpu.LORA
    ]
    if not memories:
      continue
    # Cards report slightly more or less memory than their names suggest.
    smaller = [memory for memory in memories if devices.usable_memory(memory) <= 1.1 * limit]
    choice = f'{model},{(smaller or memories[:1])[-1]},gsm8k'
    config = parse_config(config_files.load_config(f'one_gpu:{choice}'))
    if max(fitting.peaks(config).values()) <= limit:
      return f'one_gpu:{choice}'
    if fitted := fitting.fit(config, limit):
      return f'one_gpu:{choice} {fitted.flags}'
  return 'smoke_gpu'
