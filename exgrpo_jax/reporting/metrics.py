"""What a run writes down as it goes, and the numbers read off it at the end."""

import dataclasses
import importlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorboardX

from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts

_FILE = 'metrics.jsonl'
_Z_95 = 1.959963984540054  # the normal distribution's 97.5th percentile


@dataclasses.dataclass(frozen=True)
class Config:
  """What a run writes down beside its metrics.jsonl and TensorBoard files."""

  sampled_rows: int = setting('[0, inf)', 'responses of each step that are written to samples/')
  wandb_project: str = setting(
    None, "the Weights & Biases project that gets the metrics too; '' is none"
  )


class Writer:
  """Writes each step's metrics to metrics.jsonl, TensorBoard and, if asked, wandb.

  Of several hosts only the first writes.

  Opening at `first_step` drops what an earlier process wrote from that step on: a
  run resumes at its last checkpoint and takes the steps after it again. wandb
  cannot take records back, so each start is a run of its own there, grouped by
  the name of the workdir.
  """

  def __init__(self, workdir: str | os.PathLike, first_step: int, wandb_project: str = ''):
    """Raises InputError where metrics.jsonl is damaged or wandb is not installed."""
    self._writes = hosts.is_first()
    if not self._writes:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._wandb = _start_wandb(workdir, first_step, wandb_project) if wandb_project else None
    path = workdir / _FILE
    _write_whole(path, (record for record in read(workdir) if record['step'] < first_step))
    self._file = path.open('a', encoding='utf-8')
    self._tensorboard = tensorboardX.SummaryWriter(
      str(workdir / 'tensorboard'), purge_step=first_step
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records `metrics`, Python or array scalars by name, as those of `step`."""
    if not self._writes:
      return
    values = {name: float(value) for name, value in metrics.items()}
    self._file.write(_line({'step': step, **values}))
    self._file.flush()
    for name, value in values.items():
      self._tensorboard.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log(values, step=step)

  def close(self) -> None:
    if not self._writes:
      return
    self._file.close()
    self._tensorboard.close()
    if self._wandb:
      self._wandb.finish()


def read(workdir: str | os.PathLike) -> list[dict[str, float]]:
  """The records of metrics.jsonl, oldest first; none where there is no such file.

  A last line without its end, as a kill leaves it, is passed over. Raises
  InputError for any other line that is no record.
  """
  path = pathlib.Path(workdir) / _FILE
  if not path.exists():
    return []
  lines = path.read_text(encoding='utf-8').split('\n')[:-1]
  return [_parsed(line, f'{path}:{number}') for number, line in enumerate(lines, 1)]


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes one JSON object a line to `path`, whole or not at all; makes its folder.

  Of several hosts only the first does.
  """
  if not hosts.is_first():
    return
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  _write_whole(path, rows)


def progress_line(
  step: int, num_steps: int, metrics: Mapping[str, float], seconds_left: float
) -> str:
  """One line about one step; its columns stay aligned from step to step."""

  def show(name, form, width):
    return (format(metrics[name], form) if name in metrics else '-').rjust(width)

  return ' | '.join(
    (
      f'step {step:>{len(str(num_steps))}}/{num_steps}',
      f'reward {show("reward", ".3f", 6)}',
      f'pass {show("pass_rate/fresh", ".3f", 5)}',
      f'entropy {show("entropy", ".3f", 6)}',
      f'length {show("length/mean", ".0f", 5)}',
      f'buffer {show("buffer/questions", ".0f", 5)}',
      f'retired {show("buffer/retired", ".0f", 5)}',
      f'{show("speed/tokens_per_second", ",.0f", 7)} tok/s',
      f'{_duration(seconds_left):>8} left',
    )
  )


def summary_table(records: Sequence[Mapping[str, float]]) -> str:
  """First, last and best of a run's main metrics and of every evaluation, as text.

  First and last are means over a tenth of the records that have the metric, at
  least one. Best is the highest finite value and its step; entropy and length
  have none. Metrics that no record has are left out.
  """
  evaluations = sorted(
    {
      name
      for record in records
      for name in record
      if name.startswith('eval/') and not name.endswith(('_low', '_high', '/questions'))
    }
  )
  best_of = ('reward', 'pass_rate/fresh', 'pass_rate/replay', *evaluations)
  names = [*best_of[:3], 'entropy', 'length/mean', *evaluations]
  rows = [('', 'first', 'last', 'best', 'at step')]
  for name in names:
    points = [(record['step'], record[name]) for record in records if name in record]
    if points:
      values = [value for _, value in points]
      tenth = max(1, len(values) // 10)
      best = _best(points) if name in best_of else ('-', '-')
      rows.append((name, _short(np.mean(values[:tenth])), _short(np.mean(values[-tenth:])), *best))
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join(
    '  '.join(
      [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
    )
    for row in rows
  )


def interval_95(correct_QK: np.ndarray, cluster_Q: Sequence) -> tuple[float, float, float]:
  """The mean of an evaluation and a 95% interval for it.

  Rows that share a prompt say less than as many different ones (AIME lists each
  of its 30 questions 32 times), and so do samples of one question. So: the
  cluster-robust standard error of the mean, with its G / (G - 1) correction for G
  clusters; the number n = p(1-p)/se^2 of independent samples that would have that
  error; and Wilson's score interval (JASA 22, 1927) for n, which stays inside
  [0, 1] and is not a point at 0 of 100.

  n is G where the error is 0 and tells nothing, as when all or none are correct,
  and never more than the samples there are.

  Args:
    correct_QK: [questions, samples], bool or float in [0, 1].
    cluster_Q: the prompt of each row, as text or id: equal ones are one cluster.

  Returns:
    (mean, low, high).
  """
  score_Q = np.mean(correct_QK, axis=1, dtype=np.float64)
  mean = float(score_Q.mean())
  _, cluster_Q = np.unique(np.asarray(cluster_Q), return_inverse=True)
  residual_G = np.bincount(cluster_Q, weights=score_Q - mean)
  clusters = len(residual_G)
  variance = clusters / max(clusters - 1, 1) * np.sum((residual_G / len(score_Q)) ** 2)
  # Below 1e-15 the variance is the rounding of equal clusters.
  n = mean * (1 - mean) / variance if variance > 1e-15 else clusters
  return mean, *_wilson(mean, min(float(n), np.size(correct_QK)))


def _wilson(mean: float, n: float) -> tuple[float, float]:
  shrink = 1 + _Z_95**2 / n
  center = (mean + _Z_95**2 / (2 * n)) / shrink
  half = _Z_95 * math.sqrt(mean * (1 - mean) / n + _Z_95**2 / (4 * n**2)) / shrink
  return max(center - half, 0.0), min(center + half, 1.0)


def _line(record: Mapping[str, Any]) -> str:
  # JSON has no nan and no inf; strict readers stop at Python's bare ones.
  strict = {
    name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    for name, value in record.items()
  }
  return json.dumps(strict, ensure_ascii=False, allow_nan=False) + '\n'


def _parsed(line: str, place: str) -> dict[str, float]:
  try:
    record = json.loads(line)
    return {'step': record.pop('step'), **{name: float(v) for name, v in record.items()}}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise InputError(
      f'{place}: {line[:80]!r} is no record of metrics ({error}); delete the line '
      'to read the others.'
    ) from error


def _write_whole(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """Writes one record per line; a kill leaves the old file or the new one, never a part."""
  temporary = path.with_name(path.name + '.tmp')
  # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
  with temporary.open('w', encoding='utf-8', errors='backslashreplace') as file:
    file.writelines(map(_line, records))
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def _start_wandb(workdir: pathlib.Path, first_step: int, project: str):
  try:
    wandb = importlib.import_module('wandb')
  except ImportError as error:
    raise InputError(
      f"wandb_project='{project}' needs wandb, which is not installed: "
      "pip install 'exgrpo_jax[wandb]', or leave the project empty."
    ) from error
  group = workdir.resolve().name
  return wandb.init(
    project=project, group=group, name=f'{group}-from-{first_step}', dir=str(workdir)
  )


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}'


def _best(points: Sequence[tuple[int, float]]) -> tuple[str, str]:
  finite = [(value, step) for step, value in points if math.isfinite(value)]
  if not finite:
    return '-', '-'
  value, step = max(finite, key=lambda point: point[0])  # the earliest of equals
  return _short(value), str(step)


def _short(value: float) -> str:
  return f'{value:.3f}' if abs(value) < 100 else f'{value:,.0f}'
