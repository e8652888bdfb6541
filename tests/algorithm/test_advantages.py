"""Advantages of groups against numbers computed by hand."""

import functools

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm import advantages

# The last row of the first three groups is replayed; the last group has none.
MIXED = [[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]]
IS_FRESH = [[1, 1, 1, 0]] * 3 + [[1, 1, 1, 1]]
AGAINST_FRESH = np.array(
  [[2 / 3, -1 / 3, -1 / 3, 1 / 2], [0, 0, 0, 3 / 4], [0] * 4, [1 / 2, -1 / 2, -1 / 2, 1 / 2]]
)
# Mean squared distances to the whole group's mean: the divisor is what it is without replay.
DEVIATION = np.sqrt([[4 / 16], [3 / 16], [1], [4 / 16]])


@pytest.mark.parametrize(
  ('reward', 'expected', 'kind', 'is_fresh'),
  [
    ([[1, 1, 0, 0]], [[0.5, 0.5, -0.5, -0.5]], 'off', None),
    ([[1, 0, 0, 0]], [[0.75, -0.25, -0.25, -0.25]], 'off', None),
    ([[1, 1]], [[0, 0]], 'off', None),
    ([[3, 1], [0, 0]], [[1, -1], [0, 0]], 'off', None),
    # The squared distances to the mean sum to 12 / 16: over 4 rollouts, or over 4 - 1.
    ([[1, 0, 0, 0]], np.array([[3, -1, -1, -1]]) / 4 / np.sqrt(3 / 16), 'population', None),
    ([[1, 0, 0, 0]], np.array([[3, -1, -1, -1]]) / 4 / np.sqrt(4 / 16), 'sample', None),
    ([[2, 2, 2, 2]], [[0] * 4], 'population', None),
    (MIXED, AGAINST_FRESH, 'off', IS_FRESH),
    (MIXED, AGAINST_FRESH / DEVIATION, 'population', IS_FRESH),
  ],
  ids=[
    *('half_solved', 'one_of_four', 'all_solved_teaches_nothing', 'groups_are_independent'),
    *('population', 'sample', 'no_deviation', 'fresh_baseline', 'fresh_baseline_population'),
  ],
)
def test_advantages_are_the_hand_computed_ones(reward, expected, kind, is_fresh):
  reward = np.float32(reward)
  is_fresh = None if is_fresh is None else np.array(is_fresh, bool)
  for wrap in (lambda f: f, functools.partial(jax.jit, static_argnums=1)):
    advantage = wrap(advantages.group_advantages)(reward, kind, is_fresh)
    assert advantage.dtype == np.float32
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-6)


def test_beside_a_replayed_success_fresh_advantages_sum_to_less_than_0():
  """What the fresh baseline is for."""
  fresh_sum = (advantages.group_advantages(np.float32(MIXED)) * IS_FRESH).sum(axis=1)
  np.testing.assert_allclose(fresh_sum, [-1 / 2, -3 / 4, 0, 0])
