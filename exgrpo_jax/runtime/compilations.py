"""What XLA compiles: counted, and kept on disk for the next start."""

import collections
import contextlib
import os
from collections.abc import Iterator

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'
_READ = '/jax/compilation_cache/cache_hits'  # comes before that event of the same program


class Counter:
  """The programs compiled, or read back from disk, since `counted` was entered."""

  def __init__(self) -> None:
    self._durations: list[float] = []  # seconds
    self._names: collections.Counter[str] = collections.Counter()
    self._read: collections.Counter[str] = collections.Counter()
    self._is_read = False  # the program that comes next

  def hear(self, event: str, duration_secs: float, **details: str | int) -> None:
    """Notes one of JAX's events; for `jax.monitoring`."""
    if event == _EVENT:
      self._durations.append(duration_secs)
      name = str(details.get('fun_name', '?')).removeprefix('jit(').removesuffix(')')
      self._names[name] += 1
      self._read[name] += self._is_read
      self._is_read = False

  def hear_instant(self, event: str, **_: str | int) -> None:
    """Notes one of JAX's events that have no duration; for `jax.monitoring`."""
    self._is_read |= event == _READ

  @property
  def count(self) -> int:
    """How many programs."""
    return len(self._durations)

  @property
  def seconds(self) -> float:
    """What they took."""
    return sum(self._durations)

  @property
  def names(self) -> dict[str, int]:
    """How many programs each function has."""
    return dict(self._names)

  @property
  def compiled_anew(self) -> dict[str, int]:
    """How many of them were not on disk, of the functions that have any."""
    return dict(self._names - self._read)

  def metrics(self) -> dict[str, float]:
    """How many programs, and the seconds they took."""
    return {
      'speed/compilations': float(self.count),
      'time/compile_total': self.seconds,
    }

  def __str__(self) -> str:
    def listed(counts: dict[str, int]) -> str:
      return ', '.join(name if n == 1 else f'{name} {n}' for name, n in counts.items())

    anew = f'; not in the compilation cache: {listed(self.compiled_anew) or "none"}'
    return f'{self.count} programs in {self.seconds:.0f} s: {listed(self.names)}{anew}'


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
  """Counts what is compiled in the block."""
  counter = Counter()
  jax.monitoring.register_event_duration_secs_listener(counter.hear)
  jax.monitoring.register_event_listener(counter.hear_instant)
  try:
    yield counter
  finally:
    jax.monitoring.unregister_event_duration_listener(counter.hear)
    jax.monitoring.unregister_event_listener(counter.hear_instant)


def folder(setting: str, workdir: str) -> str:
  """Where `config.compilation_cache` keeps compiled programs: {workdir} is the run's."""
  return os.path.expanduser(setting.replace('{workdir}', workdir))


def keep(folder: str) -> None:
  """Makes JAX look in `folder` before it compiles, and keep there what it compiles.

  Small programs too: together they take longer than the large ones. '' leaves JAX's own settings,
  such as the environment's JAX_COMPILATION_CACHE_DIR.
  """
  if folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    # XLA's own caches would make the folder's path a part of what identifies a program: one that is
    # mounted or copied elsewhere would be of no use.
    jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
