"""The tokenizer that a run keeps in its workdir."""

import pathlib

import pytest

from exgrpo_jax.data import tokenizer
from exgrpo_jax.experiment import experiment
from exgrpo_jax.training import session


def test_a_run_keeps_its_tokenizer_once(config, tmp_path):
  opened = experiment.open_experiment(config, str(tmp_path))
  session.keep_tokenizer(opened)
  kept = tokenizer.load(tmp_path / 'tokenizer')
  assert kept.encode('12+7\n') == opened.tokenizer.encode('12+7\n')
  (tmp_path / 'tokenizer' / 'tokenizer.model').write_text('kept')
  session.keep_tokenizer(opened)
  assert (tmp_path / 'tokenizer' / 'tokenizer.model').read_text() == 'kept'


def test_a_kill_leaves_no_part_of_a_tokenizer(config, tmp_path, monkeypatch):
  opened = experiment.open_experiment(config, str(tmp_path))

  def killed(folder):
    (folder_path := pathlib.Path(folder)).mkdir()
    (folder_path / 'half').write_text('')
    raise KeyboardInterrupt

  monkeypatch.setattr(opened.tokenizer, 'save', killed)
  with pytest.raises(KeyboardInterrupt):
    session.keep_tokenizer(opened)
  monkeypatch.undo()
  assert not (tmp_path / 'tokenizer').exists()
  session.keep_tokenizer(opened)
  assert tokenizer.load(tmp_path / 'tokenizer').vocab_size == opened.tokenizer.vocab_size
  assert not (tmp_path / 'tokenizer' / 'half').exists()
