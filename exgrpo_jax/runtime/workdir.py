"""The workdir: one run's folder, bound to one config, and the settings a resumed run may change."""

import contextlib
import datetime
import errno
import fcntl
import functools
import json
import math
import os
import pathlib
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO

from ml_collections import ConfigDict

from exgrpo_jax import renamed
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity, hosts
from exgrpo_jax.runtime.replacement import replacing

# ---- The lock of a folder ----

# The lock is an flock on a file in the folder. The kernel releases it when the process that holds
# it ends, so stale locks need no cleanup. On NFS, the lock applies to all hosts. Some mounted
# buckets do not support flock, so nothing keeps out other hosts or other processes on this host.

# An NFS server keeps the locks of a dead host until the host's lease ends, usually after 90 s.
LEASE_SECONDS = 120.0
_POLL_SECONDS = 1.0
RUN_LOCK = 'run.lock'  # in a workdir, held by the process that trains there
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def folder_held(folder: str, name: str, refusal: str) -> Iterator[int]:
  """Lock the file `name` in `folder`, creating it if missing; yield its file descriptor.

  A process that inherits the descriptor holds the lock too, even after its parent dies. If another
  process holds the lock, raises InputError with `refusal` and the owner: immediately if the owner
  is on this machine, otherwise after LEASE_SECONDS, when a dead host's lock would have expired.
  """
  path = os.path.join(folder, name)
  os.makedirs(folder, exist_ok=True)
  with open(path, 'a+b', buffering=0) as file:
    _take(file, refusal)
    since = datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')
    me = f'{_machine()} process {os.getpid()} on {socket.gethostname()}, at {since}'
    with contextlib.suppress(OSError):  # the disk may be full; this text is only for error messages
      file.truncate(0)
      file.write(me.encode())
    yield file.fileno()


@contextlib.contextmanager
def in_turn_of(folder: str, name: str, message: str) -> Iterator[None]:
  """Lock a file as `folder_held` does, but if the lock is taken, print `message` and wait."""
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, name), 'ab', buffering=0) as file:
    if not _lock(file):
      print(message, flush=True)
      with activity.doing(message):
        _lock(file, wait=True)
    yield


def _take(file: BinaryIO, refusal: str) -> None:
  deadline = time.monotonic() + LEASE_SECONDS
  is_waiting = False
  while not _lock(file):
    file.seek(0)
    machine, _, owner = file.read().decode(errors='replace').partition(' ')
    reason = f'The lock was taken by {owner or "another process just now"}'
    if machine in ('', _machine()) or time.monotonic() >= deadline:
      raise InputError(f'{refusal} {reason}.')
    if not is_waiting:
      is_waiting = True
      print(f'{file.name}: {reason}. Waiting up to {LEASE_SECONDS:.0f} s.', flush=True)
    time.sleep(_POLL_SECONDS)


def _lock(file: BinaryIO, wait: bool = False) -> bool:
  """Lock the file and return True.

  If another process holds the lock, waits for it if `wait` is True, and otherwise returns False.
  If the file system does not support locks, warns and returns True.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno not in _UNSUPPORTED:
      raise
    hosts.warn(
      f'{file.name}: this file cannot be locked ({error}). Make sure no other process is '
      'writing to its folder.'
    )
  return True


def is_abandoned(path: pathlib.Path) -> bool:
  """Return True if the lock was last held by a process on this machine and is now free.

  The check takes the lock for an instant, so a run that starts just then is rejected. Once this
  has returned True, do not check again until the file changes.
  """
  with contextlib.suppress(OSError), open(path, 'rb') as file:
    if file.read().startswith(f'{_machine()} '.encode()):
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises an OSError if the lock is held
      return True
  return False


def _machine() -> str:
  """Return an id unique to this machine, because containers may share host names and PIDs."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  except OSError:
    return socket.gethostname()


