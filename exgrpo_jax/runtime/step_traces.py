"""Traces of chosen steps by JAX's profiler: what device and host do, and when.

TensorBoard's plugin (pip install xprof) shows the folder; ui.perfetto.dev opens the *.trace.json.gz
in it. The phases of the clock and the steps are marked in a trace.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator

import jax


def written(steps: Iterable[int], chosen: Collection[int], workdir: str) -> Iterator[int]:
  """`steps`; while a chosen one is worked on, its trace is taken, into workdir/traces/step_…/.

  A trace ends when the next step is asked for.
  """
  for step in steps:
    with _traced(os.path.join(workdir, 'traces', f'step_{step:06d}'), step, step in chosen):
      yield step


@contextlib.contextmanager
def _traced(folder: str, step: int, is_chosen: bool) -> Iterator[None]:
  if not is_chosen:
    yield
    return
  try:  # the last step may end the iteration
    with (
      jax.profiler.trace(folder),
      jax.profiler.StepTraceAnnotation('step', step_num=step),
    ):
      yield
  finally:
    print(f'trace of step {step}: {folder}', flush=True)
