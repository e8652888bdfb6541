"""The command line: configs by name or path, flags, and refusals in one line."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

from exgrpo_jax import commands
from exgrpo_jax.__main__ import COMMANDS
from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.runtime.workdir import claim_workdir
from tests.helpers import forked

NAMES = [name for group in COMMANDS.values() for name in group]


def train(*arguments):
  """How the command ends."""
  return forked.run_one(['train', *arguments])


def assert_refused(outcome, message):
  """One line on stderr that begins with 'error:', exit status 2, no traceback."""
  assert outcome.status == 2, outcome.err
  assert 'Traceback' not in outcome.err and outcome.out == ''
  (line,) = [line for line in outcome.err.splitlines() if line.startswith('error:')]
  assert message in line


def test_an_override_of_no_field_is_answered_with_the_nearest(tmp_path):
  assert_refused(
    train('--config=configs/smoke.py', f'--workdir={tmp_path}', '--config.replay.ratoi=0.25'),
    "error: config.replay has no 'ratoi'; did you mean 'ratio'?",
  )


def test_the_config_may_be_an_argument_of_its_own(tmp_path):
  """Absl takes '--config x.py' as well as '--config=x.py'."""
  assert_refused(
    train('--config', 'configs/smoke.py', '--workdir', tmp_path, '--config.repaly.ratio=0'),
    "error: config has no 'repaly'; did you mean 'replay'?",
  )


def test_a_missing_workdir_is_reported_with_an_example():
  assert_refused(
    train('--config=configs/smoke.py'),
    '--config and --workdir are both needed, e.g. --config=smoke --workdir=/tmp/smoke.',
  )


def test_a_reward_that_cannot_be_imported_is_refused_before_anything_is_trained(tmp_path):
  assert_refused(
    train(
      '--config=configs/smoke.py',
      f'--workdir={tmp_path}',
      '--config.grading.rewards=nowhere_at_all:reward',
    ),
    "config.grading.rewards: 'nowhere_at_all:reward' cannot be used "
    "(ModuleNotFoundError: No module named 'nowhere_at_all'): it must be ",
  )
  assert not (tmp_path / 'config.json').exists()


def test_a_refused_start_leaves_the_workdir_to_the_corrected_one(tmp_path):
  """Otherwise the corrected command would be refused as another config."""
  refused = train(
    '--config=configs/smoke.py',
    f'--workdir={tmp_path}/run',
    '--config.data.train=nowhere.jsonl',
    '--config.warm_start.data=nowhere.jsonl',
  )
  assert_refused(refused, 'nowhere.jsonl: there is no such file')
  claim_workdir(
    importlib.import_module('exgrpo_jax.configs.smoke').get_config(), str(tmp_path / 'run')
  )


# ---- Configs by name ----


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
  with pytest.raises(
    InputError, match=r'--config=smok: there is no config of that name; .*, smoke'
  ):
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


def test_the_words_that_gave_the_config_are_told_from_the_others():
  config = ['-config=x.py', '--config.num_steps', '-3', '--noconfig.replay.count_replayed']
  others = ['--workdir=/tmp/x', '--samples', '4', '--configuration=y']
  assert (
    command_line.config_arguments(['train', *others, *config[:3], *others, *config[3:]]) == config
  )
  assert command_line.config_arguments(['--config', 'smoke', 'other']) == ['--config', 'smoke']
  assert command_line.config_arguments(['--noconfig.x', 'other', '--config.y=1']) == [
    '--noconfig.x',
    '--config.y=1',
  ]


# ---- Flags ----


@pytest.mark.parametrize(
  'command',
  [
    ['check', '--config=smoke', '--workdir=~/damaged'],
    ['check', '--config=~/smoke.py', '--workdir', '~/damaged'],
    ['export', '--checkpoint=~/damaged', '--out=~/policy'],
    ['evaluate', '--compare=x,~/damaged'],
  ],
)
def test_a_tilde_is_the_home_folder_in_every_path_flag(tmp_path, command):
  (tmp_path / 'damaged').mkdir()
  (tmp_path / 'damaged' / 'config.json').write_text('{')
  (tmp_path / 'smoke.py').write_text('from exgrpo_jax.configs.smoke import get_config')
  outcome = forked.run_one(command, HOME=str(tmp_path))
  assert_refused(outcome, f'{tmp_path}/damaged/config.json cannot be read as the config of a run')


def test_all_commands_can_be_imported_together_for_none_defines_a_flag_at_import():
  names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
  assert set(NAMES) <= set(names)
  script = f"""
from absl import flags
before = set(flags.FLAGS)
import importlib
for name in {names!r}:
  importlib.import_module(f'exgrpo_jax.commands.{{name}}')
# ml_collections and JAX define flags of their own.
ours = [module for module in flags.FLAGS.flags_by_module_dict() if module.startswith('exgrpo_jax')]
assert not ours, ours
"""
  process = subprocess.run([sys.executable, '-c', script], text=True, capture_output=True)
  assert process.returncode == 0, process.stderr


def test_help_has_the_flags_of_each_command():
  flags = {
    'capacity': {'config', 'device', 'evaluated', 'fit', 'lengths', 'topology'},
    'check': {'config', 'workdir', 'num_processes'},
    'evaluate': {'config', 'checkpoint', 'step', 'data', 'samples', 'temperature', 'out'},
    'export': {'checkpoint', 'step', 'out', 'dtype'},
    'sweep': {'config', 'workdir', 'sweep', 'parallel', 'launcher'},
    'study': {'workdir', 'study', 'parallel', 'launcher'},
    'train': {'config', 'workdir', 'num_processes'},
    'verify': {'response', 'answer', 'file'},
  }
  for name, outcome in zip(NAMES, forked.run([name, '--help'] for name in NAMES)):
    text = outcome.out
    assert outcome.status == 0, name
    assert f'exgrpo {name}' in text, name
    for flag in flags.get(name, ()):
      assert f'--{flag}' in text.replace('--[no]', '--'), (name, flag)


def test_without_a_command_they_are_listed_by_purpose_and_a_slip_is_answered_with_the_nearest():
  listed, slip = forked.run([['exgrpo_jax.__main__'], ['trian']])
  assert listed.status == 0
  for purpose, commands_of_it in COMMANDS.items():
    assert purpose in listed.out and all(f'  {name} ' in listed.out for name in commands_of_it)
  assert (slip.status, slip.out) == (2, '') and 'did you mean train?' in slip.err
