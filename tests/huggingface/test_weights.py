"""Checkpoints against transformers, there and back, damaged, and a slice at a time.

What transformers computes is stored by make_checkpoints.py; where torch and
transformers are installed the same tests also run on checkpoints made now.
"""

import dataclasses
import json
import pathlib
import shutil

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from fsspec.implementations import memory
from safetensors.numpy import load_file, save_file

from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import scheduler, token_sampling
from tests.helpers.devices import on_eight_devices, on_two_hosts
from tests.helpers.paths import CHECKPOINTS

STORED = CHECKPOINTS
NAMES = sorted(path.name for path in STORED.iterdir())
SHARDED, SINGLE = 'llama_shards', 'qwen2_seven_queries_a_key'
INDEX = 'model.safetensors.index.json'


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.Config(data=1, fsdp=1, tensor=-1))


@dataclasses.dataclass(frozen=True)
class Case:
  folder: pathlib.Path
  config: model.Config
  params: model.Params
  expected: dict


@pytest.fixture(
  scope='module',
  params=[
    pytest.param((name, seed), id=f'{name}-{"live" if seed else "stored"}')
    for name in NAMES
    for seed in (0, 1)
  ],
)
def case(request, mesh, tmp_path_factory):
  name, seed = request.param
  folder = STORED / name
  if seed:
    for library in ('torch', 'transformers'):
      pytest.importorskip(library)
    from tests.helpers import make_checkpoints

    folder = tmp_path_factory.mktemp(name)
    make_checkpoints.make(name, folder, seed)
  config = shape(folder)
  expected = dict(np.load(folder / 'expected.npz'))
  return Case(folder, config, weights.load(folder, config, mesh), expected)


def shape(folder, dtype='float32'):
  return architecture.parse(architecture.read_json(folder), str(folder), dtype)


_forward = jax.jit(model.hidden_states, static_argnums=0)


def logits(config, params, expected):
  """At the real tokens, row after row."""
  hidden_BTD = _forward(config, params, expected['tokens_BT'].astype(np.int32))
  logits_BTV = (hidden_BTD @ model.unembedding(config, params)).astype(jnp.float32)
  real_BT = np.arange(logits_BTV.shape[1]) < expected['length_B'][:, None]
  return np.asarray(logits_BTV)[real_BT]


@pytest.mark.parametrize('side', ['right', 'left'])
def test_logits_equal_those_of_transformers(case, side):
  found, expected = logits(case.config, case.params, case.expected), case.expected[side]
  difference = np.abs(found - expected).max()
  print(
    f'{case.folder.name}: largest difference of a logit {difference:.1e}, '
    f'largest logit {np.abs(expected).max():.1f}'
  )
  assert difference < 1e-4


def test_64_greedy_tokens_equal_those_of_transformers(case, mesh):
  prompts = [
    tokens_T[:length].astype(np.int32)
    for tokens_T, length in zip(case.expected['tokens_BT'], case.expected['length_B'])
  ]
  never = case.config.vocab_size
  with jax.set_mesh(mesh):
    found = scheduler.generate(
      case.config,
      model.decode_layout(case.config, case.params, mesh),
      prompts,
      range(3),
      [0] * 3,
      jax.random.key(0),
      scheduler.Settings(
        token_sampling.Config(0.0), slots=4, max_response=64, eos_ids=(never,), pad_id=0
      ),
      mesh,
    )
  np.testing.assert_array_equal([response.tokens for response in found], case.expected['greedy_BT'])


def test_bfloat16_is_close(case):
  """Mean KL from transformers' float32 distribution; its own bfloat16 stands beside it."""

  def mean_kl(found):
    p, q = (jax.nn.log_softmax(x) for x in (case.expected['right'], found))
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))

  config = dataclasses.replace(case.config, dtype='bfloat16')
  ours, theirs = (
    mean_kl(logits(config, case.params, case.expected)),
    mean_kl(case.expected['bfloat16']),
  )
  print(f'{case.folder.name}: KL of bfloat16 {ours:.1e} nats, of transformers {theirs:.1e}')
  assert ours < 1e-3


# ---- There and back ----


def tensors_of(folder):
  return {
    name: value
    for file in sorted(pathlib.Path(folder).glob('*.safetensors'))
    for name, value in load_file(file).items()
  }


