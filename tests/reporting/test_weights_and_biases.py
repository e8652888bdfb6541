"""Weights & Biases, by a stand-in for the package: what it is given, and when it is refused."""

import sys
import types

import pytest

from exgrpo_jax.commands import train
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics
from tests.helpers import tiny


class WandbError(Exception):
  """Stands in for wandb.Error."""


@pytest.fixture
def package(monkeypatch):
  """A stand-in for wandb; `calls` has what it was given."""
  calls = []
  run = types.SimpleNamespace(
    log=lambda values, step: calls.append((values, step)),
    finish=lambda exit_code: calls.append(f'finished with {exit_code}'),
  )
  module = types.SimpleNamespace(
    init=lambda **options: calls.append(options) or run,
    login=lambda: True,
    Error=WandbError,
    calls=calls,
  )
  monkeypatch.setitem(sys.modules, 'wandb', module)
  return module


def refuse(*_, **__):
  raise WandbError('api_key not configured (no-tty).\n  call wandb.login()')


def test_a_run_gets_the_config_and_the_metrics(package, tmp_path):
  settings = {'seed': 3, 'replay': {'ratio': 0.5}}
  with metrics.Writer(tmp_path / 'run', 7, 'replay', settings) as writer:
    writer.write(7, {'reward': 1})
  options, (values, step), end = package.calls
  assert options == {
    'project': 'replay',
    'group': 'run',
    'name': 'run-from-7',
    'dir': str(tmp_path / 'run'),
    'config': settings,
  }
  assert values['reward'] == 1.0 and step == 7 and end == 'finished with 0'


def test_a_run_that_fails_is_marked_as_failed(package, tmp_path):
  with pytest.raises(SystemExit), metrics.Writer(tmp_path, 0, 'replay', {}):
    sys.exit(75)
  assert package.calls[-1] == 'finished with 1'


@pytest.mark.parametrize('installed', [None, types.ModuleType('wandb')], ids=['absent', 'a_folder'])
def test_a_missing_package_is_refused_before_anything_is_prepared(
  config, tmp_path, monkeypatch, installed
):
  """A folder wandb/, which wandb leaves where it ran, is no package either."""
  monkeypatch.setitem(sys.modules, 'wandb', installed)
  config.metrics.wandb_project = 'replay'
  with pytest.raises(InputError, match=r"run pip install -e '\.\[wandb\]' in the clone"):
    train.main(types.SimpleNamespace(config=config, workdir=str(tmp_path / 'run')))
  assert not (tmp_path / 'run').exists()


def test_without_a_key_it_is_refused_in_one_line(package, config, tmp_path, monkeypatch):
  monkeypatch.setattr(package, 'login', refuse)
  config.metrics.wandb_project = 'replay'
  with pytest.raises(InputError, match=r'no-tty\)\. call wandb\.login\(\); set WANDB_API_KEY, run'):
    train.main(types.SimpleNamespace(config=config, workdir=str(tmp_path / 'run')))
  assert not (tmp_path / 'run').exists()


def test_a_start_that_fails_is_one_line(package, tmp_path, monkeypatch):
  monkeypatch.setattr(package, 'init', refuse)
  with pytest.raises(InputError, match='WANDB_MODE=offline keeps the metrics in the workdir'):
    metrics.Writer(tmp_path, 0, 'replay', {})
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_without_a_project_nothing_is_asked_for(monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  metrics.check_wandb('')
  assert tiny.values('', '').metrics.wandb_project == ''
