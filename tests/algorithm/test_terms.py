"""The terms of single tokens against numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import terms


@pytest.mark.parametrize(
  ('w', 'f', 'slope'),
  [
    (1.0, 1 / 1.1, 0.1 / 1.21),  # 0.083, where a fresh token at ratio 1 has 1
    (0.1, 0.5, 0.01 / 0.04),
    (0.9, 0.9, 0.09),
    (0.01, 0.01 / 0.11, 0.001 / 0.0121),
    (np.exp(200.0), 1, 0),  # beyond float32
  ],
)
def test_policy_shaping_and_its_gradient(w, f, slope):
  """f(w) = w / (w + 0.1), and df/dlog w = 0.1 w / (w + 0.1)^2."""
  found = jax.value_and_grad(lambda x: terms.fraction(x, 0.1))(jnp.float32(np.log(w)))
  np.testing.assert_allclose(found, [f, slope], rtol=1e-5)


def test_policy_shaping_lifts_rare_tokens_and_damps_the_rest():
  threshold = np.sqrt(0.1) - 0.1  # 0.216
  for w, lifts in [(threshold * 0.99, True), (threshold * 1.01, False)]:
    slope = jax.grad(lambda x: terms.fraction(x, 0.1))(jnp.log(w))
    assert (slope > w) == lifts


def test_a_tis_weight_is_the_ratio_of_trainer_to_sampler_truncated_at_the_limit():
  trainer = np.log(np.array([0.5, 0.2, 0.9, 1.0], np.float32))
  sampler = np.append(np.log([0.25, 0.4, 0.1]), -200.0).astype(np.float32)  # exp(200) overflows
  weight = terms.tis_weight(trainer, sampler, 3.0)
  assert weight.dtype == np.float32
  np.testing.assert_allclose(weight, [2.0, 0.5, 3.0, 3.0], rtol=1e-5)


def test_the_second_moment_of_ratios_is_bounded_by_leaving_out_the_fewest():
  """Four of seven have moved to where their advantage pushes: .1, .3, .2 and .5."""
  log_ratio = np.float32([0.1, -0.3, 0.2, 0.5, -9.0, 9.0, 9.0])
  advantage = np.float32([1.0, -0.5, 1.0, 0.5, 1.0, -1.0, 0.0])
  # Squares .01 .04 .09 .25: means of the smallest are .01, .025, .0467 and .0975.
  for limit, left_out in ((0.1, []), (0.0974, [3]), (0.04, [1, 3]), (0.02, [1, 2, 3])):
    stays = terms.within_second_moment(log_ratio, advantage, limit)
    assert np.flatnonzero(~stays).tolist() == left_out, limit
  assert terms.within_second_moment(np.float32([9.0]), np.float32([1.0]), 0.04).tolist() == [False]


def test_rows_that_share_a_sequence_have_sums_and_means_of_their_own():
  x_BT = np.float32([[1, 2, 0, 5, 0], [0, 0, 0, 0, 3]])
  mask_BT = np.float32([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]])
  segment_BT = np.array([[1, 1, 1, 2, 0], [1, 1, 3, 3, 3]])
  assert terms.row_sums(x_BT, segment_BT).tolist() == [[3, 3, 3, 5, 0], [0, 0, 3, 3, 3]]
  means = [[1.5, 1.5, 1.5, 5, 0], [0, 0, 3, 3, 3]]
  assert terms.row_means(x_BT, mask_BT, segment_BT).tolist() == means