def save(folder, directory, mesh, dtype='float32', **kwargs):
  config = shape(folder)
  weights.save(
    directory,
    config,
    weights.load(folder, config, mesh),
    architecture.read_json(folder),
    dtype,
    **kwargs,
  )
  return directory


@pytest.mark.parametrize('name', NAMES)
def test_export_gives_back_every_bit(name, mesh, tmp_path):
  again = save(STORED / name, tmp_path / 'again', mesh)
  expected, found = tensors_of(STORED / name), tensors_of(again)
  assert expected.keys() == found.keys()
  for tensor in expected:
    np.testing.assert_array_equal(expected[tensor], found[tensor], strict=True)
  assert shape(again) == shape(STORED / name)
  values = architecture.read_json(again)
  assert values | {'torch_dtype': 'float32'} == architecture.read_json(STORED / name) | {
    'torch_dtype': 'float32'
  }


def test_bfloat16_and_float16_come_back_too(mesh, tmp_path):
  for dtype in ('bfloat16', 'float16'):
    once = save(STORED / SINGLE, tmp_path / dtype, mesh, dtype)
    config = shape(once)
    params = weights.load(once, config, mesh)
    assert params['embedding_VD'].dtype == np.float32
    weights.save(tmp_path / f'{dtype}_twice', config, params, {}, dtype)
    first, second = (raw(folder) for folder in (once, tmp_path / f'{dtype}_twice'))
    assert first == second
    assert {kind for kind, _ in first.values()} == {{'bfloat16': 'BF16', 'float16': 'F16'}[dtype]}


def raw(folder):
  """(dtype, bytes) of every tensor, read without safetensors."""
  content = (folder / 'model.safetensors').read_bytes()
  start = 8 + int.from_bytes(content[:8], 'little')
  header = json.loads(content[8:start])
  return {
    name: (entry['dtype'], content[slice(*(start + at for at in entry['data_offsets']))])
    for name, entry in header.items()
    if name != '__metadata__'
  }


def test_shards_stay_under_the_limit_and_the_index_finds_every_tensor(mesh, tmp_path):
  limit = 30_000
  save(STORED / SINGLE, tmp_path, mesh, shard_bytes=limit)
  files = sorted(path.name for path in tmp_path.glob('*.safetensors'))
  assert (
    files == [f'model-{n:05d}-of-{len(files):05d}.safetensors' for n in range(1, len(files) + 1)]
    and len(files) > 2
  )
  contents = {file: load_file(tmp_path / file) for file in files}
  sizes = [sum(value.nbytes for value in content.values()) for content in contents.values()]
  assert max(sizes) <= limit
  index = json.loads((tmp_path / INDEX).read_text())
  assert index['metadata'] == {'total_size': sum(sizes)}
  assert index['weight_map'] == {name: file for file in files for name in contents[file]}
  assert tensors_of(tmp_path).keys() == tensors_of(STORED / SINGLE).keys()
  assert {path.stat().st_mode for path in tmp_path.iterdir()} == {
    (tmp_path / 'config.json').stat().st_mode
  }  # whoever may read one may read all


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', NAMES)
def test_transformers_reads_an_export(name, dtype, mesh, tmp_path):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  save(STORED / name, tmp_path, mesh, dtype, shard_bytes=50_000)
  policy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype='auto').eval()
  assert policy.dtype == getattr(torch, dtype)
  expected = dict(np.load(STORED / name / 'expected.npz'))
  rows = []
  for tokens_T, length in zip(expected['tokens_BT'], expected['length_B']):
    with torch.no_grad():
      rows.append(policy(torch.tensor(tokens_T[None, :length])).logits[0].float().numpy())
  kept = expected['right'] if dtype == 'float32' else expected['bfloat16']
  np.testing.assert_allclose(np.concatenate(rows), kept, atol=1e-5 if dtype == 'float32' else 0.2)


# ---- Where and how it is read ----

# For scripts: `reads` gets (tensor, entries) of every slice of a matrix that is read.
RECORDED = """
theirs, reads = weights._theirs, []
def recorded(tensor, shape, index):
  found = theirs(tensor, shape, index)
  reads.append((tensor, math.prod(found[1])))
  return found
weights._theirs = recorded
"""


