"""No two uses of randomness share a stream, and each stream can be reproduced."""

import itertools

import jax
import numpy as np

from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

PLACES = (0, 1, 2, 3, 7, 8)


def test_purposes_keep_their_numbers():
  """A checkpoint of an earlier version must continue with the same streams."""
  assert {purpose.name: purpose.value for purpose in Purpose} == {
    'INIT': 0,
    'ROLLOUT': 1,
    'EVALUATION': 2,
    'WARM_START_CHECK': 3,
    'STOCHASTIC_ROUNDING': 4,
    'PLAN': 5,
    'TRAJECTORY': 6,
    'QUESTION_STREAM': 7,
    'WARM_START_ORDER': 8,
    'SAMPLES': 9,
    'ALIGNMENT': 10,
    'RECORDED_GROUPS': 11,
    'LORA': 12,
    'GENERATE': 13,
    'PREFILTER': 14,
    'TRAINED_ORDER': 15,
  }


def test_no_two_of_seed_purpose_and_place_share_a_stream_on_the_host():
  """Not even where step and epoch, or seed and step, are the same number."""
  streams = {
    (seed, purpose, place): tuple(
      randomness.generator(seed, purpose, place).integers(2**62, size=2)
    )
    for seed, purpose, place in itertools.product((0, 1, 5), Purpose, PLACES)
  }
  assert len(set(streams.values())) == len(streams) == 3 * len(Purpose) * 6


def test_the_ranks_of_places_differ_and_depend_on_each_place_alone():
  place_N = np.arange(10_000)
  rank_N = randomness.ranks(5, Purpose.RECORDED_GROUPS, place_N)
  assert len(set(rank_N.tolist())) == 10_000
  some = place_N[[9_999, 0, 3]]
  np.testing.assert_array_equal(
    randomness.ranks(5, Purpose.RECORDED_GROUPS, some), rank_N[[9_999, 0, 3]]
  )
  for seed, purpose in ((6, Purpose.RECORDED_GROUPS), (5, Purpose.SAMPLES)):
    assert not np.isin(randomness.ranks(seed, purpose, place_N), rank_N).any()


def test_ranks_are_uniform_whatever_the_places():
  """Of 10,000 in a row, and of every hundredth, 1,000 ± 30 are in each tenth of the range."""
  for step in (1, 100):
    rank_N = randomness.ranks(0, Purpose.RECORDED_GROUPS, np.arange(0, 10_000 * step, step))
    count, _ = np.histogram(rank_N / 2**64, bins=10, range=(0, 1))
    assert (abs(count - 1000) < 150).all()


def test_no_two_of_seed_purpose_and_place_share_a_key():
  keys = {
    tuple(np.asarray(jax.random.key_data(randomness.key(seed, purpose, place))).tolist())
    for seed, purpose, place in itertools.product((0, 1, 5), Purpose, PLACES)
  }
  assert len(keys) == 3 * len(Purpose) * 6


def test_a_stream_can_be_reproduced():
  first, second = (randomness.generator(3, Purpose.PLAN, 9).random(4) for _ in range(2))
  np.testing.assert_array_equal(first, second)
  assert randomness.key(3, Purpose.INIT) == randomness.key(3, Purpose.INIT)


def test_a_place_may_be_traced():
  traced = jax.jit(lambda update: randomness.key(0, Purpose.STOCHASTIC_ROUNDING, update))(4)
  assert traced == randomness.key(0, Purpose.STOCHASTIC_ROUNDING, 4)


def test_a_responses_numbers_depend_on_question_sample_and_position_alone():
  """Not on the other rows of its batch."""
  key = randomness.key(0, Purpose.ROLLOUT, 1)
  questions, samples, positions = np.array([4, 9, 4]), np.array([0, 0, 1]), np.array([5, 2, 5])
  together = randomness.uniforms(randomness.row_keys(key, questions, samples), positions)
  for row in range(3):
    only = slice(row, row + 1)
    alone = randomness.uniforms(
      randomness.row_keys(key, questions[only], samples[only]), positions[only]
    )
    np.testing.assert_array_equal(alone[0], together[row])
  assert len(set(map(float, np.ravel(together)))) == 6


def test_uniforms_depend_on_key_question_sample_and_position():
  def uniforms(question, sample, position, key=5):
    key_B = randomness.row_keys(jax.random.key(key), np.array([question]), np.array([sample]))
    return tuple(np.asarray(randomness.uniforms(key_B, np.array([position])))[0])

  base = uniforms(1, 2, 3)
  assert base == uniforms(1, 2, 3)
  pairs = {
    uniforms(2, 2, 3),
    uniforms(1, 3, 3),
    uniforms(1, 2, 4),
    uniforms(1, 2, 3, key=6),
    uniforms(2, 1, 3),
    base,
  }
  assert len(pairs) == 6 and len({uniform for pair in pairs for uniform in pair}) == 12
