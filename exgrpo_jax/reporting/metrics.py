"""Writes the metrics of a run, and summarises them."""

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from exgrpo_jax.config import setting
from exgrpo_jax.reporting import direction, records, tensorboard, weights_and_biases
from exgrpo_jax.reporting.artist import Artist
from exgrpo_jax.reporting.records import Run, read
from exgrpo_jax.runtime import hosts

Z_95 = 1.959963984540054  # 97.5th percentile of the standard normal distribution
_ROUNDING = 1e-15  # variances of means that are not above it are 0


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

    Args:
      workdir: the run's, or the folder of a warm start.
      first_step: the first that will be written.
      wandb_project: where metrics are also sent, if it is not ''.
      settings: the resolved config of a run, nested; with it curves.png is kept up to date. None
        for a warm start.
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
    path = workdir / records.FILE
    records.write(path, (record for record in read(workdir) if record['step'] < first_step))
    self._file = path.open('a', encoding='utf-8')
    self._board = tensorboard.Board(workdir / 'tensorboard', first_step, settings)
    self._artist = Artist(workdir) if settings else None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    self.close(failed=kind is not None)

  def write(
    self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]] = ()
  ) -> None:
    """Records the `metrics` of `step`: name -> Python or array scalar; and when that was.

    `rows` are the step's `samples.sample_rows`, of which TensorBoard shows some.
    """
    if not self._writes:
      return
    values = {name: float(value) for name, value in metrics.items()} | {'timestamp': time.time()}
    self._file.write(records.json_line({'step': step, **values}))
    self._file.flush()
    self._board.write(step, values, rows)
    if self._wandb:
      self._wandb.log(values, step=step)
    if self._artist:
      self._artist.draw()

  def close(self, failed: bool = False) -> None:
    """Closes the files and finishes the wandb run, which says whether it `failed`."""
    if not self._writes:
      return
    self._file.close()
    self._board.close()
    if self._artist:
      self._artist.close()
    if self._wandb:
      self._wandb.finish(exit_code=int(failed))


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes one JSON object per line to `path`, atomically; creates its folder.

  With several hosts only the first one writes.
  """
  if not hosts.is_first():
    return
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  records.write(path, rows)


def summary_table(run: Run) -> str:
  """A text table of the first, last and best values of a run's main metrics and evaluations.

  First and last are means over the first and last tenth of the records that have the metric, at
  least one record. Best is the highest finite value, or the lowest of a metric that should fall
  (`direction.falls`), with its step; entropy and length have no best. A metric that no record has
  is left out.
  """
  evaluations = sorted(
    {
      name
      for record in run
      for name in record
      if name.startswith('eval/') and not name.endswith(('_low', '_high', '/questions'))
    }
  )
  with_best = ('reward', 'pass_rate/fresh', 'pass_rate/replay', *evaluations)
  names = [*with_best[:3], 'entropy', 'length/mean', *evaluations]
  rows: list[tuple[str, ...]] = [('', 'first', 'last', 'best', 'at step')]
  for name in names:
    points = [(record['step'], record[name]) for record in run if name in record]
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
  score_Q = correct_QK.mean(axis=1, dtype=np.float64)
  mean = float(score_Q.mean())
  variance, clusters = _variance_of_mean(score_Q, cluster_Q)
  n = mean * (1 - mean) / variance if variance > _ROUNDING else clusters
  return mean, *_wilson_interval(mean, min(float(n), np.size(correct_QK)))


def difference_95(
  difference_Q: np.ndarray, cluster_Q: Sequence[Any] | np.ndarray
) -> tuple[float, float, float]:
  """The mean of paired differences and its 95% confidence interval, by the normal approximation.

  The standard error is cluster-robust, as that of `interval_95`. Where all differences are equal it
  is 0 and says nothing. Then G clusters have not shown a different one, so its probability is at
  most b = 1 - 0.05^(1/G), about 3 / G, and the interval is what such ones in [-1, 1] leave open.

  Args:
    difference_Q: [questions], between two policies' shares of right responses.
    cluster_Q: [questions]: equal ones form a cluster.

  Returns:
    (mean, low, high).
  """
  mean = float(difference_Q.mean())
  variance, clusters = _variance_of_mean(difference_Q, cluster_Q)
  if variance <= _ROUNDING:
    unlike = 1 - 0.05 ** (1 / clusters)
    return mean, mean - unlike * (1 + mean), mean + unlike * (1 - mean)
  error = math.sqrt(variance)
  return mean, max(mean - Z_95 * error, -1.0), min(mean + Z_95 * error, 1.0)


def _variance_of_mean(
  score_Q: np.ndarray, cluster_Q: Sequence[Any] | np.ndarray
) -> tuple[float, int]:
  """The cluster-robust variance of the mean of scores, and the number G of clusters."""
  _, index_Q = np.unique(np.asarray(cluster_Q), return_inverse=True)
  residual_G = np.bincount(index_Q, weights=score_Q - score_Q.mean())
  clusters = len(residual_G)
  variance = clusters / max(clusters - 1, 1) * np.sum((residual_G / len(score_Q)) ** 2)
  return float(variance), clusters


def _wilson_interval(mean: float, n: float) -> tuple[float, float]:
  shrink = 1 + Z_95**2 / n
  center = (mean + Z_95**2 / (2 * n)) / shrink
  half = Z_95 * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2)) / shrink
  return max(center - half, 0.0), min(center + half, 1.0)


def _format_best(name: str, points: Sequence[tuple[float, float]]) -> tuple[str, str]:
  """The best finite value of (step, value) points and its step; the earliest of equals."""
  best = direction.best(name, (value for _, value in points))
  if math.isnan(best):
    return '-', '-'
  return _format_value(best), str(next(step for step, value in points if value == best))


def _format_value(value: float) -> str:
  return f'{value:.3f}' if abs(value) < 100 else f'{value:,.0f}'
