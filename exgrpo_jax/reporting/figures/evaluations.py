"""Evaluation over training, a panel for each benchmark."""

from collections.abc import Sequence

from exgrpo_jax.reporting.figures import canvas
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError
from exgrpo_jax.reporting.runs import Group, scores
from exgrpo_jax.reporting.series import over_seeds


def draw(groups: Sequence[Group]) -> Drawing:
  """Lines of means over seeds; bands are 95% intervals over questions, their ends' means."""
  names = scores(groups)
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
      rows += canvas.rows(
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
