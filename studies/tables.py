"""A study's results in Markdown: every arm, every seed, and paired differences."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from exgrpo_jax.data.questions import spec_name
from exgrpo_jax.reporting import comparison
from exgrpo_jax.reporting.comparison import Estimate
from studies.protocol import Study
from studies.runs import Evaluation, StudyRun, compared, finished

Scored = Mapping[int, Sequence[Evaluation]]  # seed -> evaluations, of an arm


def setting(name: str, runs: Sequence[StudyRun], study: Study) -> str:
  """Return the section of one setting in Markdown.

  `runs` contains all of the study's runs, including runs that have not begun.

  Raises:
    InputError: a finished run does not have the measure.
  """
  mine, measure = [run for run in runs if run.setting == name], study.measure_of(name)
  seeds = sorted({run.seed for run in mine})
  scored = {
    arm: finished(mine, name, arm, measure) for arm in dict.fromkeys(run.arm for run in mine)
  }
  parts = [f'## {name}']
  for tokens in dict.fromkeys((study.tokens_of(name), 0)):
    at = f'mean over the first {tokens:,} generated tokens' if tokens else 'at the last evaluation'
    parts += [f'`{measure}`, {at}:', *_compared(scored, measure, tokens, seeds, study)]
  spec = study.last_data_of(name)
  for kind in ('avg', 'pass') if spec else ():
    at_many = f'eval/{spec_name(spec)}/{kind}@{study.last_samples}'
    parts += [f'`{at_many}` of the last policy:', *_compared(scored, at_many, 0, seeds, study)]
  if study.takes_off:
    said = (
      f'Number of runs in which `{measure}` reaches {study.takes_off:g}, and medians over seeds:'
    )
    parts += [said, _taking_off(scored, measure, study.takes_off)]
  if missing := [f'`{run.arm},seed={run.seed}`' for run in mine if not run.is_finished]:
    parts.append(f'Missing because they have not finished: {", ".join(missing)}.')
  return '\n\n'.join(parts)


def judgement(difference: Estimate, smallest_difference: float) -> str:
  """Compare a difference's interval with the smallest difference that would matter, s.

  Returns 'larger' or 'smaller' if the whole interval is at least s or at most -s, 'no difference
  that matters' if the interval lies within (-s, s), 'cannot be told' if there is no interval, and
  'undecided' otherwise.
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


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
  """Average all but the lowest and the highest N // 4 values, [..., N] -> [...].

  Recommended by Agarwal et al. (arXiv:2108.13264): outliers do not affect this mean, and it uses
  more of the values than the median does.
  """
  return stats.trim_mean(values, 0.25, axis=axis)


def student_t(values: np.ndarray, comparisons: int) -> Estimate:
  """Compute the mean of `values` [N], N >= 1, and its t interval at 1 - .05 / comparisons.

  If the values are normally distributed, all `comparisons` intervals together contain the true
  values in 95% of cases (Bonferroni).
  """
  value = float(comparison.mean(values))
  if len(values) < comparison.FEWEST or math.isclose(
    np.ptp(values), 0, abs_tol=comparison.ROUNDING
  ):
    return Estimate(value, np.nan, np.nan)
  interval = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / comparisons)
  return Estimate(value, float(interval.low), float(interval.high))


def _compared(
  scored: Mapping[str, Scored], measure: str, tokens: int, seeds: Sequence[int], study: Study
) -> list[str]:
  """Return tables of arms, differences and seeds by the last value or the mean over tokens."""
  value_of = {arm: compared(found, measure, tokens) for arm, found in scored.items()}
  step_of = {
    arm: comparison.steps(one[-1].step for one in found.values()) for arm, found in scored.items()
  }
  parts = [_arms(value_of, step_of, len(seeds))]
  for baseline in filter(None, (study.baseline, study.second_baseline)):
    said = f'Difference from `{baseline}`, paired by seed:'
    parts += [said, _differences(value_of, study, baseline)]
  return [*parts, 'Every seed:', _seeds(value_of, seeds)]


def _taking_off(scored: Mapping[str, Scored], measure: str, bound: float) -> str:
  head = ('arm', 'taken off', 'tokens by then', 'distinct questions', 'entropy at the end')
  rows: list[tuple[str, ...]] = [head]
  for arm, found in scored.items():
    firsts = [next((e for e in own if e.scores[measure] >= bound), None) for own in found.values()]
    ends = [own[-1] for own in found.values()]
    rows.append(
      (
        arm,
        f'{sum(first is not None for first in firsts)} of {len(firsts)}',
        _median([first.generated_tokens for first in firsts if first], ',.0f'),
        _median([end.distinct_questions for end in ends if end.distinct_questions], '.0f'),
        _median([end.explaining['entropy'] for end in ends if 'entropy' in end.explaining], '.2f'),
      )
    )
  return comparison.markdown(rows)


def _median(values: Sequence[float], form: str) -> str:
  return f'{statistics.median(values):{form}}' if values else '-'


def _arms(
  value_of: Mapping[str, Mapping[int, float]], step_of: Mapping[str, str], wanted: int
) -> str:
  rows = [('arm', 'seeds', 'step', 'mean', '95% interval', 'interquartile mean', '95% interval')]
  for arm, values in value_of.items():
    count = str(len(values)) if len(values) == wanted else f'{len(values)} of {wanted}'
    rows.append((arm, count, step_of[arm], *_both(list(values.values()))))
  return comparison.markdown(rows)


def _differences(value_of: Mapping[str, Mapping[int, float]], study: Study, baseline: str) -> str:
  head = ('arm', 'pairs', 'mean', '95% interval', 'interquartile mean', '95% interval')
  rows: list[tuple[str, ...]] = [
    (*head, 't interval, corrected', f'against {study.smallest_difference:g}')
  ]
  for arm, values in value_of.items():
    if arm != baseline:
      found = comparison.compare(value_of[baseline], values).difference
      interval = said = '-'
      if len(found):
        estimate = student_t(found, study.num_comparisons)
        interval = _interval(estimate, '+')
        said = judgement(estimate, study.smallest_difference)
      rows.append((arm, str(len(found)), *_both(found.tolist(), sign='+'), interval, said))
  return comparison.markdown(rows)


def _seeds(value_of: Mapping[str, Mapping[int, float]], seeds: Sequence[int]) -> str:
  rows = [('arm', *(f'seed {seed}' for seed in seeds))]
  for arm, values in value_of.items():
    rows.append((arm, *(f'{values[s]:.4f}' if s in values else '-' for s in seeds)))
  return comparison.markdown(rows)


def _both(values: Sequence[float], sign: str = '') -> tuple[str, str, str, str]:
  """Format the mean and the interquartile mean, each with its interval."""
  if not values:
    return '-', '-', '-', '-'
  cells = []
  for statistic in (comparison.mean, interquartile_mean):
    estimate = comparison.bootstrap(np.array(values), statistic)
    cells += [f'{estimate.value:{sign}.4f}', _interval(estimate, sign)]
  return tuple(cells)


def _interval(estimate: Estimate, sign: str) -> str:
  _, low, high = estimate
  return f'{low:{sign}.4f} to {high:{sign}.4f}' if math.isfinite(low) else '-'
