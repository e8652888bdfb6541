"""A workdir: one run's folder, which belongs to one config, and what may change on resuming."""

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import folder_lock, hosts

# What a resumed run may change: how long it is, what it writes and evaluates on the way, and which
# machines compute it (another mesh, number of slots or size of microbatch changes nothing but
# rounding). With any other change its records would be those of two experiments.
FREE = (
  'evaluation.',
  'alignment.',
  'checkpoint.',
  'export.',
  'metrics.',
  'mesh.',
  'compilation_cache',
  'data.cache_dir',
  'data.validation',
  'data.evaluation',
  'parity.max',
  'grading.workers',
  'grading.max_failures',
  'grading.batch_timeout',
  'rollout.slots',
  'rollout.logit_chunk',
  'gradient.tokens_per_microbatch',
  'gradient.remat',
)

# Settings in the config.json of earlier versions that are gone, each with the one value it allowed.
_RETIRED = {'rollout.top_k': 0, 'rollout.top_p': 1.0, 'rollout.min_p': 0.0}
# Settings that are newer than some runs, each with the value that stands for what those did.
_ADDED = {'grading.verifier': 'built_in'}


def check_workdir(values: ConfigDict, workdir: str, sections: Collection[str] = ()) -> None:
  """Refuses a workdir that belongs to another config; compares only `sections` where given.

  A run may change what `FREE` names, and may be prolonged (num_steps, unless the learning rate's
  schedule depends on it); such changes are printed.
  """
  if '://' in workdir:
    raise InputError(
      f'--workdir={workdir} must be a local folder: metrics, samples and plots '
      'are written through the file system.'
    )
  if os.path.exists(os.path.join(workdir, 'config.json')):
    saved, given = read_config(workdir), _as_json(values)
    free = FREE + ('num_steps',) * (given['optimizer']['schedule'] == 'constant')
    allowed, refused = [], []
    for name, old, new in differences(saved, given):
      if not sections or name.split('.')[0] in sections:
        changed = allowed if name.startswith(free) else refused
        changed.append(f'config.{name} was {old}, is {new}')
    if refused:
      raise InputError(
        f'{workdir} belongs to another config: {"; ".join(refused)}. '
        'Choose another --workdir, or restore the config.'
      )
    if allowed:
      print(f'{workdir} resumes with another config: {"; ".join(allowed)}', flush=True)


def check_writable(workdir: str) -> None:
  """Makes the folder where it is missing; InputError where it cannot be written into."""
  try:
    os.makedirs(workdir, exist_ok=True)
    with tempfile.TemporaryFile(dir=workdir):
      pass
  except OSError as error:
    raise InputError(
      f'--workdir={workdir} cannot be written into ({error}); a run writes all its results there, '
      'so name a folder that can.'
    ) from error


def make_folder(key: str, folder: str) -> None:
  """Makes a folder that a config names where it is missing; InputError where that is impossible.

  One that is there may be read only, for what is in it may be all that is needed.
  """
  if folder and '://' not in folder:
    try:
      os.makedirs(os.path.expanduser(folder), exist_ok=True)
    except OSError as error:
      raise InputError(
        f'{key}={folder} cannot be made ({error}); name a folder that can.'
      ) from error


def check_hosts(values: ConfigDict, workdir: str) -> None:
  """Refuses hosts that do not share the workdir, or were given different configs."""
  hosts.check_shared(workdir)
  first, *others = hosts.all_gather(_as_json(values))
  for number, other in enumerate(others, 1):
    for name, of_first, of_other in differences(first, other):
      raise InputError(
        f'host 0 was given config.{name}={of_first} and host {number} config.{name}={of_other}; '
        'all must be started with the same command.'
      )


@contextlib.contextmanager
def owned(workdir: str) -> Iterator[None]:
  """Holds the workdir for this run, which alone may write there; all hosts of the run call it.

  Raises InputError on all of them, with the owner's process and host, where another run holds it.
  What only reads a workdir needs no lock. A killed run's is free at once.
  """
  refusal = ''
  with contextlib.ExitStack() as stack:
    if hosts.is_first():
      try:
        stack.enter_context(folder_lock.held(workdir, 'run.lock', _is_running(workdir)))
      except InputError as error:
        refusal = str(error)
    if refusal := hosts.broadcast_from_first(refusal):
      raise InputError(refusal)
    yield


def _is_running(workdir: str) -> str:
  return (
    f'--workdir={workdir}: another run is writing there, and two would destroy each other; wait '
    'for it, end it, or choose another --workdir.'
  )


def claim_workdir(values: ConfigDict, workdir: str) -> None:
  """Writes workdir/config.json: from now on the workdir belongs to this config.

  Called once all that the user gave has passed its checks, so that a refused start leaves
  the workdir to the corrected one.
  """
  os.makedirs(workdir, exist_ok=True)
  write_json(os.path.join(workdir, 'config.json'), _as_json(values))
  hosts.barrier('claim_workdir')


def write_json(path: str, value: Any) -> None:
  """Writes `value`, completely or not at all: a kill leaves the previous file.

  Of several hosts only the first writes.
  """
  if not hosts.is_first():
    return
  with open(path + '.new', 'w') as file:
    json.dump(value, file, indent=2)
  os.replace(path + '.new', path)


def read_config(workdir: str) -> dict[str, Any]:
  """The config that a workdir belongs to; refuses a folder that no run has claimed."""
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    raise InputError(
      f"--checkpoint={workdir} is no run's workdir: it holds no config.json; name train's."
    )
  try:
    with open(path) as file:
      values = json.load(file)
    if not isinstance(values, dict):
      raise ValueError('it is no object')
  except (OSError, ValueError) as error:
    raise InputError(
      f'{path} cannot be read as the config of a run ({error}); bring back a copy of it, or name '
      'another folder.'
    ) from error
  for name, value in _RETIRED.items():
    section, key = name.split('.')
    if values.get(section, {}).get(key) == value:
      del values[section][key]
  for name, value in _ADDED.items():
    section, key = name.split('.')
    if isinstance(values.get(section), dict):
      values[section].setdefault(key, value)
  return values


def _as_json(values: ConfigDict) -> dict[str, Any]:
  return json.loads(json.dumps(values.to_dict()))


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ''
) -> list[tuple[str, Any, Any]]:
  """(dotted name, old value, new value) of all that differs between nested mappings."""
  found = []
  for name in sorted({*old, *new}):
    before, after = old.get(name), new.get(name)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
      found += differences(before, after, f'{prefix}{name}.')
    elif before != after:
      found.append((prefix + name, before, after))
  return found
