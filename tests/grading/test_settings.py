"""Which verifiers and rewards fit each other."""

import dataclasses
import math

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import settings
from tests.helpers import tiny

MINE = 'mine:score'


@pytest.mark.parametrize(
  ('changes', 'named'),
  [
    ({'verifier': 'math_verfy'}, ["config.grading.verifier has no 'math_verfy'", "'math_verify'?"]),
    ({'rewards': ('overlng',)}, ["config.grading.rewards has no 'overlng'", "'overlong'?"]),
    ({'rewards': ()}, ['config.grading.rewards=()']),
    ({'rewards': ('correctness', 'mine:correctness')}, ["2 functions 'correctness'"]),
    ({'rewards': ('correctness', MINE), 'weights': (1.0,)}, ['weights=(1.0,)', '1 numbers', MINE]),
    ({'weights': (math.inf,)}, ['config.grading.weights=(inf,)', 'from -100000 to 100000']),
    ({'weights': (-1e6,)}, ['config.grading.weights=(-1000000.0,)', 'from -100000 to 100000']),
    ({'batched': (MINE,)}, ['config.grading.batched', f"no '{MINE}'"]),
    ({'batched': ('correctness',)}, ["has 'correctness'", 'one response at a time']),
    ({'overlong_buffer': 13}, ['overlong_buffer=13', 'config.rollout.max_response=12']),
  ],
)
def test_what_does_not_fit_is_refused(changes, named):
  with pytest.raises(InputError) as refused:
    settings.check_rewards(dataclasses.replace(tiny.GRADING, **changes), 12)
  assert all(part in str(refused.value) for part in named), refused.value


def test_rewards_that_fit_are_not():
  config = dataclasses.replace(
    tiny.GRADING,
    verifier='mine:Exact',
    rewards=('correctness', MINE),
    weights=(1.0, -0.5),
    batched=(MINE,),
    overlong_buffer=12,
  )
  settings.check_rewards(config, 12)
  settings.check_rewards(config.correctness_alone, 12)
  assert config.weight_of == {'correctness': 1.0, 'score': -0.5}
  assert config.correctness_alone.weight_of == {'correctness': 1.0}
