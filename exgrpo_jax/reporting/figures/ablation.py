"""The last evaluation of all settings beside each other, on each benchmark and on average."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.reporting.figures import canvas, tables
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError
from exgrpo_jax.reporting.runs import Group, scores
from exgrpo_jax.reporting.series import Series, last_common_step, over_seeds

_COLUMNS = 3
_LABEL = 30  # characters in a line of a setting's name
_MEAN = 'mean over benchmarks'


class _Bar(NamedTuple):
  mean: float
  low: float
  high: float
  seeds: list[float]


def draw(groups: Sequence[Group]) -> Drawing:
  """Bars at the last step after 0 at which all runs have been evaluated.

  A bar is the mean over seeds, its whiskers a 95% interval by Student's t; for one seed they are
  over questions. Seeds that are all equal have none.
  """
  names = scores(groups)
  if not names:
    raise NothingToDrawError('no run has been evaluated')
  if len(groups) < 2:
    raise NothingToDrawError('all runs are of one setting, so there is nothing to compare')
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
  canvas.caption(
    figure,
    'dots: seeds; whiskers: 95% intervals over seeds, of one seed over questions; of two seeds '
    'they may leave the panel',
  )
  return Drawing(figure, rows)


def _extent(bars: Sequence[_Bar | None]) -> float:
  """How far the panel reaches: to all but the whiskers of two seeds, which are 9 times as wide."""
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
  """The mean over benchmarks; one seed has no interval, since its scores share a policy."""
  seeds = np.mean([_at(over_seeds(group.metrics, name), step) for name in names], axis=0).tolist()
  return _over_seeds(seeds) if len(seeds) > 1 else _Bar(seeds[0], seeds[0], seeds[0], seeds)


def _over_seeds(seeds: list[float]) -> _Bar:
  found = tables.mean_by(np.zeros(len(seeds)), np.array(seeds))
  mean, half = float(found.mean[0]), float(found.half[0])
  return _Bar(mean, mean - half, mean + half, seeds)
