"""Wall-clock time of alternatives, to compare within one run."""

import statistics
import time
from collections.abc import Callable


def median_seconds(repeats: int, *runs: Callable[[], object]) -> list[float]:
  """The median time of each run, in seconds.

  The runs take turns, so that a machine that slows down for a while slows all of them alike. An
  additional first round compiles and is not counted. A run must wait for its results itself.
  """
  seconds: list[list[float]] = [[] for _ in runs]
  for repeat in range(1 + repeats):
    for run, seconds_of_run in zip(runs, seconds):
      start = time.perf_counter()
      run()
      if repeat:
        seconds_of_run.append(time.perf_counter() - start)
  return [statistics.median(seconds_of_run) for seconds_of_run in seconds]
