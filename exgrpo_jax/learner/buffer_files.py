"""The replay buffer in a checkpoint: trajectory segments and an index.

A segment is a file of consecutive trajectories: int32 tokens, their float32 log-probabilities, and
the arrays added by features. A segment is written once. Later checkpoints hard-link the segment
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
_NUMBERS = [field for field in dataclasses.fields(Trajectory) if field.type in (float, int, bool)]
_FEATURES = [field.name for field in FEATURES]
_PLACES = ('segment', 'offset', 'length', 'sum')
_TRAJECTORY_COLUMNS = (*_PLACES, *(field.name for field in _NUMBERS), *_FEATURES)  # columns

Columns = Mapping[str, np.ndarray]  # name -> column of the index


def write(folder: epath.Path, step: int, buffer: Buffer, previous: epath.Path | None) -> None:
  """Write the buffer for the checkpoint of `step` into an existing, empty folder.

  Hard-links segments from `previous`, the previous checkpoint's buffer folder, unless it is None.
  """
  rows = sorted(buffer.entries)
  trajectories = [trajectory for row in rows for trajectory in buffer.entries[row].trajectories]
  columns = _build_columns(buffer, rows, trajectories)
  places = _places(previous) if previous else {}
  trajectory_places = [places.get(identity, (-1, -1)) for identity in _identities(columns)]
  segment, offset = np.array(trajectory_places, np.int64).reshape(-1, 2).T
  sizes = np.array(
    [sum(values.nbytes for values in _content(trajectory)) for trajectory in trajectories], np.int64
  )
  linked_segments = _link_segments(previous, folder, segment, sizes) if previous else []
  is_new = ~np.isin(segment, linked_segments)
  segment[is_new] = step
  offset[is_new] = _write_segment(
    folder / _name(step), [trajectory for trajectory, new in zip(trajectories, is_new) if new]
  )
  content = io.BytesIO()
  np.savez(content, **columns, segment=segment, offset=offset)  # pyright: ignore[reportArgumentType]
  (folder / _INDEX).write_bytes(content.getvalue())
  (folder / _INDEX_SUM).write_text(str(zlib.crc32(content.getvalue())))


def read(folder: epath.Path) -> Buffer:
  """Read a buffer written by `write`; no two trajectories share memory.

  Raises OSError if a file cannot be read, and ValueError if a file was changed or truncated.
  """
  columns = _read_index(folder)
  trajectories = _read_trajectories(folder, columns)
  ends = np.cumsum(columns['num_trajectories']).tolist()
  numbers = (columns[name].tolist() for name in ('row', 'correctness', 'prompt_length'))
  entries = {
    row: Entry(correctness, prompt_length, tuple(trajectories[start:end]))
    for row, correctness, prompt_length, start, end in zip(*numbers, [0, *ends], ends)
  }
  retired_epoch = dict(zip(columns['retired_row'].tolist(), columns['retired_epoch'].tolist()))
  history = dict[int, tuple[float, float]]()
  if 'history_row' in columns:
    history = dict(zip(columns['history_row'].tolist(), map(tuple, columns['history'].tolist())))
  return Buffer(entries, retired_epoch, bool(columns['started']), history)


def read_some(
  folder: epath.Path, rows: Sequence[int], max_tokens: int
) -> dict[int, tuple[Trajectory, ...]]:
  """Read the stored trajectories of the questions in `rows` as row -> trajectories, oldest first.

  Skips rows that are not in the buffer. Stops before the total exceeds `max_tokens` tokens.
  Raises the same errors as `read`.
  """
  columns = _read_index(folder)
  num_tokens = dict.fromkeys(columns['row'].tolist(), 0)
  for row, length in zip(columns['question'].tolist(), columns['length'].tolist()):
    num_tokens[row] += length
  stored_rows = [row for row in rows if row in num_tokens]
  fits = np.cumsum([num_tokens[row] for row in stored_rows]) <= max_tokens
  read_rows = [row for row, does_fit in zip(stored_rows, fits) if does_fit]
  is_read = np.isin(columns['question'], read_rows)
  read_columns = {name: columns[name][is_read] for name in _TRAJECTORY_COLUMNS if name in columns}
  trajectories_by_row: dict[int, list[Trajectory]] = {row: [] for row in read_rows}
  questions = columns['question'][is_read].tolist()
  for row, trajectory in zip(questions, _read_trajectories(folder, read_columns)):
    trajectories_by_row[row].append(trajectory)
  return {row: tuple(trajectories) for row, trajectories in trajectories_by_row.items()}


# ---- The index ----


def _build_columns(buffer: Buffer, rows: list[int], trajectories: list[Trajectory]) -> Columns:
  """Build all index columns except segment and offset, in the order of `rows` or `trajectories`."""
  entries = [buffer.entries[row] for row in rows]
  retirements, history = sorted(buffer.retired_epoch.items()), dict(sorted(buffer.history.items()))
  num_trajectories = np.array([len(entry.trajectories) for entry in entries], np.int64)
  descriptions = [describe(trajectory) for trajectory in trajectories]
  return {
    'started': np.array(buffer.started),
    'row': np.array(rows, np.int64),
    'correctness': np.array([entry.correctness for entry in entries], np.float64),
    'prompt_length': np.array([entry.prompt_length for entry in entries], np.int64),
    'num_trajectories': num_trajectories,
    'question': np.repeat(np.array(rows, np.int64), num_trajectories),
    **{
      field.name: np.array(
        [getattr(trajectory, field.name) for trajectory in trajectories], field.type
      )
      for field in _NUMBERS
    },
    'length': np.array([len(trajectory.tokens) for trajectory in trajectories], np.int64),
    **{
      name: np.array(
        [
          json.dumps(description[name]) if description[name] else '' for description in descriptions
        ],
        np.str_,
      )
      for name in _FEATURES
    },
    'sum': np.array([_checksum(trajectory) for trajectory in trajectories], np.int64),
    'retired_row': np.array([row for row, _ in retirements], np.int64),
    'retired_epoch': np.array([epoch for _, epoch in retirements], np.int64),
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
  places = zip(columns['segment'].tolist(), columns['offset'].tolist())
  return dict(zip(_identities(columns), places))


def _read_index(folder: epath.Path) -> Columns:
  content = (folder / _INDEX).read_bytes()
  if str(zlib.crc32(content)) != (folder / _INDEX_SUM).read_text():
    raise ValueError(f'buffer/{_INDEX}: the data differs from what was saved')
  with np.load(io.BytesIO(content)) as columns:
    return dict(columns)


# ---- Segments ----


def _name(segment: int) -> str:
  """Return the file name of the segment written by the checkpoint of step `segment`."""
  return f'segment_{segment:06d}'


def _link_segments(
  previous: epath.Path, folder: epath.Path, segment: np.ndarray, size: np.ndarray
) -> list[int]:
  """Link segments worth keeping from `previous` into `folder`; return their numbers.

  `segment` is each trajectory's segment in `previous`, negative for a new trajectory. `size` is
  each trajectory's size in bytes.
  """
  used_bytes = {
    int(number): int(size[segment == number].sum()) for number in np.unique(segment[segment >= 0])
  }
  largest_first = sorted(used_bytes, key=lambda number: -used_bytes[number])
  if len(largest_first) > MAX_SEGMENTS:
    del largest_first[MAX_SEGMENTS // 2 :]
  linked_segments = []
  for number in largest_first:
    source = previous / _name(number)
    try:
      if used_bytes[number] >= source.stat().length / 2:
        os.link(source, folder / source.name)
        linked_segments.append(number)
    except OSError:  # hard links are unsupported, or the file is gone: write it again
      pass
  return linked_segments


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
    indices = np.flatnonzero(columns['segment'] == number)
    with open(folder / _name(number), 'rb') as file:
      for index in indices[np.argsort(columns['offset'][indices])].tolist():
        file.seek(offset[index])
        description = {name: json.loads(column[index] or '[]') for name, column in features.items()}
        trajectories[index] = trajectory = Trajectory(
          tokens=_take(file, np.int32, length[index]),
          logp=_take(file, np.float32, length[index]),
          **{name: column[index] for name, column in numbers.items()},
          **restore(description, lambda _, *spec, file=file: _take(file, *spec)),
        )
        if _checksum(trajectory) != sums[index]:
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


def _checksum(trajectory: Trajectory) -> int:
  total = 0
  for values in _content(trajectory):
    total = zlib.crc32(values.data, total)
  return total


# ---- Feature fields of trajectories and responses ----


def describe(sequence: TokenSequence) -> dict[str, list[Any]]:
  """Convert the feature fields to JSON values; for arrays, only the dtype and shape."""

  def to_json(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
      return [str(value.dtype), *value.shape]
    return list(value or ())

  return {name: to_json(value) for name, value in sequence.features.items()}


def arrays(sequence: TokenSequence) -> dict[str, np.ndarray]:
  """Return the feature fields that are arrays."""
  values = sequence.features.items()
  return {name: np.ascontiguousarray(x) for name, x in values if isinstance(x, np.ndarray)}


def restore(
  description: Mapping[str, list[Any]], take: Callable[..., np.ndarray]
) -> dict[str, Any]:
  """Undo `describe`; `take` reads an array, given its name, dtype and shape."""
  features = dict[str, Any]()
  for field in FEATURES:
    if values := description.get(field.name):
      item = field.metadata.get('item')
      features[field.name] = (
        tuple(item(*arguments) for arguments in values) if item else take(field.name, *values)
      )
  return features
