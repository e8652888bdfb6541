"""Settings of the algorithm that would do nothing together are refused; all others pass."""

import pytest

from exgrpo_jax.algorithm import combinations, objective, replay
from exgrpo_jax.errors import InputError


def check(num_questions=128, ratio=0.5, replay_values=(), **of_objective):
  replay_config = replay.Config(ratio=ratio, **dict(replay_values))
  combinations.check(replay_config, objective.Config(**of_objective), num_questions, num_rollouts=8)


@pytest.mark.parametrize(
  ('num_questions', 'ratio', 'enough'),
  [
    (8, 0.1, 'ratio to at least 0.125, config.rollout.questions to at least 10, '),
    (3, 0.25, 'ratio to at least 0.333334, config.rollout.questions to at least 4, '),
    (1, 0.5, 'set config.rollout.questions to at least 2, '),  # no ratio below 1 is enough
  ],
)
def test_a_ratio_that_replays_no_question_is_refused_with_what_does(num_questions, ratio, enough):
  with pytest.raises(InputError) as refused:
    check(num_questions, ratio)
  values = f'config.replay.ratio={ratio} of config.rollout.questions={num_questions} '
  assert str(refused.value).startswith(values) and enough in str(refused.value)


@pytest.mark.parametrize(
  ('num_questions', 'ratio'), [(8, 0.125), (10, 0.1), (3, 0.333334), (3, 1 / 3), (2, 0.5), (1, 0.0)]
)
def test_a_ratio_that_replays_a_question_passes_and_so_does_none(num_questions, ratio):
  check(num_questions, ratio)


def test_bounds_that_let_no_group_be_recorded_are_refused():
  bounds = dict(lower_bound=0.9, upper_bound=0.95)
  with pytest.raises(InputError, match=r'lower_bound=0\.9 and .*upper_bound=0\.95 let no group'):
    check(replay_values=bounds)
  check(ratio=0.0, replay_values=bounds)


@pytest.mark.parametrize(
  'variant', [{'dual_clip': 3.0}, {'clip_epsilon_high': 0.28}, {'surrogate': 'cispo'}]
)
def test_a_variant_of_clipping_needs_clipping_in_every_step(variant):
  for clip, ratio in (('until_replay', 0.5), ('never', 0.5), ('never', 0.0)):
    with pytest.raises(InputError, match=rf"{next(iter(variant))}=.* needs config.*clip='always'"):
      check(ratio=ratio, clip=clip, **variant)
  check(clip='always', **variant)
  check(ratio=0.0, clip='until_replay', **variant)


@pytest.mark.parametrize(
  'plain', [{}, {'clip_epsilon': 0.1}, {'clip_epsilon': 0.3, 'clip_epsilon_high': 0.3}]
)
def test_plain_clipping_may_end_with_the_start_of_replay(plain):
  for clip in ('until_replay', 'never'):
    check(clip=clip, **plain)
