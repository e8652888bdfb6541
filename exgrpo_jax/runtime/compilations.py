"""Programs that XLA compiles: listed, counted, and kept on disk for the next start."""

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from exgrpo_jax import errors
from exgrpo_jax.runtime import activity

_LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'  # compilation comes next
_COMPILED = '/jax/core/compile/backend_compile_duration'
_READ = '/jax/compilation_cache/cache_hits'  # comes before _COMPILED of the same program


@dataclasses.dataclass(eq=False)
class Program:
  """A jitted function at one of the sizes that a run calls it with.

  The code that runs the function lists it; compiling it needs nothing else. It is compiled once,
  when `executable` is first asked for.
  """

  name: str
  function: Any  # what `jax.jit` or `jit_for_training` returns
  args: tuple[Any, ...]  # as in a run; shapes with shardings may replace arrays
  mesh: Mesh  # the active mesh while it runs
  size: tuple[int, int] = (0, 0)  # rows that it computes at once, and tokens per row
  kept: Any = ()  # a tree of arrays that its caller keeps meanwhile, arguments or not
  runs: float = 0  # per step
  trips: float = 1  # per run, of a loop whose number of iterations depends on data
  filled: float = 1  # share of its cache that is written

  @functools.cached_property
  def lowered(self) -> jax.stages.Lowered:
    """Trace the function; the devices of its mesh need not exist."""
    with jax.set_mesh(self.mesh):
      return self.function.lower(*self.args)

  @functools.cached_property
  def executable(self) -> jax.stages.Compiled:
    """Compile the function."""
    return self.lowered.compile()

  def results(self, exact: bool = False) -> Any:
    """Return the shapes and shardings of the function's results.

    On several devices this compiles. On one it compiles only if `exact`; else shardings are empty.
    """
    if self.mesh.size == 1 and not exact:
      layout = NamedSharding(self.mesh, PartitionSpec())
      with jax.set_mesh(self.mesh):
        shapes = self.function.eval_shape(*self.args)
      return jax.tree.map(lambda leaf: _abstract(leaf, layout), shapes)
    return jax.tree.map(_abstract, self.lowered.out_info, self.executable.output_shardings)


def _abstract(leaf: Any, layout: Any) -> jax.ShapeDtypeStruct:
  is_weak = getattr(leaf, 'weak_type', False)  # part of the program's cache key
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout, weak_type=is_weak)


class Counter:
  """The programs compiled, or read back from disk, since `counted` was entered."""

  def __init__(self) -> None:
    self.count = 0  # programs
    self.seconds = 0.0  # total over these programs
    self.names: collections.Counter[str] = collections.Counter()  # function -> its programs
    self.not_cached: collections.Counter[str] = collections.Counter()  # programs not on disk
    self._is_read = False  # True if the next program comes from disk

  def hear(self, event: str, duration_secs: float, **details: str | int) -> None:
    """Count a compilation; a listener for `jax.monitoring`."""
    if event == _COMPILED:
      name = _program(details)
      self.count += 1
      self.seconds += duration_secs
      self.names[name] += 1
      self.not_cached[name] += not self._is_read
      self._is_read = False

  def hear_instant(self, event: str, **_: str | int) -> None:
    """Note a read from the cache; a listener for events of `jax.monitoring` without a duration."""
    self._is_read |= event == _READ

  def metrics(self) -> dict[str, float]:
    """Return the number of programs and the seconds they took."""
    return {'perf/compilations': float(self.count), 'time/compile_total': self.seconds}

  def __str__(self) -> str:
    def listed(counts: collections.Counter[str]) -> str:
      return ', '.join(name if n == 1 else f'{name} {n}' for name, n in counts.items() if n)

    programs = f'{errors.counted(self.count, "program")} in {self.seconds:.0f} s'
    not_cached = listed(self.not_cached) or 'none'
    return f'{programs}: {listed(self.names)}; not in the compilation cache: {not_cached}'


@contextlib.contextmanager
def shown() -> Iterator[None]:
  """Have `activity.now` name the programs that JAX compiles in the block."""
  jax.monitoring.register_event_duration_secs_listener(_show)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(_show)


def _show(event: str, duration_secs: float, **details: str | int) -> None:
  del duration_secs
  if event in (_LOWERED, _COMPILED):
    activity.compiling(_program(details) if event == _LOWERED else '')


def _program(details: Mapping[str, str | int]) -> str:
  return str(details.get('fun_name', '?')).removeprefix('jit(').removesuffix(')')


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
  """Count the programs that are compiled in the block."""
  counter = Counter()
  jax.monitoring.register_event_duration_secs_listener(counter.hear)
  jax.monitoring.register_event_listener(counter.hear_instant)
  try:
    yield counter
  finally:
    jax.monitoring.unregister_event_duration_listener(counter.hear)
    jax.monitoring.unregister_event_listener(counter.hear_instant)


def folder(setting: str, workdir: str) -> str:
  """Resolve `config.compilation_cache` to a folder; '{workdir}' stands for the run's workdir."""
  return os.path.expanduser(setting.replace('{workdir}', workdir))


def keep(folder: str) -> None:
  """Make `folder` JAX's compilation cache.

  Small programs are cached too: together they take longer than the large ones. '' leaves JAX's own
  settings, such as the environment's JAX_COMPILATION_CACHE_DIR.
  """
  if folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    # With XLA's own caches the folder's path is part of a program's key, so a folder that is
    # mounted or copied elsewhere would be useless.
    jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
