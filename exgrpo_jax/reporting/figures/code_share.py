"""The share of responses with a code block: a habit that replay may spread."""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.reporting.figures import canvas, tables
from exgrpo_jax.reporting.figures.canvas import Drawing, NothingToDrawError
from exgrpo_jax.reporting.runs import Group

_STYLES = {
  'fresh, all': dict(color='#000000', linestyle='-'),
  'fresh, right': dict(color=canvas.BLUE, linestyle='--'),
  'fresh, wrong': dict(color=canvas.ORANGE, linestyle='-.'),
  'replayed': dict(color=canvas.GREEN, linestyle=':'),
}


def draw(groups: Sequence[Group]) -> Drawing:
  """A panel for each setting, of shares at each step over the responses of all its seeds."""
  if not any(len(group.responses('step')[0]) for group in groups):
    raise NothingToDrawError('no run has records of its responses')
  if not any(group.responses('has_code_block')[0].any() for group in groups):
    raise NothingToDrawError('no response has a code block')
  figure, axes = canvas.grid(1, len(groups), sharey='row')
  rows = []
  for ax, group in zip(axes[0], groups):
    has_block, outcome, is_replay, step = group.responses(
      'has_code_block', 'outcome', 'is_replay', 'step'
    )
    fresh, right = is_replay == 0, outcome == 'correct'
    for name, kept in zip(_STYLES, (fresh, fresh & right, fresh & ~right, ~fresh)):
      if not np.any(kept):
        continue
      found = tables.mean_by(step[kept], has_block[kept])
      drawn = canvas.line(ax, found.keys, found.mean, name, **_STYLES[name])
      rows += canvas.rows(
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
