"""Atomic checkpoints of train state, buffer, cursor, groups in flight and step, with orbax.

Orbax writes to a temporary directory while training continues and renames it once complete, so a
killed run still has its previous checkpoint. Orbax detects missing and truncated files, but only
our checksums detect every flipped bit in an array.
"""

import contextlib
import dataclasses
import io
import json
import math
import re
import shutil
import sys
import textwrap
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import LogRecord
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import future
from rich.filesize import decimal

from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.config import AUTHORS, setting
from exgrpo_jax.datatypes import FEATURES, Cursor, PartialGroup, Response, Span, Verdict
from exgrpo_jax.errors import InputError, with_causes
from exgrpo_jax.learner import buffer_files, storage
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.policy.model import Params
from exgrpo_jax.runtime import hosts

# ---- Partial rollouts ----

# Stored as three files: a JSON index, the concatenated tokens and per-token values of all
# responses, and a checksum of both. In a checkpoint, this item is called 'carried'.

_INDEX, _VALUES, _SUM = 'index.json', 'values.npz', 'crc32'
_DTYPES = {'tokens': np.int32, 'logp': np.float32, 'entropy': np.float32, 'tis_weight': np.float32}


def write_partial(folder: epath.Path, groups: Sequence[PartialGroup]) -> None:
  """Write the groups to an existing, empty folder."""
  responses = [response for group in groups for response in group.responses]
  values, columns = io.BytesIO(), dict[str, np.ndarray]()
  for name, dtype in _DTYPES.items():  # concatenated; some responses lack some of the fields
    arrays = [getattr(response, name) for response in responses]
    columns[name] = np.concatenate([np.zeros(0, dtype), *(x for x in arrays if x is not None)])
  feature_arrays = [buffer_files.arrays(response) for response in responses]
  for name in (field.name for field in FEATURES):  # as bytes; dtype and shape are in the index
    content = b''.join(arrays[name].tobytes() for arrays in feature_arrays if name in arrays)
    columns[name] = np.frombuffer(content, np.uint8)
  np.savez(values, **columns)  # pyright: ignore[reportArgumentType]
  index = json.dumps([_describe_group(group) for group in groups]).encode()
  (folder / _INDEX).write_bytes(index)
  (folder / _VALUES).write_bytes(values.getvalue())
  (folder / _SUM).write_text(str(zlib.crc32(values.getvalue(), zlib.crc32(index))))


def read_partial(folder: epath.Path) -> tuple[PartialGroup, ...]:
  """Read groups written by `write_partial`.

  Raises OSError if a file cannot be read, and ValueError if a file was changed.
  """
  index, values = (folder / _INDEX).read_bytes(), (folder / _VALUES).read_bytes()
  if str(zlib.crc32(values, zlib.crc32(index))) != (folder / _SUM).read_text():
    raise ValueError('carried: the data differs from what was saved')
  with np.load(io.BytesIO(values)) as file:
    columns = dict(file)
  return tuple(_restore_group(description, columns) for description in json.loads(index))


def _describe_group(group: PartialGroup) -> Mapping[str, Any]:
  """Convert a group, without its arrays, to JSON values."""
  return {
    'question_row': group.question_row,
    'drawn': group.drawn,
    'is_replay': group.is_drawn,  # the key that earlier versions used
    'verdicts': [verdict._asdict() for verdict in group.verdicts],
    'responses': [
      {
        'length': len(response.tokens),
        'weights': 0 if response.tis_weight is None else len(response.tis_weight),
        'truncated': response.truncated,
        'is_complete': response.is_complete,
        'spans': response.spans,
        'verdict': response.verdict and response.verdict._asdict(),
        **buffer_files.describe(response),
      }
      for response in group.responses
    ],
  }


