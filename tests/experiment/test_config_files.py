"""Config files: by name or path, and with an argument."""

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files


def test_a_config_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for argv in (['x', '--config=smoke', '--workdir=w'], ['x', '--config', 'smoke', '--workdir=w']):
    resolved = ' '.join(config_files.resolved(argv))
    assert resolved.endswith('configs/smoke.py --workdir=w'), resolved


def test_a_config_by_path_stays_as_it_is(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').write_text('from exgrpo_jax.configs.smoke import get_config')
  assert config_files.resolved(['x', '--config=mine.py']) == ['x', '--config=mine.py']
  with pytest.raises(InputError, match=r'--config=other\.py: there is no such file; by name there'):
    config_files.resolved(['x', '--config=other.py'])


def test_a_name_that_no_config_has_is_refused_with_those_there_are():
  with pytest.raises(InputError, match=r'--config=smok: .* did you mean .smoke.\? .*, smoke'):
    config_files.resolved(['x', '--config=smok'])


def test_a_shipped_config_is_passed_on_by_name_and_any_other_by_path():
  path = config_files.shipped_path('smoke', 'exgrpo_jax.configs', 'config')
  assert config_files.portable_config(path) == 'smoke'
  assert config_files.portable_config('configs/smoke.py') == 'configs/smoke.py'


def test_what_follows_a_colon_is_the_argument_of_get_config(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').write_text(
    'from exgrpo_jax.configs import smoke\n\n\ndef get_config(seed):\n'
    '  config = smoke.get_config()\n  config.seed = int(seed)\n  return config\n'
  )
  argv = ['x', '--config=mine.py:7', '--config.num_steps=2']
  assert config_files.resolved(argv) == argv
  assert config_files.load('mine.py:7').seed == 7
  with pytest.raises(InputError, match=r"mine\.py:6: ValueError: invalid literal .* 'x'"):
    config_files.load('mine.py:x')
  path = config_files.config_path('one_gpu:math,24gb')
  assert path.endswith('configs/one_gpu.py:math,24gb')
  assert config_files.portable_config(path) == 'one_gpu:math,24gb'
