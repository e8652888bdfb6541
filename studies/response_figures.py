"""Figures of runs from the records of their responses: entropies and code blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

from exgrpo_jax.reporting import canvas
from exgrpo_jax.reporting.runs import Group
from studies import drawing
from studies.drawing import Drawing, NothingToDrawError, Row, num_rollouts, responses

_LEAST = 5  # minimum responses per point by difficulty, because a single response says nothing
_KINDS: Mapping[str, dict[str, Any]] = {
  'right, valid steps': dict(color=canvas.BLUE, linestyle='-'),
  'right, invalid steps': dict(color=canvas.ORANGE, linestyle='--'),
  'wrong': dict(color=canvas.GREY, linestyle=':'),
}
_BINS = 24  # bins of the entropy axis
_STYLES = {
  'fresh, all': dict(color='#000000', linestyle='-'),
  'fresh, right': dict(color=canvas.BLUE, linestyle='--'),
  'fresh, wrong': dict(color=canvas.ORANGE, linestyle='-.'),
  'replayed': dict(color=canvas.GREEN, linestyle=':'),
}


# ---- Entropy of valid and of invalid reasoning ----


def reasoning_entropy(groups: Sequence[Group]) -> Drawing:
  """Draw each setting's entropy over steps, and by the number of successes in the group.

  Only generated responses count, because replayed responses are selected by their entropy.
  """
  shown = [group for group in groups if np.isfinite(responses(group, 'valid_steps')[0]).any()]
  if not shown:
    raise NothingToDrawError('no run has a task with steps that can be checked')
  figure, axes = canvas.grid(len(shown), 2, sharey='row')
  rows: list[Row] = []
  for (left, right), group in zip(axes, shown):
    entropy, step = responses(group, 'entropy', 'step')
    successes = drawing.successes(group)
    for name, is_kind in _kinds(group).items():
      over_steps = drawing.mean_by(step[is_kind], entropy[is_kind])
      if len(over_steps.keys):
        line = canvas.line(left, over_steps.keys, over_steps.mean, name, **_KINDS[name])
        rows += _rows(group, name, 'step', over_steps, line)
      found = drawing.at_least(drawing.mean_by(successes[is_kind], entropy[is_kind]), _LEAST)
      style = _KINDS[name] | dict(marker='o', markersize=4, capsize=2, linewidth=1.2)
      right.errorbar(found.keys, found.mean, found.half, label=name, **style)
      rows += _rows(group, name, 'successes', found, found.mean)
    canvas.label(left, f'Over training\n{group.label}', 'mean token entropy, nats')
    successes_of = f"successes of the question's {num_rollouts(group)} responses"
    canvas.label(right, f'By difficulty\n{group.label}', '', successes_of)
    left.set_ylim(bottom=0)
  note = f'whiskers: 95% intervals; points with fewer than {_LEAST} responses are left out'
  canvas.legend(figure, list(axes.flat), note)
  return Drawing(figure, rows)


def _kinds(group: Group) -> Mapping[str, np.ndarray]:
  """Return a mask for each kind. A correct response with unchecked steps has no kind."""
  outcome, valid, is_replay = responses(group, 'outcome', 'valid_steps', 'is_replay')
  fresh, right = is_replay == 0, outcome == 'correct'
  return dict(
    zip(_KINDS, (fresh & right & (valid == 1), fresh & right & (valid == 0), fresh & ~right))
  )


def _rows(group: Group, name: str, over: str, means: drawing.Means, line: np.ndarray) -> list[Row]:
  """Return table rows with a kind's means and the values of the line through them."""
  return drawing.rows(
    setting=group.label,
    responses=name,
    over=over,
    value=means.keys,
    count=means.count,
    entropy=means.mean,
    half_interval_95=means.half,
    line=line,
  )


# ---- Correctness against entropy ----


def correctness_entropy(groups: Sequence[Group]) -> Drawing:
  """Draw a histogram of each setting's visits by successes and entropy.

  The entropy is the mean over a visit's correct generated responses. Visits without a correct
  response are not shown. The topmost cells also count all visits above them.
  """
  points = {group.label: _visits(group) for group in groups}
  shown = [group for group in groups if len(points[group.label][0])]
  if not shown:
    raise NothingToDrawError('no run has records of correct responses')
  top = max(np.percentile(points[group.label][1], 99.5) for group in shown)
  edges = np.linspace(0, top, _BINS + 1)
  figure, axes = canvas.grid(1, len(shown), sharey='row')
  cells = []
  for group in shown:
    successes, entropy = points[group.label]
    bounds = [np.arange(num_rollouts(group) + 2) - 0.5, edges]
    cells.append(np.histogram2d(successes, np.minimum(entropy, top), bounds)[0])
  norm = PowerNorm(0.5, vmin=0, vmax=max(count_KE.max() for count_KE in cells))
  rows: list[Row] = []
  mesh = None
  for ax, group, count_KE in zip(axes[0], shown, cells):
    mesh = ax.pcolormesh(
      np.arange(num_rollouts(group) + 2) - 0.5,
      edges,
      np.ma.masked_equal(count_KE.T, 0),
      norm=norm,
      cmap='cividis',
      rasterized=True,
    )
    means = drawing.mean_by(*points[group.label])
    ax.plot(means.keys, means.mean, color='white', linewidth=4)
    ax.plot(means.keys, means.mean, color=canvas.ORANGE, marker='o', label='mean', linewidth=1.8)
    canvas.label(ax, group.label, '', f'successes of {num_rollouts(group)} responses')
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(left=0.5)  # visits without a success are not shown
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
  """Return (successes, mean entropy of correct responses) for visits with a correct response."""
  outcome, is_replay, entropy = responses(group, 'outcome', 'is_replay', 'entropy')
  kept = (outcome == 'correct') & (is_replay == 0)
  if not kept.any():
    return np.zeros(0), np.zeros(0)
  key, successes = drawing.visits(group)[kept], drawing.successes(group)[kept]
  return drawing.mean_by(key, successes).mean.round(), drawing.mean_by(key, entropy[kept]).mean


# ---- Code blocks ----


def code_share(groups: Sequence[Group]) -> Drawing:
  """Draw each setting's share of responses with a code block at each step, over all seeds."""
  if not any(len(responses(group, 'step')[0]) for group in groups):
    raise NothingToDrawError('no run has records of its responses')
  if not any(responses(group, 'has_code_block')[0].any() for group in groups):
    raise NothingToDrawError('no response has a code block')
  figure, axes = canvas.grid(1, len(groups), sharey='row')
  rows = []
  for ax, group in zip(axes[0], groups):
    has_block, outcome, is_replay, step = responses(
      group, 'has_code_block', 'outcome', 'is_replay', 'step'
    )
    fresh, right = is_replay == 0, outcome == 'correct'
    for name, kept in zip(_STYLES, (fresh, fresh & right, fresh & ~right, ~fresh)):
      if not np.any(kept):
        continue
      found = drawing.mean_by(step[kept], has_block[kept])
      drawn = canvas.line(ax, found.keys, found.mean, name, **_STYLES[name])
      rows += drawing.rows(
        setting=group.label,
        responses=name,
        step=found.keys,
        count=found.count,
        share=found.mean,
        line=drawn,
      )
    canvas.label(ax, f'Code blocks\n{group.label}', '')
  axes[0, 0].set_ylabel('share of responses')
  axes[0, 0].set_ylim(bottom=0)
  canvas.legend(figure, list(axes[0]))
  return Drawing(figure, rows)
