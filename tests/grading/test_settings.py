"""Which rewards fit each other."""

import dataclasses
import math
import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import settings
from tests.helpers import tiny

MINE = 'mine:score'


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'rewards': ('overlng',)},
      "config.grading.rewards has no 'overlng'; did you mean 'overlong'?",
    ),
    (
      {'rewards': ('x',)},
      "has no 'x'; it has: correctness, overlong, think_format, boxed_format, l",
    ),
    ({'rewards': ()}, 'config.grading.rewards=() must name at least one'),
    (
      {'rewards': ('correctness', 'mine:correctness')},
      "has 2 functions 'correctness'; each is logged by its name",
    ),
    (
      {'rewards': ('correctness', MINE), 'weights': (1.0,)},
      f"weights=(1.0,) has 1 numbers, and config.grading.rewards=('correctness', '{MINE}') has 2 f",
    ),
    ({'weights': (math.inf,)}, 'config.grading.weights=(inf,) must be finite numbers'),
    ({'weights': (math.nan,)}, 'config.grading.weights=(nan,) must be finite numbers'),
    ({'batched': (MINE,)}, f"batched: config.grading.rewards has no '{MINE}'; it has: correctness"),
    ({'batched': ('correctness',)}, "has 'correctness', which takes one response at a time"),
    ({'overlong_buffer': 13}, 'overlong_buffer=13 must be at most config.rollout.max_response=12'),
  ],
)
def test_rewards_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(InputError, match=re.escape(message)):
    settings.check_rewards(dataclasses.replace(tiny.GRADING, **changes), 12)


def test_rewards_that_fit_are_not():
  config = dataclasses.replace(
    tiny.GRADING,
    rewards=('correctness', MINE),
    weights=(1.0, -0.5),
    batched=(MINE,),
    overlong_buffer=12,
  )
  settings.check_rewards(config, 12)
  settings.check_rewards(config.correctness_alone, 12)
  assert config.weight_of == {'correctness': 1.0, 'score': -0.5}
  assert config.correctness_alone.weight_of == {'correctness': 1.0}
