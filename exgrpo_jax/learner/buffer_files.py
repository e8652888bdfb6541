"""The replay buffer in a checkpoint: trajectory segments and an index.

A segment is a file of consecutive trajectories: int32 tokens, their float32 log-probabilities, and
the arrays that features add. A segment is written once. Later checkpoints hard-link the segment
while at least half of its data is still in the buffer. So a save writes mostly new trajectories,
yet every checkpoint is complete and can be copied, moved or deleted independently of the others. On
a file system without hard links, each save writes everything.

The index stores each question's data and each trajectory's location and checksum.
"""

import dataclasses
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.datatypes import FEATURES, TokenSequence, Trajectory

MAX_SEGMENTS = 64  # per checkpoint; with more, only the largest MAX_SEGMENTS / 2 are linked
_INDEX, _INDEX_SUM = 'index.npz', 'index.crc32'
_NUMBERS = [one for one in dataclasses.fields(Trajectory) if one.type in (float, int, bool)]
_FEATURES = [field.name for field in FEATURES]
_PLACES = ('segment', 'offset', 'length', 'sum')
_OF_TRAJECTORY = (*_PLACES, *(field.name for field in _NUMBERS), *_FEATURES)  # columns

Columns = Mapping[str, np.ndarray]  # name -> column of the index


def write(folder: epath.Path, step: int, buffer: Buffer, previous: epath.Path | None) -> None:
  """Write the buffer for the checkpoint of `step` into an existing, empty folder.

  Hard-links segments from `previous`, the previous checkpoint's buffer folder, unless it is None.
  """
  rows = sorted(buffer.entries)
  stored = [trajectory for row in rows for trajectory in buffer.entries[row].trajectories]
  columns = _describe(buffer, rows, stored)
  places = _places(previous) if previous else {}
  found = [places.get(identity, (-1, -1)) for identity in _identities(columns)]
  segment, offset = np.array(found, np.int64).reshape(-1, 2).T
  sizes = np.array([sum(values.nbytes for values in _content(one)) for one in stored], np.int64)
  linked = _link_segments(previous, folder, segment, sizes) if previous else []
  is_new = ~np.isin(segment, linked)
  segment[is_new] = step
  offset[is_new] = _write_segment(
    folder / _name(step), [trajectory for trajectory, new in zip(stored, is_new) if new]
  )
  content = io.BytesIO()
  np.savez(content, **columns, segment=segment, offset=offset)  # pyright: ignore[reportArgumentType]
  (folder / _INDEX).write_bytes(content.getvalue())
  (folder / _INDEX_SUM).write_text(str(zlib.crc32(content.getvalue())))


def read(folder: epath.Path) -> Buffer:
  """Read a buffer written by `write`; no two trajectories share memory.

  Raises OSError, or ValueError if the files were changed or truncated.
  """
  columns = _read_index(folder)
  trajectories = _read_trajectories(folder, columns)
  ends = np.cumsum(columns['num_trajectories']).tolist()
  numbers = (columns[name].tolist() for name in ('row', 'correctness', 'prompt_length'))
  entries = {
    row: Entry(correctness, prompt_length, tuple(trajectories[start:end]))
    for row, correctness, prompt_length, start, end in zip(*numbers, [0, *ends], ends)
  }
  retired = dict(zip(columns['retired_row'].tolist(), columns['retired_epoch'].tolist()))
  history = dict[int, tuple[float, float]]()
  if 'history_row' in columns:
    history = dict(zip(columns['history_row'].tolist(), map(tuple, columns['history'].tolist())))
  return Buffer(entries, retired, bool(columns['started']), history)


