"""This machine: its accelerators, and how much of its memory JAX takes.

Import this before JAX, which starts threads.
"""

import contextlib
import ctypes
import functools
import glob
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

from exgrpo_jax.errors import InputError

# The share of a GPU's memory that JAX takes. JAX's default of three quarters leaves 6 GB of a 24 GB
# card unused; a tenth is enough for CUDA, its libraries and a screen.
SHARE = 0.9
_SHARE_VARIABLES = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
# XLA's messages on its platforms.
_EXHAUSTED = re.compile('RESOURCE_EXHAUSTED|out of memory|bad_alloc', re.IGNORECASE)

_DEVICE_FILES = {  # JAX's platform name -> patterns
  'cuda': ('/dev/nvidia[0-9]*',),
  'tpu': ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*'),
  'rocm': ('/dev/kfd',),
}
_CGROUP_LIMIT = pathlib.Path('/sys/fs/cgroup/memory.max')
_NVIDIA = pathlib.Path('/proc/driver/nvidia/version')

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_INT_MAX = 2**31 - 1  # the largest value it takes


def platforms() -> list[str]:
  """Return the platforms with a device file, usable by JAX or not; not only TPUs use vfio."""
  return [
    platform
    for platform, patterns in _DEVICE_FILES.items()
    if any(glob.glob(pattern) for pattern in patterns)
  ]


@functools.cache
def has_bfloat16_units(cpuinfo: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> bool:
  """Return True if the CPU has bfloat16 matrix units (Intel AMX). Only Linux reports them."""
  return cpuinfo.is_file() and 'amx_bf16' in cpuinfo.read_text().split()


def count_cores() -> int:
  """Return the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def physical_memory() -> int:
  """Return the bytes of the machine's memory; 0 if that is not known."""
  if 'SC_PHYS_PAGES' not in os.sysconf_names:
    return 0
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def host_memory() -> int:
  """Return the bytes of memory that this process may use, without swap; 0 if not known."""
  physical = physical_memory()
  limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else ''
  return min(physical, int(limit)) if limit.isdigit() else physical


def nvidia_driver() -> str:
  """Return the version of NVIDIA's kernel module, such as '550.54.15'; '' if there is none."""
  text = _NVIDIA.read_text() if _NVIDIA.exists() else ''
  found = re.search(r'Kernel Module.*?(\d+\.[\d.]+)', text)
  return found[1] if found else ''


def keep_pages() -> None:
  """Make glibc keep freed memory for the next call, if JAX computes on the CPU.

  XLA:CPU allocates a program's temporary arrays again at every call. glibc maps large ones from the
  system and unmaps them again, so the kernel zeroes every page at its first touch: up to half of
  the time of a small model's update. Call this before any import starts a thread, because threads
  keep the arena that they have.
  """
  library = ctypes.CDLL(None) if sys.platform == 'linux' else None
  if not hasattr(library, 'gnu_get_libc_version') or platforms():
    return
  library.mallopt(_MMAP_MAX, 0)  # large arrays come from the heap as well
  library.mallopt(_TRIM_THRESHOLD, _INT_MAX)  # its free end is returned only above 2 GiB
  library.mallopt(_ARENA_MAX, 1)  # other arenas are too small for large arrays


def take_share() -> None:
  """Set JAX's share of a GPU to SHARE, unless the environment sets it; call before JAX starts."""
  if not any(name in os.environ for name in _SHARE_VARIABLES):
    os.environ[_SHARE_VARIABLES[0]] = str(SHARE)


@contextlib.contextmanager
def explained(largest: Callable[[], str] | None = None) -> Iterator[None]:
  """Turn running out of memory in the block into an InputError.

  `largest` returns a sentence about the largest array. It is called only if memory runs out.
  """
  try:
    yield
  except (RuntimeError, MemoryError) as error:  # XLA raises RuntimeError; on a CPU either may come
    if not isinstance(error, MemoryError) and not _EXHAUSTED.search(str(error)):
      raise
    first_line = str(error).strip().partition('\n')[0][:300] or 'MemoryError'
    raise InputError(
      f'the memory is full ({first_line}). {largest() + " " if largest else ""}'
      'Lower config.rollout.slots, the responses that decode at once, or '
      'config.microbatch.tokens, the tokens of a forward and backward pass. They change only '
      'memory and time, and a run can resume with other values. For a GPU, '
      '`exgrpo capacity --config=… --device=… --fit` computes how large they may be.'
    ) from error
