"""The warm start: the solutions that it learns, and where its result is reused."""

import re

import jax
import numpy as np
import pytest

from exgrpo_jax import experiment, warm_start
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import model
from tests.helpers import tiny


def run(config, workdir):
  """What `python -m exgrpo_jax.train` does before the first step."""
  opened = experiment.open_experiment(config, str(workdir))
  data = experiment.load_questions(opened, opened.config.data.train)
  with jax.set_mesh(opened.mesh):
    return warm_start.initial_params(opened, data)


def test_a_question_without_a_solution_is_refused_with_its_place(config, jsonl, tmp_path):
  path = jsonl({'question': '1+1', 'answer': '2'})
  config.data.train = config.warm_start.data = path
  config.data.cache_dir = str(tmp_path / 'cache')
  with pytest.raises(
    InputError,
    match=(
      r'train\.jsonl: row 0 has no worked solution to learn from; set '
      r'config\.data\.solution_field, or config\.warm_start\.num_updates=0\.'
    ),
  ):
    run(config, tmp_path)


def test_a_solution_over_the_limit_is_refused(config, tmp_path):
  config.rollout.max_response = 2
  with pytest.raises(
    InputError,
    match=re.escape(
      "over config.rollout.max_response=2; raise it, or set config.data.overlong='drop'."
    ),
  ):
    run(config, tmp_path)


def test_where_overlong_solutions_are_dropped_one_must_be_left(config, tmp_path):
  config.rollout.max_response, config.data.overlong = 1, 'drop'
  with pytest.raises(InputError, match=r'no solution fits config\.rollout\.max_response=1'):
    run(config, tmp_path)


def test_a_warm_start_of_the_same_config_is_reused(recorded, capsys):
  opened = recorded.experiment
  params = warm_start.run(opened, model.shapes(opened.model, opened.mesh), recorded.data)
  assert 'warm start: reused from' in capsys.readouterr().out
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[1].params)


def test_a_warm_start_of_another_config_is_not_reused(recorded, config, tmp_path):
  folder = str(recorded.workdir / 'warm_start')
  config.warm_start.path, config.seed = folder, tiny.SEED + 1
  opened = experiment.open_experiment(config, str(tmp_path))
  with pytest.raises(
    InputError,
    match=re.escape(
      f'{folder} holds a warm start of another configuration (differing: seed); choose another '
      'config.warm_start.path.'
    ),
  ):
    warm_start.run(opened, params=None, data=recorded.data)