# Settings that affect a run's outputs or speed, but not what it learns. Mesh, slots and microbatch
# affect only rounding. With partial rollouts, slots also affect how many groups are in flight.
WITHOUT_EFFECT = (
  'checkpoint.', 'export.', 'metrics.', 'mesh.', 'compilation_cache', 'data.cache_dir',
  'grading.workers', 'environment.workers', 'rollout.slots', 'rollout.logit_chunk',
  'microbatch.tokens', 'microbatch.remat',
)  # fmt: skip
# Settings that a resumed run may change. With partial rollouts, drafts and kept caches change which
# responses end first. `_changes` adds num_steps and num_epochs. Any other change would mix two
# experiments in one set of records.
FREE = (
  *WITHOUT_EFFECT, 'evaluation.', 'data.validation', 'data.evaluation', 'logprob_check.',
  'grading.batch_timeout', 'rollout.drafts', 'environment.keep_caches',
)  # fmt: skip

# Settings that older runs lack, by section, with values that reproduce how those runs behaved.
_MODEL_SWITCHES = ('output_bias', 'mlp_bias', 'norm_offset', 'norm_all_heads', 'scaled_embeddings')
_MODEL_NUMBERS = ('query_scale', 'query_beta', 'attention_cap', 'logit_cap')
_ADDED = {
  'grading': dict(verifier='built_in'),
  'replay': dict(
    include_trajectory=True, store='successes', max_age=math.inf, age_decay=math.inf, max_drift=1e-3
  ),
  'objective': dict(
    replay_advantage='group', m2po_threshold=math.inf, balance_coefficient=0.0, mask_truncated=False
  ),
  'optimizer': dict(name='adamw', epochs=1, max_kl=math.inf),
  'prompt': dict(template_kwargs=''),
  'environment': dict(keep_caches=False),
  'rollout': dict(router_replay=False, drafts='0', dynamic_sampling=1.0),
  'mesh.training': dict(expert=1),
  'mesh.decoding': dict(expert=1),
  'model': dict(
    activation='silu',
    norms='before',
    layers='f',
    window=0,
    num_experts=0,
    experts_per_token=0,
    normalised_experts=False,
    **dict.fromkeys(_MODEL_SWITCHES, False),
    **dict.fromkeys(_MODEL_NUMBERS, 0.0),
  ),
  'model.rope': dict(beta_fast=32.0, beta_slow=1.0, attention_factor=1.0),
}
# Sections that older runs lack, with values for single turns and no sliding window.
_ENVIRONMENT = dict(
  name='', tools=[], max_turns=8, max_turn_tokens=0, keep_caches=True,
  discount=1.0, workers=0, time_limit=5.0, memory_limit=1024,
)  # fmt: skip
_LOCAL_ROPE = dict(
  theta=1e4, scaling='none', factor=1.0, original_positions=4096,
  low_frequency_factor=1.0, high_frequency_factor=4.0, **_ADDED['model.rope'],
)  # fmt: skip


# What a run writes in its workdir.
_FILES = (
  RUN_LOCK, 'config.json', 'console.log', 'environment.json', 'hub.json', 'metrics.jsonl',
  'report.html', 'tokenizer.model',
)  # fmt: skip
_FOLDERS = (
  'checkpoints', 'damaged', 'evaluation', 'export', 'records', 'samples', 'tensorboard',
  'tokenizer', 'traces', 'warm_start',
)  # fmt: skip


def check_local(place: str) -> None:
  """Raise InputError if `place`, a path or key=path, is a URL instead of a local folder."""
  if '://' in place:
    raise InputError(
      f'{place}: this must be a local folder, because it is accessed through the file system. '
      'Mount the bucket, for example with Cloud Storage FUSE, and pass the mounted folder.'
    )


def check_entries(workdir: str) -> None:
  """Raise InputError if `workdir` is a URL or a file, or contains an entry of the wrong kind.

  An entry has the wrong kind if it is a folder where a run needs a file, or vice versa.
  """
  check_local(workdir)
  if os.path.isfile(workdir):
    raise InputError(f'{workdir}: this is a file. Choose a folder.')
  kinds = (
    (_FILES, os.path.isdir, 'a file', 'folder'),
    (_FOLDERS, os.path.isfile, 'a folder', 'file'),
  )
  for names, is_wrong, kind, actual in kinds:
    for path in (os.path.join(workdir, name) for name in names):
      if is_wrong(path):
        raise InputError(
          f'{path}: a run needs {kind} here, but this is a {actual}. Move or rename the {actual}.'
        )


def is_model(values: Mapping[str, Any]) -> bool:
  """Return True if a config.json describes a Hugging Face model rather than a run."""
  return 'architectures' in values or 'model_type' in values


