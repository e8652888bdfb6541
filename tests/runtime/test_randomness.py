"""Random streams: no two uses share a stream, and each stream can be reproduced."""

import itertools

import jax
import numpy as np

from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

PLACES = (0, 1, 2, 3, 7, 8)
STREAMS = list(itertools.product((0, 1, 5), Purpose, PLACES))


def test_purposes_never_change_their_values():
  """A checkpoint of an earlier version must continue with the same streams."""
  assert ' '.join(purpose.name for purpose in sorted(Purpose)) == (
    'INIT ROLLOUT EVALUATION WARM_START_CHECK STOCHASTIC_ROUNDING PLAN TRAJECTORY QUESTION_STREAM '
    'WARM_START_ORDER SAMPLES ALIGNMENT RECORDED_GROUPS LORA GENERATE PREFILTER TRAINED_ORDER '
    'ENVIRONMENT DEMONSTRATION EPOCH_ORDER'
  )
  assert [purpose.value for purpose in sorted(Purpose)] == list(range(19))


def test_different_seeds_purposes_or_places_never_share_a_stream_or_key():
  """This holds even if step and epoch, or seed and step, are the same number."""
  drawn = {tuple(randomness.generator(*stream).integers(2**62, size=2)) for stream in STREAMS}
  keys = {tuple(jax.random.key_data(randomness.key(*stream)).tolist()) for stream in STREAMS}
  assert len(drawn) == len(keys) == len(STREAMS)


def test_a_stream_can_be_reproduced_and_its_place_may_be_traced():
  first, second = (randomness.generator(3, Purpose.PLAN, 9).random(4) for _ in range(2))
  np.testing.assert_array_equal(first, second)
  traced = jax.jit(lambda update: randomness.key(0, Purpose.STOCHASTIC_ROUNDING, update))(4)
  assert traced == randomness.key(0, Purpose.STOCHASTIC_ROUNDING, 4)


def test_ranks_differ_and_depend_only_on_their_own_place():
  place_N = np.arange(10_000)
  rank_N = randomness.ranks(5, Purpose.RECORDED_GROUPS, place_N)
  assert len(set(rank_N.tolist())) == 10_000
  some = [9_999, 0, 3]
  np.testing.assert_array_equal(
    randomness.ranks(5, Purpose.RECORDED_GROUPS, place_N[some]), rank_N[some]
  )
  for seed, purpose in ((6, Purpose.RECORDED_GROUPS), (5, Purpose.SAMPLES)):
    assert not np.isin(randomness.ranks(seed, purpose, place_N), rank_N).any()


def test_ranks_are_uniform_for_any_places():
  """For 10,000 places in a row or 100 apart, each tenth of the range has 1,000 ± 30 ranks."""
  for step in (1, 100):
    rank_N = randomness.ranks(0, Purpose.RECORDED_GROUPS, np.arange(0, 10_000 * step, step))
    count, _ = np.histogram(rank_N / 2**64, bins=10, range=(0, 1))
    assert (abs(count - 1000) < 150).all()


def test_a_responses_numbers_depend_only_on_step_question_sample_and_position():
  """They do not depend on the other rows in the batch."""
  rows = [(4, 0, 5), (9, 0, 5), (4, 1, 5), (4, 0, 2), (0, 4, 5)]  # question, sample, position

  def uniforms(rows, step=1):
    question_B, sample_B, position_B = np.array(rows).T
    keys = randomness.row_keys(randomness.key(0, Purpose.ROLLOUT, step), question_B, sample_B)
    return np.asarray(randomness.uniforms(keys, position_B))

  together = uniforms(rows)
  for row, expected in zip(rows, together):
    np.testing.assert_array_equal(uniforms([row])[0], expected)
  other_step = uniforms(rows, step=2)
  assert len(set(map(float, [*together.ravel(), *other_step.ravel()]))) == 4 * len(rows)
