"""What XLA compiles: counted, and kept on disk for the next start."""

import collections
import contextlib
import os
from collections.abc import Iterator

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'


class Counter:
  """The programs compiled, or read back from disk, since `counted` was entered."""

  def __init__(self) -> None:
    self._durations: list[float] = []  # seconds
    self._names: collections.Counter[str] = collections.Counter()

  def hear(self, event: str, duration_secs: float, **details: str | int) -> None:
    """Notes one of JAX's events; for `jax.monitoring`."""
    if event == _EVENT:
      self._durations.append(duration_secs)
      self._names[str(details.get('fun_name', '?')).removeprefix('jit(').removesuffix(')')] += 1

  @property
  def names(self) -> dict[str, int]:
    """How many programs each compiled function has, in the order of the first."""
    return dict(self._names)

  def __str__(self) -> str:
    functions = ', '.join(
      name if count == 1 else f'{name} {count}' for name, count in self._names.items()
    )
    return f'{self.count} programs in {self.seconds:.0f} s: {functions}'

  @property
  def count(self) -> int:
    """How many programs."""
    return len(self._durations)

  @property
  def seconds(self) -> float:
    """What they took."""
    return sum(self._durations)

  def metrics(self) -> dict[str, float]:
    """How many programs, and the seconds they took."""
    return {
      'speed/compilations': float(self.count),
      'time/compile_total': self.seconds,
    }


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
  """Counts what is compiled in the block."""
  counter = Counter()
  jax.monitoring.register_event_duration_secs_listener(counter.hear)
  try:
    yield counter
  finally:
    jax.monitoring.unregister_event_duration_listener(counter.hear)


def keep(folder: str) -> None:
  """Makes JAX look in `folder` before it compiles, and keep there what it compiles.

  Small programs too: there are dozens, and together they take longer than the large ones. '' leaves
  JAX's own settings, such as the environment's JAX_COMPILATION_CACHE_DIR.
  """
  if folder:
    jax.config.update('jax_compilation_cache_dir', os.path.expanduser(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
