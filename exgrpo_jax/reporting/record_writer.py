"""Writes records/ in the background, so that a resumed run has the same rows as one never stopped.

A file holds the steps of a window, such as 11 to 20. It is written when the window is complete, and
before a checkpoint with the steps so far. So whatever a checkpoint covers is on disk, and no more
than a window is in memory.
"""

import concurrent.futures
import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pyarrow as pa
from pyarrow import compute

from exgrpo_jax.reporting import step_records
from exgrpo_jax.runtime import hosts

Columns = Mapping[str, Sequence[Any]]  # of rows of a table, by name
Rows = Mapping[str, Columns]  # of a step, by the table's name (step_records.SCHEMAS)


class Writer:
  """Writes each step's rows in a thread; with several hosts only the first one writes.

  Opening a writer at `first_step` drops the rows of that step and later ones: a resumed run starts
  from its last checkpoint and repeats the steps after it. An error in the thread is raised by
  the next call.
  """

  def __init__(self, workdir: str | os.PathLike, first_step: int, every: int) -> None:
    """Opens records/, in files of `every` steps; raises InputError for a damaged file."""
    self._writes = hosts.is_first()
    if not self._writes:
      return
    self._workdir, self._every = pathlib.Path(workdir), every
    (self._workdir / step_records.FOLDER).mkdir(parents=True, exist_ok=True)
    _drop(self._workdir, first_step)
    # Only this one thread uses what follows, so there is nothing to lock.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='records')
    self._pending: list[concurrent.futures.Future[None]] = []
    self._window = 0  # the first step of the open file; 0 for none
    self._tables: dict[str, pa.Table] = {}  # its content, by the table's name
    self._is_written = True  # all of it

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if not self._writes:
      return
    # Another error must not hide the one that ends the run.
    with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
      self.flush()
    self._thread.shutdown()

  def add(self, step: int, rows: Rows) -> None:
    """Queues the rows of a step, which must be later than those before; does not wait."""
    if not self._writes:
      return
    self._await([future for future in self._pending if future.done()])
    self._pending.append(self._thread.submit(self._take, step, rows))

  def flush(self) -> None:
    """Returns once all rows so far are on disk."""
    if not self._writes:
      return
    self._pending.append(self._thread.submit(self._write))
    self._await(list(self._pending))

  def _await(self, futures: Sequence[concurrent.futures.Future[None]]) -> None:
    for future in futures:
      self._pending.remove(future)
      future.result()

  def _take(self, step: int, rows: Rows) -> None:
    window = (step - 1) // self._every * self._every + 1
    if window != self._window:
      self._write()
      self._window = window
      self._tables = {name: self._present(name) for name in rows}
    for name, columns in rows.items():
      new = pa.table(dict(columns), schema=step_records.SCHEMAS[name])
      self._tables[name] = pa.concat_tables([self._tables[name], new])
    self._is_written = False
    if step == window + self._every - 1:
      self._write()

  def _present(self, name: str) -> pa.Table:
    """What the window's file holds already, when a run resumes within the window."""
    path = step_records.path_of(self._workdir, name, self._window)
    if not path.exists():
      return step_records.SCHEMAS[name].empty_table()
    return step_records.read_file(path, name)

  def _write(self) -> None:
    if not self._is_written:
      for name, table in self._tables.items():
        if table.num_rows:  # there may be no tokens
          step_records.write_file(step_records.path_of(self._workdir, name, self._window), table)
      self._is_written = True


def _drop(workdir: pathlib.Path, first_step: int) -> None:
  """Removes the rows from `first_step` on, and incomplete files that a kill left."""
  for path in (workdir / step_records.FOLDER).glob('*.new'):
    path.unlink()
  for name in step_records.SCHEMAS:
    for path in step_records.files(workdir, name):
      table = step_records.read_file(path, name)
      kept = table.filter(compute.field('step') < first_step)
      if not kept.num_rows:
        path.unlink()
      elif kept.num_rows < table.num_rows:
        step_records.write_file(path, kept)
