"""The metrics of a run: metrics.jsonl, and the writer that also feeds TensorBoard and wandb."""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import tensorboard, weights_and_biases
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.replacement import replacing

FILE = 'metrics.jsonl'

Run = Sequence[Mapping[str, float]]  # the records of its metrics.jsonl, oldest first


@dataclasses.dataclass(frozen=True)
class Config:
  """What a run records in addition to metrics.jsonl and TensorBoard files."""

  sampled_rows: int = setting(16, '[0, inf)', 'responses of each step that are written to samples/')
  records_every: int = setting(
    10, '[1, inf)', 'steps whose rows are written to records/ together, as one file of each table'
  )
  recorded_groups: int = setting(
    4, '[0, inf)', 'groups of each step whose responses are recorded token by token; 0 is none'
  )
  traced_steps: tuple[int, ...] = setting(
    (),
    None,
    "steps of which JAX's profiler writes a trace into the workdir's traces/, such as (10,)",
  )
  wandb_project: str = setting(
    '', None, "the Weights & Biases project that metrics are also sent to; '' is none"
  )


class Writer:
  """Writes each step's metrics to metrics.jsonl, to TensorBoard and optionally to wandb.

  With several hosts only the first one writes.

  Opening a writer at `first_step` drops the records that an earlier process wrote from that step
  on: a resumed run starts from its last checkpoint and repeats the steps after it.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    first_step: int,
    wandb_project: str = '',
    settings: Mapping[str, Any] | None = None,
  ) -> None:
    """Opens the files in `workdir`; raises InputError for a damaged metrics.jsonl or no wandb.

    `settings` is the resolved config of a run, nested; None for a warm start.
    """
    self._writes = hosts.is_first()
    if not self._writes:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._wandb = (
      weights_and_biases.start(wandb_project, workdir, first_step, settings or {})
      if wandb_project
      else None
    )
    path = workdir / FILE
    _write(path, (record for record in read(workdir) if record['step'] < first_step))
    self._file = path.open('a', encoding='utf-8')
    self._board = tensorboard.Board(workdir / 'tensorboard', first_step, settings)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    self.close(failed=kind is not None)

  def write(
    self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]] = ()
  ) -> None:
    """Records the `metrics` of `step`: name -> Python or array scalar; and the time.

    `rows` are the step's `step_rows.sample_rows`, some of which TensorBoard shows.
    """
    if not self._writes:
      return
    values = {name: float(value) for name, value in metrics.items()} | {'timestamp': time.time()}
    self._file.write(json_line({'step': step, **values}))
    self._file.flush()
    self._board.write(step, values, rows)
    if self._wandb:
      self._wandb.log(values, step=step)

  def close(self, failed: bool = False) -> None:
    """Closes the files and finishes the wandb run, marked as `failed` or not."""
    if not self._writes:
      return
    self._file.close()
    self._board.close()
    if self._wandb:
      self._wandb.finish(exit_code=int(failed))


def read(workdir: str | os.PathLike) -> list[dict[str, float]]:
  """The records of metrics.jsonl, oldest first; none if the file does not exist.

  A last line without a newline, as a killed process leaves it, is skipped. Raises InputError for
  any other line that is not a record.
  """
  path = pathlib.Path(workdir) / FILE
  if not path.exists():
    return []
  # Bytes that are not UTF-8 make a line that is not a record.
  lines = path.read_text(encoding='utf-8', errors='backslashreplace').split('\n')[:-1]
  return [_parse(line, f'{path}:{number}') for number, line in enumerate(lines, 1)]


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes one JSON object per line to `path`, atomically; creates its folder.

  With several hosts only the first one writes.
  """
  if hosts.is_first():
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, rows)


def json_line(record: Mapping[str, Any]) -> str:
  """The record as strict JSON, with its newline; NaN and infinity become text."""
  strict = {
    name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }
  return json.dumps(strict, ensure_ascii=False, allow_nan=False) + '\n'


def _write(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Write one record per line; a killed process leaves the old file or the new one, complete."""
  # UTF-8 cannot encode a lone surrogate; backslashreplace writes its JSON escape.
  with (
    replacing(path) as unfinished,
    unfinished.open('w', encoding='utf-8', errors='backslashreplace') as file,
  ):
    file.writelines(map(json_line, records))
    file.flush()
    os.fsync(file.fileno())


def _parse(line: str, location: str) -> dict[str, float]:
  try:
    record = json.loads(line)
    return {'step': record.pop('step'), **{name: float(v) for name, v in record.items()}}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(
      f'{location}: {line[:80]!r} is not a record of metrics ({error}); delete the line to read '
      'the others.'
    ) from error
