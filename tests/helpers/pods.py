"""Training as users start it, on several hosts that are processes of this machine."""

import pathlib
import time

from tests.helpers import forked
from tests.helpers.devices import caching, devices_of, free_port
from tests.helpers.paths import TINY_CONFIG

CARRY = (  # flags of a run whose responses span steps
  '--config.rollout.carry=True',
  '--config.rollout.in_flight=10',
  '--config.rollout.slots=7',
)


class Pod:
  """The processes of one run, all of which are dead at the end of its block."""

  def __init__(self, workdir, shape, data, compiled, *flags):
    """Starts train with `flags`.

    Args:
      workdir: its --workdir; each process logs to a file beside it.
      shape: (number of processes, devices of each).
      data: the fixture.
      compiled: the folder of JAX's compilation cache.
      *flags: further flags.
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
