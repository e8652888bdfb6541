"""The replay buffer over a run: what entered and left it, and what was replayed of it."""

from typing import Any

import numpy as np
import pyarrow as pa

from exgrpo_jax.reporting.page import charts, curves
from exgrpo_jax.reporting.page.charts import Line, Panel, flags, known
from exgrpo_jax.reporting.runs import Recorded

_MOST_REPLAYED = 50  # questions of the table
_AGE_BINS = 40  # at most


def describe(run: Recorded) -> dict[str, Any]:
  """Heat map, curves and tables of the buffer, as far as recorded.

  A run without replay has none of them: what its buffer keeps is never read.
  """
  if not run.config['replay.ratio']:
    return {'is_used': False, 'panels': [], 'replayed': []}
  replays = run.responses.filter(run.responses['is_replay'])
  panels = curves.buckets(run.metrics)
  if run.questions.num_rows:
    panels.append(_flow(run.questions))
  if replays.num_rows:
    panels += [_ages(replays), _entropies(replays), *_by_age(replays)]
  return {'is_used': True, 'panels': panels, 'replayed': _most_replayed(run.questions, replays)}


def _flow(questions: pa.Table) -> Panel:
  """Questions that entered the buffer, moved in it, retired and were replayed, by step."""
  step = questions['step'].to_numpy()
  before, after = (known(questions[f'bucket_{when}']) for when in ('before', 'after'))
  was_in, is_in = ~np.isnan(before), ~np.isnan(after)
  steps = np.unique(step)
  flows = {
    'entered': is_in & ~was_in,
    'moved to another bucket': was_in & is_in & (before != after),
    'retired': ~np.isnan(known(questions['retired_step'])),
    'replayed': flags(questions['is_replay']),
  }
  lines = [
    Line(label, steps, np.bincount(np.searchsorted(steps, step[chosen]), minlength=len(steps)))
    for label, chosen in flows.items()
  ]
  return charts.lines('Into the buffer, within it and out of it', 'questions', lines)


def _ages(replays: pa.Table) -> Panel:
  """Median age of what is replayed, and the range of its middle eight tenths."""
  age = replays['step'].to_numpy() - replays['policy_step'].to_numpy()
  steps, (low, median, high) = _quantiles(replays['step'].to_numpy(), age, (0.1, 0.5, 0.9))
  line = Line('median; band: 10% to 90%', steps, median, (steps, low, high))
  return charts.lines('Age of what is replayed', 'steps', [line])


def _entropies(replays: pa.Table) -> Panel:
  """Mean token entropy of what was chosen, and of all there was to choose from."""
  step, chosen = replays['step'].to_numpy(), known(replays['entropy'])
  steps = np.unique(step)
  lines = [Line('chosen', steps, _means(steps, step, chosen))]
  candidates = replays['candidate_entropies'].combine_chunks()
  counts = np.asarray(candidates.value_lengths().fill_null(0))
  several = counts > 1
  if several.any():
    offered = np.repeat(step, counts)[np.repeat(several, counts)]
    values = np.asarray(candidates.flatten(), np.float64)[np.repeat(several, counts)]
    among = np.unique(offered)
    of_several = _means(among, step[several], chosen[several])
    lines.append(Line('chosen where there were several', among, of_several))
    lines.append(Line('all there were to choose from', among, _means(among, offered, values)))
  return charts.lines('Entropy of what is replayed', 'nats per token', lines)


def _by_age(replays: pa.Table) -> list[Panel]:
  """Panels of importance ratio, effective sample size and number of replays by age.

  The effective sample size is (sum w)^2 / (n sum w^2) over the tokens of an age, as in the metric
  of that name. Earlier versions did not record the variance of w that it takes.
  """
  age = replays['step'].to_numpy() - replays['policy_step'].to_numpy()
  width = max(1, -(-int(age.max() + 1) // _AGE_BINS))
  group = age // width
  bins = np.unique(group)
  place, middle = np.searchsorted(bins, group), bins * width + (width - 1) / 2
  tokens, ratio = known(replays['length']), known(replays['ratio_mean'])

  def total(values: np.ndarray) -> np.ndarray:
    return np.bincount(place, weights=values, minlength=len(bins))

  mean = total(tokens * ratio) / total(tokens)
  largest = np.full(len(bins), -np.inf)
  np.maximum.at(largest, place, known(replays['ratio_max']))
  x = 'age' if width == 1 else f'age (groups of {width} steps)'
  ratios = [Line('mean over tokens', middle, mean), Line('largest', middle, largest)]
  panels = [
    charts.lines('Importance ratio by age', 'ratio, log scale', ratios, x=x, log=True, smooth=False)
  ]
  variance = known(replays['ratio_variance'])
  if not np.isnan(variance).all():
    squares = total(tokens * (variance + ratio**2))
    size = total(tokens * ratio) ** 2 / (total(tokens) * squares)
    line, title = Line('effective sample size', middle, size), 'Effective sample size by age'
    panels.append(charts.lines(title, 'share of tokens', [line], x=x, share=True, smooth=False))
  counts = Line('replays', middle, np.bincount(place, minlength=len(bins)))
  return [*panels, charts.lines('Replays by age', 'responses', [counts], x=x, smooth=False)]


def _most_replayed(questions: pa.Table, replays: pa.Table) -> list[dict[str, Any]]:
  """The questions that were replayed most often, and where they stand now."""
  rows, counts = np.unique(replays['question'].to_numpy(), return_counts=True)
  chosen = rows[np.argsort(-counts, kind='stable')][:_MOST_REPLAYED]
  visits = {row: [] for row in chosen.tolist()}
  wanted = np.isin(questions['question'].to_numpy(), chosen)
  for visit in questions.filter(pa.array(wanted)).to_pylist():
    visits[visit['question']].append(visit)
  replayed = dict(zip(rows.tolist(), counts.tolist()))
  return [
    {
      'question': row,
      'replays': replayed[row],
      'visits': len(of_row),
      'first': of_row[0]['correctness'],
      'last': of_row[-1]['correctness'],
      'step': of_row[-1]['step'],
      'retired': next((v['retired_step'] for v in of_row if v['retired_step'] is not None), None),
    }
    for row, of_row in visits.items()
  ]


def _quantiles(
  step: np.ndarray, values: np.ndarray, shares: tuple[float, ...]
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Steps, and for each share its quantile at each step; `step` is sorted."""
  steps, starts = np.unique(step, return_index=True)
  found = [np.quantile(part, shares) for part in np.split(values, starts[1:])]
  return steps, list(np.array(found).T)


def _means(steps: np.ndarray, step: np.ndarray, values: np.ndarray) -> np.ndarray:
  place = np.searchsorted(steps, step)
  counts = np.bincount(place, minlength=len(steps))
  return np.bincount(place, weights=values, minlength=len(steps)) / counts
