"""Eight devices on any machine, of one host or of two."""

import os
import socket
import subprocess
import sys


def _flags(num_devices):
  return f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={num_devices}'


def on_eight_devices(script):
  """Runs `script` in a process of its own, since a process cannot change its devices.

  Returns what it wrote to standard error.
  """
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': _flags(8)}
  done = subprocess.run(
    [sys.executable, '-c', script], env=env, text=True, capture_output=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stderr


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
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': _flags(4)}
  hosts = [
    subprocess.Popen(
      [sys.executable, '-c', script],
      env=env | own,
      text=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
    )
    for own in environments
  ]
  messages = [host.communicate(timeout=300)[1] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], '\n'.join(messages)
