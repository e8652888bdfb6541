"""The measure of a study against what training had cost: steps, questions, tokens and time."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from exgrpo_jax.reporting import bootstrap
from exgrpo_jax.reporting.figures import canvas
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError, Row
from exgrpo_jax.studies.runs import COSTS, Evaluation, StudyRun, finished


def draw(runs: Sequence[StudyRun], measure_of: Callable[[str], str]) -> Drawing:
  """A row of panels for each setting, a line for each arm: the mean over its finished seeds.

  A point is an evaluation that all of these seeds have; where they differ in what it cost, it
  stands at their mean. `measure_of` gives a setting's measure.
  """
  settings = list(dict.fromkeys(run.setting for run in runs))
  arms = list(dict.fromkeys(run.arm for run in runs))
  lines = {}
  for setting, arm in itertools.product(settings, arms):
    measure = measure_of(setting)
    if table := _points([*finished(runs, setting, arm, measure).values()], measure):
      lines[setting, arm] = table
  if not lines:
    raise NothingToDrawError('no run of the study has finished')
  figure, axes = canvas.grid(len(settings), len(COSTS), sharey='row')
  for setting, axes_of_setting in zip(settings, axes):
    for ax, (cost, unit) in zip(axes_of_setting, COSTS.items()):
      for arm, style in zip(arms, canvas.styles()):
        if table := lines.get((setting, arm)):
          at, mean, low, high = np.array(
            [[point[name] for point in table] for name in (cost, 'mean', 'low_95', 'high_95')]
          )
          ax.fill_between(at, low, high, color=style['color'], alpha=0.15, linewidth=0)
          ax.plot(at, mean, marker='o', markersize=3, linewidth=1.5, label=arm, **style)
      ax.xaxis.set_major_locator(MaxNLocator(4))
      ax.xaxis.set_major_formatter(EngFormatter(sep=''))  # 75k
      canvas.label(
        ax, setting, measure_of(setting).rpartition('/')[2] if cost == 'step' else '', unit
      )
  canvas.legend(figure, list(axes.flat), 'bands: 95% bootstrap intervals of the mean over seeds')
  rows = [
    {'setting': setting, 'arm': arm, **point}
    for (setting, arm), table in lines.items()
    for point in table
  ]
  return Drawing(figure, rows)


def _points(seeds: Sequence[Sequence[Evaluation]], measure: str) -> list[Row]:
  """Costs, mean and interval at each step at which all seeds were evaluated."""
  if not seeds:
    return []
  by_step = [{evaluation.step: evaluation for evaluation in one} for one in seeds]
  rows = []
  for step in sorted(set.intersection(*map(set, by_step))):
    found = [one[step] for one in by_step]
    score = np.array([evaluation.scores[measure] for evaluation in found])
    mean, low, high = bootstrap.estimate(score, bootstrap.mean)
    costs = {cost: float(np.mean([getattr(one, cost) for one in found])) for cost in COSTS}
    rows.append({**costs, 'seeds': len(found), 'mean': mean, 'low_95': low, 'high_95': high})
  return rows
