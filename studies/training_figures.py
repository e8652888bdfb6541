"""Figures of runs from their metrics: dynamics, buffer, evaluations, and settings compared."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.reporting import canvas
from exgrpo_jax.reporting.comparison import last_common_step
from exgrpo_jax.reporting.runs import Group, Series, over_seeds, score_names
from studies import drawing
from studies.drawing import Drawing, NothingToDrawError, num_rollouts

_PANELS = (
  ('reward', 'Reward', 'mean over responses'),
  ('pass_rate/fresh', 'Pass rate of fresh questions', 'share correct'),
  ('entropy', 'Entropy', 'nats per token'),
  ('length/mean', 'Response length', 'tokens'),
  ('policy/clip_fraction', 'Clipped tokens', 'share of fresh tokens'),
)
_EVALUATION = ('evaluation', 'Evaluation, mean over benchmarks', 'share correct')
_COUNTS = {
  'buffer/questions': ('questions in the buffer', canvas.BLUE, '-'),
  'buffer/trajectories': ('stored trajectories', canvas.ORANGE, '--'),
  'buffer/retired': ('retired questions', canvas.GREEN, '-.'),
}
_COLUMNS = 3
_LABEL = 30  # characters per line of a setting's name
_MEAN = 'mean over benchmarks'


# ---- Dynamics ----


def dynamics(groups: Sequence[Group]) -> Drawing:
  """Draw each setting's mean over seeds, with a band from the lowest to the highest seed."""
  series = {
    (name, group.label): found
    for group in groups
    for name, found in (
      *((name, over_seeds(group.metrics, name)) for name, _, _ in _PANELS),
      (_EVALUATION[0], _evaluation(groups, group)),
    )
    if found is not None
  }
  shown = [p for p in (*_PANELS, _EVALUATION) if any(name == p[0] for name, _ in series)]
  if not shown:
    raise NothingToDrawError('the runs have recorded no training step yet')
  figure, axes = canvas.wrapped(len(shown), 3)
  rows = []
  for ax, (name, title, unit) in zip(axes, shown):
    for group, style in zip(groups, canvas.styles()):
      if found := series.get((name, group.label)):
        low, high = found.value_SN.min(axis=1), found.value_SN.max(axis=1)
        if len(group.runs) > 1:
          ax.fill_between(found.steps, low, high, color=style['color'], alpha=0.15, linewidth=0)
        drawn = canvas.line(ax, found.steps, found.mean, _seeds(group), **style)
        rows += drawing.rows(
          setting=group.label,
          metric=name,
          step=found.steps,
          seeds=len(group.runs),
          mean=found.mean,
          min=low,
          max=high,
          line=drawn,
        )
    canvas.label(ax, title, unit)
  canvas.legend(figure, axes)
  return Drawing(figure, rows)


def _seeds(group: Group) -> str:
  count = len(group.runs)
  return f'{group.label} ({count} seeds: mean, min to max)' if count > 1 else group.label


def _scores(groups: Sequence[Group]) -> dict[str, str]:
  """Map each evaluation source to its score metric."""
  return score_names([run.metrics for group in groups for run in group.runs])


def _evaluation(groups: Sequence[Group], group: Group) -> Series | None:
  """Average over all benchmarks at the steps that have a score for each benchmark."""
  found = [over_seeds(group.metrics, name) for name in _scores(groups).values()]
  complete = [one for one in found if one is not None]
  if not found or len(complete) < len(found):
    return None
  steps = sorted(set.intersection(*(set(one.steps.tolist()) for one in complete)))
  values = [one.value_SN[np.isin(one.steps, steps)] for one in complete]
  return Series(np.array(steps), np.mean(values, axis=0)) if steps else None


# ---- The replay buffer ----


