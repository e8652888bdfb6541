"""What a GGUF's metadata says becomes config.json; what is not computed is refused by its name."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture, gguf_file
from exgrpo_jax.policy import rotary
from tests.helpers.paths import CHECKPOINTS

pytest.importorskip('gguf')
from tests.helpers import gguf_files
from tests.helpers.gguf_files import KINDS

LLAMA, QWEN2 = CHECKPOINTS / 'llama_shards', CHECKPOINTS / 'qwen2_tied'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setattr('huggingface_hub.constants.HF_ASSETS_CACHE', str(tmp_path / 'assets'))
  return tmp_path / 'assets'


def test_numbers_are_as_people_write_them_and_ends_are_named(tmp_path):
  """Metadata is float32: 9.999999747378752e-06, where the model's config.json has 1e-05."""
  folder = gguf_file.gguf_folder(gguf_files.write(tmp_path / 'model.gguf', QWEN2))
  values = json.loads((pathlib.Path(folder) / 'config.json').read_text())
  assert values['rms_norm_eps'] == 1e-5 and values['rope_theta'] == 1e4
  assert values['eos_token_id'] == [2, 0] and values['pad_token_id'] == 0
  assert values['dtype'] == 'float32'
  original = tokenizer.load(QWEN2)
  assert tokenizer.load(folder).encode('é }\n12') == original.encode('é }\n12')


def test_a_folder_is_made_once_for_all_copies_of_a_file(tmp_path, cache, monkeypatch):
  path = gguf_files.write(tmp_path / 'model.gguf', QWEN2)
  (tmp_path / 'copy').mkdir()
  (tmp_path / 'other').mkdir()
  copy = shutil.copy(path, tmp_path / 'copy')
  other = gguf_files.write(tmp_path / 'other' / 'model.gguf', QWEN2, changes={'general.name': 'x'})
  made = gguf_file.gguf_folder(path)
  assert gguf_file.gguf_folder(other) != made
  monkeypatch.setattr(gguf_file, 'opened', None)
  assert gguf_file.gguf_folder(path) == gguf_file.gguf_folder(copy) == made
  assert not [name for name in os.listdir(cache / 'exgrpo_jax' / 'gguf') if 'incomplete' in name]


def rope_factors(scaling, theta, head_size):
  """How far each wavelength is stretched, as convert_hf_to_gguf.py writes it."""
  plain = rotary.frequencies(rotary.Config(theta), head_size)
  return plain / rotary.frequencies(scaling, head_size)


@pytest.mark.parametrize('factor', [8.0, 32.0])
def test_llama_3s_rotary_scaling_is_found_in_its_factors(tmp_path, factor):
  """One head of 64, as in Llama 3.2 1B; with fewer pairs none would lie between the bounds."""
  changes = {
    'llama.rope.freq_base': 5e5,
    'llama.rope.scaling.type': None,
    'llama.rope.dimension_count': 64,
    'llama.attention.key_length': 64,
  }
  expected = rotary.Config(5e5, 'llama3', factor, 1.0, 4.0, 8192)
  factors = rope_factors(expected, 5e5, 64).astype(np.float32)
  assert sorted({1.0, factor} & set(factors.tolist())) == [1.0, factor] and len(set(factors)) > 3
  path = gguf_files.write(
    tmp_path / 'model.gguf', LLAMA, changes=changes, rope_freqs__weight=(factors, KINDS.F32)
  )
  folder = gguf_file.gguf_folder(path)
  assert architecture.parse(architecture.read_json(folder), folder, 'float32').rope == expected
  factors[10] *= 1.01
  path = gguf_files.write(
    tmp_path / 'other.gguf', LLAMA, changes=changes, rope_freqs__weight=(factors, KINDS.F32)
  )
  with pytest.raises(InputError, match=r"rope_freqs\.weight is not Llama 3's rotary scaling by"):
    gguf_file.gguf_folder(path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'general.architecture': 'gemma3'},
      r"general\.architecture='gemma3' is not supported; supported are qwen2, qwen3, llama\.",
    ),
    ({'llama.block_count': None}, r"no llama\.block_count, which determines the model's shape\."),
    (
      {'llama.attention.head_count_kv': [2, 1]},
      r'llama\.attention\.head_count_kv=\[2, 1\] must be one number, for all layers\.',
    ),
    ({'llama.expert_count': 8}, r'llama\.expert_count=8 is not supported: this decoder computes '),
    (
      {'llama.rope.dimension_count': 4},
      r"llama\.rope\.dimension_count=4 must be the heads' size, 8: this decoder has no other ",
    ),
    (
      {'llama.rope.scaling.type': 'yarn'},
      r"no 'original_max_position_embeddings', which rope type 'yarn' needs",
    ),
    ({'tokenizer.ggml.model': None}, r'no tokenizer; tokenizer\.ggml\.model must be one of gpt2, '),
  ],
)
def test_what_is_not_computed_is_refused(tmp_path, cache, changes, message):
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, changes=changes)
  with pytest.raises(InputError, match=f'^{re.escape(path)}: {message}') as caught:
    gguf_file.gguf_folder(path)
  assert '\n' not in str(caught.value)
  assert not list(cache.rglob('config.json'))


def test_a_folder_without_weights_or_a_place_is_refused(tmp_path, cache):
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, token_embd__weight=None)
  with pytest.raises(InputError, match=r'no tensor token_embd\.weight; the file must hold a whole'):
    gguf_file.gguf_folder(path)
  cache.write_text('a file')
  with pytest.raises(InputError, match=r'cannot be written into .*; HF_HOME names another folder'):
    gguf_file.gguf_folder(gguf_files.write(tmp_path / 'good.gguf', LLAMA))
