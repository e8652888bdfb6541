"""Where the time of a step goes."""

import contextlib
import statistics
import time
from typing import NamedTuple


class Now(NamedTuple):
  """What a clock shows in the middle of a step."""

  step: int  # steps that have ended
  step_seconds: float  # of this one so far
  phase: str  # '' between two
  phase_seconds: float
  median_seconds: float  # of the steps that have ended; infinite before there are MEDIAN_STEPS


MEDIAN_STEPS = 3  # the first ones compile


class Clock:
  """Seconds by phase since the last `restart`, and those in which the device had no work."""

  def __init__(self):
    self._steps: list[float] = []  # seconds of those that have ended
    self._begin()

  def restart(self) -> None:
    """Ends a step and begins another."""
    self._steps.append(time.monotonic() - self._started)
    self._begin()

  def _begin(self):
    self._started = time.monotonic()
    self._phase = ('', self._started)  # in progress, and since when
    self._phases: dict[str, float] = {}
    self._device_waited = 0.0

  @contextlib.contextmanager
  def __call__(self, phase: str, device_waits: bool = False):
    """Times a block as `phase`; `device_waits`: the device has no work meanwhile."""
    start = time.monotonic()
    self._phase = (phase, start)
    yield
    now = time.monotonic()
    self._phase = ('', now)
    self._phases[phase] = self._phases.get(phase, 0.0) + now - start
    self._device_waited += (now - start) * device_waits

  def device_idle_since(self, moment: float) -> None:
    """The device finished at `moment` (time.monotonic) and has waited until now."""
    self._device_waited += max(0.0, time.monotonic() - moment)

  def seconds(self) -> dict[str, float]:
    """'time/{phase}', 'time/device_wait' and 'time/step', in seconds."""
    return {f'time/{phase}': seconds for phase, seconds in self._phases.items()} | {
      'time/device_wait': self._device_waited,
      'time/step': time.monotonic() - self._started,
    }

  def now(self) -> Now:
    """May be asked by another thread than the one that runs the step."""
    (phase, since), moment = self._phase, time.monotonic()
    median = statistics.median(self._steps) if len(self._steps) >= MEDIAN_STEPS else float('inf')
    return Now(len(self._steps), moment - self._started, phase, moment - since, median)
