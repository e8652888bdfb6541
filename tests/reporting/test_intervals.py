"""Intervals of evaluations and of their differences, worked out by hand and by simulation."""

import numpy as np
import pytest

from exgrpo_jax.reporting import intervals


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
  interval = intervals.interval_95(np.array(correct_QK, bool), list(cluster_Q))
  np.testing.assert_allclose(interval, expected, atol=2e-5)


def test_the_effective_sample_size_is_at_most_the_number_of_samples():
  # Question means .5 and .51 differ so little that p(1-p)/se^2 is 10,000, of 200 samples.
  correct_QK = np.zeros((2, 100))
  correct_QK[0, :50] = correct_QK[1, :51] = 1
  _, low, high = intervals.interval_95(correct_QK, [0, 1])
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
    _, low, high = intervals.interval_95(correct_QK, cluster_Q)
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
  found = intervals.difference_95(np.array(difference_Q), list(cluster_Q))
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_every_row_needs_a_cluster():
  with pytest.raises(AssertionError):
    intervals.interval_95(np.zeros((3, 1)), [0, 1])
