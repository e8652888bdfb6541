"""Names of earlier versions: refused in a config, and read in an old workdir."""

import json
import re

import pytest

from exgrpo_jax import config, renamed
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.settings import RunConfig
from exgrpo_jax.reporting import metrics, runs
from exgrpo_jax.runtime import workdir

DEFAULTS = runs.flat(config.defaults(RunConfig).to_dict())


@pytest.mark.parametrize('old', [name for name in renamed.SETTINGS if '.' in name])
def test_an_old_setting_is_refused_with_its_new_name(old):
  new = renamed.SETTINGS[old]
  assert new in DEFAULTS and old not in DEFAULTS
  with pytest.raises(InputError, match=rf'; it is now called config\.{new}\.$'):
    config.overridden(config.defaults(RunConfig), {old: 1})


@pytest.mark.parametrize('old', ['gradient.remat', 'parity.every'])
def test_an_old_section_is_refused_with_its_new_name(old):
  section = old.partition('.')[0]
  with pytest.raises(InputError, match=rf'it is now called config\.{renamed.SETTINGS[section]}\.$'):
    config.overridden(config.defaults(RunConfig), {old: 1})


@pytest.mark.parametrize('old', renamed.REMOVED)
def test_a_removed_setting_is_refused_with_the_reason_and_dropped_from_old_workdirs(old):
  section, _, name = old.rpartition('.')
  with pytest.raises(InputError, match=re.escape(f"no '{name}'; {renamed.REMOVED[old]}")):
    config.overridden(config.defaults(RunConfig), {old: 1})
  stored = {name: renamed.NEUTRAL.get(old, 1), 'other': 2}
  assert renamed.current_settings({section: stored} if section else stored) == (
    {section: {'other': 2}} if section else {'other': 2}
  )


@pytest.mark.parametrize('key', renamed.MERGED)
def test_a_merged_setting_is_refused_with_its_new_name_and_an_example(key):
  old_names, example, _ = renamed.MERGED[key]
  section = key.partition('.')[0]
  for name in old_names:
    hint = f'; it is now part of config.{key}, for example config.{key}=('
    with pytest.raises(InputError, match=re.escape(hint)):
      config.overridden(config.defaults(RunConfig), {f'{section}.{name}': 1})
  config.build(RunConfig, config.overridden(config.defaults(RunConfig), {key: example}), 'config')


@pytest.mark.parametrize(
  ('key', 'old', 'value'),
  [
    ('verifier.require', (False, False), []),
    ('verifier.require', (False, True), ['box']),
    ('evaluation.require', (True, False), ['think']),
    ('evaluation.require', (True, True), ['think', 'box']),
    ('replay.correctness_range', (0.25, 0.5), [0.25, 0.5]),
  ],
)
def test_the_old_values_of_a_merged_setting_become_one(key, old, value):
  section, name = key.split('.')
  stored = {section: dict(zip(renamed.MERGED[key][0], old, strict=True)) | {'other': 1}}
  assert renamed.current_settings(stored) == {section: {name: value, 'other': 1}}


@pytest.mark.parametrize(
  ('key', 'old'), [(key, old) for key, values in renamed.VALUES.items() for old in values]
)
def test_an_old_value_is_refused_with_its_new_one(key, old):
  values = config.overridden(config.defaults(RunConfig), {key: old})
  with pytest.raises(InputError, match=rf'{old!r} is now called {renamed.VALUES[key][old]!r}\.$'):
    config.build(RunConfig, values, 'config')


def test_the_config_of_an_old_workdir_is_read_under_the_new_names(tmp_path):
  old = config.defaults(RunConfig).to_dict()
  for before, now in renamed.SETTINGS.items():
    if '.' in before:
      section, key = now.split('.')
      old.setdefault(before.split('.')[0], {})[before.split('.')[1]] = old[section].pop(key)
  for before, now in renamed.SETTINGS.items():
    if '.' not in before:
      old[before] = old.get(before, {}) | old.pop(now)
  old['objective'] |= {'shaping': 'fraction', 'old_logprobs': 'sampler'}
  (tmp_path / 'config.json').write_text(json.dumps(old))
  read = runs.flat(workdir.read_config(str(tmp_path)))
  assert read == runs.flat(json.loads(json.dumps(config.defaults(RunConfig).to_dict())))


def test_the_metrics_of_an_old_workdir_are_read_under_the_new_names(tmp_path):
  record = {'step': 1, 'zero_variance': 0.5, 'carry/age_max': 3.0, 'loss': 0.1}
  (tmp_path / metrics.FILE).write_text(json.dumps(record) + '\n')
  assert metrics.read(tmp_path) == [
    {'step': 1, 'groups/zero_advantage': 0.5, 'staleness/max': 3.0, 'loss': 0.1}
  ]
