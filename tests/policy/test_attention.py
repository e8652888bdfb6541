"""Each kind of attention against jax.nn's, in values, gradients, memory and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from exgrpo_jax.policy import attention, sharding
from tests.helpers.devices import on_eight_devices


@pytest.mark.parametrize(
  'platform, dtype, kind',
  [
    ('cpu', 'float32', 'blockwise'),
    ('cpu', 'bfloat16', 'blockwise'),
    ('gpu', 'bfloat16', 'cudnn'),
    ('cuda', 'bfloat16', 'cudnn'),
    ('gpu', 'float32', 'blockwise'),  # cuDNN's flash attention has no float32
    ('tpu', 'float32', 'splash'),
    ('tpu', 'bfloat16', 'splash'),
  ],
)
def test_the_platform_chooses(platform, dtype, kind):
  assert attention.backend_for(platform, dtype) == kind


def random_inputs(B, T, N, G, H, dtype='float32'):
  """Query, key, value and a cotangent of the result."""
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, G, G, N)]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(attend, query, key, value, cotangent):
  mixed, backward = jax.vjp(attend, query, key, value)
  return mixed, *backward(cotangent)


expected = functools.partial(
  value_and_gradients, functools.partial(jax.nn.dot_product_attention, is_causal=True)
)


def found(kind, *inputs):
  # A function of its own each time: what jit kept for another may have other constants.
  return value_and_gradients(lambda *qkv: attention.causal(*qkv, kind), *inputs)


def assert_close(found, expected, tolerance):
  for mine, theirs in zip(found, expected, strict=True):
    assert mine.dtype == theirs.dtype
    np.testing.assert_allclose(
      np.array(mine, np.float32), np.array(theirs, np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
  'T, N, G',
  [  # with strips of 8 in blocks of 16
    (5, 2, 2),
    (13, 7, 1),
    (16, 8, 2),
    (17, 7, 1),
    (32, 2, 2),
    (39, 8, 2),
  ],
)
def test_blockwise_equals_jax(monkeypatch, T, N, G):
  monkeypatch.setattr(attention, '_STRIP', 8)
  monkeypatch.setattr(attention, '_BLOCK', 16)
  inputs = random_inputs(2, T, N, G, 8)
  assert_close(found('blockwise', *inputs), expected(*inputs), 1e-5)


def test_bfloat16_keeps_its_dtype_and_a_softmax_in_float32():
  """Scores of about 30 in bfloat16 would be off by .06, and weights by as much of themselves."""
  query, key, value, _ = random_inputs(1, 64, 2, 1, 64, 'bfloat16')
  query *= 16
  mixed = jax.jit(attention.causal, static_argnums=3)(query, key, value, 'blockwise')
  assert mixed.dtype == jnp.bfloat16
  exact = jax.nn.dot_product_attention(
    *(x.astype(jnp.float32) for x in (query, key, value)), is_causal=True
  )
  np.testing.assert_allclose(mixed.astype(jnp.float32), exact, rtol=2**-7, atol=2**-7)


def test_another_kind_is_a_bug():
  with pytest.raises(KeyError):
    attention.causal(*random_inputs(1, 2, 1, 1, 4)[:3], 'blokwise')


def test_blockwise_never_holds_the_scores_of_a_long_sequence():
  T, N = 9216, 2
  inputs = random_inputs(1, T, N, 1, 8)
  memory = (
    value_and_gradients.lower(lambda *qkv: attention.causal(*qkv, 'blockwise'), *inputs)
    .compile()
    .memory_analysis()
  )
  assert memory.temp_size_in_bytes < N * T * T * 4 / 4  # a block at 512 of 9,216 is 1/18


@pytest.mark.parametrize('T', [128, 300])  # one block of the kernel; three, the last padded
@pytest.mark.parametrize('kind', ['cudnn', 'splash'])
def test_the_kinds_agree(monkeypatch, kind, T):
  platform = jax.default_backend()
  if kind == 'cudnn' and platform != 'gpu':
    pytest.skip('cuDNN needs a GPU')
  exact = kind == 'splash' and platform != 'tpu'
  if exact:
    interpret(monkeypatch)
  monkeypatch.setattr(attention, '_BLOCK', 256)  # which does not divide 384
  inputs = random_inputs(1, T, 4, 2, 64, 'float32' if exact else 'bfloat16')
  # A backward pass in bfloat16 adds up terms of three digits.
  assert_close(found(kind, *inputs), expected(*inputs), 1e-5 if exact else 0.05)


def interpret(monkeypatch):
  """Runs the TPU's kernels anywhere, one operation at a time."""
  module = attention.splash_attention
  monkeypatch.setattr(
    module,
    'make_splash_mha_single_device',
    functools.partial(module.make_splash_mha_single_device, interpret=True),
  )