def buffer(groups: Sequence[Group]) -> Drawing:
  """Draw a row of panels for each setting with a buffer, showing means over its seeds."""
  shown = [group for group in groups if _counts(group).any()]
  if not shown:
    raise NothingToDrawError('no run has stored anything in a buffer yet')
  most_buckets = max(num_rollouts(group) for group in shown)
  colors = matplotlib.colormaps['viridis'](np.linspace(0.95, 0.1, most_buckets))
  figure, axes = canvas.grid(len(shown), 2, sharex='row')
  rows = []
  for (left, right), group in zip(axes, shown):
    bucket_KS = _counts(group)
    series = {name: over_seeds(group.metrics, name) for name in _COUNTS}
    steps = next(found.steps for found in series.values() if found)
    areas = left.stackplot(steps, *bucket_KS, colors=colors[: len(bucket_KS)], linewidth=0)
    for k, area in enumerate(areas):
      area.set_label(f'bucket {k}')
    canvas.label(left, f'Buffer by successes of {num_rollouts(group)}\n{group.label}', 'questions')
    for name, (text, color, dashes) in _COUNTS.items():
      if found := series[name]:
        right.plot(steps, found.mean, label=text, color=color, linestyle=dashes, linewidth=1.5)
    canvas.label(right, f'Buffer and retirement\n{group.label}', 'count')
    right.set_ylim(bottom=0)
    counts = {f'buffer/bucket_{k}': bucket_S for k, bucket_S in enumerate(bucket_KS)}
    absent = {f'buffer/bucket_{k}': '' for k in range(len(bucket_KS), most_buckets)}
    means = {name: found.mean for name, found in series.items() if found}
    shared = {'setting': group.label, 'step': steps, 'seeds': len(group.runs)}
    rows += drawing.rows(**shared, **means, **counts, **absent)
  canvas.legend(figure, list(axes.flat), at_right=True)
  return Drawing(figure, rows)


def _counts(group: Group) -> np.ndarray:
  """Average the number of questions in each bucket at each step over seeds, [K, S]."""
  found = [over_seeds(group.metrics, f'buffer/bucket_{k}') for k in range(num_rollouts(group))]
  return np.array([one.mean for one in found if one])


# ---- Evaluations ----


def evaluations(groups: Sequence[Group]) -> Drawing:
  """Draw means over seeds, with a band between the mean ends of 95% intervals over questions."""
  names = _scores(groups)
  if not names:
    raise NothingToDrawError('no run has been evaluated')
  figure, axes = canvas.wrapped(len(names), 3)
  rows = []
  for ax, (source, name) in zip(axes, names.items()):
    for group, style in zip(groups, canvas.styles()):
      found, low, high = (over_seeds(group.metrics, name + end) for end in ('', '_low', '_high'))
      if not (found and low and high):
        continue
      ax.fill_between(low.steps, low.mean, high.mean, color=style['color'], alpha=0.15, linewidth=0)
      ax.plot(found.steps, found.mean, marker='o', markersize=3, label=group.label, **style)
      rows += drawing.rows(
        setting=group.label,
        benchmark=source,
        score=name.rpartition('/')[2],
        step=found.steps,
        seeds=len(group.runs),
        mean=found.mean,
        low_95=low.mean,
        high_95=high.mean,
      )
    canvas.label(ax, source, name.rpartition('/')[2])
  canvas.legend(figure, axes, 'bands: 95% intervals over questions')
  return Drawing(figure, rows)


# ---- Settings compared at the end ----


class _Bar(NamedTuple):
  mean: float
  low: float
  high: float
  seeds: list[float]


