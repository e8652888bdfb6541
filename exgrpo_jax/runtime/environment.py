"""What a run runs on: machine, versions, commit, and the memory it has taken.

workdir/environment.json has an entry for each start of the run.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shlex
import socket
import subprocess
import sys
from typing import Any

import jax

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.workdir import write_json

FILE = 'environment.json'
PARAMETERS = 'initial_parameters'  # the entry's digest of them, see checksums.digest

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


def record_start(workdir: str, first_step: int, parameters: str = '') -> None:
  """Appends what this start runs on; of several hosts only the first writes.

  `parameters` is a digest of those that the run begins with; '' where it is resumed.
  """
  start = describe(first_step) | ({PARAMETERS: parameters} if parameters else {})
  write_json(os.path.join(workdir, FILE), [*read(workdir), start])


def read(workdir: str) -> list[dict[str, Any]]:
  """What each start of the run ran on, see `describe`; none where there has been no start."""
  path = os.path.join(workdir, FILE)
  if not os.path.exists(path):
    return []
  try:
    with open(path) as file:
      return json.load(file)
  except ValueError as error:
    raise InputError(f'{path} is not JSON ({error}); delete it, a new one is made.') from error


def describe(first_step: int) -> dict[str, Any]:
  """The machine, the versions and the command, as JSON holds them."""
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
  """Those of this package and of what it computes with, by name, as far as they are installed."""
  installed = {name: _version(name) for name in _PACKAGES}
  return {'exgrpo_jax': __version__} | {
    name: version for name, version in installed.items() if version
  }


def peak_memory() -> dict[str, float]:
  """The most memory that this process and any of its devices have held so far, in GiB.

  Devices that do not say it, as the CPU, are left out.
  """
  unit = 1 if sys.platform == 'darwin' else 1024  # bytes there, KiB elsewhere
  host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [
    of_device['peak_bytes_in_use'] for of_device in stats if 'peak_bytes_in_use' in of_device
  ]
  return {'memory/host_peak': host / _GIB} | (
    {'memory/device_peak': max(peaks) / _GIB} if peaks else {}
  )


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return ''


def _commit(folder: pathlib.Path) -> dict[str, Any] | None:
  """The commit of the clone that `folder` belongs to, and whether it has been changed since.

  None where it is in no clone, or only lies in another project's, as an installed package may.
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
