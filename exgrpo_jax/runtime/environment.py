"""environment.json: the machine, versions and commit for each start of a run."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import console
from exgrpo_jax.runtime.workdir import write_json

FILE = 'environment.json'
PARAMETERS = 'initial_parameters'  # key of the initial parameters' digest; see storage.digest
QUESTIONS = 'training_questions'  # key of the training questions' digest; see `checks.check_data`

_PACKAGES = ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-pjrt', 'jax-cuda13-pjrt')
_PACKAGES += ('flax', 'optax', 'orbax-checkpoint', 'numpy')


def record_start(workdir: str, first_step: int, digests: Mapping[str, str]) -> None:
  """Append an entry for this start. With several hosts, only the first host writes.

  `digests` has the key QUESTIONS and, for a new run, also the key PARAMETERS.
  """
  write_json(os.path.join(workdir, FILE), [*read(workdir), {**describe(first_step), **digests}])


def read(workdir: str) -> list[dict[str, Any]]:
  """Return one entry per start of the run (see `describe`), or [] before the first start."""
  path = os.path.join(workdir, FILE)
  if not os.path.exists(path):
    return []
  try:
    with open(path) as file:
      return json.load(file)
  except ValueError as error:
    raise InputError(
      f'{path}: this file is not valid JSON ({error}). Delete it; a new one is written the next '
      'time the run starts.'
    ) from error


def describe(first_step: int) -> dict[str, Any]:
  """Describe the machine, the versions and the command as JSON values."""
  device = jax.devices()[0]
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'first_step': first_step,
    'command': console.to_copy(sys.orig_argv),
    'commit': _commit(pathlib.Path(__file__).parents[1]),
    'python': platform.python_version(),
    'packages': versions(),
    'device': dict(platform=device.platform, kind=device.device_kind, count=jax.device_count()),
    'hosts': jax.process_count(),
    'first_host': {'name': socket.gethostname(), 'system': platform.platform()},
  }


def versions() -> dict[str, str]:
  """Return the versions of this package and the installed packages it uses, keyed by name."""
  packages = {'exgrpo_jax': __version__}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      packages[name] = importlib.metadata.version(name)
  return packages


def peak_memory() -> dict[str, float]:
  """Return the peak memory use so far, in GiB, of this process and of its fullest device.

  CPU devices do not report a peak, so on a CPU only the process's peak is returned.
  """
  units = 2**30 if sys.platform == 'darwin' else 2**20  # macOS reports bytes, other systems KiB
  metrics = {'memory/host_peak': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units}
  all_stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [stats['peak_bytes_in_use'] for stats in all_stats if 'peak_bytes_in_use' in stats]
  return metrics | ({'memory/device_peak': max(peaks) / 2**30} if peaks else {})


def _commit(folder: pathlib.Path) -> dict[str, Any] | None:
  """Return the commit of the clone that contains `folder`, and whether it has local changes.

  Returns None outside a clone, or if the package is installed inside another project's clone.
  """

  def git(*words: str) -> str:
    null = subprocess.DEVNULL
    return subprocess.check_output(
      ['git', *words], cwd=folder, text=True, stdin=null, stderr=null, timeout=10
    ).strip()

  try:
    git('ls-files', '--error-unmatch', '__init__.py')
    return {
      'hash': git('rev-parse', 'HEAD'),
      'has_uncommitted_changes': bool(git('status', '--porcelain', '--untracked-files=no')),
    }
  except (OSError, subprocess.SubprocessError):
    return None
