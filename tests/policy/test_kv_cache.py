"""All cache layouts sample the same tokens. On a TPU, they are written without a loop."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from exgrpo_jax.policy import dense_cache, kv_cache, model, ragged_cache, sharding
from exgrpo_jax.rollout import decode_loop
from tests.helpers import tiers
from tests.helpers.decoding import decoding_by, generated
from tests.rollout import test_scheduler
from tests.rollout.test_scheduler import CONFIG, KEY, NEVER, PROMPTS, ROWS, SAMPLES, SPEC


@pytest.mark.parametrize(
  ('platform', 'dtype', 'G', 'H', 'backend'),
  [
    ('cpu', 'bfloat16', 4, 128, 'transposed'),
    ('gpu', 'bfloat16', 4, 128, 'cudnn'),
    ('gpu', 'bfloat16', 4, 256, 'dense'),  # before Hopper, the maximum is 128
    ('gpu', 'float32', 4, 128, 'dense'),
    ('tpu', 'bfloat16', 1, 128, 'ragged'),
    ('tpu', 'bfloat16', 8, 128, 'ragged'),
    ('tpu', 'bfloat16', 3, 128, 'dense'),  # six keys and values leave a tile half empty
    ('tpu', 'bfloat16', 4, 64, 'dense'),
    ('tpu', 'float32', 4, 128, 'dense'),
  ],
)
def test_platform_and_shape_decide_the_backend(platform, dtype, G, H, backend):
  assert kv_cache.backend_for(platform, G, H, dtype) == backend


@pytest.mark.parametrize(
  ('G', 'tensor', 'backend'),
  [
    (2, 1, 'ragged'),  # Qwen2.5-Math-1.5B
    (4, 4, 'ragged'),  # the 7B models
    (8, 4, 'ragged'),  # Llama-3.1-8B
    (2, 4, 'dense'),  # a key on one chip and its value on another
    (2, 8, 'ragged'),  # every chip has both
    (6, 2, 'dense'),
  ],
)
def test_the_mesh_decides_whether_the_kernel_is_used(G, tensor, backend):
  mesh = jax.sharding.AbstractMesh((1, 1, 1, tensor), ('data', 'fsdp', 'expert', 'tensor'))
  none = jax.sharding.AbstractMesh((), ())  # between meshes of different sizes
  with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(mesh):
    assert kv_cache.backend_for('tpu', G, 128, 'bfloat16') == backend


@pytest.fixture
def interpreted(monkeypatch):
  """Run the TPU kernel on CPU, with NaN in uninitialized memory."""
  monkeypatch.setattr(
    kernel.pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=pltpu.InterpretParams())
  )
  # The interpreter cannot load from a reshaped reference.
  wait = kernel.MultiPageAsyncCopyDescriptor.wait
  monkeypatch.setattr(kernel.MultiPageAsyncCopyDescriptor, 'wait', lambda copy: wait(copy)[...])


@pytest.mark.full
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize(('N', 'G'), tiers.full_after_first([(7, 1), (8, 2)]))
def test_ragged_attention_equals_plain_attention_for_all_lengths(N, G):
  """The lengths are near one position, a page, a block and the maximum, or random."""
  S, H = 1280, 128
  rng = np.random.default_rng(0)
  position_B = np.array([0, 1, 255, 256, 511, 512, 1023, 1024, 1279, *rng.integers(0, S, 3)])
  B = len(position_B)
  query_BNH, key_BSGH, value_BSGH = (
    np.float32(rng.normal(size=size)) for size in ((B, N, H), (B, S, G, H), (B, S, G, H))
  )
  # Entries after a row's position must not be read.
  beyond = (np.arange(S) > position_B[:, None])[..., None, None]

  @jax.jit
  def ragged(query_BNH, position_B, *sequence):
    return ragged_cache.attend(query_BNH, position_B, ragged_cache.from_sequence(*sequence))

  @jax.jit
  def plain(query_BNH, position_B, *sequence):
    layer = dense_cache.dense_from_sequence(*sequence)
    return dense_cache.attend(query_BNH, position_B, layer)

  seen = np.where(beyond, np.float32(np.nan), key_BSGH), np.where(beyond, np.inf, value_BSGH)
  found = ragged(query_BNH, np.int32(position_B), *map(np.float32, seen))
  expected = plain(query_BNH, np.int32(position_B), key_BSGH, value_BSGH)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_attention_for_gpu_equals_plain_attention(monkeypatch):
  """XLA computes the attention in place of cuDNN."""
  asked = []

  def by_xla(*qkv, implementation, **options):
    asked.append(implementation)
    return attention(*qkv, **options)

  attention = jax.nn.dot_product_attention
  monkeypatch.setattr(jax.nn, 'dot_product_attention', by_xla)
  B, S, N, G, H = 4, 384, 14, 2, 64
  position_B = np.int32([0, S // 2, S - 1, S - 2])
  rng = np.random.default_rng(0)
  sizes = (B, N, H), (B, S, G, H), (B, S, G, H)
  query_BNH, *sequence = (np.float32(rng.normal(size=size)) for size in sizes)
  layer = dense_cache.dense_from_sequence(*sequence)
  found = jax.jit(dense_cache.attend_on_gpu)(query_BNH, position_B, layer)
  expected = jax.jit(dense_cache.attend)(query_BNH, position_B, layer)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert asked == ['cudnn']


@pytest.fixture(scope='module')
def generate(one_device):
  config = dataclasses.replace(CONFIG, head_size=128)  # required by the TPU kernel
  params = test_scheduler.make_params(config, one_device)

  def call(order=range(7), limits=None, slots=3, **changes):
    rows = [[values[i] for i in order] for values in (PROMPTS, ROWS, SAMPLES)]
    spec = dataclasses.replace(SPEC, slots=slots, **changes)
    decoding = model.decode_layout(config, params, sharding.Meshes(one_device, one_device))
    return generated(
      config, decoding, *rows, KEY, spec, one_device, limits=limits and [limits[i] for i in order]
    )

  return call


# Rows that end early, so that caches grow and shrink and slots are compacted.
LIMITS = [1, 3, 120, 2, 40, 1, 1]
LONG = dict(limits=LIMITS, max_response=120, eos_ids=(NEVER,))


@pytest.fixture(scope='module')
def expected(generate):
  return generate(), generate(**LONG)


def assert_same(found, wanted):
  for ours, theirs in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(ours.tokens, theirs.tokens[: len(ours.tokens)])
    np.testing.assert_allclose(ours.logp, theirs.logp[: len(ours.tokens)], atol=2e-5)


@pytest.mark.full
def test_every_layout_samples_the_same_tokens_with_the_same_logp(generate, expected):
  order = [6, 2, 0, 5, 3, 1, 4]
  responses, long_responses = expected
  with decoding_by('dense'):
    cases = [
      (generate(order=order), [responses[i] for i in order]),
      (generate(**LONG), long_responses),
      (generate(order=order, **LONG, slots=8), [long_responses[i] for i in order]),
    ]
  for found, wanted in cases:
    assert [len(one.tokens) for one in found] == [len(one.tokens) for one in wanted]
    assert_same(found, wanted)


@pytest.mark.full
@pytest.mark.usefixtures('interpreted')
def test_ragged_attention_samples_the_same_tokens_with_the_same_logp(generate, expected):
  """Slots are refilled while their caches still contain earlier rows."""
  with decoding_by('ragged'):
    found = generate(limits=[5] * 7)
  assert_same(found, expected[0])
  assert max(len(one.tokens) for one in found) == 5


@pytest.mark.full
def test_a_finished_row_writes_within_every_cache(monkeypatch, generate):
  """Its last position may be beyond the end of a cache that has shrunk."""
  free, decode = [], decode_loop.decode

  def watched(*args):
    state, decoded = decode(*args)
    free.append(np.asarray(state.position_B)[~np.asarray(state.live_B)])
    return state, decoded

  monkeypatch.setattr(decode_loop, 'decode', watched)
  generate(**LONG)
  assert sum(map(len, free)) > 6 and not np.concatenate(free).any()


SEVEN_B = dataclasses.replace(
  CONFIG,
  vocab_size=1000,  # the vocabulary's shards are not whole blocks
  width=512,
  num_layers=2,
  num_heads=28,
  num_kv_heads=4,
  head_size=128,
  mlp_width=1024,
  dtype='bfloat16',
)


def empty_on(mesh, config, spec, length):
  """Return the shapes and shardings of `decode_loop.empty`'s state on the mesh."""
  with jax.set_mesh(mesh):
    lowered = decode_loop.empty.lower(config, spec, length)
  return jax.tree.map(
    lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
    lowered.out_info[0],
    lowered.compile().output_shardings[0],
  )


