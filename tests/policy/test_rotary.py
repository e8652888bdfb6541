"""Rotary frequencies, plain and scaled, against values computed by hand."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import rotary
from tests.helpers.tiny import ROPE


def test_plain_frequencies():
  plain = dataclasses.replace(ROPE, theta=100.0)
  np.testing.assert_allclose(rotary.frequencies(plain, 4), [1, 0.1], rtol=1e-6)


def test_linear_scaling_stretches_all_wavelengths_alike():
  linear = dataclasses.replace(ROPE, theta=100.0, scaling='linear', factor=4.0)
  np.testing.assert_allclose(rotary.frequencies(linear, 4), [0.25, 0.025], rtol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_stretches_slow_ones_and_interpolates():
  """Over 2 pi * 100 positions a pair of frequency x turns 100 x times; here 100, 10, 1, .1."""
  config = dataclasses.replace(
    ROPE,
    theta=1e4,
    scaling='llama3',
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=19.0,
    original_positions=round(2 * np.pi * 100),
  )
  # 10 turns are half way between 1 and 19: the mean of .1 and .1 / 8.
  np.testing.assert_allclose(
    rotary.frequencies(config, 8), [1, 0.05625, 0.01 / 8, 0.001 / 8], rtol=1e-3
  )


def test_an_empty_band_is_refused():
  values = dataclasses.asdict(ROPE) | {'scaling': 'llama3', 'high_frequency_factor': 1.0}
  with pytest.raises(InputError, match=r'low_frequency_factor=1\.0 must be below'):
    config_lib.build(rotary.Config, values, 'config.model.rope')
