"""A GGUF has the weights of the checkpoint it was converted from, up to its quantisation."""

import re
import sys

import jax
import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import gguf_file, hub_checkpoint, weights
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface.stored_checkpoints import read_config, read_tensors

gguf = pytest.importorskip('gguf')
from tests.helpers import gguf_files  # noqa: E402
from tests.helpers.gguf_files import KINDS  # noqa: E402

# Two heads of queries to one of keys, and tied, with biases, with norms of queries and keys.
FAMILIES = 'llama_shards', 'qwen2_tied', 'qwen2_seven_queries_a_key', 'qwen3_wide_heads'
LLAMA = CHECKPOINTS / 'llama_shards'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """The folder in which what describes a GGUF is kept."""
  monkeypatch.setattr('huggingface_hub.constants.HF_ASSETS_CACHE', str(tmp_path / 'assets'))
  return tmp_path / 'assets'


@pytest.mark.parametrize('name', FAMILIES)
def test_each_family_is_that_of_its_hugging_face_folder_bit_for_bit(tmp_path, mesh, name):
  folder = CHECKPOINTS / name
  path = gguf_files.write(tmp_path / 'model.gguf', folder)
  config = read_config(hub_checkpoint.folder(path, '--model'))
  assert config == read_config(folder)
  loaded = weights.load(hub_checkpoint.folder(path, '--model', weights=True), config, mesh)
  expected = weights.load(folder, config, mesh)
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize('kind', ['F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1'])
def test_quantised_weights_are_what_the_format_says_of_them(tmp_path, kind, monkeypatch):
  """Rows are quantised one by one, so neither their order nor those read together matter."""
  monkeypatch.setattr(gguf_file, '_VALUES', 200)  # a few rows
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, KINDS[kind])
  config, exact = read_config(LLAMA), read_tensors(LLAMA)
  tensors = {t.name: t for t in weights.tensor_names.of(config).values()}
  slices = gguf_file.slices(path, tensors, config.head_size)
  for name, array in exact.items():
    expected = gguf.dequantize(*gguf_files.stored(array, KINDS[kind]))
    index = (slice(None),) * array.ndim
    np.testing.assert_array_equal(slices[name][index if array.ndim == 2 else index[0]], expected)
  assert np.any(slices['model.embed_tokens.weight'][:, :] != exact['model.embed_tokens.weight'])


def kinds_that_dequantise():
  found = []
  for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
    try:
      gguf.dequantize(np.zeros((1, size), np.uint8), kind)
      found.append(kind)
    except NotImplementedError:
      pass
  return found


@pytest.mark.parametrize('kind', kinds_that_dequantise(), ids=lambda kind: kind.name)
@pytest.mark.filterwarnings('ignore:(overflow|invalid value) encountered:RuntimeWarning')
def test_a_part_of_a_tensor_is_that_of_the_whole(tmp_path, kind):
  """Also where it begins or ends within a block; any bytes are numbers of each type."""
  values, size = gguf.GGML_QUANT_SIZES[kind]
  blocks = np.random.default_rng(0).integers(0, 256, (8, 3 * size), np.uint8)
  path = tmp_path / 'one.gguf'
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tensor('one', blocks, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  (stored,) = gguf_file.opened(str(path)).tensors
  whole = gguf.dequantize(blocks, kind)
  assert whole.shape == (8, 3 * values)
  reader = gguf_file.Slice(gguf, stored, head_size=0)
  permuted = gguf_file.Slice(gguf, stored, head_size=4)
  ordered = whole[[0, 2, 1, 3, 4, 6, 5, 7]]
  for rows in (slice(None), slice(4, 8)):
    for columns in (slice(None), slice(1, 3 * values - 1), slice(values, 2 * values)):
      np.testing.assert_array_equal(reader[rows, columns], whole[rows, columns])
      np.testing.assert_array_equal(permuted[rows, columns], ordered[rows, columns])


# ---- Refusals ----


def refused(path, message, mesh):
  """Asserts that loading is refused, in one line."""
  config = read_config(LLAMA)
  with pytest.raises(InputError, match=f'^{re.escape(str(path))}: {message}') as caught:
    hub_checkpoint.folder(str(path), '--model') and weights.load(path, config, mesh)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('arrays', 'message'),
  [
    ({'blk__1__attn_q__weight': None}, r'tensor blk\.1\.attn_q\.weight is missing; the metadata '),
    (
      {'blk__0__attn_q__bias': (np.zeros(32, np.float32), KINDS.F32)},
      r'tensor blk\.0\.attn_q\.bias is unexpected; the model of the metadata has no tensor of ',
    ),
    (
      {'blk__0__attn_v__weight': (np.zeros((8, 32), np.float32), KINDS.F32)},
      r'tensor blk\.0\.attn_v\.weight has shape \[8, 32\]; the metadata requires \[16, 32\]\.',
    ),
    (
      {'blk__0__attn_v__weight': (np.zeros((16, 32), np.int8), KINDS.I8)},
      r'tensor blk\.0\.attn_v\.weight has type I8, which the package gguf does not dequantise; ',
    ),
  ],
)
def test_tensors_that_are_not_the_models_are_refused(tmp_path, mesh, arrays, message):
  refused(gguf_files.write(tmp_path / 'model.gguf', LLAMA, **arrays), message, mesh)


def test_a_part_of_a_model_and_a_missing_file_are_refused(tmp_path, mesh):
  refused(tmp_path / 'none.gguf', 'there is no such file; ', mesh)
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, changes={'split.count': 3})
  refused(path, r'one of 3 files, and a model must be one; llama-gguf-split --merge', mesh)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, mesh):
  whole = gguf_files.write(tmp_path / 'model.gguf', LLAMA)
  content, path = open(whole, 'rb').read(), tmp_path / 'cut.gguf'  # noqa: SIM115
  for length in (0, 3, 4, 7, 23, 24, 100, 1000, 5000, len(content) // 2, len(content) - 40):
    path.write_bytes(content[:length])
    refused(path, rf'not a complete GGUF file, at {length} bytes \(.*\); download it again', mesh)
  path.write_bytes(b'<html>' * 100)
  refused(path, r'not a complete GGUF file, at 600 bytes \(ValueError: GGUF magic invalid\)', mesh)


def test_a_big_endian_file_is_refused(tmp_path, mesh):
  writer = gguf.GGUFWriter(tmp_path / 'big.gguf', 'llama', endianess=gguf.GGUFEndian.BIG)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  refused(tmp_path / 'big.gguf', 'its numbers are big-endian', mesh)


@pytest.mark.parametrize('stand_in', [None, type(sys)('gguf')])
def test_a_missing_package_is_named(tmp_path, mesh, monkeypatch, stand_in):
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA)
  monkeypatch.setitem(sys.modules, 'gguf', stand_in)
  refused(path, r"a GGUF is read by the package gguf, .*: pip install 'exgrpo_jax\[gguf\]'", mesh)