def _restore_group(description: Mapping[str, Any], columns: dict[str, np.ndarray]) -> PartialGroup:
  """Rebuild a group, removing its arrays from the front of `columns`."""

  def take(name: str, count: int) -> np.ndarray:
    values, columns[name] = np.split(columns[name], [count])
    return values.copy()

  def take_array(name: str, dtype: str, *shape: int) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return take(name, size).view(dtype).reshape(shape)

  def response(item: Mapping[str, Any]) -> Response:
    return Response(
      tokens=take('tokens', item['length']),
      logp=take('logp', item['length']),
      entropy=take('entropy', item['length']),
      truncated=item['truncated'],
      tis_weight=take('tis_weight', item['weights']) if item['weights'] else None,
      is_complete=item['is_complete'],
      spans=tuple(Span(*span) for span in item['spans']),
      verdict=Verdict(**verdict) if (verdict := item.get('verdict')) else None,
      **buffer_files.restore(item, take_array),
    )

  return PartialGroup(
    question_row=description['question_row'],
    drawn=description['drawn'],
    is_drawn=description['is_replay'],
    responses=tuple(map(response, description['responses'])),
    verdicts=tuple(Verdict(**verdict) for verdict in description['verdicts']),
  )


class FolderHandler(ocp.AsyncCheckpointHandler):
  """An orbax handler that calls the function in `FolderArgs`."""

  async def async_save(self, directory: epath.Path, args: 'FolderArgs') -> list[future.Future]:
    """Start writing in the background."""

    async def write() -> None:
      self.save(directory, args)

    return [future.CommitFutureAwaitingContractedSignals(write())]

  def save(self, directory: epath.Path, args: 'FolderArgs') -> None:
    """Write synchronously."""
    if hosts.is_first():
      args.call(directory)

  def restore(self, directory: epath.Path, args: 'FolderArgs') -> Any:
    """Return the result of `args.call`."""
    return args.call(directory)


