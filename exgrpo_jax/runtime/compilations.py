"""What XLA compiles: counted, and kept on disk for the next start."""

import os

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'
_durations: list[float] = []  # seconds, of this process


def _note(event: str, duration: float, **_) -> None:
  if event == _EVENT:
    _durations.append(duration)


jax.monitoring.register_event_duration_secs_listener(_note)


def keep(folder: str) -> None:
  """Looks in `folder` before compiling, and keeps there what took over a second.

  '' leaves JAX's own setting, the environment's JAX_COMPILATION_CACHE_DIR.
  """
  if folder:
    jax.config.update('jax_compilation_cache_dir', os.path.expanduser(folder))


def metrics() -> dict[str, float]:
  """Programs compiled or read back from disk since the process began, and the seconds taken."""
  return {'speed/compilations': float(len(_durations)), 'time/compile_total': sum(_durations)}