def ablation(groups: Sequence[Group]) -> Drawing:
  """Draw bars at the last step after 0 at which all runs have been evaluated.

  A bar is the mean over seeds. Its whiskers show Student's 95% t interval over seeds or, for a
  single seed, the 95% interval over questions. If all seeds are equal, there are no whiskers.
  """
  names = _scores(groups)
  if not names:
    raise NothingToDrawError('no run has been evaluated')
  if len(groups) < 2:
    raise NothingToDrawError('all runs have the same setting, so there is nothing to compare')
  step = _last_common_step(groups, list(names.values()))
  bars: dict[str, list[_Bar | None]] = {
    source: [_bar(group, name, step) for group in groups] for source, name in names.items()
  }
  if len(names) > 1:
    bars[_MEAN] = [_average(group, list(names.values()), step) for group in groups]
  figure, axes = canvas.wrapped(len(bars), _COLUMNS)
  figure.set_figheight(figure.get_figheight() * (0.4 + 0.15 * len(groups)))
  rows, places = [], np.arange(len(groups))
  for ax, (source, found) in zip(axes, bars.items()):
    for place, group, bar, style in zip(places, groups, found, canvas.styles()):
      if bar is None:
        continue
      ax.barh(place, bar.mean, color=style['color'], alpha=0.75, height=0.7)
      is_told = bar.high > bar.low
      if is_told:
        whiskers = [[bar.mean - bar.low], [bar.high - bar.mean]]
        ax.errorbar(bar.mean, place, xerr=whiskers, color='black', capsize=3, linewidth=1)
      if len(bar.seeds) > 1:
        ax.plot(bar.seeds, [place] * len(bar.seeds), 'o', color='black', markersize=3, alpha=0.7)
      rows.append(
        {
          'setting': group.label,
          'benchmark': source,
          'step': step,
          'seeds': len(bar.seeds),
          'mean': bar.mean,
          'low_95': bar.low if is_told else '',
          'high_95': bar.high if is_told else '',
          'interval_over': ('seeds' if len(bar.seeds) > 1 else 'questions') if is_told else '',
        }
      )
    canvas.label(ax, source, '', f'share correct after step {step}')
    ax.set_yticks(places, [canvas.wrap(group.label, _LABEL) for group in groups])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * _extent(found))
    ax.grid(visible=False, axis='y')
    if ax not in axes[::_COLUMNS]:
      ax.tick_params(labelleft=False)
  drawing.caption(
    figure,
    'Dots: seeds. Whiskers: 95% intervals over seeds, or over questions if there is one seed. With '
    'two seeds, whiskers may extend beyond the panel.',
  )
  return Drawing(figure, rows)


def _extent(bars: Sequence[_Bar | None]) -> float:
  """Return the panel's extent, ignoring whiskers over two seeds (9 standard deviations long)."""
  ends = [end for bar in bars if bar for end in (*bar.seeds, bar.high * (len(bar.seeds) != 2))]
  return max(ends) or 1.0


def _last_common_step(groups: Sequence[Group], names: Sequence[str]) -> int:
  runs = [run for group in groups for run in group.metrics]
  found = [over_seeds([run], name) for run in runs for name in names]
  step = last_common_step([series.steps.tolist() if series else [] for series in found])
  if step is None:
    raise NothingToDrawError(
      'there is no step after 0 at which all runs were evaluated on all benchmarks'
    )
  return step


def _at(series: Series | None, step: int) -> list[float]:
  return [] if series is None else series.value_SN[series.steps == step].ravel().tolist()


def _bar(group: Group, name: str, step: int) -> _Bar | None:
  seeds = _at(over_seeds(group.metrics, name), step)
  if len(seeds) > 1:
    return _over_seeds(seeds)
  (low,), (high,) = (_at(over_seeds(group.metrics, name + end), step) for end in ('_low', '_high'))
  return _Bar(seeds[0], low, high, seeds)


def _average(group: Group, names: Sequence[str], step: int) -> _Bar:
  """Average over benchmarks. A single seed has no interval: all scores are from one policy."""
  seeds = np.mean([_at(over_seeds(group.metrics, name), step) for name in names], axis=0).tolist()
  return _over_seeds(seeds) if len(seeds) > 1 else _Bar(seeds[0], seeds[0], seeds[0], seeds)


def _over_seeds(seeds: list[float]) -> _Bar:
  found = drawing.mean_by(np.zeros(len(seeds)), np.array(seeds))
  mean, half = float(found.mean[0]), float(found.half[0])
  return _Bar(mean, mean - half, mean + half, seeds)