@ocp.args.register_with_handler(FolderHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FolderArgs(ocp.args.CheckpointArgs):
  """A function that reads a folder, or writes immutable data to an empty folder."""

  call: Callable[[epath.Path], Any]


# The checkpoint format. Format 1 stored no format number and stored the buffer as a few arrays.
# Format 2 lacked `carried`.
FORMAT = 3
NO_BASE: Mapping[str, int] = {}  # for states that contain the whole model
_NOT_WHAT_WAS_SAVED = 'the data differs from what was saved'


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """The checkpoint interval and the number of checkpoints to keep."""

  every: int = setting(
    50, '[1, inf)', 'number of steps between checkpoints; the last step is always saved', AUTHORS
  )
  keep: int = setting(2, '[1, inf)', 'the number of most recent checkpoints to keep', AUTHORS)


class DamagedError(Exception):
  """Raised if a checkpoint's files are missing, truncated or changed."""


class Snapshot(NamedTuple):
  """Everything that a run needs to continue after `step` steps."""

  step: int
  state: TrainState
  buffer: Buffer
  cursor: Cursor  # after the last finished step, before the next plan
  partial_groups: tuple[PartialGroup, ...] = ()  # left for the next step


def open_manager(workdir: str, config: CheckpointConfig | None = None) -> ocp.CheckpointManager:
  """Open a run's checkpoints, read-only if `config` is None."""
  options = ocp.CheckpointManagerOptions(
    max_to_keep=config.keep if config else None,
    create=config is not None,
    read_only=config is None,
    cleanup_tmp_directories=config is not None,
    async_options=ocp.options.AsyncOptions(barrier_sync_fn=_wait_for_hosts),
  )
  return ocp.CheckpointManager(_folder(workdir), options=options)


def _wait_for_hosts(*, key: str, timeout_ms: int) -> None:
  """Wait for the other hosts, unless this host's write has failed.

  After a failure, the other hosts are waiting at an earlier barrier, which this host never reaches.
  Without this check, orbax would wait 20 minutes before raising this host's error.
  """
  if not sys.exc_info()[0]:  # orbax calls this in a `finally` block
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _folder(workdir: str) -> epath.Path:
  return epath.Path(workdir).absolute() / 'checkpoints'


def steps(workdir: str) -> list[int]:
  """List the steps of a run's complete checkpoints in ascending order.

  Lists the folder instead of opening a manager, because managers are slow and wait for other hosts.
  """
  folder = _folder(workdir)

  def names() -> list[str]:
    # Not folder.exists(): it is False, too, while the storage fails, and the run would start over.
    with contextlib.suppress(FileNotFoundError):
      return [path.name for path in folder.iterdir()]
    return []

  return sorted(map(int, filter(str.isdigit, storage.patiently(names, str(folder)))))


def buffer_folder(workdir: str, step: int) -> epath.Path:
  """Return the replay buffer's folder in the checkpoint of `step`; see buffer_files.py."""
  return _folder(workdir) / str(step) / 'buffer'


def save(
  manager: ocp.CheckpointManager, snapshot: Snapshot, base_sums: Mapping[str, int] = NO_BASE
) -> None:
  """Start writing a snapshot in the background, once the previous snapshot has been written.

  The caller may donate the state as soon as this returns. By then, orbax has copied the state to
  the host or, on CPU, keeps a reference that prevents JAX from reusing the memory. The buffer and
  the partial groups are immutable.

  `manager` must be open for writing. `base_sums`, the checksums of LoRA's frozen base, are saved so
  that a different base can be rejected when the checkpoint is restored.
  """
  manager.wait_until_finished()
  step, newest, cursor = snapshot.step, manager.latest_step(), dataclasses.asdict(snapshot.cursor)
  previous = None if newest is None else manager.directory / str(newest) / 'buffer'
  sums = storage.state_checksums(snapshot.state, cursor)
  manager.save(
    step,
    args=ocp.args.Composite(
      state=ocp.args.StandardSave(snapshot.state),
      buffer=FolderArgs(lambda folder: buffer_files.write(folder, step, snapshot.buffer, previous)),
      cursor=ocp.args.JsonSave(cursor),
      carried=FolderArgs(lambda folder: write_partial(folder, snapshot.partial_groups)),
      sums=ocp.args.JsonSave({'format': FORMAT, **base_sums, **sums}),
    ),
  )


def restore(
  manager: ocp.CheckpointManager, step: int, like: Any, base_sums: Mapping[str, int] = NO_BASE
) -> Snapshot:
  """Restore the snapshot of `step`; `like` specifies the state's structure and layout.

  If any host fails, every host raises the error:
    DamagedError: the checkpoint is damaged, or its data differs from what was saved.
    InputError: a host cannot read its part right now, or the checkpoint was written by a different
      version or contains adapters for a different base.
  """
  manager.wait_until_finished()
  path, sums, items = manager.directory / str(step), {}, {}
  with hosts.refusing_together(DamagedError):  # before the checksums, which are collective
    sums = _read(path, sums=ocp.args.JsonRestore())['sums']
    _check_format(path, sums)
    _check_base(path, sums, base_sums)
    items = _read(
      path,
      state=ocp.args.StandardRestore(like),
      buffer=FolderArgs(buffer_files.read),
      cursor=ocp.args.JsonRestore(),
      carried=FolderArgs(read_partial),
    )
  computed_sums = storage.state_checksums(items['state'], items['cursor'])
  with hosts.refusing_together(DamagedError):
    if array_names := storage.changed(sums, computed_sums):
      raise DamagedError(f'{array_names}: {_NOT_WHAT_WAS_SAVED}')
  state, buffer, cursor = (items[name] for name in ('state', 'buffer', 'cursor'))
  return Snapshot(step, state, buffer, Cursor(**cursor), partial_groups=items['carried'])


def _read(path: epath.Path, **items: ocp.args.CheckpointArgs) -> Mapping[str, Any]:
  """Read items from a checkpoint; raise InputError or DamagedError if that fails."""

  def read() -> Mapping[str, Any]:
    # Do not use a manager: it would wait for all hosts, including hosts that have failed.
    with contextlib.closing(ocp.CompositeCheckpointHandler()) as handler:
      return handler.restore(path, ocp.args.Composite(**items))

  try:
    with _ignoring_late_ends():
      return storage.patiently(read, str(path))
  except (InputError, MemoryError):
    raise
  except Exception as error:  # orbax and its stores raise many types
    cause: BaseException = error
    while cause.__cause__:  # orbax itself only says that reading failed
      cause = cause.__cause__
    text = f'{type(cause).__name__}: {cause}'.splitlines()[0].partition(' [tensorstore_spec')[0]
    raise DamagedError(textwrap.shorten(text, 1000, placeholder=' …')) from error


def _check_format(path: epath.Path, sums: Mapping[str, int]) -> None:
  number = sums.get('format', 1)
  if number != FORMAT:
    raise InputError(
      f'{path} was written by a different version of exgrpo_jax (checkpoint format {number}, but '
      f'this version reads {FORMAT}). Continue with the version that started the run, or use '
      'another --workdir.'
    )


def _check_base(path: epath.Path, sums: Mapping[str, int], base_sums: Mapping[str, int]) -> None:
  if array_names := storage.changed(sums, base_sums):
    raise InputError(
      f'{path} contains adapters that were trained on a different base (differing arrays: '
      f'{array_names}). Restore the original weights of config.model.path or of the warm start.'
    )


def restore_newest(
  manager: ocp.CheckpointManager, like: Any, base_sums: Mapping[str, int] = NO_BASE
) -> Snapshot | None:
  """Restore the newest intact snapshot; return None if nothing has been saved.

  Warns about newer, damaged checkpoints and moves them to a folder 'damaged' next to
  'checkpoints', because the run will save those steps again. Raises InputError and moves nothing if
  no checkpoint is intact or a checkpoint cannot be read right now.
  """
  problems = {}
  for step in sorted(manager.all_steps(), reverse=True):
    try:
      snapshot = restore(manager, step, like, base_sums)
    except DamagedError as error:
      problems[step] = str(error)
      continue
    for damaged_step, problem in problems.items():
      _put_aside(manager.directory, damaged_step, f'({problem})', step)
    if problems:
      hosts.barrier('damaged')
      manager.reload()
    return snapshot
  if problems:
    raise InputError(
      f'{manager.directory}: none of the checkpoints can be read. '
      + ' '.join(f'Step {step}: {problem}.' for step, problem in problems.items())
      + ' Restore a checkpoint from a backup, or use another --workdir.'
    )
  return None


def _put_aside(directory: epath.Path, step: int, reason: str, resumed_step: int) -> None:
  if not hosts.is_first():
    return
  target = directory.parent / 'damaged' / f'step_{step:06d}_{uuid.uuid4().hex[:8]}'
  target.parent.mkdir(parents=True, exist_ok=True)
  (directory / str(step)).rename(target)
  hosts.warn(
    f'the checkpoint from step {step} is damaged {reason}; resuming from step {resumed_step} '
    f'instead. Moved the damaged checkpoint to {target}'
  )


def restore_params(
  workdir: str, step: int | None, like: Params, base_sums: Mapping[str, int] = NO_BASE
) -> tuple[Params, int]:
  """Restore only (parameters, step) from a checkpoint in `workdir`, by default the newest one.

  Raises InputError if the step was not saved, or if its checkpoint is damaged or belongs to a
  different base.
  """
  saved_steps = steps(workdir)
  if step is None:
    step = _newest_step(workdir, saved_steps)
  if step not in saved_steps:
    step_names = ', '.join(map(str, saved_steps)) or 'none'
    raise InputError(
      f'{workdir}/checkpoints has no checkpoint for step {step}. Saved steps: {step_names}.'
    )
  path, item = _folder(workdir) / str(step), {'params': like}
  layout = ocp.checkpoint_utils.construct_restore_args(item)
  state = ocp.args.PyTreeRestore(item=item, restore_args=layout, partial_restore=True)
  try:
    items = _read(path, sums=ocp.args.JsonRestore(), state=state)
  except DamagedError as error:
    raise InputError(f'{path} is damaged ({error}). Choose another --step.') from error
  params = items['state']['params']
  _check_base(path, items['sums'], base_sums)
  computed_sums = storage.state_checksums(TrainState(params, ()), {})
  if array_names := storage.changed(items['sums'], computed_sums):
    raise InputError(
      f'{path}/state is damaged ({array_names}: {_NOT_WHAT_WAS_SAVED}). Choose another --step.'
    )
  return params, step


def restore_buffer(workdir: str) -> tuple[Buffer, int]:
  """Restore only (replay buffer, step) from the newest checkpoint in `workdir`.

  Raises InputError if `workdir` has no checkpoint, or if the newest checkpoint is damaged or was
  written by a different version.
  """
  step = _newest_step(workdir, steps(workdir))
  path = _folder(workdir) / str(step)
  try:
    items = _read(path, sums=ocp.args.JsonRestore(), buffer=FolderArgs(buffer_files.read))
  except DamagedError as error:
    raise InputError(f'{path} is damaged ({error}). Restore it from a backup.') from error
  _check_format(path, items['sums'])
  return items['buffer'], step


def _newest_step(workdir: str, saved_steps: Sequence[int]) -> int:
  if not saved_steps:
    raise InputError(f'{workdir}/checkpoints contains no complete checkpoint.')
  return max(saved_steps)


def save_params(path: str, params: Params) -> None:
  """Save only the parameters, for example after a warm start. The write is atomic."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(epath.Path(path).absolute(), params)


def load_params(path: str, like: Params) -> Params:
  """Load parameters written by `save_params`, in the layout of `like`."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(epath.Path(path).absolute(), like)


def abstract(tree: Any) -> Any:
  """Return a tree's shapes, dtypes and shardings, to pass to restore functions as `like`."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


# ---- The disk ----

# The system's write errors as Python and tensorstore word them, their meaning, and what to do.
_FAILURES = (
  ('no space left|quota exceeded|file too large', 'the disk is full', 'Free up some space'),
  (
    'input/output error|read-only file system|stale file handle',
    'the disk failed',
    'Repair the disk',
  ),
  (
    'too many open files',
    "the process has reached the system's limit on open files",
    'Raise the limit, for example with `ulimit -n 4096`,',
  ),
)


def check_space(workdir: str, state: TrainState) -> None:
  """Raise InputError if a checkpoint does not fit on the disk; print its size and the free space.

  `state` may consist of arrays or shapes. The buffer is ignored because it is small compared to a
  model.
  """
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  free_space = shutil.disk_usage(workdir).free
  if free_space < size:
    raise InputError(
      f'--workdir={workdir}: the disk has {decimal(free_space)} left, but a checkpoint takes '
      f'{decimal(size)}. Free up some space, or use another disk.',
      status=1,
    )
  print(f'a checkpoint takes {decimal(size)}; {workdir} has {decimal(free_space)} left', flush=True)


@contextlib.contextmanager
def explain_failure(workdir: str) -> Iterator[None]:
  """Convert an error raised in the block to an InputError if the system could not write files.

  Orbax wraps the file system's errors in many exception types.
  """
  hook, log = sys.unraisablehook, logging.get_absl_handler()
  # Each of orbax's threads logs the full error, before it is raised or long afterwards.
  log.addFilter(_is_unrelated)
  is_failing = False
  try:
    with _ignoring_late_ends():
      yield
  except Exception as error:
    reason = '' if isinstance(error, InputError) else _write_failure(error)
    if not reason:
      raise
    is_failing = True
    complete_steps = ', '.join(map(str, steps(workdir))) or 'none'
    _, meaning, remedy = next(row for row in _FAILURES if re.search(row[0], reason, re.IGNORECASE))
    raise InputError(
      f'--workdir={workdir}: {meaning} ({reason}). Complete checkpoints: {complete_steps}. '
      f'{remedy} and run the same command again to resume from the newest checkpoint.',
      status=1,
    ) from error
  finally:
    if not is_failing:
      log.removeFilter(_is_unrelated)
      sys.unraisablehook = hook


@contextlib.contextmanager
def _ignoring_late_ends() -> Iterator[None]:
  """Ignore tensorstore operations that end after orbax has given up on their checkpoint.

  If the block fails, they are ignored from then on, because they may end long afterwards.
  """
  hook = sys.unraisablehook

  def report_unraisable(unraisable: Any) -> None:
    if not re.search('Event loop is closed|TensorStore details', str(unraisable.exc_value)):
      hook(unraisable)

  sys.unraisablehook = report_unraisable
  yield
  sys.unraisablehook = hook


def _write_failure(error: BaseException) -> str:
  """Return the system's error message if one of `_FAILURES` caused `error`, else ''."""
  pattern = '|'.join(row[0] for row in _FAILURES)
  for cause in with_causes(error):
    for line in str(cause).splitlines():
      if match := re.search(pattern, line, re.IGNORECASE):
        return line[max(0, match.start() - 100) : match.end() + 100]
  return ''


def _is_unrelated(record: LogRecord) -> bool:
  error = record.exc_info[1] if record.exc_info else None
  return error is None or not _write_failure(error)
