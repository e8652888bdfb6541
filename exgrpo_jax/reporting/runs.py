"""Recorded runs, grouped by setting, and their metrics over steps."""

import dataclasses
import importlib
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
from exgrpo_jax.reporting.comparison import scores_of
from exgrpo_jax.reporting.metrics import Run
from exgrpo_jax.runtime.workdir import RUN_LOCK, WITHOUT_EFFECT, check_no_model, read_config

# Runs have the same setting if only these keys differ: the seed and keys that don't affect results.
SAME_SETTING = ('seed', 'warm_start.path', *WITHOUT_EFFECT)
_BASE = 'exgrpo_jax.configs.base'
# Keys that every run's config contains.
_NEEDED = ('seed', 'num_steps', 'replay.ratio', 'rollout.questions', 'rollout.group_size')


@dataclasses.dataclass(frozen=True)
class Recorded:
  """A run's records so far."""

  workdir: str
  config: Mapping[str, Any]  # dotted name -> value
  metrics: Run
  responses: pa.Table  # see step_records.RESPONSES
  questions: pa.Table  # see step_records.QUESTIONS

  @property
  def last_step(self) -> int:
    """Return the step after which the run ends, according to its scores so far."""
    return last_step(self.config, self.metrics)


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs with the same setting and different seeds."""

  label: str  # the settings that distinguish this group from the others
  runs: tuple[Recorded, ...]

  @property
  def metrics(self) -> list[Run]:
    """Return each run's metrics."""
    return [run.metrics for run in self.runs]


def read(workdirs: Sequence[str]) -> list[Group]:
  """Read the runs in these workdirs and group them by setting, in the given order.

  Raises InputError for duplicate runs, or if a folder is not a run's workdir or has no metrics yet.
  """
  names = [os.path.realpath(workdir) for workdir in workdirs]
  for index, workdir in enumerate(workdirs):
    if names[index] in names[:index]:
      raise InputError(f'{workdir}: this workdir was given twice. Pass each run only once.')
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
        f'{group.runs[0].workdir}: two of the {len(seeds)} runs with this setting have the same '
        f'seed (seeds: {", ".join(map(str, sorted(seeds)))}), so they are duplicates. Pass only '
        'one of them.'
      )
  return groups


def read_metrics(workdir: str) -> Run:
  """Read a run's metrics so far; raise InputError if the folder is not a run's workdir.

  A run that is still checking its settings and data has a lock but no config.json yet.
  """
  check_no_model(workdir, workdir)
  if not any(os.path.exists(os.path.join(workdir, name)) for name in ('config.json', RUN_LOCK)):
    raise InputError(
      f"{workdir}: this is not a run's workdir, because it contains no config.json. Pass the "
      '--workdir of a training run.'
    )
  return metrics.read(workdir)


def _read(workdir: str) -> Recorded:
  records = read_metrics(workdir)
  if not records:
    raise InputError(
      f'{workdir}: the run has not written any metrics yet. Wait for its first step.'
    )
  config, tables = read_settings(workdir), step_records.read(workdir)
  return Recorded(workdir, config, records, tables.responses, tables.questions)


def read_settings(workdir: str) -> dict[str, Any]:
  """Read a run's config as dotted name -> value; raise InputError if a required name is missing."""
  config = flat(read_config(workdir))
  if missing_names := [name for name in _NEEDED if name not in config]:
    raise InputError(
      f"{workdir}/config.json: this is not a run's config, because it lacks "
      f'{", ".join(missing_names)}. Restore this file from a backup.'
    )
  return config


def last_step(config: Mapping[str, Any], records: Run) -> int:
  """Return the step after which a run ends, according to its scores so far."""
  patience = config.get('evaluation.patience', 0)  # missing in configs of older versions
  return alarms.last_step(scores_of(records, alarms.SCORE), config['num_steps'], patience)


def flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flatten a nested config into dotted name -> value."""
  flat_values: dict[str, Any] = {}
  for name, value in values.items():
    is_section = isinstance(value, Mapping)
    flat_values |= flat(value, f'{prefix}{name}.') if is_section else {prefix + name: value}
  return flat_values


def departures(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
  """Return a flat config's departures from configs/base.py, as (name, default, value)."""
  values = importlib.import_module(_BASE).get_config().to_dict()
  base = flat(json.loads(json.dumps(values)))  # in the same form as a run's config.json
  return [
    (name, base.get(name), value) for name, value in config.items() if base.get(name) != value
  ]


def setting(run: Recorded) -> dict[str, Any]:
  """Return the part of a run's config that defines its setting, as dotted name -> value."""
  return {k: v for k, v in run.config.items() if not k.startswith(SAME_SETTING)}


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """Label settings with just enough values to tell them apart.

  replay.ratio comes first, then short values. A single setting is labeled with its replay.ratio.
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
    longer_labels = [', '.join(filter(None, pair)) for pair in zip(labels, values[name])]
    if len(set(longer_labels)) > len(set(labels)):
      labels = longer_labels
  return labels


def score_names(runs: Sequence[Run]) -> dict[str, str]:
  """Map each evaluation source to the name of its score: avg@k, or pass@1 if k is 1.

  If k changed during a run, the newest evaluation determines the name.
  """
  last_steps: dict[str, float] = {}  # the last step of each metric
  for record in (record for run in runs for record in run):
    last_steps |= {name: max(record.get('step', 0), last_steps.get(name, 0)) for name in record}
  name_of_source: dict[str, str] = {}
  # Later names replace earlier ones, so newer steps come later and, at the same step, avg@k.
  for name in sorted(last_steps, key=lambda name: (last_steps[name], '/avg@' in name)):
    if match := re.fullmatch(r'eval/(.+)/(pass@1|avg@\d+)', name):
      name_of_source[match[1]] = name
  return dict(sorted(name_of_source.items()))


# ---- Metrics over steps ----

SMOOTHED_FROM = 40  # points, or steps in canvas.py; a shorter line is drawn unsmoothed
_SMOOTHED_SHARE = 1 / 40  # share of a line's points averaged on either side


@dataclasses.dataclass(frozen=True)
class Series:
  """A metric over the steps at which every seed has a finite value."""

  steps: np.ndarray  # [S]
  value_SN: np.ndarray  # one column per seed

  @property
  def mean(self) -> np.ndarray:
    """Return the mean over seeds, [S]."""
    return self.value_SN.mean(axis=1)

  @property
  def std(self) -> np.ndarray:
    """Return the sample standard deviation over seeds (n - 1), [S]; 0 for a single seed."""
    steps, seeds = self.value_SN.shape
    return self.value_SN.std(axis=1, ddof=1) if seeds > 1 else np.zeros(steps)


def over_seeds(runs: Sequence[Run], name: str) -> Series | None:
  """Return a metric over the steps that several runs share, or None if there are no such steps."""
  series = [
    {int(row['step']): row[name] for row in run if math.isfinite(row.get(name, math.nan))}
    for run in runs
  ]
  steps = sorted(set.intersection(*map(set, series)))
  if not steps:
    return None
  return Series(np.array(steps), np.array([[values[step] for values in series] for step in steps]))


def smoothed(values: Sequence[float] | np.ndarray, points: int | None = None) -> np.ndarray:
  """Return the moving average, whose window extends a fortieth of all points to either side.

  At the ends of the line, the window is cut off. `points` overrides the number of points, so that
  several lines can use the same window. Non-finite values are left out of the averages.
  """
  array = np.asarray(values, np.float64)
  reach = max(1, int(_SMOOTHED_SHARE * (points or len(array))))
  window = np.ones(2 * reach + 1)
  # Not mode 'same': its result is as long as the window if the window is longer than the line.
  is_known = np.isfinite(array)
  sums = np.convolve(np.where(is_known, array, 0.0), window)
  counts = np.convolve(is_known, window)
  return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)[reach : reach + len(array)]
