"""What a benchmark runs on: device, versions, commit."""

from typing import Any

import jax

from exgrpo_jax.performance import peaks
from exgrpo_jax.runtime import environment, machine


def describe() -> dict[str, Any]:
  """Name -> value, as JSON holds them.

  'memory' is of all devices, None where they do not say it; 'is_known': their peaks are published.
  """
  described = environment.describe(0)
  device = jax.devices()[0]
  limit = (device.memory_stats() or {}).get('bytes_limit')
  commit = described['commit']
  changed = commit and commit['has_uncommitted_changes']
  return {
    'platform': device.platform,
    'kind': device.device_kind,
    'is_known': peaks.published(device.device_kind) is not None,
    'count': jax.device_count(),
    'memory': limit and limit * jax.device_count(),
    'driver': _driver(device),
    'commit': commit and commit['hash'] + (' with uncommitted changes' if changed else ''),
    'versions': {'python': described['python'], **described['packages']},
    'host': described['first_host'],
    'time': described['time'],
  }


def _driver(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
  """Of NVIDIA's kernel module, and the version that the runtime reports."""
  module = machine.nvidia_driver()
  runtime = ' '.join(device.client.platform_version.split())
  return f'NVIDIA {module}, {runtime}' if module else runtime
