"""Code that a config names is refused by its name where it cannot be used."""

import dataclasses
import sys

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.workers import user_code
from tests.helpers import misbehaving, tiny

REQUIRED = verifier.Config(require_think=False, require_box=True)
CODE = misbehaving.__name__


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'rewards': (':reward',)}, "ValueError: it does not have the form 'package.module:function'"),
    ({'rewards': ('nowhere_at_all:f',)}, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ({'rewards': (f'{CODE}:nothing',)}, 'AttributeError: '),
    ({'rewards': (f'{CODE}:of_position',)}, "ValueError: its parameter 'response' cannot be given"),
    ({'rewards': (f'{CODE}:time',)}, 'TypeError: '),
    (
      {'rewards': (f'{CODE}:of_trl',)},
      "'completions' is that of a reward for TRL; here it is called",
    ),
    ({'rewards': (f'{CODE}:of_verl',)}, 'as in `def reward(response, answer): return float('),
    ({'rewards': (f'{CODE}:broken',)}, f"KeyError: 'score' ({misbehaving.__file__}:"),
    ({'rewards': (f'{CODE}:as_list',)}, 'returned [19.0], not a number'),
    ({'rewards': (f'{CODE}:beyond_float32',)}, 'returned 1e+39, not a number from -1e+10 to 1e+10'),
    ({'rewards': (f'{CODE}:leaves',)}, 'SystemExit: 3'),
    ({'rewards': (f'{CODE}:of_last_word',)}, "tried on ('', '1', 'no answer'): IndexError"),
    ({'rewards': (f'{CODE}:vanishes',)}, 'its process ended with exit status 3, while trying it'),
    ({'rewards': (f'{CODE}:reward',), 'batched': (f'{CODE}:reward',)}, 'a batch of 3 responses'),
    ({'verifier': 'nowhere_at_all:X'}, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ({'verifier': f'{CODE}:Undecided'}, "returned ('perhaps', None)"),
  ],
)
def test_what_cannot_be_used_is_refused_by_name(changes, reason):
  config = dataclasses.replace(tiny.GRADING, **changes)
  with pytest.raises(InputError) as refused:
    pool.check(config, REQUIRED)
  key = next(iter(changes))
  spec = config.verifier if key == 'verifier' else config.rewards[0]
  assert str(refused.value).startswith(f"config.grading.{key}: '{spec}' cannot be used (")
  assert reason in str(refused.value)


def test_what_can_be_used_passes_the_check():
  rewards = ('exgrpo_jax.grading.rewards:think_format',)
  own = 'exgrpo_jax.grading.verifier:BuiltIn'
  pool.check(dataclasses.replace(tiny.GRADING, rewards=rewards, verifier=own), REQUIRED)


def test_code_in_the_current_folder_is_found(tmp_path, monkeypatch):
  (tmp_path / 'lies_here.py').write_text('def score(response):\n  return 7\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [path for path in sys.path if path])
  assert user_code.load('lies_here:score')('') == 7


def test_an_error_is_one_short_line():
  assert user_code.summarize(OSError('a\nb\x00' + 'c' * 600)) == ('OSError: a b ' + 'c' * 600)[:500]