def test_eight_devices_read_their_slices_and_no_more():
  """In every layout the values are those of one device, and no read exceeds a device's slice."""
  script = f"""
import math, pathlib
import jax, numpy as np
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import sharding

{RECORDED}

for name in ('llama_shards', 'qwen2_seven_queries_a_key'):
  folder = pathlib.Path({str(STORED)!r}) / name
  config = architecture.parse(architecture.read_json(folder), name, 'float32')
  whole = None
  for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)):
    reads.clear()
    mesh = sharding.make_mesh(sharding.Config(*sizes))
    params = weights.load(folder, config, mesh)
    own = {{}}
    for (path, layer), tensor in architecture.tensors(config).items():
      part = weights._at(params, path).addressable_shards[0].data
      own[tensor] = part.size if layer is None else part[layer].size
    assert len(reads) >= sum(len(tensor.shape) == 2 for tensor in own)
    assert all(size == own[tensor] for tensor, size in reads)
    whole = whole or params
    jax.tree.map(np.testing.assert_array_equal, params, whole)
  assert params['layers']['mlp']['gate_DF'].addressable_shards[0].data.shape[2] == 48 // 8
"""
  on_eight_devices(script)


def test_each_of_two_hosts_reads_its_half_and_the_first_writes_the_whole(copy, tmp_path):
  """Over eight devices each host's four hold half of what is sharded by eight."""
  other, name = copy(SHARDED), 'model.norm.weight'
  file = json.loads((other / INDEX).read_text())['weight_map'][name]
  rewrite(other / file, lambda content: content.update({name: 2 * content[name]}))
  script = f"""
import math, pathlib
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import sharding
from exgrpo_jax.errors import InputError

{RECORDED}
folder = pathlib.Path({str(STORED / SHARDED)!r})
config = architecture.parse(architecture.read_json(folder), '', 'float32')
params = weights.load(folder, config, sharding.make_mesh(sharding.Config(1, 8, 1)))
matrices = [(tensor, size) for tensor, size in reads if len(tensor.shape) == 2]
assert len(matrices) == 4 * (2 * 7 + 2)  # devices, kernels of two layers, both embeddings
assert all(size == math.prod(tensor.shape) // 8 for tensor, size in matrices)
weights.save({str(tmp_path)!r} + f'/{{jax.process_index()}}', config, params,
             architecture.read_json(folder), 'float32', shard_bytes=30_000)
try:
  weights.load((folder, {str(other)!r})[jax.process_index()], config,
               sharding.make_mesh(sharding.Config(1, 8, 1)))
  raise AssertionError('each has its own')
except InputError as error:
  assert 'the weights of host 1 are not those of host 0' in str(error)
"""
  on_two_hosts(script)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['0', other.name]
  expected, found = tensors_of(STORED / SHARDED), tensors_of(tmp_path / '0')
  assert expected.keys() == found.keys()
  for tensor in expected:
    np.testing.assert_array_equal(expected[tensor], found[tensor], strict=True)


@pytest.fixture
def bucket():
  """A gs:// folder in memory, behind epath's own backend for remote files."""

  class Storage(memory.MemoryFileSystem):
    @classmethod
    def _strip_protocol(cls, path):
      return '/' + str(path).removeprefix('gs://').strip('/')

  fsspec.register_implementation('gcs', Storage, clobber=True)  # what epath calls gs://
  yield epath.Path('gs://bucket')
  Storage.store.clear()


def test_a_remote_folder_is_read_and_written(bucket, mesh):
  save(STORED / SHARDED, bucket / 'policy', mesh, shard_bytes=20_000)
  (bucket / 'policy' / 'tokenizer.json').write_bytes(
    (STORED / 'qwen2_tied' / 'tokenizer.json').read_bytes()
  )
  assert len(list((bucket / 'policy').glob('model-*.safetensors'))) > 2
  config = shape(bucket / 'policy')
  assert config == shape(STORED / SHARDED)
  jax.tree.map(
    np.testing.assert_array_equal,
    weights.load('gs://bucket/policy', config, mesh),
    weights.load(STORED / SHARDED, config, mesh),
  )
  assert tokenizer.load('gs://bucket/policy').encode('1+2')


# ---- Damage ----


@pytest.fixture
def copy(tmp_path):
  """A function that copies a stored checkpoint to where it may be damaged."""

  def make(name):
    return pathlib.Path(shutil.copytree(STORED / name, tmp_path / name))

  return make


def refusal(folder, mesh):
  with pytest.raises(InputError) as caught:
    weights.load(folder, shape(folder), mesh)
  return str(caught.value)


def rewrite(file, change):
  content = load_file(file)
  change(content)
  save_file(content, file, {'format': 'pt'})


