"""Train state, buffer, cursor and step: saved together or not at all (orbax).

Orbax writes into a temporary directory while training goes on, and renames it when everything
is there, so a kill leaves the checkpoint of before. The buffer becomes a few flat arrays:
all tokens after one another, and offsets. Orbax notices files that are gone or cut, but
not a wrong bit in an array; for that each checkpoint holds sums of its bits.
"""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Cursor, Trajectory
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.runtime import hosts


@dataclasses.dataclass(frozen=True)
class Config:
  every: int = setting('[1, inf)', 'steps between checkpoints; the last step is always saved')
  keep: int = setting('[1, inf)', 'newest checkpoints kept')


class Snapshot(NamedTuple):
  """All that a run needs to go on after `step` steps."""

  step: int
  state: TrainState
  buffer: Buffer
  cursor: Cursor  # behind the last finished step, before any prefetched plan


def open_manager(workdir: str, config: Config | None = None) -> ocp.CheckpointManager:
  """The checkpoints of a run. Without a config it only reads."""
  options = ocp.CheckpointManagerOptions(
    max_to_keep=config.keep if config else None,
    create=config is not None,
    read_only=config is None,
    cleanup_tmp_directories=config is not None,
  )
  return ocp.CheckpointManager(_folder(workdir), options=options)


def _folder(workdir):
  return epath.Path(workdir).absolute() / 'checkpoints'


def steps(workdir: str) -> list[int]:
  """The steps that a run has whole checkpoints of, the newest last.

  Read off the folder: a manager takes a while, and waits for the other hosts.
  """
  folder = _folder(workdir)
  names = [path.name for path in folder.iterdir()] if folder.exists() else []
  return sorted(map(int, filter(str.isdigit, names)))


def check_disk_space(workdir: str, state: TrainState) -> None:
  """Prints what a checkpoint of `state`, or of its shapes, takes and what the disk has.

  Raises InputError where the disk has less. The buffer is left out: it is small beside a model.
  """
  needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  free = shutil.disk_usage(workdir).free
  if free < needed:
    raise InputError(
      f'--workdir={workdir} has {free / 2**30:.2f} GiB left, and a checkpoint takes '
      f'{needed / 2**30:.2f}: clear the disk, or take another.'
    )
  print(
    f'a checkpoint takes {needed / 2**30:.2f} GiB; {workdir} has {free / 2**30:,.2f} left',
    flush=True,
  )


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
  """Begins to write a snapshot, whole or not at all, once the one before it is written.

  The state may be given away meanwhile: orbax has copied it to the host when it returns, or on
  CPU holds on to its memory, which JAX then does not hand on.
  """
  manager.wait_until_finished()
  buffer = flatten(snapshot.buffer)
  manager.save(
    snapshot.step,
    args=ocp.args.Composite(
      state=ocp.args.StandardSave(snapshot.state),
      buffer=ocp.args.StandardSave(buffer),
      cursor=ocp.args.JsonSave(dataclasses.asdict(snapshot.cursor)),
      sums=ocp.args.JsonSave(_sums(snapshot.state, buffer)),
    ),
  )


@contextlib.contextmanager
def explain_full_disk(workdir: str) -> Iterator[None]:
  """What fails in the block for want of room becomes an InputError that says so.

  The file system tells it to whoever writes, and orbax passes it on in errors of many kinds.
  """
  try:
    yield
  except Exception as error:
    if not re.search('no space left|quota exceeded', str(error), re.IGNORECASE):
      raise
    kept = ', '.join(map(str, steps(workdir))) or 'none'
    raise InputError(
      f'--workdir={workdir}: the disk is full ({str(error).splitlines()[-1]:.300}). '
      f'Checkpoints that are whole: {kept}. Make room and start the same command '
      'again; it goes on from the newest.'
    ) from error


def restore(manager: ocp.CheckpointManager, step: int, like: Any) -> Snapshot:
  """What `save` wrote at `step`; `like` gives the state's structure and layout.

  Raises ValueError, on every host, where one of them cannot read its part or a bit is not what
  it was.
  """
  manager.wait_until_finished()
  found, reason = None, ''
  try:
    found = _read(
      manager.directory / str(step),
      state=ocp.args.StandardRestore(like),
      buffer=ocp.args.StandardRestore(),
      cursor=ocp.args.JsonRestore(),
      sums=ocp.args.JsonRestore(),
    )
  except Exception as error:  # orbax and its stores have many kinds
    reason = f'{type(error).__name__}: {error}'.splitlines()[0][:300]
  _refuse_all(reason)  # before the sums, for which all are needed
  changed = _changed(found['sums'], _sums(found['state'], found['buffer']))
  _refuse_all(f'{changed}: not the bits that were saved' if changed else '')
  return Snapshot(step, found['state'], unflatten(found['buffer']), Cursor(**found['cursor']))


def _read(path, **items):
  """By the handler alone: behind it a manager waits for all hosts, also those that cannot read."""
  with contextlib.closing(ocp.CompositeCheckpointHandler()) as handler:
    return handler.restore(path, ocp.args.Composite(**items))


def _refuse_all(reason):
  """ValueError on all hosts where one has a reason; else they would wait for it for ever."""
  if reasons := [one for one in hosts.all_gather(reason) if one]:
    raise ValueError(reasons[0])


