"""A study's results in Markdown: every arm, every seed, and paired differences."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from exgrpo_jax.reporting import bootstrap, comparison
from exgrpo_jax.reporting.bootstrap import Estimate
from exgrpo_jax.studies.runs import StudyRun, finished, last, paired


def setting(
  name: str,
  runs: Sequence[StudyRun],
  measure: str,
  baseline: str,
  smallest_difference: float,
) -> str:
  """The section of one setting.

  Args:
    name: of the setting.
    runs: of the whole study, those that have not begun included.
    measure: the primary one, at each finished run's last evaluation.
    baseline: the arm that the others are compared with.
    smallest_difference: the smallest that would matter.

  Raises:
    InputError: a finished run does not have the measure.
  """
  mine = [run for run in runs if run.setting == name]
  seeds = sorted({run.seed for run in mine})
  scored = {
    arm: finished(mine, name, arm, measure) for arm in dict.fromkeys(run.arm for run in mine)
  }
  value_of = {arm: last(found, measure) for arm, found in scored.items()}
  step_of = {
    arm: comparison.steps(one[-1].step for one in found.values()) for arm, found in scored.items()
  }
  parts = [
    f'## {name}',
    f'`{measure}` at the last evaluation:',
    _arms(value_of, step_of, len(seeds)),
    f'Difference to `{baseline}`, seed by seed:',
    _differences(value_of, baseline, smallest_difference),
    'Every seed:',
    _seeds(value_of, seeds),
  ]
  if missing := [f'`{run.arm},seed={run.seed}`' for run in mine if not run.is_finished]:
    parts.append(f'Missing, because not finished: {", ".join(missing)}.')
  return '\n\n'.join(parts)


def judgement(difference: Estimate, smallest_difference: float) -> str:
  """Compares a difference's interval with the smallest difference that would matter, s.

  'larger' than s or 'smaller' than -s if all of the interval is; 'no difference that matters' if
  all of it lies within (-s, s); 'cannot be told' without an interval; else 'undecided'.
  """
  _, low, high = difference
  if math.isnan(low):
    return 'cannot be told'
  if low >= smallest_difference:
    return 'larger'
  if high <= -smallest_difference:
    return 'smaller'
  if -smallest_difference < low and high < smallest_difference:
    return 'no difference that matters'
  return 'undecided'


def _arms(
  value_of: Mapping[str, Mapping[int, float]], step_of: Mapping[str, str], wanted: int
) -> str:
  rows = [('arm', 'seeds', 'step', 'mean', '95% interval', 'interquartile mean', '95% interval')]
  for arm, values in value_of.items():
    count = str(len(values)) if len(values) == wanted else f'{len(values)} of {wanted}'
    rows.append((arm, count, step_of[arm], *_both(list(values.values()))))
  return comparison.markdown(rows)


def _differences(
  value_of: Mapping[str, Mapping[int, float]], baseline: str, smallest_difference: float
) -> str:
  head = ('arm', 'pairs', 'mean', '95% interval', 'interquartile mean', '95% interval')
  rows: list[tuple[str, ...]] = [(*head, f'against {smallest_difference:g}')]
  for arm, values in value_of.items():
    if arm != baseline:
      found = paired(values, value_of[baseline])
      said = '-'
      if len(found):
        said = judgement(bootstrap.estimate(found, bootstrap.mean), smallest_difference)
      rows.append((arm, str(len(found)), *_both(found.tolist(), sign='+'), said))
  return comparison.markdown(rows)


def _seeds(value_of: Mapping[str, Mapping[int, float]], seeds: Sequence[int]) -> str:
  rows = [('arm', *(f'seed {seed}' for seed in seeds))]
  for arm, values in value_of.items():
    rows.append((arm, *(f'{values[s]:.4f}' if s in values else '-' for s in seeds)))
  return comparison.markdown(rows)


def _both(values: Sequence[float], sign: str = '') -> tuple[str, str, str, str]:
  """Mean and interquartile mean, each with its interval."""
  if not values:
    return '-', '-', '-', '-'
  cells = []
  for statistic in (bootstrap.mean, bootstrap.interquartile_mean):
    value, low, high = bootstrap.estimate(np.array(values), statistic)
    interval = f'{low:{sign}.4f} to {high:{sign}.4f}' if math.isfinite(low) else '-'
    cells += [f'{value:{sign}.4f}', interval]
  return tuple(cells)
