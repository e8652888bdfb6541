"""Figures of a study's results: curves against costs, and differences from the baseline."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from exgrpo_jax.reporting import canvas, comparison
from studies import drawing, tables
from studies.drawing import Drawing, NothingToDrawError, Row
from studies.protocol import Study
from studies.runs import COSTS, Evaluation, StudyRun, compared, finished

_COLUMNS = 2
_INCHES_OF_ARM = 0.28
_thousands = EngFormatter(sep='').format_eng  # 75k


def curves(runs: Sequence[StudyRun], measure_of: Callable[[str], str]) -> Drawing:
  """Draw a row of panels for each setting, with a line for each arm's mean over finished seeds.

  A point is an evaluation that exists for all of these seeds. If the seeds' costs differ, the point
  is drawn at the mean cost. `measure_of` returns a setting's measure.
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
  """Return costs, mean and interval for each step at which all seeds were evaluated."""
  if not seeds:
    return []
  by_step = [{evaluation.step: evaluation for evaluation in one} for one in seeds]
  rows = []
  for step in sorted(set.intersection(*map(set, by_step))):
    found = [one[step] for one in by_step]
    score = np.array([evaluation.scores[measure] for evaluation in found])
    mean, low, high = comparison.bootstrap(score)
    costs = {cost: float(np.mean([getattr(one, cost) for one in found])) for cost in COSTS}
    rows.append({**costs, 'seeds': len(found), 'mean': mean, 'low_95': low, 'high_95': high})
  return rows


def differences(runs: Sequence[StudyRun], study: Study) -> Drawing:
  """Draw each arm's difference from the baseline, with one panel per setting.

  Differences are paired by seed. Their intervals are the ones that the verdicts use: Student's t
  intervals, corrected for all of the study's comparisons.
  """
  arms = [arm for arm in study.arms if arm != study.baseline]
  rows = [row for setting in study.settings for row in _compared(runs, study, setting, arms)]
  drawn = [name for name in study.settings if any(row['setting'] == name for row in rows)]
  if not drawn:
    raise NothingToDrawError('no seed of an arm and of the baseline has finished')
  figure, panels = canvas.wrapped(len(drawn), _COLUMNS)
  lines = -(-len(drawn) // _COLUMNS)
  figure.set_figheight(lines * (1.3 + _INCHES_OF_ARM * len(arms)) + 0.4)
  for number, (setting, ax) in enumerate(zip(drawn, panels)):
    ax.axvspan(-study.smallest_difference, study.smallest_difference, color='#EEEEEE', zorder=0)
    ax.axvline(0, color=canvas.GREY, linewidth=0.8)
    for row in rows:
      if row['setting'] == setting:
        place = arms.index(row['arm'])
        ax.plot(row['seeds'], [place] * len(row['seeds']), '.', color=canvas.GREY, alpha=0.4)
        ax.plot([row['low'], row['high']], [place] * 2, color=canvas.BLUE, linewidth=1.5)
        ax.plot(row['mean'], place, 'o', color=canvas.BLUE, markersize=5)
    ax.set_yticks(range(len(arms)), arms)
    ax.tick_params(labelleft=number % _COLUMNS == 0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.set_ylim(len(arms) - 0.5, -0.5)
    measure, tokens = study.measure_of(setting).rpartition('/')[2], study.tokens_of(setting)
    over = f' over {_thousands(tokens)} tokens' if tokens else ' at the end'
    canvas.label(ax, f'{setting}\n{measure}{over}', '', f'difference from {study.baseline}')
  drawing.caption(
    figure,
    f'Dots: seeds. Lines: t intervals, corrected for {study.num_comparisons} comparisons. '
    f'Band: too small to matter, {study.smallest_difference:g}.',
  )
  return Drawing(figure, [{**row, 'seeds': len(row['seeds'])} for row in rows])


def _compared(
  runs: Sequence[StudyRun], study: Study, setting: str, arms: Sequence[str]
) -> list[dict]:
  """Return each arm's differences by seed, their mean, and its interval."""
  measure, tokens = study.measure_of(setting), study.tokens_of(setting)
  value_of = {
    arm: compared(finished(runs, setting, arm, measure), measure, tokens) for arm in study.arms
  }
  rows = []
  for arm in arms:
    found = comparison.compare(value_of[study.baseline], value_of[arm]).difference
    if len(found):
      mean, low, high = tables.student_t(found, study.num_comparisons)
      rows.append(
        dict(setting=setting, arm=arm, seeds=found.tolist(), mean=mean, low=low, high=high)
      )
  return rows
