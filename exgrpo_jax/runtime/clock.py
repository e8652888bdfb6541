"""Step timing: seconds per phase, an estimate of the time left, and warnings about hangs."""

import collections
import concurrent.futures
import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from exgrpo_jax.runtime import activity, compilations

NO_TRAINING = ('evaluate', 'export', 'callbacks')  # phases excluded from speed and cost
RECENT = 20  # steps that Pace extrapolates from
MEDIAN_STEPS = 3  # finished steps required for a median, because the first steps compile
FACTOR = 10  # report a step that takes this many times the median
LEAST_SECONDS = 60.0  # but never report a step that has taken less


class Now(NamedTuple):
  """A clock reading in the middle of a step."""

  step: int  # steps finished before this one
  step_seconds: float  # time spent in this step so far
  phase: str  # '' between two phases
  phase_seconds: float
  median_seconds: float  # over finished steps; infinite until MEDIAN_STEPS have finished


class Clock:
  """A timer for the current step: seconds in each phase, and seconds the device sat idle."""

  def __init__(self) -> None:
    self._steps: list[float] = []  # seconds of each finished step
    self._ready_time: concurrent.futures.Future[float] | None = None  # when the device finishes
    self._begin()

  def restart(self) -> None:
    """End a step and start the next."""
    self._steps.append(time.monotonic() - self._start)
    self._begin()

  def _begin(self) -> None:
    self._start = time.monotonic()
    self._phase = ('', self._start)  # current phase and its start time
    self._phases: dict[str, float] = {}
    self._device_waited = 0.0

  @contextlib.contextmanager
  def __call__(self, phase: str, device_waits: bool = False) -> Iterator[None]:
    """Time a block as `phase`. Set `device_waits` if the device idles during the block."""
    start = time.monotonic()
    self._phase = (phase, start)
    with activity.doing(phase.replace('_', ' ')), jax.profiler.TraceAnnotation(phase):
      yield
    now = time.monotonic()
    self._phase = ('', now)
    self._phases[phase] = self._phases.get(phase, 0.0) + now - start
    self._device_waited += (now - start) * device_waits

  def dispatched(self, values: Any) -> None:
    """Count the device as busy until it has computed `values`, a tree of arrays."""

    def wait() -> float:
      jax.block_until_ready(values)
      return time.monotonic()

    pool = concurrent.futures.ThreadPoolExecutor(1)
    self._ready_time = pool.submit(wait)
    pool.shutdown(wait=False)

  def await_device(self) -> None:
    """Wait for the dispatched values; the time since they became ready counts as idle."""
    assert self._ready_time is not None, 'nothing was dispatched'
    ready_time = self._ready_time.result()
    self._device_waited += max(0.0, time.monotonic() - ready_time)

  def seconds(self) -> dict[str, float]:
    """Return 'time/{phase}', 'time/device_wait' and 'time/step', in seconds."""
    return {f'time/{phase}': seconds for phase, seconds in self._phases.items()} | {
      'time/device_wait': self._device_waited,
      'time/step': time.monotonic() - self._start,
    }

  def now(self) -> Now:
    """Return the current reading. Any thread may call this."""
    (phase, phase_start), moment = self._phase, time.monotonic()
    median = statistics.median(self._steps) if len(self._steps) >= MEDIAN_STEPS else float('inf')
    return Now(len(self._steps), moment - self._start, phase, moment - phase_start, median)


class Pace:
  """Recent speed of steps and evaluations, excluding compilation.

  Only the first steps and the first evaluation compile, so their times do not predict later ones.
  """

  def __init__(
    self, counter: compilations.Counter, records: Iterable[Mapping[str, float]] = ()
  ) -> None:
    """Start with the evaluation times in `records`, the past metrics of a resumed run."""
    self._counter = counter
    seconds = (
      record['time/evaluate'] + record.get('time/export', 0.0)
      for record in records
      if 'time/evaluate' in record
    )
    self._steps: collections.deque[float] = collections.deque(maxlen=RECENT)  # seconds
    self._evaluations: collections.deque[float] = collections.deque(seconds, maxlen=RECENT)
    self._begin()

  def _begin(self) -> None:
    self._start, self._programs = time.monotonic(), self._counter.count
    self._evaluation_seconds = 0.0  # seconds spent on evaluations within the step

  @contextlib.contextmanager
  def evaluation(self) -> Iterator[None]:
    """Time a block as an evaluation, and exclude it from the step's time."""
    start, compile_seconds = time.monotonic(), self._counter.seconds
    programs = self._counter.count
    yield
    seconds = time.monotonic() - start
    self._evaluations.append(max(0.0, seconds - (self._counter.seconds - compile_seconds)))
    self._evaluation_seconds += seconds
    self._programs += self._counter.count - programs

  def finish_step(self) -> None:
    """End a step and start the next."""
    if self._counter.count == self._programs:
      self._steps.append(time.monotonic() - self._start - self._evaluation_seconds)
    self._begin()

  def seconds_left(self, steps: int, evaluations: int) -> float | None:
    """Estimate the seconds left for these steps and evaluations; None if there are no timings."""
    if not steps:
      return 0.0
    if not self._steps or (evaluations and not self._evaluations):
      return None
    seconds = steps * statistics.median(self._steps)
    return seconds + (evaluations * statistics.median(self._evaluations) if evaluations else 0.0)


@contextlib.contextmanager
def watched() -> Iterator[Clock]:
  """Yield a clock for the steps in the block; a thread warns about steps that take far too long.

  A warning is printed once a step has taken FACTOR times the median and at least LEAST_SECONDS, and
  again whenever its time doubles. A host that waits for another host or a file system looks the
  same as a busy host. Every host reports its own phase, so look for a host whose phase differs from
  the others'.
  """
  clock, stop = Clock(), threading.Event()
  thread = threading.Thread(target=_watch, args=(clock, stop), daemon=True)
  thread.start()
  try:
    yield clock
  finally:
    stop.set()
    thread.join()


def _watch(clock: Clock, stop: threading.Event) -> None:
  step, limit = None, 0.0
  while not stop.wait(LEAST_SECONDS / 100):
    now = clock.now()
    if now.step != step:
      step, limit = now.step, max(FACTOR * now.median_seconds, LEAST_SECONDS)
    if now.step_seconds > limit:
      limit = 2 * now.step_seconds
      phase = f"has been in phase '{now.phase}' for {now.phase_seconds:.0f} s"
      print(
        f'WARNING: {socket.gethostname()}: this step has taken {now.step_seconds:.0f} s, but the '
        f'median of the earlier steps is {now.median_seconds:.1f} s; the step '
        + (phase if now.phase else 'is between two phases'),
        file=sys.stderr,
        flush=True,
      )


def traced(steps: Iterable[int], traced_steps: Collection[int], workdir: str) -> Iterator[int]:
  """Yield `steps`; trace those in `traced_steps` with JAX's profiler.

  A trace is written to workdir/traces/step_…/ and ends when the caller requests the next step. It
  is a timeline of device and host activity, with steps and phases marked. Open the folder in
  TensorBoard (pip install xprof), or open its *.trace.json.gz at ui.perfetto.dev.
  """
  for step in steps:
    if step not in traced_steps:
      yield step
      continue
    folder = os.path.join(workdir, 'traces', f'step_{step:06d}')
    try:  # the caller may stop iterating at the last step
      with jax.profiler.trace(folder), jax.profiler.StepTraceAnnotation('step', step_num=step):
        yield step
    finally:
      print(f'trace of step {step}: {folder}', flush=True)
