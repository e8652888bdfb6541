"""Advantages of groups against numbers computed by hand."""

import functools

import jax
import numpy as np
import pytest

from exgrpo_jax.algorithm import advantages

# The last row of the first three groups is replayed; the last group has none.
MIXED = [[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]]
IS_REPLAY = [[0, 0, 0, 1]] * 3 + [[0, 0, 0, 0]]
AGAINST_FRESH = np.array(
  [[2 / 3, -1 / 3, -1 / 3, 1 / 2], [0, 0, 0, 3 / 4], [0] * 4, [1 / 2, -1 / 2, -1 / 2, 1 / 2]]
)
# The baseline where the replayed row weighs a half: the mean of 3.5 rows.
BALANCED = np.array(MIXED) - np.array([[1.5 / 3.5], [0.5 / 3.5], [1], [1 / 2]])
ZERO = [[1 / 2, -1 / 2, -1 / 2, 0], [-1 / 4] * 3 + [0], [0] * 4, [1 / 2, -1 / 2, -1 / 2, 1 / 2]]
FRESH_AND_ZERO = AGAINST_FRESH * (1 - np.array(IS_REPLAY))
# Mean squared distances to the whole group's mean: the divisor is what it is without replay.
DEVIATION = np.sqrt([[4 / 16], [3 / 16], [1], [4 / 16]])


@pytest.mark.parametrize(
  ('reward', 'expected', 'kind', 'of_replay'),
  [
    ([[1, 1, 0, 0]], [[0.5, 0.5, -0.5, -0.5]], 'off', ()),
    ([[1, 0, 0, 0]], [[0.75, -0.25, -0.25, -0.25]], 'off', ()),
    ([[1, 1]], [[0, 0]], 'off', ()),
    ([[3, 1], [0, 0]], [[1, -1], [0, 0]], 'off', ()),
    # The squared distances to the mean sum to 12 / 16: over 4 rollouts, or over 4 - 1.
    ([[1, 0, 0, 0]], np.array([[3, -1, -1, -1]]) / 4 / np.sqrt(3 / 16), 'population', ()),
    ([[1, 0, 0, 0]], np.array([[3, -1, -1, -1]]) / 4 / np.sqrt(4 / 16), 'sample', ()),
    ([[2, 2, 2, 2]], [[0] * 4], 'population', ()),
    (MIXED, AGAINST_FRESH, 'off', ('fresh',)),
    (MIXED, AGAINST_FRESH / DEVIATION, 'population', ('fresh',)),
    (MIXED, BALANCED, 'off', ('group', 'balanced', 0.5)),
    (MIXED, BALANCED / DEVIATION, 'population', ('group', 'balanced', 0.5)),
    (MIXED, ZERO, 'off', ('group', 'zero', 0.5)),
    (MIXED, FRESH_AND_ZERO, 'off', ('fresh', 'zero')),
  ],
  ids=[
    *('half_solved', 'one_of_four', 'all_solved_teaches_nothing', 'groups_are_independent'),
    *('population', 'sample', 'no_deviation', 'fresh_baseline', 'fresh_baseline_population'),
    *('balanced', 'balanced_population', 'zero', 'fresh_baseline_zero'),
  ],
)
def test_advantages_are_the_hand_computed_ones(reward, expected, kind, of_replay):
  reward = np.float32(reward)
  is_replay = np.array(IS_REPLAY, bool) if of_replay else None
  for wrap in (lambda f: f, functools.partial(jax.jit, static_argnums=(1, 3, 4, 5))):
    advantage = wrap(advantages.group_advantages)(reward, kind, is_replay, *of_replay)
    assert advantage.dtype == np.float32
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('kind', ['off', 'population', 'sample'])
@pytest.mark.parametrize(
  'of_replay', [('group',), ('fresh',), ('group', 'zero'), ('fresh', 'zero'), ('group', 'balanced')]
)
@pytest.mark.parametrize('reward', [0.3, 1.3, -2.3, 9.9, 10.1, 1e-30, 1e15])
def test_equal_rewards_give_exactly_0(reward, of_replay, kind):
  for num_rollouts in range(2, 25):
    equal = np.full((2, num_rollouts), reward, np.float32)
    is_replay = np.arange(num_rollouts) == np.array([[0], [-1]])  # the first of a group, or none
    advantage = advantages.group_advantages(equal, kind, is_replay, *of_replay, replay_slope=0.0826)
    assert not advantage.any()


@pytest.mark.parametrize('replayed', [0, 5])
@pytest.mark.parametrize('kind', ['off', 'sample'])
def test_equal_fresh_rewards_give_0_with_the_fresh_baseline(kind, replayed):
  is_replay = np.arange(6)[None] == replayed
  reward = np.where(is_replay, 0.1, 0.3).astype(np.float32)
  advantage = advantages.group_advantages(reward, kind, is_replay, 'fresh')
  assert not advantage[~is_replay].any() and advantage[is_replay] < 0


def test_beside_a_replayed_success_fresh_advantages_sum_to_less_than_0():
  """What the fresh baseline is for."""
  advantage = advantages.group_advantages(np.float32(MIXED))
  fresh_sum = (advantage * (1 - np.array(IS_REPLAY))).sum(axis=1)
  np.testing.assert_allclose(fresh_sum, [-1 / 2, -3 / 4, 0, 0])
