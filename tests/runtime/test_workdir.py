"""A workdir belongs to one config, of which a resumed run may change some settings."""

import json
import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.workdir import (
  check_workdir,
  check_writable,
  claim_workdir,
  read_config,
  release_workdir,
)
from tests.helpers import tiny


def changed(config, changes):
  config.update_from_flattened_dict(changes)
  return config


@pytest.fixture
def workdir(tmp_path):
  """Where a run has finished a step."""
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n{"step": 1}\n')
  return tmp_path


def test_a_workdir_keeps_the_config_that_made_it(config, tmp_path):
  claim_workdir(config, str(tmp_path / 'new'))
  written = json.loads((tmp_path / 'new' / 'config.json').read_text())
  assert written['replay']['ratio'] == tiny.RATIO
  check_workdir(config, str(tmp_path / 'new'))  # as when resuming


def test_the_config_of_an_earlier_version_may_have_settings_that_are_gone(config, workdir):
  values = config.to_dict()
  values['rollout'] |= {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}
  (workdir / 'config.json').write_text(json.dumps(values))
  check_workdir(config, str(workdir))
  assert read_config(str(workdir)).keys() == values.keys()
  values['rollout']['top_p'] = 0.9
  (workdir / 'config.json').write_text(json.dumps(values))
  with pytest.raises(InputError, match=r'config\.rollout\.top_p was 0\.9, is None'):
    check_workdir(config, str(workdir))


def test_a_run_older_than_a_setting_resumes_with_what_it_did(config, workdir):
  claim_workdir(config, str(workdir))
  written = json.loads((workdir / 'config.json').read_text())
  del written['grading']['verifier']
  (workdir / 'config.json').write_text(json.dumps(written))
  check_workdir(config, str(workdir))
  with pytest.raises(InputError, match='verifier was built_in, is math_verify'):
    check_workdir(changed(config, {'grading.verifier': 'math_verify'}), str(workdir))


def test_a_workdir_of_another_config_is_refused_with_what_differs(config, workdir):
  claim_workdir(config, str(workdir))
  before = (workdir / 'config.json').read_text()
  with pytest.raises(
    InputError,
    match=re.escape(
      f'{workdir} belongs to another config: config.replay.ratio was 0.5, is 0.25; config.seed '
      'was 5, is 3. Choose another --workdir, or restore the config.'
    ),
  ):
    check_workdir(changed(config, {'seed': 3, 'replay.ratio': 0.25}), str(workdir))
  assert (workdir / 'config.json').read_text() == before


def test_a_run_may_be_prolonged_observed_and_computed_differently(config, workdir):
  claim_workdir(config, str(workdir))
  changes = {
    'num_steps': 99,
    'evaluation.every': 1,
    'checkpoint.keep': 1,
    'metrics.sampled_rows': 0,
    'data.validation': ('arithmetic:test',),
    'rollout.slots': 3,
  }
  check_workdir(changed(config, changes), str(workdir))


def test_a_decaying_rate_forbids_prolonging(config, workdir):
  claim_workdir(changed(config, {'optimizer.schedule': 'cosine'}), str(workdir))
  with pytest.raises(InputError, match=r'config\.num_steps was 32, is 99'):
    check_workdir(changed(config, {'num_steps': 99}), str(workdir))


def test_only_the_given_sections_are_compared(config, workdir):
  claim_workdir(config, str(workdir))
  check_workdir(changed(config, {'seed': 3}), str(workdir), ('model',))
  with pytest.raises(InputError, match=r'config: config\.model\.width was \d+, is 64\. Choose'):
    check_workdir(changed(config, {'model.width': 64}), str(workdir), ('model',))


@pytest.mark.parametrize('evaluated', [False, True])
def test_a_start_that_finished_no_step_leaves_its_workdir_to_any_config(
  config, tmp_path, evaluated, capsys
):
  claim_workdir(config, str(tmp_path))
  (tmp_path / 'tokenizer').mkdir()
  (tmp_path / 'environment.json').write_text('[]')
  (tmp_path / 'console.log').write_text('of the earlier start')
  if evaluated:
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "validation/score": 0.5}\n')
  other = changed(config.copy_and_resolve_references(), {'seed': 3})
  release_workdir(config, str(tmp_path))  # the same config goes on
  assert (tmp_path / 'config.json').exists() and capsys.readouterr().out == ''
  check_workdir(other, str(tmp_path))
  release_workdir(other, str(tmp_path))
  assert 'an earlier start finished no step' in capsys.readouterr().out
  assert [path.name for path in tmp_path.iterdir()] == ['console.log']


@pytest.mark.parametrize('finished', ['checkpoints/1', 'export/last'])
def test_a_checkpoint_or_a_policy_keeps_the_workdir(config, tmp_path, finished):
  claim_workdir(config, str(tmp_path))
  (tmp_path / finished).mkdir(parents=True)
  other = changed(config.copy_and_resolve_references(), {'seed': 3})
  with pytest.raises(InputError, match='belongs to another config'):
    check_workdir(other, str(tmp_path))
  release_workdir(other, str(tmp_path))
  assert (tmp_path / 'config.json').exists()


def test_a_workdir_is_made_where_it_is_missing_and_refused_where_it_cannot_be_written(tmp_path):
  check_writable(str(tmp_path / 'new' / 'run'))
  assert list((tmp_path / 'new' / 'run').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(InputError, match=r'file/run cannot be written into .*Not a directory'):
    check_writable(str(tmp_path / 'file' / 'run'))