def restore_newest(manager: ocp.CheckpointManager, like: Any) -> Snapshot | None:
  """The newest snapshot that is whole; None where nothing has been saved.

  Damaged ones behind it are told, and moved into 'damaged' beside the checkpoints, since
  their steps will be saved again. Where none is whole InputError says why, and nothing moves.
  """
  damaged = {}
  for step in sorted(manager.all_steps(), reverse=True):
    try:
      snapshot = restore(manager, step, like)
    except ValueError as error:
      damaged[step] = str(error)
      continue
    for other, reason in damaged.items():
      _put_aside(manager.directory, other, f'({reason}), and the one of step {step} is taken')
    if damaged:
      hosts.barrier('damaged')
      manager.reload()
    return snapshot
  if damaged:
    raise InputError(
      f'{manager.directory}: none of its checkpoints can be read. '
      + ' '.join(f'Step {step}: {reason}.' for step, reason in damaged.items())
      + ' Bring a copy back, or start in another --workdir.'
    )
  return None


def _put_aside(directory, step, why):
  if not hosts.is_first():
    return
  place = directory.parent / 'damaged' / f'step_{step:06d}_{os.getpid()}'
  place.parent.mkdir(parents=True, exist_ok=True)
  (directory / str(step)).rename(place)
  hosts.warn(f'the checkpoint of step {step} is damaged {why}; it is now {place}')


def restore_params(workdir: str, step: int | None, like: Any) -> tuple[Any, int]:
  """The parameters alone, of `step` or of the newest checkpoint under `workdir`.

  Raises InputError where there is no such step, or a bit is not what it was.
  """
  there = steps(workdir)
  step = max(there, default=None) if step is None else step
  if step not in there:
    raise InputError(
      f'{workdir}/checkpoints has no step {step}; it has: {", ".join(map(str, there)) or "none"}.'
    )
  path, item = _folder(workdir) / str(step), {'params': like}
  found = _read(
    path,
    sums=ocp.args.JsonRestore(),
    state=ocp.args.PyTreeRestore(
      item=item,
      restore_args=ocp.checkpoint_utils.construct_restore_args(item),
      partial_restore=True,
    ),
  )
  params = found['state']['params']
  if changed := _changed(found['sums'], _sums(TrainState(params, ()), {})):
    raise InputError(f'{path}/state: {changed}: not the bits that were saved; take another --step.')
  return params, step


def save_params(path: str, params: Any) -> None:
  """Parameters alone, whole or not at all, e.g. those of a warm start."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(epath.Path(path).absolute(), params)


def load_params(path: str, like: Any) -> Any:
  """What `save_params` wrote, laid out as `like`."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(epath.Path(path).absolute(), like)


def _changed(saved, found):
  return ', '.join(name for name, value in found.items() if value != saved.get(name))


def _sums(state: TrainState, buffer: dict[str, np.ndarray]) -> dict[str, int]:
  """A sum of the bits of each array, by name: the same on every mesh, another for another bit."""
  sums = {
    jax.tree_util.keystr(path): int(value)
    for path, value in jax.tree_util.tree_leaves_with_path(jax.device_get(_bit_sums(state)))
  }
  return sums | {
    f'buffer.{name}': int(np.asarray(values).view(np.uint8).sum(dtype=np.uint64))
    for name, values in buffer.items()
  }


@jax.jit
def _bit_sums(state):
  """uint32 sums that wrap around, so that they come out alike in whatever order."""

  def bits(leaf):
    return jax.lax.bitcast_convert_type(leaf, f'uint{8 * leaf.dtype.itemsize}')

  return jax.tree.map(lambda leaf: jnp.sum(bits(leaf), dtype=jnp.uint32), state)


def abstract(tree: Any) -> Any:
  """Shapes, dtypes and shardings of a tree of arrays, for the restoring functions."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def flatten(buffer: Buffer) -> dict[str, np.ndarray]:
  """The buffer as flat arrays; `unflatten` gives it back exactly.

  Every array begins with one element that means nothing, since the array store
  refuses empty ones.
  """
  rows = sorted(buffer.entries)
  entries = [buffer.entries[row] for row in rows]
  stored = [trajectory for entry in entries for trajectory in entry.trajectories]
  retired = sorted(buffer.retired_epoch.items())
  columns = {
    'row': (rows, np.int64),
    'correctness': ([e.correctness for e in entries], np.float64),
    'prompt_length': ([e.prompt_length for e in entries], np.int64),
    'num_trajectories': ([len(e.trajectories) for e in entries], np.int64),
    'length': ([len(t.tokens) for t in stored], np.int64),
    'reward': ([t.reward for t in stored], np.float64),
    'step': ([t.step for t in stored], np.int64),
    'tokens': (np.concatenate([t.tokens for t in stored]) if stored else [], np.int32),
    'logp': (np.concatenate([t.logp for t in stored]) if stored else [], np.float32),
    'retired_row': ([row for row, _ in retired], np.int64),
    'retired_epoch': ([epoch for _, epoch in retired], np.int64),
  }
  arrays = {
    name: np.concatenate([np.zeros(1, kind), np.asarray(values, kind)])
    for name, (values, kind) in columns.items()
  }
  return arrays | {'started': np.array([buffer.started], np.int32)}


def unflatten(arrays: dict[str, np.ndarray]) -> Buffer:
  """The inverse of `flatten`."""
  column = {name: np.asarray(values)[1:] for name, values in arrays.items() if name != 'started'}
  ends = np.cumsum(column['length'])[:-1]
  stored = [
    Trajectory(tokens, logp, float(reward), int(step))
    for tokens, logp, reward, step in zip(
      np.split(column['tokens'], ends),
      np.split(column['logp'], ends),
      column['reward'],
      column['step'],
    )
  ]
  entries, start = {}, 0
  for row, correctness, prompt_length, count in zip(
    column['row'], column['correctness'], column['prompt_length'], column['num_trajectories']
  ):
    entries[int(row)] = Entry(
      float(correctness), int(prompt_length), tuple(stored[start : start + count])
    )
    start += count
  retired = {int(r): int(e) for r, e in zip(column['retired_row'], column['retired_epoch'])}
  return Buffer(entries, retired, bool(np.asarray(arrays['started'])[0]))
