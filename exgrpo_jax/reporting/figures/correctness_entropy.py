"""Correctness against entropy: how sure the policy is of right answers, by difficulty."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.reporting.figures import canvas, tables
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError, Row
from exgrpo_jax.reporting.runs import Group

_BINS = 24  # of entropy


def draw(groups: Sequence[Group]) -> Drawing:
  """For each setting a histogram of visits over their successes and entropy.

  The entropy is the mean over the generated responses that are right; a visit without any is not
  shown. The topmost cells also hold all that is above them.
  """
  points = {group.label: _visits(group) for group in groups}
  shown = [group for group in groups if len(points[group.label][0])]
  if not shown:
    raise NothingToDrawError('no run has records of right responses')
  top = max(np.percentile(points[group.label][1], 99.5) for group in shown)
  edges = np.linspace(0, top, _BINS + 1)
  figure, axes = canvas.grid(1, len(shown), sharey='row')
  cells = []
  for group in shown:
    successes, entropy = points[group.label]
    bounds = [np.arange(group.num_rollouts + 2) - 0.5, edges]
    cells.append(np.histogram2d(successes, np.minimum(entropy, top), bounds)[0])
  norm = PowerNorm(0.5, vmin=0, vmax=max(count_KE.max() for count_KE in cells))
  rows: list[Row] = []
  mesh = None
  for ax, group, count_KE in zip(axes[0], shown, cells):
    mesh = ax.pcolormesh(
      np.arange(group.num_rollouts + 2) - 0.5,
      edges,
      np.ma.masked_equal(count_KE.T, 0),
      norm=norm,
      cmap='cividis',
      rasterized=True,
    )
    means = tables.mean_by(*points[group.label])
    ax.plot(means.keys, means.mean, color='white', linewidth=4)
    ax.plot(means.keys, means.mean, color=canvas.ORANGE, marker='o', label='mean', linewidth=1.8)
    canvas.label(ax, group.label, '', f'successes of {group.num_rollouts} responses')
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(left=0.5)  # without a success there is no right response
    rows += [
      {
        'setting': group.label,
        'successes': k,
        'entropy_from': edges[e],
        'entropy_to': edges[e + 1],
        'questions': int(count_KE[k, e]),
      }
      for k, e in np.argwhere(count_KE).tolist()
    ]
  axes[0, 0].set_ylabel('entropy of right responses, nats')
  assert mesh is not None
  bar = figure.colorbar(mesh, ax=list(axes[0]), label='visits of a question')
  bar.locator = MaxNLocator(nbins=6, integer=True)
  canvas.legend(figure, list(axes[0]))
  return Drawing(figure, rows)


def _visits(group: Group) -> tuple[np.ndarray, np.ndarray]:
  """(successes, mean entropy of right responses) of each visit that has one."""
  outcome, is_replay, entropy = group.responses('outcome', 'is_replay', 'entropy')
  kept = (outcome == 'correct') & (is_replay == 0)
  if not kept.any():
    return np.zeros(0), np.zeros(0)
  key, successes = tables.visits(group)[kept], tables.successes(group)[kept]
  return tables.mean_by(key, successes).mean.round(), tables.mean_by(key, entropy[kept]).mean