def read_some(
  folder: epath.Path, rows: Sequence[int], max_tokens: int
) -> dict[int, tuple[Trajectory, ...]]:
  """Read the stored trajectories of the questions in `rows` as row -> trajectories, oldest first.

  Skips rows that are not in the buffer. Stops before the total exceeds `max_tokens` tokens.
  Raises the same errors as `read`.
  """
  columns = _read_index(folder)
  tokens = dict.fromkeys(columns['row'].tolist(), 0)
  for row, length in zip(columns['question'].tolist(), columns['length'].tolist()):
    tokens[row] += length
  known = [row for row in rows if row in tokens]
  fits = np.cumsum([tokens[row] for row in known]) <= max_tokens
  chosen = [row for row, does in zip(known, fits) if does]
  inside = np.isin(columns['question'], chosen)
  own = {name: columns[name][inside] for name in _OF_TRAJECTORY if name in columns}
  found: dict[int, list[Trajectory]] = {row: [] for row in chosen}
  questions = columns['question'][inside].tolist()
  for row, trajectory in zip(questions, _read_trajectories(folder, own)):
    found[row].append(trajectory)
  return {row: tuple(trajectories) for row, trajectories in found.items()}


# ---- The index ----


def _describe(buffer: Buffer, rows: list[int], stored: list[Trajectory]) -> Columns:
  """Build all index columns except segment and offset, in the order of `rows` or `stored`."""
  entries = [buffer.entries[row] for row in rows]
  retired, history = sorted(buffer.retired_epoch.items()), dict(sorted(buffer.history.items()))
  num_trajectories = np.array([len(entry.trajectories) for entry in entries], np.int64)
  described = [describe(trajectory) for trajectory in stored]
  return {
    'started': np.array(buffer.started),
    'row': np.array(rows, np.int64),
    'correctness': np.array([entry.correctness for entry in entries], np.float64),
    'prompt_length': np.array([entry.prompt_length for entry in entries], np.int64),
    'num_trajectories': num_trajectories,
    'question': np.repeat(np.array(rows, np.int64), num_trajectories),
    **{
      field.name: np.array([getattr(one, field.name) for one in stored], field.type)
      for field in _NUMBERS
    },
    'length': np.array([len(trajectory.tokens) for trajectory in stored], np.int64),
    **{
      name: np.array([json.dumps(own[name]) if own[name] else '' for own in described], np.str_)
      for name in _FEATURES
    },
    'sum': np.array([_sum(trajectory) for trajectory in stored], np.int64),
    'retired_row': np.array([row for row, _ in retired], np.int64),
    'retired_epoch': np.array([epoch for _, epoch in retired], np.int64),
    **({'history_row': np.array(list(history), np.int64)} if history else {}),
    **({'history': np.array(list(history.values()), np.float64)} if history else {}),
  }


def _identities(columns: Columns) -> Iterator[tuple[int, ...]]:
  """Yield each trajectory's key, which identifies it across checkpoints."""
  return zip(*(columns[name].tolist() for name in ('question', 'step', 'length', 'sum')))


def _places(folder: epath.Path) -> dict[tuple[int, ...], tuple[int, int]]:
  """Map each trajectory's key to its (segment, offset); {} if the checkpoint is unreadable."""
  try:
    columns = _read_index(folder)
  except (OSError, ValueError):
    return {}
  where = zip(columns['segment'].tolist(), columns['offset'].tolist())
  return dict(zip(_identities(columns), where))


def _read_index(folder: epath.Path) -> Columns:
  content = (folder / _INDEX).read_bytes()
  if str(zlib.crc32(content)) != (folder / _INDEX_SUM).read_text():
    raise ValueError(f'buffer/{_INDEX}: the data differs from what was saved')
  with np.load(io.BytesIO(content)) as columns:
    return dict(columns)


# ---- Segments ----


def _name(segment: int) -> str:
  """Return a segment's file name; `segment` is the step whose checkpoint wrote it."""
  return f'segment_{segment:06d}'


