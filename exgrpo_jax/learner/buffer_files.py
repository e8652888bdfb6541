"""The replay buffer as flat NumPy arrays, for a checkpoint."""

from collections.abc import Mapping

import numpy as np

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.datatypes import Trajectory


def flatten(buffer: Buffer) -> dict[str, np.ndarray]:
  """The buffer as flat arrays; `unflatten` gives it back exactly.

  Every array begins with a dummy element, since the array store refuses empty ones.
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


def unflatten(arrays: Mapping[str, np.ndarray]) -> Buffer:
  """The inverse of `flatten`."""
  column = {name: np.asarray(values)[1:] for name, values in arrays.items() if name != 'started'}
  ends = np.cumsum(column['length'])[:-1]
  stored = [
    Trajectory(tokens=tokens, logp=logp, reward=float(reward), step=int(step))
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
      correctness=float(correctness),
      prompt_length=int(prompt_length),
      trajectories=tuple(stored[start : start + count]),
    )
    start += count
  retired = {int(r): int(e) for r, e in zip(column['retired_row'], column['retired_epoch'])}
  return Buffer(
    entries=entries, retired_epoch=retired, started=bool(np.asarray(arrays['started'])[0])
  )
