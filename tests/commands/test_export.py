"""A model of any origin becomes a Hugging Face folder, by one command."""

import types

import numpy as np
import pytest

from exgrpo_jax.commands import export
from exgrpo_jax.experiment import policies
from exgrpo_jax.runtime import activity
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface.stored_checkpoints import read_config, read_tensors

STORED = CHECKPOINTS / 'qwen2_tied'


@pytest.fixture
def run(tmp_path, capsys):
  """Exports a model; gives the folder and what is printed."""

  def run(model, dtype=None):
    out = tmp_path / 'out'
    flags = dict(checkpoint=None, step=None, model=str(model), adapters=False)
    export.main(types.SimpleNamespace(**flags, out=str(out), dtype=dtype))
    return out, capsys.readouterr().out

  return run


@pytest.fixture
def gguf(tmp_path, monkeypatch):
  """The stored checkpoint as a GGUF file."""
  pytest.importorskip('gguf')
  from tests.helpers import gguf_files

  monkeypatch.setattr('huggingface_hub.constants.HF_ASSETS_CACHE', str(tmp_path / 'assets'))
  return gguf_files.write(tmp_path / 'model.gguf', STORED)


def assert_same_weights(folder):
  found, expected = read_tensors(folder), read_tensors(STORED)
  assert set(found) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array)


def test_a_folder_comes_back_bit_for_bit(run):
  out, printed = run(STORED)
  assert printed == f'{out}: {STORED}, in float32\n'
  assert_same_weights(out)
  assert (out / 'tokenizer.json').read_bytes() == (STORED / 'tokenizer.json').read_bytes()


def test_it_says_what_it_does_and_what_it_compiles(run, monkeypatch):
  said, write = [], export.write

  def watched(*args):
    said.append(activity.now())
    activity.compiling('cast')
    said.append(activity.now())
    write(*args)

  monkeypatch.setattr(export, 'write', watched)
  run(STORED)
  assert said[0].startswith(f'exporting {STORED} (') and ': compiling cast (' in said[1]


def test_a_gguf_becomes_a_folder_that_is_the_same_model(run, gguf):
  out, printed = run(gguf)
  assert printed == f'{out}: {gguf}, in float32\n'
  assert_same_weights(out)
  assert read_config(out) == read_config(STORED)
  text = '<|im_start|>\\boxed{12}\n café ###'
  given, written, stored = (policies.open_policy(str(path)) for path in (gguf, out, STORED))
  encoded = [p.experiment.tokenizer.encode(text) for p in (given, written, stored)]
  assert encoded[0] == encoded[1] == encoded[2]
  for policy in (given, written):
    assert policy.experiment.tokenizer.eos_ids == stored.experiment.tokenizer.eos_ids
    assert policy.experiment.tokenizer.chat.template == stored.experiment.tokenizer.chat.template
  assert given.experiment.model == written.experiment.model == stored.experiment.model


def test_the_dtype_is_that_of_the_flag(run, gguf):
  out, printed = run(gguf, 'bfloat16')
  assert printed.endswith('in bfloat16\n')
  assert {str(array.dtype) for array in read_tensors(out).values()} == {'bfloat16'}
