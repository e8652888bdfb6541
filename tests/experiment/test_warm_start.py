"""The warm start: the solutions that it learns, and where its result is reused."""

import dataclasses
import fcntl
import re
import shutil

import jax
import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment, warm_start
from exgrpo_jax.policy import model
from tests.helpers import tiny


def run(config, workdir):
  """What `exgrpo train` does before the first step."""
  opened = experiment.open_experiment(config, str(workdir))
  data = experiment.load_questions(opened, opened.config.data.train)
  with jax.set_mesh(opened.meshes.training):
    return warm_start.initial_params(opened, data)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({}, r'row 0 has no worked solution .*config\.data\.solution_field'),
    (
      {'rollout.max_response': 2},
      r'over config\.rollout\.max_response=2; .*config\.data\.overlong',
    ),
    (
      {'rollout.max_response': 1, 'data.overlong': 'drop'},
      r'no solution fits config\.rollout\.max_response=1',
    ),
  ],
)
def test_solutions_that_are_missing_or_too_long_are_refused(
  changes, message, config, jsonl, tmp_path
):
  if not changes:
    config.data.train = config.warm_start.data = jsonl({'question': '1+1', 'answer': '2'})
    config.data.cache_dir = str(tmp_path / 'cache')
  config.update_from_flattened_dict(changes)
  with pytest.raises(InputError, match=message):
    run(config, tmp_path)


def test_a_warm_start_of_the_same_config_is_reused(recorded, capsys):
  opened = recorded.experiment
  params = warm_start.run(opened, model.shapes(opened.model, opened.meshes.training), recorded.data)
  assert 'warm start: reused from' in capsys.readouterr().out
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[1].params)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'seed': 6}, f'config.warm_start.seed was {tiny.SEED}, is 6'),
    ({'warm_start.seed': 6}, f'config.warm_start.seed was {tiny.SEED}, is 6'),
    (
      {'warm_start.path': '~/warm_start', 'model.norm_epsilon': 0.5, 'warm_start.batch_size': 3},
      'config.model.norm_epsilon was 1e-06, is 0.5; config.warm_start.batch_size was 8, is 3',
    ),
  ],
)
def test_a_warm_start_of_another_config_is_not_reused(
  changes, message, recorded, config, tmp_path, monkeypatch
):
  monkeypatch.setenv('HOME', str(recorded.workdir))
  folder = str(recorded.workdir / 'warm_start')
  config.update_from_flattened_dict({'warm_start.path': folder} | changes)
  opened = experiment.open_experiment(config, str(tmp_path))
  with pytest.raises(InputError, match=re.escape(message)):
    warm_start.run(opened, params=None, data=recorded.data)


def test_a_run_waits_for_another_that_trains_the_same_warm_start(
  recorded, tmp_path, capsys, monkeypatch
):
  """The other one holds the lock; once it lets go, the result is there."""
  kept, folder = recorded.workdir / 'warm_start', tmp_path / 'shared'
  opened = recorded.experiment
  config = dataclasses.replace(
    opened.config,
    warm_start=dataclasses.replace(opened.config.warm_start, path=str(folder)),
  )
  opened = dataclasses.replace(opened, config=config)

  def held_by_another(_, operation):
    if operation & fcntl.LOCK_NB:
      raise BlockingIOError
    shutil.copytree(kept, folder, dirs_exist_ok=True)

  monkeypatch.setattr(fcntl, 'flock', held_by_another)
  params = warm_start.run(opened, model.shapes(opened.model, opened.meshes.training), recorded.data)
  printed = capsys.readouterr().out
  assert f'another run is training it in {folder}' in printed and 'reused from' in printed
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[1].params)


def test_a_warm_start_that_diverges_is_refused_and_not_kept(recorded, config, tmp_path):
  config.warm_start.update(dict(num_updates=3, learning_rate=1e30))
  message = (
    r'^warm start: the loss of update \d is nan; .*config\.warm_start\.learning_rate.*1e\+30'
  )
  with recorded.compiling(), pytest.raises(InputError, match=message):
    run(config, tmp_path)
  assert not (tmp_path / 'warm_start' / 'params').exists()


def test_what_is_trained_on_afterwards_does_not_change_a_warm_start(config, jsonl, tmp_path):
  """Neither its origin, but where `enough` is checked on it, nor the tokenizer."""
  before = experiment.open_experiment(config, str(tmp_path / 'before'))
  config.data.train = jsonl({'question': '3 plus 4?', 'answer': '7'})
  config.data.cache_dir = str(tmp_path / 'cache')
  after = experiment.open_experiment(config, str(tmp_path / 'after'))
  assert after.tokenizer.files == before.tokenizer.files
  origins = [warm_start.origin(one.config, one.model) for one in (before, after)]
  assert origins[0] == origins[1]
  config.warm_start.enough = 0.5
  checked = experiment.parse_config(config)
  assert warm_start.origin(checked, after.model)['train'] == config.data.train


def test_runs_of_two_seeds_can_begin_with_the_same_policy(config, tmp_path):
  """config.warm_start.seed decides the random parameters and the origin; without it the run's."""
  config.warm_start.num_updates = 0
  found = {}
  for warm_start_seed, seed in ((3, 5), (3, 6), (-1, 5), (-1, 3)):
    config.warm_start.seed, config.seed = warm_start_seed, seed
    workdir = tmp_path / f'{warm_start_seed} {seed}'
    leaf = jax.tree.leaves(run(config, workdir))[0]
    parsed = experiment.parse_config(config)
    origin = warm_start.origin(parsed, experiment.model_config(parsed))
    found[warm_start_seed, seed] = origin['seed'], np.asarray(leaf).tobytes()
  assert found[3, 5] == found[3, 6] == found[-1, 3] != found[-1, 5]
