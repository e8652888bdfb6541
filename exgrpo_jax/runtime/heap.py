"""The C library keeps the memory that programs on the CPU free, for their next call.

XLA:CPU allocates a program's temporary arrays anew at every call. glibc maps large ones from the
system and unmaps them again, so the kernel zeroes every page at its first touch: up to half of the
time of a small model's update.
"""

import ctypes
import sys

from exgrpo_jax.runtime import hardware

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_INT_MAX = 2**31 - 1  # the largest value it takes


def keep_pages() -> None:
  """Freed memory stays with this process, where JAX computes on the CPU and the library is glibc.

  To be called before any import starts a thread: threads keep the arena that they have.
  """
  library = ctypes.CDLL(None) if sys.platform == 'linux' else None
  if not hasattr(library, 'gnu_get_libc_version') or hardware.platforms():
    return
  library.mallopt(_MMAP_MAX, 0)  # large arrays come from the heap as well
  library.mallopt(_TRIM_THRESHOLD, _INT_MAX)  # whose free end is returned above 2 GiB only
  library.mallopt(_ARENA_MAX, 1)  # other arenas are too small for large arrays
