"""Where the time of a step goes."""

import contextlib
import time


class Clock:
  """Seconds by phase since the last `restart`, and those in which the device had no work."""

  def __init__(self):
    self.restart()

  def restart(self) -> None:
    self._started = time.monotonic()
    self._phases: dict[str, float] = {}
    self._device_waited = 0.

  @contextlib.contextmanager
  def __call__(self, phase: str, device_waits: bool = False):
    """Times a block as `phase`; `device_waits`: the device has no work meanwhile."""
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    self._phases[phase] = self._phases.get(phase, 0.) + seconds
    self._device_waited += seconds * device_waits

  def device_idle_since(self, moment: float) -> None:
    """The device finished at `moment` (time.monotonic) and has waited until now."""
    self._device_waited += max(0., time.monotonic() - moment)

  def seconds(self) -> dict[str, float]:
    """'time/{phase}', 'time/device_wait' and 'time/step', in seconds."""
    return {f'time/{phase}': seconds for phase, seconds in self._phases.items()} | {
        'time/device_wait': self._device_waited, 'time/step': time.monotonic() - self._started}
