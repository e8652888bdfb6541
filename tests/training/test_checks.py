"""What can be checked before a run starts."""

import dataclasses

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.training import checks
from tests.helpers import tiny


def test_the_score_of_a_task_is_no_reward_for_data_without_its_entries(recorded):
  grading = dataclasses.replace(tiny.GRADING, rewards=('score_answer',))
  config = dataclasses.replace(recorded.experiment.config, grading=grading)
  with pytest.raises(
    InputError, match=r"'score_answer' .* it asks for 'entry', which is no column"
  ):
    checks.check_rewards(config, recorded.evaluations[0])
