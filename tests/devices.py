"""Eight devices on any machine."""

import os
import subprocess
import sys


def on_eight_devices(script):
  """Runs `script` in a process of its own, since a process cannot change its devices."""
  env = os.environ | {'JAX_PLATFORMS': 'cpu',
                      'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}
  done = subprocess.run([sys.executable, '-c', script], env=env, text=True,
                        capture_output=True, check=False)
  assert done.returncode == 0, done.stderr