def check_no_model(place: str, folder: str) -> None:
  """Raise InputError if `folder`, called `place`, contains a model or the wrong entries."""
  check_entries(folder)
  values = None
  with contextlib.suppress(OSError, ValueError):  # not a model's; a run has its own error
    values = json.loads(pathlib.Path(folder, 'config.json').read_text())
  if isinstance(values, dict) and is_model(values):
    raise InputError(
      f"{place}: this must be a run's workdir, but it contains a Hugging Face model, such as an "
      'exported policy. Choose another folder.'
    )


def check_workdir(values: ConfigDict, workdir: str) -> str:
  """Return a message about changed settings, or ''.

  Raises InputError if the workdir belongs to a run with a different config. A run that never
  finished a step does not own its workdir: see `has_begun` and `release_workdir`. The settings in
  `FREE` may change, and so may num_steps and num_epochs unless the learning rate's schedule depends
  on them.
  """
  check_no_model(f'--workdir={workdir}', workdir)
  try:
    is_run = has_begun(workdir)
  except OSError as error:
    raise InputError(
      f'--workdir={workdir}: cannot read this folder ({error}). Choose another path, or change its '
      'permissions.'
    ) from error
  if is_run:
    allowed, refused = _changes(values, workdir)
    if refused:
      raise InputError(
        f'--workdir={workdir} belongs to a run with a different config: {"; ".join(refused)}. '
        'Choose another --workdir, or restore the config.'
      )
    if allowed:
      return f'{workdir}: resuming with changed settings: {"; ".join(allowed)}'
  elif not os.path.exists(os.path.join(workdir, 'config.json')) and _has_checkpoints(workdir):
    raise InputError(
      f'--workdir={workdir}: the folder contains checkpoints but no config.json, so their config '
      "is unknown. Copy the run's config.json to this folder, or choose another --workdir."
    )
  return ''


def check_policy(values: ConfigDict, workdir: str, sections: Collection[str]) -> None:
  """Raise InputError if the config differs from the run's config in one of these sections."""
  stored_sections, given_sections = (
    {name: each.get(name, {}) for name in sections} for each in _comparable_configs(values, workdir)
  )
  if messages := [
    f'config.{name} is {new!r}, but the run was trained with {old!r}'
    for name, old, new in differences(stored_sections, given_sections)
  ]:
    raise InputError(
      f"{workdir}: {'; '.join(messages)}. Leave out --config to use the run's config, or change "
      'these settings.'
    )


