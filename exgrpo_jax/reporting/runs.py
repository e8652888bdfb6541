"""Recorded runs, grouped by setting, and their metrics over steps."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import alarms, metrics, step_records
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.runtime.workdir import read_config

# Runs that differ only in these are of one setting: seeds, places, and what changes no result.
_SAME_SETTING = (
  'seed',
  'compilation_cache',
  'checkpoint.',
  'export.',
  'metrics.',
  'mesh.',
  'data.cache_dir',
  'warm_start.path',
  'grading.workers',
  'rollout.slots',
  'rollout.logit_chunk',
  'microbatch.tokens',
  'microbatch.remat',
)
# Every run's config has these.
_NEEDED = ('seed', 'num_steps', 'replay.ratio', 'rollout.questions', 'rollout.group_size')


@dataclasses.dataclass(frozen=True)
class Recorded:
  """A run, as far as it has been recorded."""

  workdir: str
  config: Mapping[str, Any]  # by dotted name
  metrics: Run
  responses: pa.Table  # see step_records.RESPONSES
  questions: pa.Table  # see step_records.QUESTIONS

  @property
  def last_step(self) -> int:
    """The step after which the run ends, as far as its scores up to now tell."""
    patience = self.config.get('evaluation.patience', 0)  # workdirs of older versions lack it
    return alarms.last_step(alarms.scores_of(self.metrics), self.config['num_steps'], patience)


@dataclasses.dataclass(frozen=True)
class Group:
  """The runs of one setting, which differ in their seeds."""

  label: str  # as few settings as tell it from the other groups
  runs: tuple[Recorded, ...]

  @property
  def metrics(self) -> list[Run]:
    """The metrics of each of its runs."""
    return [run.metrics for run in self.runs]


def read(workdirs: Sequence[str]) -> list[Group]:
  """The runs of these workdirs by setting, in their order.

  Raises InputError where one is not a run's workdir, is named twice, or holds no metrics yet.
  """
  names = [os.path.realpath(workdir) for workdir in workdirs]
  for index, workdir in enumerate(workdirs):
    if names[index] in names[:index]:
      raise InputError(f'{workdir} is named twice; a run counts once.')
  by_setting: dict[str, list[Recorded]] = {}
  for run in map(_read, workdirs):
    by_setting.setdefault(json.dumps(setting(run), sort_keys=True), []).append(run)
  settings = [setting(runs[0]) for runs in by_setting.values()]
  groups = [
    Group(label, tuple(runs)) for label, runs in zip(_labels(settings), by_setting.values())
  ]
  for group in groups:
    seeds = [run.config['seed'] for run in group.runs]
    if len(set(seeds)) < len(seeds):
      raise InputError(
        f'{group.runs[0].workdir}: of {len(seeds)} runs of this setting two have the same seed '
        f'({", ".join(map(str, sorted(seeds)))}), so they are one run twice; name one of them.'
      )
  return groups


def has_metrics(workdir: str) -> bool:
  """Whether the run has written any yet; InputError where there is no run in the folder."""
  return bool(_read_metrics(workdir))


def _read_metrics(workdir: str) -> Run:
  if not os.path.exists(os.path.join(workdir, 'config.json')):
    raise InputError(
      f"{workdir} is no run's workdir: it holds no config.json; name train's --workdir."
    )
  return metrics.read(workdir)


def _read(workdir: str) -> Recorded:
  records = _read_metrics(workdir)
  if not records:
    raise InputError(
      f'{workdir}: the run has not written any metrics yet; wait for its first step.'
    )
  config = flat(read_config(workdir))
  if missing := [name for name in _NEEDED if name not in config]:
    raise InputError(
      f"{workdir}/config.json is no run's config: it lacks {', '.join(missing)}; bring back a copy."
    )
  tables = step_records.read(workdir)
  return Recorded(workdir, config, records, tables.responses, tables.questions)


def flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """A config by dotted names."""
  found: dict[str, Any] = {}
  for name, value in values.items():
    is_section = isinstance(value, Mapping)
    found |= flat(value, f'{prefix}{name}.') if is_section else {prefix + name: value}
  return found


def setting(run: Recorded) -> dict[str, Any]:
  """The part of its config that makes a run's setting, by dotted name."""
  return {k: v for k, v in run.config.items() if not k.startswith(_SAME_SETTING)}


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """Name each setting by as few values as tell them apart: how much they replay, then short ones.

  A single one is named by how it replays.
  """
  if len(settings) == 1:
    ratio = settings[0]['replay.ratio']
    return [f'ExGRPO, replay.ratio={ratio:g}' if ratio else 'GRPO']
  values = {
    name: [f'{name}={setting.get(name, "-")}' for setting in settings]
    for name in sorted({name for setting in settings for name in setting})
  }
  by_length = sorted(values, key=lambda name: (name != 'replay.ratio', sum(map(len, values[name]))))
  labels = [''] * len(settings)
  for name in by_length:
    longer = [', '.join(filter(None, pair)) for pair in zip(labels, values[name])]
    if len(set(longer)) > len(set(labels)):
      labels = longer
  return labels


