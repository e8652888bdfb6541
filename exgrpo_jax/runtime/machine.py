"""This machine's accelerators and memory, and JAX's share of GPU memory.

Import this module and call `keep_pages` before importing JAX, because JAX starts threads.
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

# The share of a GPU's memory that JAX allocates. JAX's default of three quarters leaves 6 GB of a
# 24 GB card unused; a tenth is enough for CUDA, its libraries and a display.
SHARE = 0.9
_SHARE_VARIABLES = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
# XLA's out-of-memory messages on all platforms.
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
_INT_MAX = 2**31 - 1  # the largest value mallopt accepts


def platforms() -> list[str]:
  """Return the platforms with a device file, even if JAX cannot use them.

  A vfio file does not prove that the device is a TPU.
  """
  return [
    platform
    for platform, patterns in _DEVICE_FILES.items()
    if any(glob.glob(pattern) for pattern in patterns)
  ]


def has_matrix_units() -> bool:
  """Return True if the CPU has bfloat16 matrix units (AMX, in Intel server CPUs since 2023)."""
  return 'amx_bf16' in cpu_flags()


def has_fast_bfloat16() -> bool:
  """Return True if the CPU multiplies bfloat16 matrices about twice as fast as float32 matrices.

  These are the CPUs with AMX or AVX512_BF16, which AMD has supported since Zen 4.
  """
  return not cpu_flags().isdisjoint(('amx_bf16', 'avx512_bf16'))


@functools.cache
def cpu_flags(cpuinfo: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> frozenset[str]:
  """Return the names of the CPU's features. Only Linux reports them."""
  return frozenset(cpuinfo.read_text().split()) if cpuinfo.is_file() else frozenset()


def count_cores() -> int:
  """Return the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def physical_memory() -> int:
  """Return the machine's memory in bytes, or 0 if unknown."""
  if 'SC_PHYS_PAGES' not in os.sysconf_names:
    return 0
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def host_memory() -> int:
  """Return the memory that this process may use, excluding swap, in bytes; 0 if unknown."""
  physical = physical_memory()
  limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else ''
  return min(physical, int(limit)) if limit.isdigit() else physical


def nvidia_driver() -> str:
  """Return the version of NVIDIA's kernel module, such as '550.54.15', or '' if not found."""
  text = _NVIDIA.read_text() if _NVIDIA.exists() else ''
  match = re.search(r'Kernel Module.*?(\d+\.[\d.]+)', text)
  return match[1] if match else ''


def keep_pages() -> None:
  """Make glibc keep freed memory for reuse if JAX computes on the CPU.

  XLA:CPU reallocates a program's temporary arrays on every call. glibc maps and unmaps large arrays
  each time, so the kernel zeroes every page on first touch, which takes up to half the time of a
  small model's update. Call this before any import starts a thread, because existing threads keep
  their arena.
  """
  library = ctypes.CDLL(None) if sys.platform == 'linux' else None
  if not hasattr(library, 'gnu_get_libc_version') or platforms():
    return
  library.mallopt(_MMAP_MAX, 0)  # allocate large arrays on the heap too
  library.mallopt(_TRIM_THRESHOLD, _INT_MAX)  # return the heap's free end only above 2 GiB
  library.mallopt(_ARENA_MAX, 1)  # other arenas are too small for large arrays


def take_share() -> None:
  """Set JAX's share of GPU memory to SHARE unless already set. Call this before JAX starts."""
  if not any(name in os.environ for name in _SHARE_VARIABLES):
    os.environ[_SHARE_VARIABLES[0]] = str(SHARE)


@contextlib.contextmanager
def explained(largest: Callable[[], str] | None = None) -> Iterator[None]:
  """Turn out-of-memory errors in the block into InputError.

  `largest` returns a sentence about the largest array. It is called only if memory runs out.
  """
  try:
    yield
  except (RuntimeError, MemoryError) as error:  # XLA raises RuntimeError; on CPUs either may occur
    if not isinstance(error, MemoryError) and not _EXHAUSTED.search(str(error)):
      raise
    first_line = str(error).strip().partition('\n')[0][:300] or 'MemoryError'
    raise InputError(
      f'out of memory ({first_line}). {largest() + " " if largest else ""}'
      'Lower config.rollout.slots (responses decoded at the same time) or '
      'config.microbatch.tokens (tokens per forward and backward pass). These settings affect '
      'only memory and speed, so a resumed run may change them. For a GPU, '
      '`exgrpo capacity --config=… --device=… --fit` computes the largest values that fit.'
    ) from error