def test_a_missing_tensor_is_refused(copy, mesh):
  folder = copy(SINGLE)
  rewrite(folder / 'model.safetensors', lambda content: content.pop('model.norm.weight'))
  assert refusal(folder, mesh) == (
    f'{folder}/model.safetensors: tensor model.norm.weight is missing; config.json asks for it '
    'with shape [56].'
  )


def test_a_tensor_missing_from_the_index_is_refused(copy, mesh):
  folder = copy(SHARDED)
  index = json.loads((folder / INDEX).read_text())
  del index['weight_map']['lm_head.weight'], index['weight_map']['model.norm.weight']
  (folder / INDEX).write_text(json.dumps(index))
  assert refusal(folder, mesh) == (
    f'{folder}/{INDEX}: tensor model.norm.weight is missing; config.json asks for it with shape '
    '[32] (1 others likewise).'
  )


def test_a_tensor_that_is_not_in_the_file_of_the_index_is_refused(copy, mesh):
  folder = copy(SHARDED)
  file = json.loads((folder / INDEX).read_text())['weight_map']['lm_head.weight']
  rewrite(folder / file, lambda content: content.pop('lm_head.weight'))
  assert refusal(folder, mesh) == (
    f'{folder}/{file}: tensor lm_head.weight of shape [96, 32] is missing; the index says that '
    'it is in this file.'
  )


@pytest.mark.parametrize(
  'name, file', [(SINGLE, 'model.safetensors'), (SHARDED, 'model-00002-of-00003.safetensors')]
)
def test_an_unexpected_tensor_is_refused(copy, mesh, name, file):
  folder = copy(name)
  rewrite(folder / file, lambda content: content.update(extra=np.zeros(2, np.float32)))
  assert f'{folder}/{file}: tensor extra is unexpected; ' in refusal(folder, mesh)


def test_the_output_matrix_of_a_tied_model_is_unexpected(copy, mesh):
  folder = copy('qwen2_tied')
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update({'lm_head.weight': content['model.embed_tokens.weight']}),
  )
  assert 'tensor lm_head.weight is unexpected' in refusal(folder, mesh)


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(copy, mesh):
  folder = copy(SINGLE)
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update(
      {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(4, np.float32)}
    ),
  )
  weights.load(folder, shape(folder), mesh)


def test_a_misshaped_tensor_is_refused(copy, mesh):
  folder = copy(SINGLE)
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update({'lm_head.weight': content['lm_head.weight'].T.copy()}),
  )
  assert refusal(folder, mesh) == (
    f'{folder}/model.safetensors: tensor lm_head.weight has shape [56, 96]; config.json asks for '
    '[96, 56].'
  )


def test_quantised_weights_are_refused(copy, mesh):
  folder = copy(SINGLE)
  rewrite(
    folder / 'model.safetensors',
    lambda content: content.update({'lm_head.weight': content['lm_head.weight'].astype(np.int8)}),
  )
  assert 'tensor lm_head.weight has dtype I8; it must be one of F32, BF16, F16' in refusal(
    folder, mesh
  )


@pytest.mark.parametrize('size', [0, 100, -100])
def test_a_truncated_file_is_refused(copy, mesh, size):
  folder = copy(SHARDED)
  file = folder / 'model-00003-of-00003.safetensors'
  file.write_bytes(file.read_bytes()[:size])
  expected = f'{file}: not a whole safetensors file of {file.stat().st_size} bytes ('
  assert refusal(folder, mesh).startswith(expected)


def test_an_index_that_names_an_absent_file_is_refused(copy, mesh):
  folder = copy(SHARDED)
  (folder / 'model-00002-of-00003.safetensors').unlink()
  message = refusal(folder, mesh)
  assert message.startswith(f'{folder}/{INDEX}: names model-00002-of-00003.safetensors, for model.')
  assert message.endswith(' and others, and there is no such file; fetch the checkpoint again.')


@pytest.mark.parametrize('content', ['{', '{}', '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(copy, mesh, content):
  folder = copy(SHARDED)
  (folder / INDEX).write_text(content)
  assert f'{folder}/{INDEX}: not an index of safetensors files' in refusal(folder, mesh)


def test_a_folder_without_safetensors_is_refused(copy, mesh):
  folder = copy(SINGLE)
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
  assert refusal(folder, mesh) == (
    f'{folder}: holds neither model.safetensors nor {INDEX}; weights must be safetensors, for '
    'other formats can run code.'
  )
