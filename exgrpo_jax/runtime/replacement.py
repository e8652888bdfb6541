"""Atomic replacement of files and folders.

A reader sees either the complete old version or the complete new version, even if the writer dies.
A folder is briefly missing between two renames. If the writer dies at that moment, `restored` or
the next replacement brings back the old version.
"""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

from etils import epath


@contextlib.contextmanager
def replacing(path: epath.PathLike, shared: bool = False) -> Iterator[pathlib.Path]:
  """Yield a temporary path for a file or folder that replaces `path` when the block ends.

  Creates the parent folder. If the block raises or writes nothing, `path` does not change and the
  temporary path is removed. With `shared`, several processes may write to `path` at the same time,
  and an existing folder is kept, because the process that wrote it may be reading it. Files in
  buckets are written in place, because a bucket shows only complete files.
  """
  if '://' in os.fspath(path):
    yield epath.Path(path)  # pyright: ignore[reportReturnType]  # most of pathlib's methods
    return
  target = restored(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  old = _old(target)
  unfinished = target.with_name(f'{target.name}.{uuid.uuid4().hex if shared else "new"}')
  _remove(unfinished)  # left over from a killed process
  try:
    yield unfinished
    if unfinished.is_dir():
      if not shared and target.exists():
        _remove(old)
        target.rename(old)
      try:
        unfinished.rename(target)
      except OSError:
        if not (shared and target.is_dir()):
          raise
      _remove(old)
    elif unfinished.exists():
      with unfinished.open('rb') as file:
        os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
      os.replace(unfinished, target)
  finally:
    _remove(unfinished)


def restored(path: epath.PathLike) -> pathlib.Path:
  """Restore a folder if `replacing` was killed between its two renames; return the path."""
  target = pathlib.Path(path)
  if _old(target).is_dir() and not target.exists():
    _old(target).rename(target)
  return target


def _old(target: pathlib.Path) -> pathlib.Path:
  return target.with_name(f'{target.name}.old')


def _remove(path: pathlib.Path) -> None:
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=True)
  else:
    path.unlink(missing_ok=True)