def _comparable_configs(values: ConfigDict, workdir: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return the stored and the given config. If the given dtype is 'auto', use the stored one."""
  stored_config, given_config = read_config(workdir), _as_json(values)
  if stored_dtype(given_config) == 'auto':
    given_config['model']['dtype'] = stored_dtype(stored_config)
  return stored_config, given_config


def _changes(values: ConfigDict, workdir: str) -> tuple[list[str], list[str]]:
  """Return the allowed and the rejected differences from the workdir's config.json."""
  stored_config, given_config = _comparable_configs(values, workdir)
  free = FREE + ('num_steps', 'num_epochs') * (given_config['optimizer']['schedule'] == 'constant')
  # Otherwise, new scores would be compared with scores on other questions.
  has_best = given_config['export']['best'] and pathlib.Path(workdir, 'export', 'best').exists()
  has_scores = given_config['evaluation']['patience'] and stored_config['data'].get('validation')
  fixed = ('data.validation', 'export.best_without') * bool(has_best or has_scores)
  allowed, refused = [], []
  if given_config['num_epochs']:
    given_config['num_steps'] = stored_config.get('num_steps')  # unused; see `claim_workdir`
  for name, old, new in differences(stored_config, given_config):
    messages = allowed if name.startswith(free) and name not in fixed else refused
    why = ', but new scores would be compared with earlier ones' * (name in fixed)
    messages.append(f'config.{name} was {old!r} and is now {new!r}{why}')
  return allowed, refused


def has_begun(workdir: str) -> bool:
  """Return True if a run has finished a step in the workdir, or exported a policy."""
  folder = pathlib.Path(workdir)
  if not exists(folder / 'config.json'):
    return False
  if exists(folder / 'export') or _has_checkpoints(workdir):
    return True
  metrics = folder / 'metrics.jsonl'
  # Step 0 is the evaluation before the first step. Damaged lines count as steps, to be safe.
  return exists(metrics) and any(
    line.strip() and not re.search(r'"step": 0\b', line)
    for line in metrics.read_text('utf-8', errors='replace').splitlines()
  )


def _has_checkpoints(workdir: str) -> bool:
  folder = pathlib.Path(workdir, 'checkpoints')
  return exists(folder) and any(path.name.isdigit() for path in folder.iterdir())


def exists(path: pathlib.Path) -> bool:
  """Return whether the path exists. Raises OSError if the file system cannot tell.

  From Python 3.14 on, `Path.exists` returns False in this case, and a run whose disk fails for a
  moment would look like a run that has not begun.
  """
  try:
    path.stat()
  except (FileNotFoundError, NotADirectoryError):
    return False
  return True


def release_workdir(values: ConfigDict, workdir: str) -> None:
  """Print the settings that a resumed run changes, or remove the files of an earlier attempt.

  Files are removed if that attempt used a different config and never finished a step. The caller
  must hold the workdir's lock (see `owned`). A warm start is kept, because a run with the same
  warm-start settings can reuse it.
  """
  config = os.path.join(workdir, 'config.json')
  with hosts.refusing_together():
    if not hosts.is_first():
      return
    # Until this run got the lock, another run may have written to the workdir.
    if changes := check_workdir(values, workdir):
      print(changes, flush=True)
    if os.path.exists(config) and not has_begun(workdir) and _changes(values, workdir)[1]:
      print(f'{workdir}: replacing an earlier run that never finished a step', flush=True)
      for name in ('tokenizer', 'evaluation'):
        shutil.rmtree(os.path.join(workdir, name), ignore_errors=True)
      for name in ('environment.json', 'hub.json', 'metrics.jsonl'):
        pathlib.Path(workdir, name).unlink(missing_ok=True)
      os.remove(config)  # last, because any start recreates the other files if they are missing


def check_writable(workdir: str) -> None:
  """Create the folder if it is missing. Raises InputError if it is not writable."""
  try:
    os.makedirs(workdir, exist_ok=True)
    with tempfile.TemporaryFile(dir=workdir):
      pass
  except OSError as error:
    raise InputError(
      f'--workdir={workdir}: cannot write to this folder ({error}). Choose a writable folder, '
      'because a run writes all its results there.'
    ) from error
  for name in (*_FILES, *_FOLDERS):
    path = os.path.join(workdir, name)
    if os.path.exists(path) and not os.access(path, os.W_OK):
      raise InputError(
        f'{path}: the current user cannot write to this path, but the run has to. Change its '
        'owner or permissions.'
      )


def check_folder(key: str, folder: str) -> None:
  """Raise InputError unless `folder` can be written to or created. Creates nothing."""
  check_local(f'{key}={folder}')
  ancestor = pathlib.Path(folder).absolute()
  while not ancestor.exists():
    ancestor = ancestor.parent
  if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
    raise InputError(
      f'{key}={folder}: {ancestor} is not a folder that the current user can write to. Choose '
      'another path.'
    )


def make_folder(key: str, folder: str) -> None:
  """Create a folder named in the config. Raises InputError if that fails.

  An existing folder may be read-only, because everything that is needed might already be in it.
  """
  if folder and '://' not in folder:  # a compilation cache may be in a bucket
    try:
      os.makedirs(os.path.expanduser(folder), exist_ok=True)
    except OSError as error:
      raise InputError(
        f'{key}={folder}: cannot create this folder ({error}). Choose a writable path.'
      ) from error


def check_hosts(values: ConfigDict, workdir: str, packages: Mapping[str, str]) -> None:
  """Raise InputError unless all hosts share the workdir, and have the same config and packages."""
  hosts.check_shared(workdir)
  first, *others = hosts.all_gather({'config': _as_json(values), 'version': dict(packages)})
  for number, other in enumerate(others, 1):
    for name, first_value, other_value in differences(first, other):
      raise InputError(
        f'{name} is {first_value} on host 0, but {other_value} on host {number}. Start all hosts '
        'with the same command and the same versions.'
      )


@contextlib.contextmanager
def owned(workdir: str) -> Iterator[None]:
  """Lock the workdir so that no other run writes there. All hosts of the run must call this.

  If another run holds the lock, raises InputError on all hosts, naming the owner's process and
  host. Reading needs no lock, and a killed run releases its lock immediately.
  """
  refusal = (
    f'--workdir={workdir}: another run is writing there, and two runs would overwrite each '
    "other's files. Wait for that run, stop it, or choose another --workdir."
  )
  with contextlib.ExitStack() as stack:
    with hosts.refusing_together():
      if hosts.is_first():
        stack.enter_context(folder_held(workdir, RUN_LOCK, refusal))
    yield


def claim_workdir(values: ConfigDict, workdir: str) -> None:
  """Claim the workdir for this config by writing config.json.

  With num_epochs, `values` must include the resulting num_steps, because reports read it. `values`
  must also include the dtype that 'auto' resolved to, so that the run keeps it on every machine.

  Call this after all checks have passed, so that a rejected start does not claim the workdir.
  """
  write_json(os.path.join(workdir, 'config.json'), _as_json(values))
  hosts.barrier('claim_workdir')


def write_json(path: str, value: Any) -> None:
  """Write `value` as JSON, atomically. With several hosts, only the first host writes."""
  if hosts.is_first():
    with replacing(path) as unfinished:
      unfinished.write_text(json.dumps(value, indent=2))


def read_config(workdir: str) -> dict[str, Any]:
  """Read the config of the run that owns a workdir. Raises InputError if there is none."""
  check_entries(workdir)
  path = os.path.join(workdir, 'config.json')
  if not os.path.exists(path):
    raise InputError(
      f"--checkpoint={workdir}: this is not a run's workdir, because it contains no config.json. "
      'Pass the --workdir of a training run.'
    )
  try:
    with open(path) as file:
      values = json.load(file)
    if not isinstance(values, dict):
      raise ValueError('not a JSON object')
  except (OSError, ValueError) as error:
    raise InputError(
      f"{path}: cannot read the run's config ({error}). Restore this file from a backup, or choose "
      'another folder.'
    ) from error
  values = as_current(values)
  values.setdefault('environment', _ENVIRONMENT)
  values.setdefault('num_epochs', 0.0)
  # Earlier versions accepted these combinations, in which a setting has no effect or does harm.
  environment, objective, optimizer = (
    value if isinstance(value := values.get(section), dict) else {}
    for section in ('environment', 'objective', 'optimizer')
  )
  is_uncorrected = objective.get('importance_correction') is False
  limits_kl = optimizer.get('max_kl', math.inf) < math.inf
  for is_so, section, name, value in (
    (environment.get('name'), 'verifier', 'require', []),
    (environment.get('name'), 'grading', 'weights', []),
    (is_uncorrected, 'objective', 'm2po_threshold', math.inf),
    (limits_kl, 'microbatch', 'drop_zero_advantage', False),
  ):
    if is_so and isinstance(values.get(section), dict):
      values[section][name] = value
  return values


def as_current(values: Mapping[str, Any]) -> dict[str, Any]:
  """Rename an earlier version's settings to their current names, and add the settings it lacks.

  `values` contains the sections of a config.json or of a warm start's origin.json. Missing sections
  are not added.
  """
  current_values = renamed.current_settings(values)
  for path, defaults in _ADDED.items():
    names = path.split('.')
    section = functools.reduce(lambda outer, name: (outer or {}).get(name), names, current_values)
    if isinstance(section, dict):
      section |= defaults | section
  if isinstance(current_values.get('model'), dict):
    current_values['model'].setdefault('local_rope', _LOCAL_ROPE)
  return current_values


def stored_dtype(values: Mapping[str, Any]) -> str:
  """Return model.dtype from the content of a config.json or origin.json.

  Returns 'auto' if it is missing. Runs of earlier versions also stored 'auto'.
  """
  section = values.get('model')
  return section.get('dtype', 'auto') if isinstance(section, Mapping) else 'auto'


def _as_json(values: ConfigDict) -> dict[str, Any]:
  return json.loads(json.dumps(values.to_dict()))


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ''
) -> list[tuple[str, Any, Any]]:
  """Return (dotted name, old value, new value) for each difference between nested mappings."""
  changes = []
  for name in sorted({*old, *new}):
    before, after = old.get(name), new.get(name)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
      changes += differences(before, after, f'{prefix}{name}.')
    elif before != after:
      changes.append((prefix + name, before, after))
  return changes
