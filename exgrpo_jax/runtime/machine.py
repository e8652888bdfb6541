"""This machine: its accelerators, and how much of its memory JAX takes.

Imported before JAX, which starts threads.
"""

import contextlib
import ctypes
import datetime
import functools
import glob
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import resource
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.workdir import write_json

# The share of a GPU's memory that JAX takes. Its default of three quarters leaves 6 GB of a card of
# 24 GB unused; a tenth is enough for CUDA, its libraries and a screen.
SHARE = 0.9
_SHARE_VARIABLES = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
# XLA's messages on its platforms.
_EXHAUSTED = re.compile('RESOURCE_EXHAUSTED|out of memory|bad_alloc', re.IGNORECASE)

_DEVICE_FILES = {  # by JAX's names of platforms
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
  """Platforms with a device file here, whether or not JAX can use them; not only TPUs use vfio."""
  return [
    platform
    for platform, patterns in _DEVICE_FILES.items()
    if any(glob.glob(pattern) for pattern in patterns)
  ]


@functools.cache
def has_bfloat16_units(cpuinfo: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> bool:
  """Whether the CPU has matrix units for bfloat16, Intel's AMX; Linux alone says it."""
  return cpuinfo.is_file() and 'amx_bf16' in cpuinfo.read_text().split()


def count_cores() -> int:
  """How many cores this process may use."""
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
  """The version of NVIDIA's kernel module, such as '550.54.15'; '' where there is none."""
  text = _NVIDIA.read_text() if _NVIDIA.exists() else ''
  found = re.search(r'Kernel Module.*?(\d+\.[\d.]+)', text)
  return found[1] if found else ''


def keep_pages() -> None:
  """Has glibc keep freed memory for the next call, where JAX computes on the CPU.

  XLA:CPU allocates a program's temporary arrays anew at every call. glibc maps large ones from the
  system and unmaps them again, so the kernel zeroes every page at its first touch: up to half of
  the time of a small model's update. Call it before any import starts a thread: threads keep the
  arena that they have.
  """
  library = ctypes.CDLL(None) if sys.platform == 'linux' else None
  if not hasattr(library, 'gnu_get_libc_version') or platforms():
    return
  library.mallopt(_MMAP_MAX, 0)  # large arrays come from the heap as well
  library.mallopt(_TRIM_THRESHOLD, _INT_MAX)  # whose free end is returned above 2 GiB only
  library.mallopt(_ARENA_MAX, 1)  # other arenas are too small for large arrays


def take_share() -> None:
  """Sets JAX's share of a GPU to SHARE, unless the environment sets it; call before JAX starts."""
  if not any(name in os.environ for name in _SHARE_VARIABLES):
    os.environ[_SHARE_VARIABLES[0]] = str(SHARE)


@contextlib.contextmanager
def explained(largest: Callable[[], str] | None = None) -> Iterator[None]:
  """Turn running out of memory in the block into an InputError.

  `largest` gives a sentence about what asks for most. It is called only if memory runs out.
  """
  try:
    yield
  except (RuntimeError, MemoryError) as error:  # XLA's is a RuntimeError; on a CPU either may come
    if not isinstance(error, MemoryError) and not _EXHAUSTED.search(str(error)):
      raise
    first_line = str(error).strip().partition('\n')[0][:300] or 'MemoryError'
    raise InputError(
      f'the memory is full ({first_line}). {largest() + " " if largest else ""}'
      'Lower config.rollout.slots, the responses that decode at once, or '
      'config.gradient.tokens_per_microbatch, those of a forward and backward pass: these change '
      'nothing but memory and time, and a run resumes with other values. For a GPU, '
      '`exgrpo capacity --config=… --device=… --fit` computes how large they may be.'
    ) from error


# ---- What a run ran on ----


FILE = 'environment.json'
PARAMETERS = 'initial_parameters'  # the entry's digest of them, see storage.digest

_PACKAGES = (
  'jax',
  'jaxlib',
  'libtpu',
  'jax-cuda12-pjrt',
  'jax-cuda13-pjrt',
  'flax',
  'optax',
  'orbax-checkpoint',
  'numpy',
)
_GIT_SECONDS = 10
_GIB = 2**30


def record_environment(workdir: str, first_step: int, parameters: str = '') -> None:
  """Appends what this start runs on; of several hosts only the first writes.

  `parameters` is a digest of the initial ones; '' where the run is resumed.
  """
  start = describe_environment(first_step) | ({PARAMETERS: parameters} if parameters else {})
  write_json(os.path.join(workdir, FILE), [*read_environment(workdir), start])


def read_environment(workdir: str) -> list[dict[str, Any]]:
  """What each start of the run ran on, see `describe_environment`; empty before the first."""
  path = os.path.join(workdir, FILE)
  if not os.path.exists(path):
    return []
  try:
    with open(path) as file:
      return json.load(file)
  except ValueError as error:
    raise InputError(f'{path} is not JSON ({error}); delete it, a new one is made.') from error


def describe_environment(first_step: int) -> dict[str, Any]:
  """The machine, the versions and the command, as JSON values."""
  device = jax.devices()[0]
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'first_step': first_step,
    'command': shlex.join(sys.orig_argv),
    'commit': _commit(pathlib.Path(__file__).parents[1]),
    'python': platform.python_version(),
    'packages': versions(),
    'device': {
      'platform': device.platform,
      'kind': device.device_kind,
      'count': jax.device_count(),
    },
    'hosts': jax.process_count(),
    'first_host': {'name': socket.gethostname(), 'system': platform.platform()},
  }


def versions() -> dict[str, str]:
  """The versions of this package and, where installed, of those it computes with, by name."""
  found = {'exgrpo_jax': __version__}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def peak_memory() -> dict[str, float]:
  """The peak memory of this process and of its fullest device so far, in GiB.

  A CPU does not report it, and is left out.
  """
  unit = 1 if sys.platform == 'darwin' else 1024  # bytes there, KiB elsewhere
  host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  peaks = [
    stats['peak_bytes_in_use']
    for device in jax.local_devices()
    if 'peak_bytes_in_use' in (stats := device.memory_stats() or {})
  ]
  found = {'memory/host_peak': host / _GIB}
  return found | ({'memory/device_peak': max(peaks) / _GIB} if peaks else {})


def _commit(folder: pathlib.Path) -> dict[str, Any] | None:
  """The commit of the clone that `folder` belongs to, and whether it has uncommitted changes.

  None outside a clone, or where an installed package merely lies in another project's.
  """

  def git(*words: str) -> str:
    return subprocess.run(
      ['git', *words],
      cwd=folder,
      check=True,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      stdin=subprocess.DEVNULL,
      timeout=_GIT_SECONDS,
    ).stdout.strip()

  try:
    git('ls-files', '--error-unmatch', '__init__.py')
    return {
      'hash': git('rev-parse', 'HEAD'),
      'has_uncommitted_changes': bool(git('status', '--porcelain', '--untracked-files=no')),
    }
  except (OSError, subprocess.SubprocessError):
    return None
