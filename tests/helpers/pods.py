"""Training as its users start it, on several hosts that are processes of this machine."""

import os
import pathlib
import subprocess
import sys
import time

from tests.helpers.devices import free_port
from tests.helpers.paths import REPOSITORY, TINY_CONFIG

LONG = 300  # seconds until a run that hangs is given up


class Pod:
  """The processes of one run; they are killed where the block ends before them."""

  def __init__(self, workdir, shape, data, cache, *flags):
    """`shape` is (processes, devices of each), `flags` of train; `cache` keeps what is compiled."""
    count, devices = shape
    self._logs = [pathlib.Path(f'{workdir}.log.{number}') for number in range(count)]
    env = os.environ | {
      'JAX_COMPILATION_CACHE_DIR': str(cache),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': os.environ['XLA_FLAGS'] + f' --xla_force_host_platform_device_count={devices}',
    }
    command = [
      sys.executable,
      '-m',
      'exgrpo_jax.train',
      f'--config={TINY_CONFIG}',
      f'--workdir={workdir}',
      f'--config.data.train={data.train}',
      f'--config.data.cache_dir={data.cache}',
      f'--config.warm_start.data={data.train}',
      f"--config.data.evaluation=('{data.evaluation}',)",
      '--config.warm_start.num_updates=0',
      f'--coordinator_address=localhost:{free_port()}',
      f'--num_processes={count}',
      *flags,
    ]
    self.processes = []
    for number, log in enumerate(self._logs):
      with open(log, 'w') as file:
        self.processes.append(
          subprocess.Popen(
            [*command, f'--process_id={number}'], cwd=REPOSITORY, env=env, stdout=file, stderr=file
          )
        )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()

  def log(self, number=0):
    return self._logs[number].read_text()

  def codes(self):
    """Exit statuses, once all have ended."""
    return [process.wait(timeout=LONG) for process in self.processes]

  def ended(self):
    """Asserts that all ended well."""
    assert set(self.codes()) == {0}, '\n'.join(map(self.log, range(len(self.processes))))

  def until(self, is_so):
    """Waits; nobody may have ended before."""
    limit = time.monotonic() + LONG
    while not is_so():
      assert all(process.poll() is None for process in self.processes), self.log()
      assert time.monotonic() < limit, self.log()
      time.sleep(0.01)
