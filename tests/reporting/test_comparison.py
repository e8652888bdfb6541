"""The comparison of a sweep's runs: the table of their scores, and the picture."""

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import canvas, comparison


def test_best_is_each_runs_highest_score_and_final_its_last_at_the_step_that_is_said():
  runs = [
    [
      {'step': 0, 'eval/a/pass@1': 0.5},
      {'step': 1, 'reward': 1.0},
      {'step': 2, 'eval/a/pass@1': 0.25},
      {'step': 3, 'reward': 1.0},
    ],
    [
      {'step': 0, 'eval/a/pass@1': 0.25, 'eval/a/pass@1_high': 0.9},
      {'step': 4, 'eval/a/pass@1': 0.75, 'eval/a/questions': 8.0},
    ],
  ]
  # Final .25 and .75: mean .5, deviation .5 / sqrt(2). Best .5 and .75.
  rows = comparison.table({'x': runs}, {'x': 3, 'y': 1}).splitlines()[2:]
  assert [[cell.strip() for cell in row.split('|')[1:-1]] for row in rows] == [
    ['a/pass@1', 'x', '2 of 3', '2 to 4', '0.5000 ± 0.3536', '0.6250 ± 0.1768'],
    ['a/pass@1', 'y', '0 of 1', '-', '-', '-'],
  ]


def test_the_picture_has_a_line_for_each_setting_with_a_band_over_its_seeds(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(canvas, 'save', lambda figure, _: figures.append(figure))
  first = [{'step': 0, 'reward': 0.0}, {'step': 1, 'reward': 1.0}, {'step': 2, 'reward': 5.0}]
  second = [{'step': 0, 'reward': 2.0}, {'step': 1, 'reward': 1.0}]  # has no step 2
  comparison.picture({'a': [first, second], 'b': [second]}, tmp_path / 'x.png')
  (ax,) = figures[0].axes
  a, b = ax.lines
  assert a.get_xydata().tolist() == [[0, 1], [1, 1]] and a.get_label() == 'a'
  assert b.get_xydata().tolist() == [[0, 2], [1, 1]] and a.get_color() != b.get_color()
  heights = ax.collections[0].get_paths()[0].vertices[:, 1]
  assert heights.max() == pytest.approx(1 + 2**0.5) and heights.min() == pytest.approx(1 - 2**0.5)


def test_no_metric_to_draw_is_refused(tmp_path):
  with pytest.raises(InputError, match='nothing to draw: no run has any of reward'):
    comparison.picture({'a': [[{'step': 0}]]}, tmp_path / 'x.png')
