"""Comparisons of policies and of runs, worked out by hand and by simulation."""

import math
import tracemalloc

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import canvas, comparison

# ---- Intervals over questions ----


@pytest.mark.parametrize(
  ('correct_QK', 'cluster_Q', 'expected'),
  [
    # Wilson at 0 of n: [0, z^2 / (n + z^2)] with z^2 = 3.8415, so 3.8415 / 103.8415.
    pytest.param([[0]] * 100, range(100), (0.0, 0.0, 0.03699), id='none_of_100'),
    pytest.param([[1]] * 100, range(100), (1.0, 0.96301, 1.0), id='all_of_100'),
    # se^2 = 4/3 * 4 * (1/2 / 4)^2 = 1/12, so n = (1/4) / (1/12) = 3:
    # half = 1.95996 / (1 + 3.8415/3) * sqrt(.25/3 + 3.8415/36) = .37467.
    pytest.param([[1], [0], [1], [0]], range(4), (0.5, 0.12533, 0.87467), id='two_of_four'),
    # Eight equal samples of each of these questions add no information.
    pytest.param(
      [[1] * 8, [0] * 8, [1] * 8, [0] * 8], range(4), (0.5, 0.12533, 0.87467), id='equal_samples'
    ),
    # Nor do eight rows with the same prompt, as in AIME.
    pytest.param(
      [[1], [0], [1], [0]] * 8, list('abcd') * 8, (0.5, 0.12533, 0.87467), id='equal_rows'
    ),
    # Each question right half the time: the error is 0 and carries no information, n = 4 questions:
    # half = 1.95996 / (1 + 3.8415/4) * sqrt(.25/4 + 3.8415/64) = .34997.
    pytest.param([[1, 0]] * 4, range(4), (0.5, 0.15003, 0.84997), id='no_variance'),
    # One question, so n = 1: half = 1.95996 / 4.8415 * sqrt(.25 + 3.8415/4) = .44537.
    pytest.param([[1, 0]], [0], (0.5, 0.05463, 0.94537), id='one_question'),
  ],
)
def test_intervals_worked_out_by_hand(correct_QK, cluster_Q, expected):
  interval = comparison.interval_95(np.array(correct_QK, bool), list(cluster_Q))
  np.testing.assert_allclose(interval, expected, atol=2e-5)


def test_the_effective_sample_size_is_at_most_the_number_of_samples():
  # Question means .5 and .51 differ so little that p(1-p)/se^2 is 10,000, of 200 samples.
  correct_QK = np.zeros((2, 100))
  correct_QK[0, :50] = correct_QK[1, :51] = 1
  _, low, high = comparison.interval_95(correct_QK, [0, 1])
  # About 2 * 1.96 * sqrt(.25 / 200).
  assert high - low == pytest.approx(0.1373, abs=0.001)


@pytest.mark.parametrize(
  ('prompts', 'copies', 'samples'),
  [
    pytest.param(60, 1, 8, id='eight_samples_of_each_question'),
    pytest.param(30, 32, 1, id='aime_rows'),
  ],
)
def test_95_percent_of_intervals_contain_the_true_mean(prompts, copies, samples):
  rng = np.random.default_rng(0)
  cluster_Q = np.repeat(np.arange(prompts), copies)

  def contains_the_mean():
    # Beta(.6, 1.4) has mean .3; most questions are nearly always or nearly never solved.
    p_Q = rng.beta(0.6, 1.4, prompts)
    correct_QK = rng.random((prompts * copies, samples)) < p_Q[cluster_Q][:, None]
    _, low, high = comparison.interval_95(correct_QK, cluster_Q)
    return low <= 0.3 <= high

  coverage = np.mean([contains_the_mean() for _ in range(2000)])
  assert 0.93 <= coverage <= 0.975


@pytest.mark.parametrize(
  ('difference_Q', 'cluster_Q', 'expected'),
  [
    # Residuals .75, -.25, -.25, -.25: se^2 = 4/3 * .75 / 16 = 1/16, so half = 1.95996 / 4.
    pytest.param([1.0, 0.0, 0.0, 0.0], range(4), (0.25, -0.23999, 0.73999), id='one_of_four'),
    pytest.param(
      [1.0, 0.0, 0.0, 0.0] * 8, list('abcd') * 8, (0.25, -0.23999, 0.73999), id='equal_rows'
    ),
    # se^2 = 2/1 * (1 + 1) / 4 = 1, so half = 1.95996, beyond what a difference can be.
    pytest.param([1.0, -1.0], range(2), (0.0, -1.0, 1.0), id='at_most_one'),
    # Of 16 questions none differs: one that does has a probability of at most 1 - .05^(1/16).
    pytest.param([0.0] * 16, range(16), (0.0, -0.17076, 0.17076), id='none_differs'),
    pytest.param([0.0] * 32, [*range(16)] * 2, (0.0, -0.17076, 0.17076), id='rows_of_16_prompts'),
    # And of two that gain .5 each, 1 - .05^(1/2) = .77639, which may lose 1.5 or gain .5 more.
    pytest.param([0.5, 0.5], range(2), (0.5, -0.66459, 0.88820), id='all_gain_alike'),
  ],
)
def test_paired_differences_worked_out_by_hand(difference_Q, cluster_Q, expected):
  found = comparison.difference_95(np.array(difference_Q), list(cluster_Q))
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_every_row_needs_a_cluster():
  with pytest.raises(AssertionError):
    comparison.interval_95(np.zeros((3, 1)), [0, 1])


