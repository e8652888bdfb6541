"""Where the time of a step goes."""

import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from exgrpo_jax.runtime import activity


class Now(NamedTuple):
  """A reading of the clock in the middle of a step."""

  step: int  # steps finished before this one
  step_seconds: float  # of this one so far
  phase: str  # '' between two phases
  phase_seconds: float
  median_seconds: float  # of the finished steps; infinite until there are MEDIAN_STEPS


MEDIAN_STEPS = 3  # the first ones compile
NO_TRAINING = ('evaluate', 'export', 'alignment')  # phases that speed and cost leave out


class Clock:
  """Seconds by phase since the last `restart`, and how long the device idled."""

  def __init__(self) -> None:
    self._steps: list[float] = []  # seconds of the finished ones
    self._finished: concurrent.futures.Future[float] | None = None  # when the device has
    self._begin()

  def restart(self) -> None:
    """Ends a step and starts the next."""
    self._steps.append(time.monotonic() - self._started)
    self._begin()

  def _begin(self) -> None:
    self._started = time.monotonic()
    self._phase = ('', self._started)  # in progress, and since when
    self._phases: dict[str, float] = {}
    self._device_waited = 0.0

  @contextlib.contextmanager
  def __call__(self, phase: str, device_waits: bool = False) -> Iterator[None]:
    """Times a block as `phase`; with `device_waits` the device idles meanwhile."""
    start = time.monotonic()
    self._phase = (phase, start)
    with activity.doing(phase.replace('_', ' ')), jax.profiler.TraceAnnotation(phase):
      yield
    now = time.monotonic()
    self._phase = ('', now)
    self._phases[phase] = self._phases.get(phase, 0.0) + now - start
    self._device_waited += (now - start) * device_waits

  def dispatched(self, values: Any) -> None:
    """The device works from now on until it has computed `values`, a tree of arrays."""

    def wait() -> float:
      jax.block_until_ready(values)
      return time.monotonic()

    pool = concurrent.futures.ThreadPoolExecutor(1)
    self._finished = pool.submit(wait)
    pool.shutdown(wait=False)

  def await_device(self) -> None:
    """Waits for what was dispatched; the device has idled since it was finished."""
    assert self._finished is not None, 'nothing was dispatched'
    finished = self._finished.result()
    self._device_waited += max(0.0, time.monotonic() - finished)

  def seconds(self) -> dict[str, float]:
    """'time/{phase}', 'time/device_wait' and 'time/step', in seconds."""
    return {f'time/{phase}': seconds for phase, seconds in self._phases.items()} | {
      'time/device_wait': self._device_waited,
      'time/step': time.monotonic() - self._started,
    }

  def now(self) -> Now:
    """A reading; may be called from another thread than the one that runs the step."""
    (phase, since), moment = self._phase, time.monotonic()
    median = statistics.median(self._steps) if len(self._steps) >= MEDIAN_STEPS else float('inf')
    return Now(
      step=len(self._steps),
      step_seconds=moment - self._started,
      phase=phase,
      phase_seconds=moment - since,
      median_seconds=median,
    )
