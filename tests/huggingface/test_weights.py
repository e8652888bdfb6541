"""Tests of weights: agreement with transformers, round trips, and remote folders.

make_checkpoints.py has stored the outputs of transformers; if torch and transformers are
installed, the same tests also run on newly made checkpoints.
"""

import dataclasses
import functools
import json
import pathlib

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from fsspec.implementations import memory
from safetensors.numpy import load_file

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import logprobs, model, sharding
from exgrpo_jax.rollout import decode_loop, token_sampling
from tests.helpers.decoding import generated
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface.stored_checkpoints import (
  INDEX,
  NAMES,
  SHARDED,
  SINGLE,
  read_config,
  read_tensors,
  rewrite,
)

FILE = 'model.safetensors'
ALWAYS = NAMES[0], 0  # the case in the fast tier


@dataclasses.dataclass(frozen=True)
class Case:
  folder: pathlib.Path
  config: model.ShapeConfig
  params: model.Params
  expected: dict


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(
      (name, seed),
      id=f'{name}-{"new" if seed else "stored"}',
      marks=() if (name, seed) == ALWAYS else pytest.mark.full,
    )
    for name in NAMES
    for seed in (0, 1)
  ],
)
def case(request, mesh, tmp_path_factory):
  name, seed = request.param
  folder = CHECKPOINTS / name
  if seed:
    for library in ('torch', 'transformers'):
      pytest.importorskip(library)
    from tests.helpers import make_checkpoints

    folder = tmp_path_factory.mktemp(name)
    make_checkpoints.make(name, folder, seed)
  config = read_config(folder)
  expected = dict(np.load(folder / 'expected.npz'))
  params = weights.load(folder, config, mesh)
  return Case(folder=folder, config=config, params=params, expected=expected)


_forward = jax.jit(model.hidden_states, static_argnums=0)


def logits(config, params, expected):
  """Return our logits, [sum of lengths, V], without padding."""
  hidden_BTD = _forward(config, params, expected['tokens_BT'].astype(np.int32))
  logits_BTV = (hidden_BTD @ model.unembedding(config, params)).astype(jnp.float32)
  logits_BTV = logprobs.capped(logits_BTV, config.logit_cap)
  real_BT = np.arange(logits_BTV.shape[1]) < expected['length_B'][:, None]
  return np.asarray(logits_BTV)[real_BT]


@pytest.mark.parametrize('side', ['right', 'left'])
def test_logits_equal_transformers_logits(case, side):
  ours, expected = logits(case.config, case.params, case.expected), case.expected[side]
  np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_64_greedy_tokens_equal_transformers_tokens(case, mesh):
  prompts = [
    tokens_T[:length].astype(np.int32)
    for tokens_T, length in zip(case.expected['tokens_BT'], case.expected['length_B'])
  ]
  no_token = case.config.vocab_size  # as the end token: no response ends early
  spec = decode_loop.DecodeSpec(
    distribution=token_sampling.Distribution(temperature=0.0),
    slots=4, prompts=3, max_prompt=max(map(len, prompts)), max_response=64,
    eos_ids=(no_token,), pad_id=0,
  )  # fmt: skip
  with jax.set_mesh(mesh):
    params = model.decode_layout(case.config, case.params, sharding.Meshes(mesh, mesh))
    key = jax.random.key(0)
    responses = generated(case.config, params, prompts, range(3), [0] * 3, key, spec, mesh)
  greedy_BT = [response.tokens for response in responses]
  np.testing.assert_array_equal(greedy_BT, case.expected['greedy_BT'])


def test_bfloat16_is_close(case):
  """Measured by the mean KL divergence from transformers' float32 distribution."""
  config = dataclasses.replace(case.config, dtype='bfloat16')
  ours = logits(config, case.params, case.expected)
  p, q = (jax.nn.log_softmax(x) for x in (case.expected['right'], ours))
  assert np.mean(np.sum(np.exp(p) * (p - q), axis=-1)) < 1e-3


# ---- Round trips ----


def resave(folder, directory, mesh, dtype='float32', **kwargs):
  """Load the checkpoint in `folder` and save it to `directory`."""
  config, values = read_config(folder), architecture.read_json(folder)
  weights.save(directory, config, weights.load(folder, config, mesh), values, dtype, **kwargs)
  return directory


