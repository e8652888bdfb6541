"""Numbers and panels as the page has them."""

import numpy as np

from exgrpo_jax.reporting.page import charts
from exgrpo_jax.reporting.page.charts import Line


def test_numbers_keep_six_digits_and_what_is_not_finite_is_null():
  values = [0.0, 3.0, -2.5, 0.1 + 0.2, 1234567.8, 1e-9, np.nan, np.inf, -np.inf]
  assert charts.numbers(values) == [0, 3, -2.5, 0.3, 1234570.0, 1e-9, None, None, None]
  assert all(isinstance(value, int) for value in charts.numbers(np.array([2.0, -7.0])))


def test_lines_of_a_panel_are_smoothed_alike_however_long_they_are():
  values = np.array([1.0, 4.0] * 40)
  lines = [Line(str(count), range(count), values[:count]) for count in (80, 24, 3, 1)]
  long, short, three, one = (line['smooth'] for line in charts.lines('Reward', '', lines)['lines'])
  assert short[:22] == long[:22]  # the means of two neighbours to either side
  assert (short[23], three, one) == (3, [2, 2, 2], [1])
  for alone in (charts.lines('', '', lines[1:]), charts.lines('', '', lines, smooth=False)):
    assert not any('smooth' in line for line in alone['lines'])
