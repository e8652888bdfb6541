"""The trials of a sweep: grids, lists, and sweep files."""

import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.sweeps import trials


def test_a_grid_is_every_combination_named_by_its_values():
  assert trials.grid({'replay.ratio': [0.0, 0.25], 'seed': range(2)}) == {
    'ratio=0,seed=0': {'replay.ratio': 0.0, 'seed': 0},
    'ratio=0,seed=1': {'replay.ratio': 0.0, 'seed': 1},
    'ratio=0.25,seed=0': {'replay.ratio': 0.25, 'seed': 0},
    'ratio=0.25,seed=1': {'replay.ratio': 0.25, 'seed': 1},
  }


def test_listed_settings_are_combined_with_axes_under_names_of_their_own():
  settings = {'full': {}, 'plain': {'replay.ratio': 0.0}}
  assert trials.listed(settings, {'seed': [3]}) == {
    'full,seed=3': {'seed': 3},
    'plain,seed=3': {'replay.ratio': 0.0, 'seed': 3},
  }
  assert trials.listed(settings, {}) == settings


@pytest.mark.parametrize(
  ('expression', 'message'),
  [
    ("{'a': {'seed': 1}, 'A': {'seed': 2}}", "trials 'a' and 'A' differ only in case"),
    ("trials.grid({'seed': [1, 1]})", "two trials are named 'seed=1'"),
    ("trials.grid({'replay.ratio': [.1, .10000001]})", "two trials are named 'ratio=0.1'"),
    ("{'../a': {}}", "a trial cannot be named '../a'"),
    ("{'..': {}}", "a trial cannot be named '..'"),
    ("trials.grid({'data.train': ['x.jsonl[:5]']})", "cannot be named 'train=x.jsonl[:5]'"),
    ("{'a': 1}", "trial 'a' must be {dotted config key: value}, not 1."),
    ('[]', 'at least one, not []'),
    ('1 / 0', ': ZeroDivisionError: division by zero'),
    ('exit(3)', ': SystemExit: 3'),
  ],
)
def test_a_sweep_file_that_defines_no_valid_trials_is_refused(expression, message, write_sweep):
  with pytest.raises(InputError, match=re.escape(message)):
    trials.load(write_sweep(expression))
