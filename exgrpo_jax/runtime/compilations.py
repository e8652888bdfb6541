"""XLA compilation: listing and counting programs, and caching them on disk."""

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

_LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'  # compilation follows
_COMPILED = '/jax/core/compile/backend_compile_duration'
_READ = '/jax/compilation_cache/cache_hits'  # precedes _COMPILED for the same program


@dataclasses.dataclass(eq=False)
class Program:
  """A jitted function for one of the input sizes used in a run.

  The module that runs the function also lists its programs. A program contains everything needed to
  compile it, and is compiled once, on the first access to `executable`.
  """

  name: str
  function: Any  # the result of `jax.jit` or `jit_for_training`
  args: tuple[Any, ...]  # as in a run, or shapes with shardings instead of arrays
  mesh: Mesh  # the active mesh while it runs
  size: tuple[int, int] = (0, 0)  # rows per call, and tokens per row
  kept: Any = ()  # a tree of arrays, arguments or not, that the caller keeps during the call
  runs: float = 0  # calls per step
  trips: float = 1  # iterations per call, for a loop with a data-dependent length
  filled: float = 1  # filled share of the KV cache

  @functools.cached_property
  def lowered(self) -> jax.stages.Lowered:
    """Trace the function. The devices in its mesh need not exist."""
    with jax.set_mesh(self.mesh):
      return self.function.lower(*self.args)

  @functools.cached_property
  def executable(self) -> jax.stages.Compiled:
    """Compile the function."""
    return self.lowered.compile()

  def results(self, exact: bool = False) -> Any:
    """Return the shapes and shardings of the function's results.

    With several devices, or with `exact`, this compiles the function. Otherwise all shardings are
    empty.
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
  """Counts of the programs that were compiled, or read from disk, in a `counted` block."""

  def __init__(self) -> None:
    self.count = 0  # programs
    self.seconds = 0.0  # total over these programs
    self.names: collections.Counter[str] = collections.Counter()  # function -> program count
    self.not_cached: collections.Counter[str] = collections.Counter()  # programs not on disk
    self._is_read = False  # True if the next program comes from disk

  def hear(self, event: str, duration_secs: float, **details: str | int) -> None:
    """Count a compilation. This is a listener for `jax.monitoring`."""
    if event == _COMPILED:
      name = _program(details)
      self.count += 1
      self.seconds += duration_secs
      self.names[name] += 1
      self.not_cached[name] += not self._is_read
      self._is_read = False

  def hear_instant(self, event: str, **_: str | int) -> None:
    """Note a cache read. This is a listener for `jax.monitoring` events without a duration."""
    self._is_read |= event == _READ

  def metrics(self) -> dict[str, float]:
    """Return the number of programs and their total compile time in seconds."""
    return {'perf/compilations': float(self.count), 'time/compile_total': self.seconds}

  def __str__(self) -> str:
    def describe(counts: collections.Counter[str]) -> str:
      return ', '.join(name if n == 1 else f'{name} {n}' for name, n in counts.items() if n)

    programs = f'{errors.counted(self.count, "program")} in {self.seconds:.0f} s'
    not_cached = describe(self.not_cached) or 'none'
    return f'{programs}: {describe(self.names)}; not in the compilation cache: {not_cached}'


@contextlib.contextmanager
def shown() -> Iterator[None]:
  """Show, in the status line, each program that JAX compiles during the block."""

  def show(event: str, duration_secs: float, **details: str | int) -> None:
    del duration_secs
    if event in (_LOWERED, _COMPILED):
      activity.compiling(_program(details) if event == _LOWERED else '')

  jax.monitoring.register_event_duration_secs_listener(show)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(show)


def _program(details: Mapping[str, str | int]) -> str:
  return str(details.get('fun_name', '?')).removeprefix('jit(').removesuffix(')')


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
  """Count the programs compiled in the block."""
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
  """Set JAX's compilation cache to `folder`.

  Small programs are cached too, because together they take longer to compile than the large ones.
  '' keeps JAX's own settings, such as JAX_COMPILATION_CACHE_DIR from the environment.
  """
  if folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    # XLA's own caches make the folder's path part of each program's key, so the cache would be
    # useless once the folder is copied or mounted elsewhere.
    jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