@pytest.mark.parametrize('name', NAMES)
def test_load_and_save_preserve_every_bit(name, mesh, tmp_path):
  copy = resave(CHECKPOINTS / name, tmp_path / 'copy', mesh)
  expected, copied = read_tensors(CHECKPOINTS / name), read_tensors(copy)
  jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), copied, expected)
  before, after = (architecture.read_json(folder) for folder in (CHECKPOINTS / name, copy))
  assert after == before | {'torch_dtype': 'float32', 'dtype': 'float32'}


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_is_preserved_too(dtype, mesh, tmp_path):
  once = resave(CHECKPOINTS / SINGLE, tmp_path / 'once', mesh, dtype)
  twice = resave(once, tmp_path / 'twice', mesh, dtype)
  assert (once / FILE).read_bytes() == (twice / FILE).read_bytes()
  assert {str(x.dtype) for x in read_tensors(once).values()} == {dtype}
  params = weights.load(once, read_config(once), mesh)
  assert {str(x.dtype) for x in jax.tree.leaves(params)} == {'float32'}


def test_files_stay_under_the_limit_and_the_index_lists_every_tensor(mesh, tmp_path):
  limit = 30_000
  resave(CHECKPOINTS / SINGLE, tmp_path, mesh, shard_bytes=limit)
  files = sorted(path.name for path in tmp_path.glob('*.safetensors'))
  count = len(files)
  assert files == [f'model-{n:05d}-of-{count:05d}.safetensors' for n in range(1, count + 1)]
  assert count > 2
  contents = {file: load_file(tmp_path / file) for file in files}
  sizes = [sum(value.nbytes for value in content.values()) for content in contents.values()]
  assert max(sizes) <= limit
  index = json.loads((tmp_path / INDEX).read_text())
  assert index['metadata'] == {'total_size': sum(sizes)}
  assert index['weight_map'] == {name: file for file in files for name in contents[file]}
  assert read_tensors(tmp_path).keys() == read_tensors(CHECKPOINTS / SINGLE).keys()
  assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # permissions


@pytest.mark.full
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', NAMES)
def test_transformers_reads_a_saved_checkpoint(name, dtype, mesh, tmp_path):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  resave(CHECKPOINTS / name, tmp_path, mesh, dtype, shard_bytes=50_000)
  policy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype='auto').eval()
  assert policy.dtype == getattr(torch, dtype)
  expected = dict(np.load(CHECKPOINTS / name / 'expected.npz'))
  rows = []
  for tokens_T, length in zip(expected['tokens_BT'], expected['length_B']):
    with torch.no_grad():
      rows.append(policy(torch.tensor(tokens_T[None, :length])).logits[0].float().numpy())
  stored = expected['right'] if dtype == 'float32' else expected['bfloat16']
  # Not bit for bit, because the outputs were stored on another CPU.
  rtol, atol = (1e-5, 1e-5) if dtype == 'float32' else (0.0, 0.2)
  np.testing.assert_allclose(np.concatenate(rows), stored, rtol, atol)


# ---- Remote reading ----


@pytest.fixture
def bucket():
  """A gs:// folder held in memory, accessed through epath's backend for remote files."""

  class Storage(memory.MemoryFileSystem):
    @classmethod
    def _strip_protocol(cls, path):
      return '/' + str(path).removeprefix('gs://').strip('/')

  fsspec.register_implementation('gcs', Storage, clobber=True)  # what epath calls gs://
  yield epath.Path('gs://bucket')
  Storage.store.clear()


def test_a_remote_folder_is_read_and_written(bucket, mesh):
  resave(CHECKPOINTS / SHARDED, bucket / 'policy', mesh, shard_bytes=20_000)
  (bucket / 'policy' / 'tokenizer.json').write_bytes(
    (CHECKPOINTS / 'qwen2_tied' / 'tokenizer.json').read_bytes()
  )
  assert len(list((bucket / 'policy').glob('model-*.safetensors'))) > 2
  config = read_config(bucket / 'policy')
  assert config == read_config(CHECKPOINTS / SHARDED)
  read, expected = (
    weights.load(folder, config, mesh) for folder in ('gs://bucket/policy', CHECKPOINTS / SHARDED)
  )
  jax.tree.map(np.testing.assert_array_equal, read, expected)
  assert tokenizer.load('gs://bucket/policy').encode('1+2')


@pytest.mark.skipif(not pathlib.Path('/proc/self/maps').exists(), reason='Linux lists mappings')
def test_no_tensor_is_read_while_others_stay_mapped(mesh, monkeypatch):
  """Pages of a mapped file count as the process's memory, a second copy of the weights."""
  folder = CHECKPOINTS / 'qwen2_tied'
  config = read_config(folder)
  mapped, place = [], jax.make_array_from_callback

  def placed(*args):
    array = jax.block_until_ready(place(*args))
    mapped.append(pathlib.Path('/proc/self/maps').read_text().count(str(folder)))
    return array

  monkeypatch.setattr(jax, 'make_array_from_callback', placed)
  weights.load(folder, config, mesh)
  assert len(mapped) > 20 and max(mapped) == 0


