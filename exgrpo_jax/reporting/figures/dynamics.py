"""Training dynamics of all settings side by side, the seeds of each as a band."""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.reporting.figures import canvas
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError
from exgrpo_jax.reporting.runs import Group, scores
from exgrpo_jax.reporting.series import Series, over_seeds

_PANELS = (
  ('reward', 'Reward', 'mean over responses'),
  ('pass_rate/fresh', 'Pass rate of fresh questions', 'share correct'),
  ('entropy', 'Entropy', 'nats per token'),
  ('length/mean', 'Response length', 'tokens'),
  ('clip_share', 'Clipped tokens', 'share of fresh tokens'),
)
_EVALUATION = ('evaluation', 'Evaluation, mean over benchmarks', 'share correct')


def draw(groups: Sequence[Group]) -> Drawing:
  """A line for each setting: the mean over its seeds, in a band from the lowest to the highest."""
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
        drawn = canvas.line(ax, found.steps, found.mean, _legend(group), **style)
        rows += canvas.rows(
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


def _legend(group: Group) -> str:
  count = len(group.runs)
  return f'{group.label} ({count} seeds: mean, min to max)' if count > 1 else group.label


def _evaluation(groups: Sequence[Group], group: Group) -> Series | None:
  """The mean over all benchmarks, at steps where there is a score for each."""
  found = [over_seeds(group.metrics, name) for name in scores(groups).values()]
  complete = [one for one in found if one is not None]
  if not found or len(complete) < len(found):
    return None
  steps = sorted(set.intersection(*(set(one.steps.tolist()) for one in complete)))
  values = [one.value_SN[np.isin(one.steps, steps)] for one in complete]
  return Series(np.array(steps), np.mean(values, axis=0)) if steps else None
