"""Settings of the algorithm that would do nothing together are refused; all others pass."""

import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.algorithm import combinations, objective, replay
from exgrpo_jax.configs import base
from exgrpo_jax.errors import InputError

K = 8


def check(num_questions=128, ratio=0.5, **of_objective):
  values = base.get_config()
  values.replay.ratio = ratio
  values.objective.update(of_objective)
  combinations.check(
    config_lib.build(replay.Config, values.replay, 'config.replay'),
    config_lib.build(objective.Config, values.objective, 'config.objective'),
    num_questions,
    K,
  )


@pytest.mark.parametrize(
  ('num_questions', 'ratio', 'enough'),
  [
    (8, 0.1, 'config.replay.ratio to at least 0.125, config.rollout.questions to at least 10, '),
    (3, 0.25, 'config.replay.ratio to at least 0.333334, config.rollout.questions to at least 4, '),
    (1, 0.5, 'config.rollout.questions to at least 2, '),  # no ratio below 1 is enough
  ],
)
def test_a_ratio_that_replays_no_question_is_refused_with_what_does(num_questions, ratio, enough):
  with pytest.raises(InputError) as refused:
    check(num_questions, ratio)
  assert str(refused.value) == (
    f'config.replay.ratio={ratio} of config.rollout.questions={num_questions} is less than one '
    f'question, so nothing would ever be replayed; set {enough}or config.replay.ratio=0, which is '
    'plain GRPO.'
  )


@pytest.mark.parametrize(
  ('num_questions', 'ratio'), [(8, 0.125), (10, 0.1), (3, 0.333334), (3, 1 / 3), (2, 0.5), (1, 0.0)]
)
def test_a_ratio_that_replays_a_question_passes_and_so_does_none(num_questions, ratio):
  check(num_questions, ratio)


VARIANTS = [{'dual_clip': 3.0}, {'clip_epsilon_high': 0.28}, {'surrogate': 'cispo'}]


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize(
  ('clip', 'ratio', 'when'),
  [('until_replay', 0.5, ' once replay starts'), ('never', 0.5, ''), ('never', 0.0, '')],
)
def test_a_variant_of_clipping_is_refused_where_clipping_ends(variant, clip, ratio, when):
  ((name, value),) = variant.items()
  with pytest.raises(InputError) as refused:
    check(ratio=ratio, clip=clip, **variant)
  assert str(refused.value) == (
    f"config.objective.{name}={value!r} needs config.objective.clip='always': with '{clip}' it "
    f'does nothing{when}.'
  )


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_variant_of_clipping_passes_where_every_step_clips(variant):
  check(clip='always', **variant)
  check(ratio=0.0, clip='until_replay', **variant)


@pytest.mark.parametrize(
  'plain', [{}, {'clip_epsilon': 0.1}, {'clip_epsilon': 0.3, 'clip_epsilon_high': 0.3}]
)
def test_plain_clipping_may_end_with_the_start_of_replay(plain):
  for clip in ('until_replay', 'never'):
    check(clip=clip, **plain)