# ---- Incomplete, damaged and unexpected safetensors files ----


SECOND, THIRD = (f'model-0000{n}-of-00003.safetensors' for n in (2, 3))


def update(file, tensor, change):
  """Return a function that sets a tensor of a file in a folder to `change(all)`, or removes it."""

  def apply(content):
    value = change(content)
    content.pop(tensor, None)
    if value is not None:
      content[tensor] = value

  return lambda folder: rewrite(folder / file, apply)


def truncate(size):
  return lambda folder: (folder / THIRD).write_bytes((folder / THIRD).read_bytes()[:size])


def write_index(text):
  return lambda folder: (folder / INDEX).write_text(text)


def forget_in_the_index(folder):
  index = json.loads((folder / INDEX).read_text())
  del index['weight_map']['lm_head.weight'], index['weight_map']['model.norm.weight']
  (folder / INDEX).write_text(json.dumps(index))


def remove_from_its_file(folder):
  file = json.loads((folder / INDEX).read_text())['weight_map']['lm_head.weight']
  update(file, 'lm_head.weight', nothing)(folder)


def nothing(_):
  return None


def extra(_):
  return np.zeros(2, np.float32)


DAMAGES = {
  'no_tensor': (
    SINGLE, update(FILE, 'model.norm.weight', nothing),
    f'{FILE}: tensor model.norm.weight is missing, but config.json requires it with shape [56].',
  ),
  'not_in_the_index': (
    SHARDED, forget_in_the_index,
    f'{INDEX}: tensor model.norm.weight is missing, .* with shape [32] (and 1 more).',
  ),
  'not_in_its_file': (
    SHARDED, remove_from_its_file,
    f'.safetensors: tensor lm_head.weight is missing, but the list for this file in {INDEX} requ',
  ),
  'unexpected': (
    SINGLE, update(FILE, 'extra', extra),
    f'{FILE}: tensor extra is unexpected because config.json does not require it.',
  ),
  'unexpected_in_one_file': (
    SHARDED, update(SECOND, 'extra', extra),
    f'{SECOND}: tensor extra is unexpected because the list for this file in {INDEX} does not ',
  ),
  'unembedding_of_a_tied_model': (
    'qwen2_tied', update(FILE, 'lm_head.weight', lambda of: of['model.embed_tokens.weight']),
    'tensor lm_head.weight is unexpected',
  ),
  'shape': (
    SINGLE, update(FILE, 'lm_head.weight', lambda of: of['lm_head.weight'].T.copy()),
    f'{FILE}: tensor lm_head.weight has shape [56, 96], but config.json requires [96, 56].',
  ),
  'quantized': (
    SINGLE, update(FILE, 'lm_head.weight', lambda of: of['lm_head.weight'].astype(np.int8)),
    'tensor lm_head.weight has dtype I8. It must be one of F32, BF16, F16',
  ),
  'empty': (SHARDED, truncate(0), f'{THIRD}: not a complete safetensors file (0 bytes; '),
  'cut': (SHARDED, truncate(100), f'{THIRD}: not a complete safetensors file (100 bytes; '),
  'cut_at_the_end': (SHARDED, truncate(-100), f'{THIRD}: not a complete safetensors file ('),
  'no_file': (
    SHARDED, lambda folder: (folder / SECOND).unlink(),
    f'{INDEX}: the index lists model.',
  ),
  'index_no_json': (SHARDED, write_index('{'), f'{INDEX}: not an index of safetensors files'),
  'index_without_map': (SHARDED, write_index('{}'), f'{INDEX}: not an index of safetensors files'),
  'no_safetensors': (
    SINGLE, lambda folder: (folder / FILE).rename(folder / 'pytorch_model.bin'),
    f': the folder contains neither {FILE} nor {INDEX}. Weights must be in safetensors format',
  ),
  'only_adapters': (
    SINGLE, lambda folder: (folder / FILE).rename(folder / 'adapter_model.safetensors'),
    ': the folder contains only adapters. Export the merged model, without --adapters.',
  ),
}  # fmt: skip


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_the_file_and_the_tensor(
  damage, copy_checkpoint, mesh
):
  name, apply, message = DAMAGES[damage]
  folder = copy_checkpoint(name)
  apply(folder)
  with pytest.raises(InputError) as raised:
    weights.load(folder, read_config(folder), mesh)
  assert str(raised.value).startswith(str(folder))
  for part in message.split('.*'):
    assert part in str(raised.value)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(copy_checkpoint, mesh):
  folder = copy_checkpoint(SINGLE)
  update(FILE, 'model.layers.0.self_attn.rotary_emb.inv_freq', extra)(folder)
  weights.load(folder, read_config(folder), mesh)