def scores(groups: Sequence[Group]) -> dict[str, str]:
  """Source of an evaluation -> the metric of its score: avg@k, or pass@1 where k is 1."""
  return score_names([run.metrics for group in groups for run in group.runs])


def score_names(found: Sequence[Run]) -> dict[str, str]:
  """`scores` from the metrics of some runs."""
  names = {name for run in found for record in run for name in record}
  of_source: dict[str, str] = {}
  for name in sorted(names, reverse=True):  # pass@1 first, avg@k in its place
    if match := re.fullmatch(r'eval/(.+)/(pass@1|avg@\d+)', name):
      of_source[match[1]] = name
  return dict(sorted(of_source.items()))


# ---- Metrics over steps ----

SMOOTHED_FROM = 40  # points; a shorter line is drawn as it is, with a marker at each
_SMOOTHED_SHARE = 1 / 40  # of a line's points, to either side


@dataclasses.dataclass(frozen=True)
class Series:
  """A metric over the steps at which every seed has a finite value."""

  steps: np.ndarray  # [S]
  value_SN: np.ndarray  # a column for each seed

  @property
  def mean(self) -> np.ndarray:
    """[S], over seeds."""
    return self.value_SN.mean(axis=1)

  @property
  def std(self) -> np.ndarray:
    """[S], the sample standard deviation over seeds (n - 1); 0 for a single one."""
    steps, seeds = self.value_SN.shape
    return self.value_SN.std(axis=1, ddof=1) if seeds > 1 else np.zeros(steps)


def over_seeds(runs: Sequence[Run], name: str) -> Series | None:
  """A metric of several runs; None where they have it at no common step."""
  series = [
    {int(row['step']): row[name] for row in run if math.isfinite(row.get(name, math.nan))}
    for run in runs
  ]
  steps = sorted(set.intersection(*map(set, series)))
  if not steps:
    return None
  return Series(np.array(steps), np.array([[values[s] for values in series] for s in steps]))


def smoothed(values: Sequence[float] | np.ndarray, points: int | None = None) -> np.ndarray:
  """Moving average over a fortieth of all points to either side, over fewer at the ends.

  Args:
    values: of a line.
    points: take a fortieth of this many, so that several lines are smoothed alike; by default of
      the line's own.
  """
  array = np.asarray(values, np.float64)
  reach = max(1, int(_SMOOTHED_SHARE * (points or len(array))))
  window = np.ones(2 * reach + 1)
  # Not mode 'same', whose result is as long as the window where that is longer than the line.
  sums, counts = np.convolve(array, window), np.convolve(np.ones_like(array), window)
  return (sums / counts)[reach : reach + len(array)]
