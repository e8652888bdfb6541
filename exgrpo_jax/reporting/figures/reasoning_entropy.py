"""Entropy of valid and of invalid reasoning, over steps and by the difficulty of the question."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.reporting.figures import canvas, tables
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError, Row
from exgrpo_jax.reporting.runs import Group

_LEAST = 5  # responses of a point, by difficulty: one alone says nothing
_KINDS: Mapping[str, dict[str, Any]] = {
  'right, valid steps': dict(color=canvas.BLUE, linestyle='-'),
  'right, invalid steps': dict(color=canvas.ORANGE, linestyle='--'),
  'wrong': dict(color=canvas.GREY, linestyle=':'),
}


def draw(groups: Sequence[Group]) -> Drawing:
  """For each setting entropy over steps, and by the successes of the question's group.

  Only of generated responses, since replayed ones are chosen by their entropy.
  """
  shown = [group for group in groups if np.isfinite(group.responses('valid_steps')[0]).any()]
  if not shown:
    raise NothingToDrawError('no run has a task whose steps can be checked')
  figure, axes = canvas.grid(len(shown), 2, sharey='row')
  rows: list[Row] = []
  for (left, right), group in zip(axes, shown):
    entropy, step = group.responses('entropy', 'step')
    successes = tables.successes(group)
    for name, is_kind in _kinds(group).items():
      over_steps = tables.mean_by(step[is_kind], entropy[is_kind])
      if len(over_steps.keys):
        line = canvas.line(left, over_steps.keys, over_steps.mean, name, **_KINDS[name])
        rows += _rows(group, name, 'step', over_steps, line)
      found = tables.at_least(tables.mean_by(successes[is_kind], entropy[is_kind]), _LEAST)
      style = _KINDS[name] | dict(marker='o', markersize=4, capsize=2, linewidth=1.2)
      right.errorbar(found.keys, found.mean, found.half, label=name, **style)
      rows += _rows(group, name, 'successes', found, found.mean)
    canvas.label(left, f'Over training\n{group.label}', 'mean token entropy, nats')
    successes_of = f"successes of the question's {group.num_rollouts} responses"
    canvas.label(right, f'By difficulty\n{group.label}', '', successes_of)
    left.set_ylim(bottom=0)
  note = f'whiskers: 95% intervals; points of fewer than {_LEAST} responses are left out'
  canvas.legend(figure, list(axes.flat), note)
  return Drawing(figure, rows)


def _kinds(group: Group) -> Mapping[str, np.ndarray]:
  """Which responses are of each kind; a right one whose steps cannot be checked is of none."""
  outcome, valid, is_replay = group.responses('outcome', 'valid_steps', 'is_replay')
  fresh, right = is_replay == 0, outcome == 'correct'
  return dict(
    zip(_KINDS, (fresh & right & (valid == 1), fresh & right & (valid == 0), fresh & ~right))
  )


def _rows(group: Group, name: str, over: str, means: tables.Means, line: np.ndarray) -> list[Row]:
  """The means of one kind, and the line drawn through them, as rows of the table."""
  return canvas.rows(
    setting=group.label,
    responses=name,
    over=over,
    value=means.keys,
    count=means.count,
    entropy=means.mean,
    half_interval_95=means.half,
    line=line,
  )
