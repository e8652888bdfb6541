"""The numbers in the figure of differences from the baseline, computed by hand."""

import numpy as np
import pytest
from scipy import stats

from studies import results_figures
from studies.drawing import NothingToDrawError
from studies.tests.examples import run, study


def test_an_arm_stands_at_the_mean_of_its_differences_with_the_interval_that_decides():
  """A run that rises from 0 over 100 tokens has half its score as mean. Two comparisons."""
  gained = np.array([0.1, 0.2, 0.6])
  runs = [
    *(run('exgrpo', seed, 0.0, 0.2 + score) for seed, score in enumerate(gained)),
    *(run('grpo', seed, 0.0, 0.2) for seed in range(3)),
  ]
  drawing = results_figures.differences(runs, study(('sums', 'products'), tokens=100))
  (row,) = drawing.rows
  half = stats.t.ppf(1 - 0.0125, 2) * gained.std(ddof=1) / 2 / np.sqrt(3)
  assert (row['setting'], row['arm'], row['seeds']) == ('sums', 'exgrpo', 3)
  np.testing.assert_allclose(
    [row['mean'], row['low'], row['high']], [0.15, 0.15 - half, 0.15 + half], rtol=1e-6
  )
  drawing.figure.draw_without_rendering()
  caption = drawing.figure.get_supxlabel(), drawing.figure.texts[0].get_window_extent()
  assert 'too small to matter' in caption[0]
  assert 0 < caption[1].x0 < caption[1].x1 < drawing.figure.bbox.width
  (panel,) = drawing.figure.axes
  dots, interval, mean = panel.lines[1:]
  np.testing.assert_allclose(dots.get_xdata(), gained / 2)
  np.testing.assert_allclose(interval.get_xdata(), [row['low'], row['high']])
  np.testing.assert_allclose(mean.get_xdata(), 0.15)
  assert [tick.get_text() for tick in panel.get_yticklabels()] == ['exgrpo']


def test_without_a_pair_of_runs_there_is_nothing_to_draw():
  with pytest.raises(NothingToDrawError):
    results_figures.differences([run('exgrpo', 0, 0.5), run('grpo', 1, 0.5)], study())
