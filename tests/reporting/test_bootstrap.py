"""Intervals over seeds, against numbers by hand and against the coverage that they claim."""

import math

import numpy as np
import pytest

from exgrpo_jax.reporting import bootstrap


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
  eight = np.array([9.0, 1, 2, 100, 3, 4, -50, 5])  # -50 and 1 are left out, as are 9 and 100
  assert bootstrap.interquartile_mean(eight) == 3.5
  assert bootstrap.interquartile_mean(np.array([1.0, 2, 6])) == 3  # of three, none
  assert bootstrap.interquartile_mean(np.array([[1.0, 2, 4, 90], [8, 8, 8, 0]])).tolist() == [3, 8]


def test_of_three_values_the_interval_reaches_from_the_lowest_to_the_highest():
  # A resample is (a, a, a) with probability 1/27, more often than 2.5%.
  assert bootstrap.estimate(np.array([0.25, 0.5, 0.75]), bootstrap.mean) == (0.5, 0.25, 0.75)


def test_the_interval_has_the_ends_of_the_exact_distribution_of_resampled_means():
  # Of 0, 0, 0, 0, 0, 0, 0, 8 the mean of a resample is how often the 8 is drawn: binomial (8, 1/8)
  # is 0 with probability .3436, at most 2 with .9326 and at most 3 with .9887.
  values = np.array([0.0] * 7 + [8])
  assert bootstrap.estimate(values, bootstrap.mean) == (1, 0, 3)


@pytest.mark.parametrize(
  'values',
  [
    [0.5],
    [0.25, 0.75],  # an interval from one to the other would hold the truth half of the time
    [0.5] * 5,
    [0.3 - 0.1, 0.2, 0.2, 0.2],  # 0.3 - 0.1 is less than 0.2, by rounding alone
  ],
)
def test_of_too_few_or_of_equal_values_an_interval_cannot_be_told(values):
  value, low, high = bootstrap.estimate(np.array(values), bootstrap.mean)
  assert value == pytest.approx(np.mean(values)) and math.isnan(low) and math.isnan(high)


@pytest.mark.parametrize(('count', 'expected'), [(5, 0.83), (8, 0.87), (16, 0.91)])
def test_the_interval_of_the_mean_covers_the_truth_as_often_as_its_docstring_says(
  count, expected, monkeypatch
):
  """400 samples of normal values: the share has a standard error of at most .018."""
  monkeypatch.setattr(bootstrap, 'RESAMPLES', 1000)
  samples = np.random.default_rng(1).normal(size=(400, count))
  estimates = [bootstrap.estimate(sample, bootstrap.mean) for sample in samples]
  covered = np.mean([low <= 0 <= high for _, low, high in estimates])
  assert abs(covered - expected) < 0.05


def test_pairs_are_narrower_than_arms_whose_seeds_differ_alike():
  seed_effect = np.random.default_rng(2).normal(size=8)
  own = 0.01 * np.random.default_rng(3).normal(size=8)
  paired = bootstrap.estimate((seed_effect + 0.1 + own) - seed_effect, bootstrap.mean)
  alone = bootstrap.estimate(seed_effect, bootstrap.mean)
  assert 0.05 < paired.low < paired.high < 0.15
  assert alone.high - alone.low > 20 * (paired.high - paired.low)
