"""Train state, buffer, cursor and step: saved together or not at all (orbax).

Orbax writes into a temporary directory and renames it when everything is there,
so a kill leaves the checkpoint of before. The buffer becomes a few flat arrays:
all tokens after one another, and offsets.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.optimizer import TrainState
from exgrpo_jax.replay import Buffer, Entry
from exgrpo_jax.types import Cursor, Trajectory


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
      max_to_keep=config.keep if config else None, create=config is not None,
      read_only=config is None)
  return ocp.CheckpointManager(epath.Path(workdir).absolute() / 'checkpoints', options=options)


def save(manager: ocp.CheckpointManager, snapshot: Snapshot) -> None:
  """Writes a snapshot, whole or not at all."""
  manager.save(snapshot.step, args=ocp.args.Composite(
      state=ocp.args.StandardSave(snapshot.state),
      buffer=ocp.args.StandardSave(flatten(snapshot.buffer)),
      cursor=ocp.args.JsonSave(dataclasses.asdict(snapshot.cursor))))
  # The next update gives the state's memory away, which on CPU the writer may still read.
  manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, step: int, like: Any) -> Snapshot:
  """What `save` wrote at `step`; `like` gives the state's structure and layout."""
  found = manager.restore(step, args=ocp.args.Composite(
      state=ocp.args.StandardRestore(like), buffer=ocp.args.StandardRestore(),
      cursor=ocp.args.JsonRestore()))
  return Snapshot(step, found['state'], unflatten(found['buffer']), Cursor(**found['cursor']))


def restore_params(workdir: str, step: int | None, like: Any) -> tuple[Any, int]:
  """The parameters alone, of `step` or of the newest checkpoint under `workdir`."""
  with open_manager(workdir) as manager:
    steps = manager.all_steps()
    step = max(steps, default=None) if step is None else step
    if step not in steps:
      raise InputError(f'{workdir}/checkpoints has no step {step}; it has: '
                       f'{", ".join(map(str, sorted(steps))) or "none"}.')
    path = manager.directory / str(step) / 'state'
  with ocp.PyTreeCheckpointer() as checkpointer:
    item = {'params': like}
    found = checkpointer.restore(path, ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True))
  return found['params'], step


def save_params(path: str, params: Any) -> None:
  """Parameters alone, whole or not at all, e.g. those of a warm start."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(epath.Path(path).absolute(), params)


def load_params(path: str, like: Any) -> Any:
  """What `save_params` wrote, laid out as `like`."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(epath.Path(path).absolute(), like)


def like(tree: Any) -> Any:
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
      'retired_epoch': ([epoch for _, epoch in retired], np.int64)}
  arrays = {name: np.concatenate([np.zeros(1, kind), np.asarray(values, kind)])
            for name, (values, kind) in columns.items()}
  return arrays | {'started': np.array([buffer.started], np.int32)}


def unflatten(arrays: dict[str, np.ndarray]) -> Buffer:
  """The inverse of `flatten`."""
  column = {name: np.asarray(values)[1:] for name, values in arrays.items() if name != 'started'}
  ends = np.cumsum(column['length'])[:-1]
  stored = [Trajectory(tokens, logp, float(reward), int(step)) for tokens, logp, reward, step
            in zip(np.split(column['tokens'], ends), np.split(column['logp'], ends),
                   column['reward'], column['step'])]
  entries, start = {}, 0
  for row, correctness, prompt_length, count in zip(
      column['row'], column['correctness'], column['prompt_length'], column['num_trajectories']):
    entries[int(row)] = Entry(float(correctness), int(prompt_length),
                              tuple(stored[start:start + count]))
    start += count
  retired = {int(r): int(e) for r, e in zip(column['retired_row'], column['retired_epoch'])}
  return Buffer(entries, retired, bool(np.asarray(arrays['started'])[0]))
