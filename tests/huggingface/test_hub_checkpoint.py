"""Tests of checkpoints named on the Hub, which every command loads in the same way."""

import hashlib
import os
import pathlib
import re

import pytest
from huggingface_hub import constants

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import hub_checkpoint
from exgrpo_jax.runtime import hub
from tests.helpers import forked, hub_server
from tests.helpers.paths import CHECKPOINTS, TINY_CONFIG

STORED = CHECKPOINTS / 'qwen2_tied'


@pytest.fixture(autouse=True)
def served(tmp_path):
  """A Hub with the stored checkpoint and some unneeded files."""
  files = {path.name: path.read_bytes() for path in STORED.iterdir()}
  others = {'README.md': 'text', 'pytorch_model.bin': b'1', 'original/consolidated.00.pth': b'2'}
  with hub_server.serving() as server, server.in_use(tmp_path / 'huggingface'):
    server.add('model', 'tiny/Qwen2', files | others)
    server.add('model', 'tiny/gated', files, needs_token=True)
    yield server


def test_weights_are_fetched_only_if_needed(served):
  folder = hub_checkpoint.folder('tiny/Qwen2', 'config.model.path')
  described = {path.name for path in STORED.iterdir()} - {'model.safetensors', 'expected.npz'}
  assert set(os.listdir(folder)) == described | {'README.md', '.gitattributes'}
  assert hub_checkpoint.folder('tiny/Qwen2', 'config.model.path', weights=True) == folder
  assert (STORED / 'model.safetensors').read_bytes() == served.repositories[
    'model', 'tiny/Qwen2'
  ].commits[os.path.basename(folder)]['model.safetensors']
  assert not any(path.endswith(('.bin', '.pth')) for path in served.fetched())


def test_an_existing_folder_is_not_a_hub_name(served, tmp_path, monkeypatch):
  (tmp_path / 'tiny' / 'Qwen2').mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  assert hub_checkpoint.folder('tiny/Qwen2', 'config.model.path') == 'tiny/Qwen2'
  assert hub_checkpoint.folder('', 'config.model.path') == ''
  assert served.requests == []


@pytest.mark.parametrize(
  ('endpoint', 'why', 'status'),
  [('', 'there is no folder', 2), ('http://127.0.0.1:9', 'the model .* cannot be reached', 1)],
)
def test_fetch_errors_name_the_setting(endpoint, why, status, monkeypatch):
  monkeypatch.setattr(constants, 'ENDPOINT', endpoint or constants.ENDPOINT)
  message = rf'^config\.tokenizer\.path=tiny/none: {why}'
  with hub.as_in('nowhere'), pytest.raises(InputError, match=message) as refused:
    hub_checkpoint.folder('tiny/none', 'config.tokenizer.path')
  assert refused.value.status == status


def test_the_shipped_model_matches_its_card(tmp_path, monkeypatch):
  (tmp_path / 'chains').mkdir()  # a run's workdir, not a model
  monkeypatch.chdir(tmp_path)
  folder = pathlib.Path(hub_checkpoint.folder('shipped:chains', 'config.model.path', weights=True))
  digest = hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest()
  assert f'| {digest} |' in (folder / 'README.md').read_text()


def test_an_unknown_shipped_model_is_refused_with_the_available_ones():
  message = r'^--model=shipped:chain: no model with that name ships .* Use shipped:chains\.$'
  with pytest.raises(InputError, match=message):
    hub_checkpoint.folder('shipped:chain', '--model')


@pytest.mark.full
def test_check_tries_a_named_model_and_fetches_no_weights(served, tmp_path):
  command = ['check', f'--config={TINY_CONFIG}', f'--workdir={tmp_path}/run']
  command += ['--config.data.train=sums:train', '--config.warm_start.data=sums:train']
  command += ["--config.data.evaluation=('sums:test',)"]
  fits = ['--config.rollout.max_prompt=64', '--config.model.path=tiny/Qwen2']
  good, gated, long, by_hand = forked.run(
    [
      [*command, *fits],
      [*command, '--config.model.path=tiny/gated'],
      [*command, *fits, '--config.rollout.max_response=100'],
      ['evaluate', '--model=tiny/none', '--data=arithmetic:test', f'--out={tmp_path}/out'],
    ]
  )
  assert good.status == 0 and good.out.startswith('model tiny/Qwen2: commit ')
  assert not any(path.endswith('.safetensors') for path in served.fetched())
  for outcome, message in (
    (gated, r'config\.model\.path=tiny/gated: .* is gated\. Accept its license on .*'),
    (
      long,
      r'config\.rollout\.max_prompt .* = 164 tokens exceeds max_position_embeddings=128 in .*',
    ),
    (by_hand, r'--model=tiny/none: there is no folder tiny/none, and http.*'),
  ):
    assert outcome.status == 2 and re.fullmatch(f'error: {message}\n', outcome.err), outcome.err
