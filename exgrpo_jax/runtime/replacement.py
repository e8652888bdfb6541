"""Files and folders that are written completely or not at all.

A reader, and whoever comes after a kill, finds the old one or the new one, complete.
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
  """Yield a path to write a file or a folder to, which takes the place of `path` in the end.

  Its parent is made. If the block raises, or writes nothing, `path` stays as it is, and what was
  written is removed. With `shared`, several processes may write the same path at once; then a
  folder that is there stays, because another process was first and may be reading it. A bucket's
  file is written in place: it is there when it is complete.
  """
  if '://' in os.fspath(path):
    yield epath.Path(path)  # pyright: ignore[reportReturnType]  # most of pathlib's methods
    return
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  unfinished = target.with_name(f'{target.name}.{uuid.uuid4().hex if shared else "new"}')
  _remove(unfinished)  # what a kill left
  try:
    yield unfinished
    if unfinished.is_dir():
      if not shared:
        _remove(target)
      try:
        unfinished.rename(target)
      except OSError:
        if not (shared and target.is_dir()):
          raise
    elif unfinished.exists():
      os.replace(unfinished, target)
  finally:
    _remove(unfinished)


def _remove(path: pathlib.Path) -> None:
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=True)
  else:
    path.unlink(missing_ok=True)
