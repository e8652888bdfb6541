"""The replay buffer over steps: its questions by bucket, and those that have retired."""

from collections.abc import Sequence

import matplotlib
import numpy as np

from exgrpo_jax.reporting.figures import canvas
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError
from exgrpo_jax.reporting.runs import Group
from exgrpo_jax.reporting.series import over_seeds

_COUNTS = {
  'buffer/questions': ('questions in the buffer', canvas.BLUE, '-'),
  'buffer/trajectories': ('stored trajectories', canvas.ORANGE, '--'),
  'buffer/retired': ('retired questions', canvas.GREEN, '-.'),
}


def draw(groups: Sequence[Group]) -> Drawing:
  """A row of panels for each setting that has a buffer, of means over its seeds."""
  shown = [group for group in groups if _counts(group).any()]
  if not shown:
    raise NothingToDrawError('nothing was stored in a buffer: no run has replayed yet')
  most_buckets = max(group.num_rollouts for group in shown)
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
    canvas.label(left, f'Buffer by successes of {group.num_rollouts}\n{group.label}', 'questions')
    for name, (text, color, dashes) in _COUNTS.items():
      if found := series[name]:
        right.plot(steps, found.mean, label=text, color=color, linestyle=dashes, linewidth=1.5)
    canvas.label(right, f'Buffer and retirement\n{group.label}', 'count')
    right.set_ylim(bottom=0)
    counts = {f'buffer/bucket_{k}': bucket_S for k, bucket_S in enumerate(bucket_KS)}
    absent = {f'buffer/bucket_{k}': '' for k in range(len(bucket_KS), most_buckets)}
    means = {name: found.mean for name, found in series.items() if found}
    shared = {'setting': group.label, 'step': steps, 'seeds': len(group.runs)}
    rows += canvas.rows(**shared, **means, **counts, **absent)
  canvas.legend(figure, list(axes.flat), beside=True)
  return Drawing(figure, rows)


def _counts(group: Group) -> np.ndarray:
  """[K, S]: questions of each bucket, at each step; the mean over seeds."""
  found = [over_seeds(group.metrics, f'buffer/bucket_{k}') for k in range(group.num_rollouts)]
  return np.array([one.mean for one in found if one])
