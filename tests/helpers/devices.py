"""Processes with a given number of devices on any machine, alone or as the hosts of one run."""

import os
import pathlib
import socket
import time

from tests.helpers import forked
from tests.helpers.paths import TINY_CONFIG


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


def in_two_processes(script, environments, status=0):
  """Runs `script` in two processes of four devices each, with more in the environment of each.

  Both must end with `status`. JAX is imported before it gets that environment.
  """
  hosts = [forked.start(['-c', script], **devices_of(4), **own) for own in environments]
  outcomes = [host.wait() for host in hosts]
  assert [one.status for one in outcomes] == [status] * 2, '\n'.join(one.err for one in outcomes)


# ---- The processes of a run ----


CARRY = (  # flags of a run whose responses span steps
  '--config.rollout.partial=True',
  '--config.rollout.max_groups_in_flight=10',
  '--config.rollout.slots=7',
)
DYNAMIC = (  # the same with dynamic sampling; there are 12 questions
  '--config.rollout.partial=True',
  '--config.rollout.slots=7',
  '--config.rollout.questions=2',
  '--config.rollout.max_groups_in_flight=6',
  '--config.rollout.dynamic_sampling=3',
)


class Pod:
  """The processes of one run, all of which are dead at the end of its block."""

  def __init__(self, workdir, shape, data, compiled, *flags):
    """Starts train with `flags`; each process logs to a file beside `workdir`.

    `shape` is (number of processes, devices of each), `data` the fixture, and `compiled` the folder
    of JAX's compilation cache.
    """
    count, devices = shape
    self._logs = [pathlib.Path(f'{workdir}.log.{number}') for number in range(count)]
    environment = devices_of(devices) | caching(compiled)
    command = [
      'train',
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
    for log in self._logs:
      log.touch()
    self.processes = [
      forked.start([*command, f'--process_id={number}'], log=log, **environment)
      for number, log in enumerate(self._logs)
    ]

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    for process in self.processes:
      process.__exit__(*exception)

  def log(self, number=0):
    return self._logs[number].read_text()

  def exit_statuses(self):
    """Of all processes, once they have ended."""
    return [process.wait().status for process in self.processes]

  def finish(self):
    """Waits for all processes; asserts that none failed."""
    assert set(self.exit_statuses()) == {0}, '\n'.join(map(self.log, range(len(self.processes))))

  def wait_until(self, condition):
    """Waits for condition(); asserts that no process ends before."""
    deadline = time.monotonic() + forked.TIMEOUT
    while not condition():
      assert all(process.is_running() for process in self.processes), self.log()
      assert time.monotonic() < deadline, self.log()
      time.sleep(0.01)
