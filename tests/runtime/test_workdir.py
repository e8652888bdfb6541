"""A workdir belongs to one config, of which a resumed run may change some settings."""

import json
import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.workdir import check_workdir, check_writable, claim_workdir, read_config
from tests.helpers import tiny


def changed(config, changes):
  config.update_from_flattened_dict(changes)
  return config


def test_a_workdir_keeps_the_config_that_made_it(config, tmp_path):
  claim_workdir(config, str(tmp_path / 'new'))
  written = json.loads((tmp_path / 'new' / 'config.json').read_text())
  assert written['replay']['ratio'] == tiny.RATIO
  check_workdir(config, str(tmp_path / 'new'))  # as when resuming


def test_the_config_of_an_earlier_version_may_have_settings_that_are_gone(config, tmp_path):
  values = config.to_dict()
  values['rollout'] |= {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}
  (tmp_path / 'config.json').write_text(json.dumps(values))
  check_workdir(config, str(tmp_path))
  assert read_config(str(tmp_path)).keys() == values.keys()
  values['rollout']['top_p'] = 0.9
  (tmp_path / 'config.json').write_text(json.dumps(values))
  with pytest.raises(InputError, match=r'config\.rollout\.top_p was 0\.9, is None'):
    check_workdir(config, str(tmp_path))


def test_a_run_older_than_a_setting_resumes_with_what_it_did(config, tmp_path):
  claim_workdir(config, str(tmp_path))
  written = json.loads((tmp_path / 'config.json').read_text())
  del written['grading']['verifier']
  (tmp_path / 'config.json').write_text(json.dumps(written))
  check_workdir(config, str(tmp_path))
  with pytest.raises(InputError, match='verifier was built_in, is math_verify'):
    check_workdir(changed(config, {'grading.verifier': 'math_verify'}), str(tmp_path))


def test_a_workdir_of_another_config_is_refused_with_what_differs(config, tmp_path):
  claim_workdir(config, str(tmp_path))
  before = (tmp_path / 'config.json').read_text()
  with pytest.raises(
    InputError,
    match=re.escape(
      f'{tmp_path} belongs to another config: config.replay.ratio was 0.5, is 0.25; config.seed '
      'was 5, is 3. Choose another --workdir, or restore the config.'
    ),
  ):
    check_workdir(changed(config, {'seed': 3, 'replay.ratio': 0.25}), str(tmp_path))
  assert (tmp_path / 'config.json').read_text() == before


def test_a_run_may_be_prolonged_observed_and_computed_differently(config, tmp_path):
  claim_workdir(config, str(tmp_path))
  changes = {
    'num_steps': 99,
    'evaluation.every': 1,
    'checkpoint.keep': 1,
    'metrics.sampled_rows': 0,
    'data.validation': ('arithmetic:test',),
    'rollout.slots': 3,
  }
  check_workdir(changed(config, changes), str(tmp_path))


def test_a_decaying_rate_forbids_prolonging(config, tmp_path):
  claim_workdir(changed(config, {'optimizer.schedule': 'cosine'}), str(tmp_path))
  with pytest.raises(InputError, match=r'config\.num_steps was 32, is 99'):
    check_workdir(changed(config, {'num_steps': 99}), str(tmp_path))


def test_only_the_given_sections_are_compared(config, tmp_path):
  claim_workdir(config, str(tmp_path))
  check_workdir(changed(config, {'seed': 3}), str(tmp_path), ('model',))
  with pytest.raises(InputError, match=r'config: config\.model\.width was \d+, is 64\. Choose'):
    check_workdir(changed(config, {'model.width': 64}), str(tmp_path), ('model',))


def test_a_workdir_is_made_where_it_is_missing_and_refused_where_it_cannot_be_written(tmp_path):
  check_writable(str(tmp_path / 'new' / 'run'))
  assert list((tmp_path / 'new' / 'run').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(InputError, match=r'file/run cannot be written into .*Not a directory'):
    check_writable(str(tmp_path / 'file' / 'run'))
