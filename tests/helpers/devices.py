"""Processes with a given number of devices on any machine, alone or as the hosts of one run."""

import os
import socket
import subprocess
import sys

from tests.helpers.paths import REPOSITORY


def environment(num_devices):
  """The environment of a process with so many CPU devices; no process can change its own."""
  return os.environ | devices_of(num_devices)


def devices_of(num_devices):
  """What to add to a process's environment for it to have so many CPU devices."""
  flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={num_devices}'
  return {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}


def caching(compiled):
  """What to add to a process's environment for it to keep all that it compiles in that folder."""
  return {
    'JAX_COMPILATION_CACHE_DIR': str(compiled),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }


def free_port():
  with socket.socket() as chosen:
    chosen.bind(('localhost', 0))
    return chosen.getsockname()[1]


def on_two_hosts(script):
  """Runs `script` in two processes of four devices each, joined as hosts of one run."""
  joined = f"""
import jax, os
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize('localhost:{free_port()}', num_processes=2,
                           process_id=int(os.environ['NUMBER']), shutdown_timeout_seconds=20)
"""
  in_two_processes(joined + script, [{'NUMBER': '0'}, {'NUMBER': '1'}])


def in_two_processes(script, environments):
  """Runs `script` in two processes of four devices each, with more in the environment of each."""
  hosts = [
    subprocess.Popen(
      [sys.executable, '-c', script],
      cwd=REPOSITORY,
      env=environment(4) | own,
      text=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
    )
    for own in environments
  ]
  messages = [host.communicate(timeout=300)[1] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], '\n'.join(messages)