def _link_segments(
  previous: epath.Path, folder: epath.Path, segment: np.ndarray, size: np.ndarray
) -> list[int]:
  """Link segments worth keeping from `previous` into `folder`; return their numbers.

  `segment` is each trajectory's segment in `previous`, negative for a new trajectory. `size` is
  each trajectory's size in bytes.
  """
  used = {
    int(number): int(size[segment == number].sum()) for number in np.unique(segment[segment >= 0])
  }
  largest_first = sorted(used, key=lambda number: -used[number])
  if len(largest_first) > MAX_SEGMENTS:
    del largest_first[MAX_SEGMENTS // 2 :]
  linked = []
  for number in largest_first:
    source = previous / _name(number)
    try:
      if used[number] >= source.stat().length / 2:
        os.link(source, folder / source.name)
        linked.append(number)
    except OSError:  # hard links are unsupported, or the file is gone: write it again
      pass
  return linked


def _write_segment(path: epath.Path, trajectories: Sequence[Trajectory]) -> list[int]:
  """Write trajectories to a file and return their offsets; do nothing if there are none."""
  if not trajectories:
    return []
  offsets = []
  with open(path, 'wb') as file:
    for trajectory in trajectories:
      offsets.append(file.tell())
      for values in _content(trajectory):
        file.write(values.data)
    file.flush()
    os.fsync(file.fileno())  # later checkpoints may link this file
  return offsets


def _read_trajectories(folder: epath.Path, columns: Columns) -> list[Trajectory]:
  """Read all trajectories, in index order."""
  count = len(columns['segment'])
  # Earlier versions stored fewer fields; missing fields get their defaults.
  numbers = {
    field.name: columns[field.name].tolist() if field.name in columns else [field.default] * count
    for field in _NUMBERS
  }
  features = {name: columns[name].tolist() for name in _FEATURES if name in columns}
  offset, length, sums = (columns[name].tolist() for name in ('offset', 'length', 'sum'))
  trajectories: list[Trajectory] = [None] * count  # pyright: ignore[reportAssignmentType]
  for number in np.unique(columns['segment']).tolist():
    inside = np.flatnonzero(columns['segment'] == number)
    with open(folder / _name(number), 'rb') as file:
      for index in inside[np.argsort(columns['offset'][inside])].tolist():
        file.seek(offset[index])
        described = {name: json.loads(own[index] or '[]') for name, own in features.items()}
        trajectories[index] = trajectory = Trajectory(
          tokens=_take(file, np.int32, length[index]),
          logp=_take(file, np.float32, length[index]),
          **{name: own[index] for name, own in numbers.items()},
          **restore(described, lambda _, *of_array, file=file: _take(file, *of_array)),
        )
        if _sum(trajectory) != sums[index]:
          raise ValueError(f'buffer/{_name(number)}: the data differs from what was saved')
  return trajectories


def _take(file: io.BufferedReader, dtype: Any, *shape: int) -> np.ndarray:
  """Read the next array from a segment."""
  values = np.empty(shape, dtype)
  if values.size and file.readinto(values.data) != values.nbytes:
    raise ValueError(f'buffer/{os.path.basename(file.name)}: the data differs from what was saved')
  return values


def _content(trajectory: Trajectory) -> list[np.ndarray]:
  tokens = np.ascontiguousarray(trajectory.tokens, np.int32)
  return [tokens, np.ascontiguousarray(trajectory.logp, np.float32), *arrays(trajectory).values()]


def _sum(trajectory: Trajectory) -> int:
  total = 0
  for values in _content(trajectory):
    total = zlib.crc32(values.data, total)
  return total


# ---- Feature fields of trajectories and responses ----


def describe(sequence: TokenSequence) -> dict[str, list[Any]]:
  """Convert the feature fields to JSON values; for arrays, only the dtype and shape."""

  def described(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
      return [str(value.dtype), *value.shape]
    return list(value or ())

  return {name: described(value) for name, value in sequence.features.items()}


def arrays(sequence: TokenSequence) -> dict[str, np.ndarray]:
  """Return the feature fields that are arrays."""
  values = sequence.features.items()
  return {name: np.ascontiguousarray(x) for name, x in values if isinstance(x, np.ndarray)}


def restore(described: Mapping[str, list[Any]], take: Callable[..., np.ndarray]) -> dict[str, Any]:
  """Undo `describe`; `take` reads an array, given its name, dtype and shape."""
  restored = dict[str, Any]()
  for field in FEATURES:
    if values := described.get(field.name):
      item = field.metadata.get('item')
      restored[field.name] = (
        tuple(item(*one) for one in values) if item else take(field.name, *values)
      )
  return restored