def compiled_for(topology, config, slots, length, data, tensor):
  """Compile `decode_loop.decode` for the slice."""
  pytest.importorskip('libtpu')
  from exgrpo_jax.capacity import devices

  mesh = sharding.make_mesh(
    sharding.DecodingConfig(data=data, tensor=tensor), devices.slice_devices(topology)
  )
  spec = dataclasses.replace(SPEC, slots=slots, max_prompt=length // 2, max_response=length // 2)
  state, params = empty_on(mesh, config, spec, length), model.decode_shapes(config, mesh)
  with jax.set_mesh(mesh):
    return decode_loop.decode.lower(config, spec.sampling, params, state, 1, 1, 1.0).compile()


@pytest.mark.full
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_a_decode_step_on_a_tpu_has_no_loop_and_no_copy_of_the_cache(dtype):
  """This holds with the kernel (bfloat16) and without it (float32)."""
  slots, length = 256, 2048
  config = dataclasses.replace(SEVEN_B, dtype=dtype)
  program = compiled_for('v5e:8x8', config, slots, length, data=16, tensor=4)
  text, memory = program.as_text(), program.memory_analysis()
  assert len(re.findall(r' while\(', text)) == 1  # over tokens
  assert ('ragged_paged_attention_kernel' in text) == (dtype == 'bfloat16')
  # Tokens are sampled from the block sums of the shards; no chip has all of a row's logits.
  assert not re.search(r'= f32\[16,(1000|1024)\]', text)
  # Bytes of a layer's keys and values on one chip.
  layer = slots // 16 * length * 2 * config.head_size * jnp.dtype(dtype).itemsize
  assert memory.argument_size_in_bytes > config.num_layers * layer
  assert memory.temp_size_in_bytes < layer / 2


@pytest.mark.full
@pytest.mark.parametrize(
  ('topology', 'N', 'G', 'tensor'),
  [('v5e:2x2', 12, 2, 1), ('v6e:2x2', 32, 8, 4)],  # Qwen2.5-Math-1.5B, Llama-3.1-8B
)
def test_the_kernel_compiles_for_the_heads_of_real_models(topology, N, G, tensor):
  config = dataclasses.replace(SEVEN_B, num_layers=1, num_heads=N, num_kv_heads=G)
  program = compiled_for(topology, config, 32, 9216, data=4 // tensor, tensor=tensor)
  assert 'ragged_paged_attention_kernel' in program.as_text()
