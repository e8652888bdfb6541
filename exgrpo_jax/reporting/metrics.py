"""Writes the metrics of a run, reads them back, and summarises them."""

import dataclasses
import importlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import tensorboardX

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import direction
from exgrpo_jax.runtime import hosts

_FILE = 'metrics.jsonl'
_Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution


@dataclasses.dataclass(frozen=True)
class Config:
  """What a run records in addition to metrics.jsonl and TensorBoard files."""

  sampled_rows: int = setting('[0, inf)', 'responses of each step that are written to samples/')
  wandb_project: str = setting(
    None, "the Weights & Biases project that metrics are also sent to; '' is none"
  )


class Writer:
  """Writes each step's metrics to metrics.jsonl, to TensorBoard and optionally to wandb.

  With several hosts only the first one writes.

  Opening a writer at `first_step` drops the records that an earlier process wrote from that step
  on: a resumed run starts from its last checkpoint and repeats the steps after it. wandb cannot
  delete records, so there each start is a separate run, grouped by the name of the workdir.
  """

  def __init__(self, workdir: str | os.PathLike, first_step: int, wandb_project: str = '') -> None:
    """Opens the files in `workdir`; raises InputError for a damaged metrics.jsonl or no wandb."""
    self._writes = hosts.is_first()
    if not self._writes:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._wandb = _start_wandb(workdir, first_step, wandb_project) if wandb_project else None
    path = workdir / _FILE
    _write_atomically(path, (record for record in read(workdir) if record['step'] < first_step))
    self._file = path.open('a', encoding='utf-8')
    self._tensorboard = tensorboardX.SummaryWriter(
      str(workdir / 'tensorboard'), purge_step=first_step
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records the `metrics` of `step`: name -> Python or array scalar."""
    if not self._writes:
      return
    values = {name: float(value) for name, value in metrics.items()}
    self._file.write(_json_line({'step': step, **values}))
    self._file.flush()
    for name, value in values.items():
      self._tensorboard.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log(values, step=step)

  def close(self) -> None:
    """Closes the files and finishes the wandb run."""
    if not self._writes:
      return
    self._file.close()
    self._tensorboard.close()
    if self._wandb:
      self._wandb.finish()


def read(workdir: str | os.PathLike) -> list[dict[str, float]]:
  """The records of metrics.jsonl, oldest first; none if the file does not exist.

  A last line without a newline, as a killed process leaves it, is skipped. Raises InputError for
  any other line that is not a record.
  """
  path = pathlib.Path(workdir) / _FILE
  if not path.exists():
    return []
  lines = path.read_text(encoding='utf-8').split('\n')[:-1]
  return [_parse_record(line, f'{path}:{number}') for number, line in enumerate(lines, 1)]


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes one JSON object per line to `path`, atomically; creates its folder.

  With several hosts only the first one writes.
  """
  if not hosts.is_first():
    return
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  _write_atomically(path, rows)


def summary_table(records: Sequence[Mapping[str, float]]) -> str:
  """A text table of the first, last and best values of a run's main metrics and evaluations.

  First and last are means over the first and last tenth of the records that have the metric, at
  least one record. Best is the highest finite value, or the lowest of a metric that should fall
  (`direction.falls`), with its step; entropy and length have no best. A metric that no record has
  is left out.
  """
  evaluations = sorted(
    {
      name
      for record in records
      for name in record
      if name.startswith('eval/') and not name.endswith(('_low', '_high', '/questions'))
    }
  )
  with_best = ('reward', 'pass_rate/fresh', 'pass_rate/replay', *evaluations)
  names = [*with_best[:3], 'entropy', 'length/mean', *evaluations]
  rows: list[tuple[str, ...]] = [('', 'first', 'last', 'best', 'at step')]
  for name in names:
    points = [(record['step'], record[name]) for record in records if name in record]
    if points:
      values = [value for _, value in points]
      tenth = max(1, len(values) // 10)
      first, last = float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))
      best, best_step = _format_best(name, points) if name in with_best else ('-', '-')
      rows.append((name, _format_value(first), _format_value(last), best, best_step))
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join(
    '  '.join(
      [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
    )
    for row in rows
  )


def interval_95(
  correct_QK: np.ndarray, cluster_Q: Sequence[Any] | np.ndarray
) -> tuple[float, float, float]:
  """The mean of an evaluation and its 95% confidence interval.

  Rows with the same prompt are not independent (AIME lists each of its 30 questions 32 times), and
  neither are samples of one question. So this takes the cluster-robust standard error of the mean,
  with the G / (G - 1) correction for G clusters; from it the effective sample size
  n = p(1-p) / se^2, the number of independent samples that would have this error; and Wilson's
  score interval (JASA 22, 1927) for n, which stays inside [0, 1] and does not collapse to a point
  when 0 of 100 are correct.

  Where the standard error is 0, for example because all or none are correct, it carries no
  information, and n is G. n never exceeds the number of samples.

  Args:
    correct_QK: [questions, samples], bool or float in [0, 1].
    cluster_Q: [questions], the prompt of each row, as text or id: equal ones form a cluster.

  Returns:
    (mean, low, high).
  """
  score_Q = np.mean(correct_QK, axis=1, dtype=np.float64)
  mean = float(score_Q.mean())
  _, index_Q = np.unique(np.asarray(cluster_Q), return_inverse=True)
  residual_G = np.bincount(index_Q, weights=score_Q - mean)
  clusters = len(residual_G)
  variance = clusters / max(clusters - 1, 1) * np.sum((residual_G / len(correct_QK)) ** 2)
  # Equal clusters have variance 0, but for rounding errors below 1e-15.
  n = mean * (1 - mean) / variance if variance > 1e-15 else clusters
  return mean, *_wilson_interval(mean, min(float(n), np.size(correct_QK)))


def _wilson_interval(mean: float, n: float) -> tuple[float, float]:
  shrink = 1 + _Z_95**2 / n
  center = (mean + _Z_95**2 / (2 * n)) / shrink
  half = _Z_95 * math.sqrt(mean * (1 - mean) / n + _Z_95**2 / (4 * n**2)) / shrink
  return max(center - half, 0.0), min(center + half, 1.0)


def _json_line(record: Mapping[str, Any]) -> str:
  # JSON has no NaN or infinity, and strict parsers reject the bare ones that Python writes.
  strict = {
    name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }
  return json.dumps(strict, ensure_ascii=False, allow_nan=False) + '\n'


def _parse_record(line: str, location: str) -> dict[str, float]:
  try:
    record = json.loads(line)
    return {'step': record.pop('step'), **{name: float(v) for name, v in record.items()}}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(
      f'{location}: {line[:80]!r} is not a record of metrics ({error}); delete the line to read '
      'the others.'
    ) from error


def _write_atomically(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Writes one record per line; a killed process leaves the old file or the new one, complete."""
  temporary = path.with_name(path.name + '.tmp')
  # UTF-8 cannot encode a lone surrogate; backslashreplace writes its JSON escape.
  with temporary.open('w', encoding='utf-8', errors='backslashreplace') as file:
    file.writelines(map(_json_line, records))
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def _start_wandb(workdir: pathlib.Path, first_step: int, project: str) -> Any:
  """Starts a wandb run; InputError if wandb is not installed."""
  try:
    wandb = importlib.import_module('wandb')
  except ImportError as error:
    raise InputError(
      f"config.metrics.wandb_project='{project}' needs wandb, which is not installed: "
      "pip install 'exgrpo_jax[wandb]', or leave the project empty."
    ) from error
  group = workdir.resolve().name
  return wandb.init(
    project=project, group=group, name=f'{group}-from-{first_step}', dir=str(workdir)
  )


def _format_best(name: str, points: Sequence[tuple[float, float]]) -> tuple[str, str]:
  """The best finite value of (step, value) points and its step; the earliest of equals."""
  best = direction.best(name, (value for _, value in points))
  if math.isnan(best):
    return '-', '-'
  return _format_value(best), str(next(step for step, value in points if value == best))


def _format_value(value: float) -> str:
  return f'{value:.3f}' if abs(value) < 100 else f'{value:,.0f}'
