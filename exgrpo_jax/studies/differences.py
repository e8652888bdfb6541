"""How much more than the baseline each arm reached, as a figure: every seed, mean and interval."""

from collections.abc import Sequence

from matplotlib.ticker import EngFormatter, MaxNLocator

from exgrpo_jax.reporting import bootstrap
from exgrpo_jax.reporting.figures import canvas
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError
from exgrpo_jax.studies.protocol import Study
from exgrpo_jax.studies.runs import StudyRun, compared, finished, paired

_COLUMNS = 2
_INCHES_OF_ARM = 0.28
_thousands = EngFormatter(sep='').format_eng  # 75k


def draw(runs: Sequence[StudyRun], study: Study) -> Drawing:
  """A panel for each setting, a line for each arm but the baseline.

  Differences are of what the study compares, seed by seed; intervals those that decide, Student's t
  corrected for all comparisons of the study.
  """
  arms = [arm for arm in study.arms if arm != study.baseline]
  rows = [row for setting in study.settings for row in _rows(runs, study, setting, arms)]
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
    canvas.label(ax, f'{setting}\n{measure}{over}', '', f'difference to {study.baseline}')
  canvas.caption(
    figure,
    f'Dots: seeds. Lines: t intervals, corrected for {study.num_comparisons} comparisons. '
    f'Band: too small to matter, {study.smallest_difference:g}.',
  )
  return Drawing(figure, [{**row, 'seeds': len(row['seeds'])} for row in rows])


def _rows(runs: Sequence[StudyRun], study: Study, setting: str, arms: Sequence[str]) -> list[dict]:
  """Setting, arm, the difference of every seed, their mean and its interval."""
  measure, tokens = study.measure_of(setting), study.tokens_of(setting)
  value_of = {
    arm: compared(finished(runs, setting, arm, measure), measure, tokens) for arm in study.arms
  }
  rows = []
  for arm in arms:
    found = paired(value_of[arm], value_of[study.baseline])
    if len(found):
      mean, low, high = bootstrap.student_t(found, study.num_comparisons)
      rows.append(
        dict(setting=setting, arm=arm, seeds=found.tolist(), mean=mean, low=low, high=high)
      )
  return rows