def test_eight_devices_compute_what_one_does():
  """Two key/value heads on a tensor axis of four, then heads and rows that do not divide."""
  on_eight_devices("""
import jax, numpy as np
from exgrpo_jax.policy import attention, sharding

def note_shapes(query, key, value):
  seen.append((query.shape, key.shape))
  return blockwise(query, key, value)

def value_and_gradients(query, key, value, cotangent):
  mixed, backward = jax.vjp(
      lambda *qkv: attention.causal(*qkv, 'blockwise'), query, key, value)
  return mixed, *backward(cotangent)

blockwise, seen = attention._ATTEND['blockwise'], []
attention._ATTEND['blockwise'] = note_shapes
mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=2, tensor=4))
rng = np.random.default_rng(0)
for B, N, G, own_query, own_key in (
    (4, 8, 2, (2, 10, 2, 8), (2, 10, 1, 8)),
    (3, 6, 3, (3, 10, 6, 8), (3, 10, 3, 8))):
  inputs = [rng.normal(size=(B, 10, heads, 8)).astype(np.float32) for heads in (N, G, G, N)]
  alone = jax.jit(value_and_gradients)(*inputs)
  with jax.set_mesh(mesh):
    spread = jax.jit(value_and_gradients)(*inputs)
  assert seen == [((B, 10, N, 8), (B, 10, G, 8)), (own_query, own_key)], seen
  assert spread[0].addressable_shards[0].data.shape == own_query
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), spread, alone)
  seen.clear()
""")


@pytest.mark.parametrize(
  'T, N, G, H, tensor',
  [
    (9216, 28, 4, 128, 2),  # Qwen2.5-7B at ExGRPO's lengths
    (1000, 8, 4, 64, 8),  # two devices to a key/value head, and T not a multiple of the block
  ],
)
def test_splash_compiles_for_a_tpu(monkeypatch, T, N, G, H, tensor):
  pytest.importorskip('libtpu')
  monkeypatch.setenv('TPU_SKIP_MDS_QUERY', '1')  # no search for a TPU of this machine's own
  from jax.experimental import topologies

  chips = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4').devices
  here = sharding.make_mesh(sharding.Config(data=-1, fsdp=1, tensor=1))
  mesh = Mesh(
    np.array(chips).reshape(1, 8 // tensor, tensor), here.axis_names, axis_types=here.axis_types
  )

  def placed(heads, num_heads):
    shape = 8 // tensor, T, num_heads, H  # a row on each device
    return jax.ShapeDtypeStruct(
      shape, 'bfloat16', sharding=sharding.named(mesh, ('batch', None, heads, None), shape)
    )

  query, key = placed('heads', N), placed('kv_heads', G)
  with jax.set_mesh(mesh):
    compiled = value_and_gradients.lower(
      lambda *qkv: attention.causal(*qkv, 'splash'), query, key, key, query
    ).compile()
  text, memory = compiled.as_text(), compiled.memory_analysis()
  for kernel in ('fwd', 'dq', 'dkv'):
    assert f'splash_mha_{kernel}' in text
  scores = N // tensor * T * T * 4
  assert memory.temp_size_in_bytes < scores / 4
  assert compiled.output_shardings[0].spec == query.sharding.spec
