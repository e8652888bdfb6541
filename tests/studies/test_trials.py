"""The trials of a sweep: grids, lists, and sweep files."""

import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.studies import trials


def test_a_grid_is_every_combination_named_by_its_values():
  assert trials.grid({'replay.ratio': [0.0, 0.25], 'seed': range(2)}) == {
    'ratio=0,seed=0': {'replay.ratio': 0.0, 'seed': 0},
    'ratio=0,seed=1': {'replay.ratio': 0.0, 'seed': 1},
    'ratio=0.25,seed=0': {'replay.ratio': 0.25, 'seed': 0},
    'ratio=0.25,seed=1': {'replay.ratio': 0.25, 'seed': 1},
  }


def test_listed_settings_are_combined_with_axes_under_names_of_their_own():
  assert trials.listed({'full': {}, 'plain': {'replay.ratio': 0.0}}, {'seed': [3]}) == {
    'full,seed=3': {'seed': 3},
    'plain,seed=3': {'replay.ratio': 0.0, 'seed': 3},
  }


def test_listed_settings_without_axes_are_the_trials():
  assert trials.listed({'plain': {'replay.ratio': 0.0}}, {}) == {'plain': {'replay.ratio': 0.0}}


@pytest.mark.parametrize(
  ('expression', 'message'),
  [
    pytest.param(
      "{'a': {'seed': 1}, 'A': {'seed': 2}}",
      "trials 'a' and 'A' differ only in case",
      id='names_that_differ_in_case',
    ),
    pytest.param(
      "trials.grid({'seed': [1, 1]})", "two trials are named 'seed=1'", id='a_value_twice'
    ),
    pytest.param(
      "trials.grid({'replay.ratio': [.1, .10000001]})",
      "two trials are named 'ratio=0.1'",
      id='values_that_print_the_same',
    ),
    pytest.param(
      "{'../a': {}}",
      "a trial cannot be named '../a', because its folder gets the same name",
      id='name_with_a_slash',
    ),
    pytest.param("{'..': {}}", "a trial cannot be named '..'", id='name_of_the_parent'),
    pytest.param(
      "trials.grid({'data.train': ['x.jsonl[:5]']})",
      "cannot be named 'train=x.jsonl[:5]'",
      id='value_that_makes_no_name',
    ),
    pytest.param("{'a': 1}", "trial 'a' must be {dotted config key: value}, not 1.", id='a_number'),
    pytest.param(
      '[]',
      'get_sweep() must return trial name -> {config key: value}, at least one, not [].',
      id='no_trial',
    ),
    pytest.param('1 / 0', ': ZeroDivisionError: division by zero; a sweep is', id='an_exception'),
    pytest.param('exit(3)', ': SystemExit: 3; a sweep is a Python file whose', id='an_exit'),
  ],
)
def test_a_sweep_file_that_defines_no_valid_trials_is_refused(expression, message, write_sweep):
  with pytest.raises(InputError, match=re.escape(message)):
    trials.load(write_sweep(expression))


def test_a_sweep_file_without_get_sweep_is_refused(tmp_path):
  (tmp_path / 'empty.py').write_text('')
  with pytest.raises(InputError, match=r'empty\.py: it has no get_sweep\(\); a sweep is'):
    trials.load(str(tmp_path / 'empty.py'))
