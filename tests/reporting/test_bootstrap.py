"""Intervals over seeds, against numbers by hand and against the coverage that they claim."""

import math

import numpy as np
import pytest

from exgrpo_jax.reporting import bootstrap


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
  assert bootstrap.estimate(np.array(values), bootstrap.mean) == expected


@pytest.mark.parametrize(
  'values',
  [
    [0.5],
    [0.25, 0.75],  # an interval from one to the other would hold the truth half of the time
    [0.5] * 5,
    [0.3 - 0.1, 0.2, 0.2, 0.2],  # 0.3 - 0.1 is less than 0.2, by rounding alone
  ],
)
def test_too_few_or_equal_values_have_no_interval(values):
  value, low, high = bootstrap.estimate(np.array(values), bootstrap.mean)
  assert value == pytest.approx(np.mean(values)) and math.isnan(low) and math.isnan(high)


@pytest.mark.full
@pytest.mark.parametrize(('count', 'expected'), [(5, 0.83), (16, 0.91)])
def test_the_interval_of_the_mean_covers_the_truth_as_often_as_the_module_says(
  count, expected, monkeypatch
):
  """400 samples of normal values: the share has a standard error of at most .019."""
  monkeypatch.setattr(bootstrap, 'RESAMPLES', 1000)
  samples = np.random.default_rng(1).normal(size=(400, count))
  estimates = [bootstrap.estimate(sample, bootstrap.mean) for sample in samples]
  covered = np.mean([low <= 0 <= high for _, low, high in estimates])
  assert abs(covered - expected) < 0.06