def test_one_long_prompt_takes_no_memory_per_row():
  prompts = [f'{row}' for row in range(400)] + ['1+' * 10_000]
  tracemalloc.start()
  comparison.interval_95(np.zeros((401, 1)), prompts)
  assert tracemalloc.get_traced_memory()[1] < 2**20  # 401 rows of 20,000 characters are 30 MiB
  tracemalloc.stop()


# ---- Intervals over seeds ----


@pytest.mark.parametrize(
  ('values', 'expected'),
  [
    # A resample is (a, a, a) with probability 1/27, more often than 2.5%.
    ([0.25, 0.5, 0.75], (0.5, 0.25, 0.75)),
    # The mean of a resample is how often the 8 is drawn: binomial (8, 1/8) is 0 with probability
    # .3436, at most 2 with .9326 and at most 3 with .9887.
    ([0.0] * 7 + [8.0], (1, 0, 3)),
  ],
)
def test_the_interval_has_the_ends_of_the_exact_distribution_of_resampled_means(values, expected):
  assert comparison.bootstrap(np.array(values)) == expected


@pytest.mark.parametrize(
  'values',
  [
    [0.5],
    [0.25, 0.75],  # an interval between them would contain the truth half of the time
    [0.5] * 5,
    [0.3 - 0.1, 0.2, 0.2, 0.2],  # 0.3 - 0.1 is less than 0.2, but only because of rounding
  ],
)
def test_too_few_or_equal_values_have_no_interval(values):
  value, low, high = comparison.bootstrap(np.array(values))
  assert value == pytest.approx(np.mean(values)) and math.isnan(low) and math.isnan(high)


@pytest.mark.full
@pytest.mark.parametrize(('count', 'expected'), [(5, 0.83), (16, 0.91)])
def test_the_interval_of_the_mean_covers_the_truth_as_often_as_the_module_says(
  count, expected, monkeypatch
):
  """400 samples of normal values: the share has a standard error of at most .019."""
  monkeypatch.setattr(comparison, 'RESAMPLES', 1000)
  samples = np.random.default_rng(1).normal(size=(400, count))
  estimates = [comparison.bootstrap(sample) for sample in samples]
  covered = np.mean([low <= 0 <= high for _, low, high in estimates])
  assert abs(covered - expected) < 0.06


# ---- Scores over seeds ----


@pytest.mark.parametrize(
  'name', ['eval/gsm8k/truncated', 'grading/crashed', 'loss', 'groups/solved_by_none']
)
def test_the_best_score_is_the_lowest_if_lower_is_better(name):
  assert comparison.best(name, [0.5, 0.25, math.nan, -math.inf]) == 0.25


@pytest.mark.parametrize('name', ['reward', 'eval/gsm8k/pass@1', 'eval/a/truncated/pass@1'])
def test_the_best_score_is_otherwise_the_highest(name):
  assert comparison.best(name, [0.5, 0.75, math.nan, math.inf]) == 0.75
  assert math.isnan(comparison.best(name, [math.nan]))


@pytest.mark.parametrize(
  ('evaluated', 'expected'),
  [
    ([[0, 12, 24, 36], [0, 12, 24]], 24),
    ([[0, 20, 40], [0, 10, 20, 30]], 20),
    ([[0, 20, 40]], 40),
    ([[0, 20], [0, 15]], None),
    ([[0, 20], []], None),
    ([], None),
  ],
)
def test_runs_are_compared_at_their_last_common_step_after_0(evaluated, expected):
  assert comparison.last_common_step(evaluated) == expected


# ---- Sweeps ----


def test_the_table_has_each_runs_best_and_last_scores_and_the_last_step():
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
  canvas.picture({'a': [first, second], 'b': [second]}, tmp_path / 'x.png')
  (ax,) = figures[0].axes
  a, b = ax.lines
  assert a.get_xydata().tolist() == [[0, 1], [1, 1]] and a.get_label() == 'a'
  assert b.get_xydata().tolist() == [[0, 2], [1, 1]] and a.get_color() != b.get_color()
  heights = ax.collections[0].get_paths()[0].vertices[:, 1]
  assert heights.max() == pytest.approx(1 + 2**0.5) and heights.min() == pytest.approx(1 - 2**0.5)


def test_no_metric_to_draw_is_refused(tmp_path):
  with pytest.raises(
    InputError, match='nothing to draw, because no run has any of these metrics: reward'
  ):
    canvas.picture({'a': [[{'step': 0}]]}, tmp_path / 'x.png')
