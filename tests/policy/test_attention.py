"""Every attention backend against jax.nn's attention: values, gradients and memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import attention, blockwise, matmul, rotary, sharding
from exgrpo_jax.runtime import machine
from tests.helpers import tiers
from tests.helpers.tiny import ROPE


@pytest.mark.parametrize(
  ('platform', 'dtype', 'options', 'backend'),
  [
    ('cpu', 'bfloat16', {}, 'blockwise'),
    ('gpu', 'bfloat16', {}, 'cudnn'),
    ('cuda', 'bfloat16', {}, 'cudnn'),
    # cuDNN has no float32, no cap, and only head sizes up to 128 that are multiples of 8.
    ('gpu', 'float32', {}, 'blockwise'),
    ('gpu', 'bfloat16', {'head_size': 256}, 'blockwise'),
    ('gpu', 'bfloat16', {'head_size': 100}, 'blockwise'),
    ('gpu', 'bfloat16', {'cap': 50.0}, 'blockwise'),
    ('tpu', 'float32', {}, 'splash'),
  ],
)
def test_platform_dtype_heads_and_cap_decide_the_backend(platform, dtype, options, backend):
  assert attention.backend_for(platform, dtype, **options) == backend


def random_inputs(B, T, N, G, H, dtype='float32'):
  """Return a random query, key and value, and a cotangent for the output."""
  rng = np.random.default_rng(0)
  return [rng.normal(size=(B, T, heads, H)).astype(dtype) for heads in (N, G, G, N)]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(attend, query, key, value, cotangent):
  mixed, backward = jax.vjp(attend, query, key, value)
  return mixed, *backward(cotangent)


@jax.jit
def expected(segment_BT, prefix_BT, *inputs):
  """Compute jax.nn's attention and its gradients within segments and their prefixes."""
  queries_BTx2 = jnp.stack([segment_BT, prefix_BT], -1)
  mask = (queries_BTx2[:, :, None] == segment_BT[:, None, :, None]).any(-1)[:, None]
  attend = functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=True)
  return value_and_gradients(attend, *inputs)


def actual(backend, *inputs, seen=()):
  """Compute `attention.causal` and its gradients; `seen` are its segment arguments."""
  # A new function for each call, because a cached program may have other patched constants.
  return value_and_gradients(lambda *qkv: attention.causal(*qkv, backend, *seen), *inputs)


def segments_of(B, T):
  """Return segments of random lengths, followed by padding: int32 [B, T]."""
  rng = np.random.default_rng(1)
  starts_BT = rng.random((B, T)) < 4 / T
  segment_BT = 1 + np.cumsum(starts_BT, axis=1)
  segment_BT[:, T - T // 8 :] = 0
  return segment_BT.astype(np.int32)


def assert_equals_jax(backend, inputs, tolerance):
  """Compare one segment, several segments, and segments that continue others."""
  B, T = inputs[0].shape[:2]
  segment_BT = segments_of(B, T)
  one_BT = np.ones_like(segment_BT)
  assert_close(actual(backend, *inputs), expected(one_BT, one_BT, *inputs), tolerance)
  packed = actual(backend, *inputs, seen=(segment_BT,))
  assert_close(packed, expected(segment_BT, segment_BT, *inputs), tolerance)
  if backend in attention._WITH_PREFIXES:
    seen = segment_BT, np.where(segment_BT % 2, segment_BT, segment_BT // 2).astype(np.int32)
    assert_close(actual(backend, *inputs, seen=seen), expected(*seen, *inputs), tolerance)


def assert_close(actual, expected, tolerance):
  for actual_x, expected_x in zip(actual, expected, strict=True):
    assert actual_x.dtype == expected_x.dtype
    np.testing.assert_allclose(
      np.array(actual_x, np.float32),
      np.array(expected_x, np.float32),
      rtol=tolerance,
      atol=tolerance,
    )


@pytest.mark.parametrize(
  ('T', 'N', 'G'),
  tiers.full_after_first(
    [(5, 2, 2), (17, 7, 1), (32, 2, 2), (39, 8, 2)]
  ),  # strips of 8, and blocks of 16 beyond 24
)
def test_blockwise_equals_jax(monkeypatch, T, N, G):
  monkeypatch.setattr(blockwise, '_STRIP', 8)
  monkeypatch.setattr(blockwise, '_BLOCK', 16)
  monkeypatch.setattr(blockwise, '_LONGEST_WHOLE', 24)
  assert_equals_jax('blockwise', random_inputs(2, T, N, G, 8), 1e-5)


@pytest.mark.full
def test_blockwise_in_bfloat16_has_the_gradients_of_jax(monkeypatch):
  """Test the backward pass for CPUs with bfloat16 instructions. It sums terms with three digits."""
  monkeypatch.setattr(machine, 'has_fast_bfloat16', lambda: True)
  monkeypatch.setattr(blockwise, '_STRIP', 8)
  assert_equals_jax('blockwise', random_inputs(2, 17, 4, 2, 64, 'bfloat16'), 0.05)


@functools.partial(jax.jit, static_argnums=(0, 1))
def plain(window, cap, seen, *inputs):
  """Compute attention and its gradients by definition, with all scores at once."""

  def attend(query_BTNH, key_BTGH, value_BTGH):
    H, repeats = query_BTNH.shape[-1], query_BTNH.shape[2] // key_BTGH.shape[2]
    key_BTNH, value_BTNH = (jnp.repeat(x, repeats, axis=2) for x in (key_BTGH, value_BTGH))
    score_BNTS = jnp.einsum('btnh,bsnh->bnts', query_BTNH, key_BTNH) / np.sqrt(H)
    if cap:
      score_BNTS = cap * jnp.tanh(score_BNTS / cap)
    score_BNTS = jnp.where(is_seen_B1TS, score_BNTS, -jnp.inf)
    return jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(score_BNTS), value_BTNH)

  segment_BT, prefix_BT, position_BT = seen
  is_seen_BTS = (segment_BT[:, :, None] == segment_BT[:, None]) | (
    prefix_BT[:, :, None] == segment_BT[:, None]
  )
  is_seen_BTS &= position_BT[:, :, None] - position_BT[:, None] < window
  is_seen_B1TS = (is_seen_BTS & np.tri(segment_BT.shape[1], dtype=bool))[:, None]
  return value_and_gradients(attend, *inputs)


@pytest.mark.parametrize(
  ('window', 'cap'), tiers.full_after_first([(1, 0.0), (5, 0.0), (5, 0.7), (16, 0.0), (99, 0.7)])
)
@pytest.mark.parametrize('backend', tiers.full_after_first(['strips', 'blocks', 'splash']))
def test_a_window_and_a_cap_match_their_definition(monkeypatch, backend, window, cap):
  T = 40
  if backend == 'splash':
    interpret(monkeypatch)
  else:
    monkeypatch.setattr(blockwise, '_STRIP', 8)
    monkeypatch.setattr(blockwise, '_BLOCK', 16)
    monkeypatch.setattr(blockwise, '_LONGEST_WHOLE', T if backend == 'strips' else 24)
    backend = 'blockwise'
  inputs = random_inputs(2, T, 4, 2, 64 if backend == 'splash' else 8)
  segment_BT, index_BT = segments_of(2, T), np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))

  def assert_as_defined(given, seen):
    attend = functools.partial(attention.causal, window=window, cap=cap)
    found = value_and_gradients(lambda *qkv: attend(*qkv, backend, *given), *inputs)
    assert_close(found, plain(window, cap, seen, *inputs), 1e-5)

  one_BT = np.ones_like(segment_BT)
  assert_as_defined((), (one_BT, one_BT, index_BT))
  assert_as_defined((segment_BT,), (segment_BT, segment_BT, index_BT))
  if backend == 'blockwise':
    # A segment that continues another has positions as if it directly followed it.
    prefix_BT = np.where(segment_BT % 2, segment_BT, segment_BT - 1).astype(np.int32)
    position_BT = (index_BT - 3 * (segment_BT % 2 == 0)).astype(np.int32)
    seen = segment_BT, prefix_BT, position_BT
    assert_as_defined(seen, seen)


@pytest.mark.parametrize('T', [48, 1200])  # in strips; in blocks
def test_no_token_sees_another_segment(T):
  """Its output does not change by a bit if other segments change."""
  inputs, segment_BT = random_inputs(1, T, 2, 1, 8)[:3], np.repeat([1, 2, 3], T // 3)[None]
  is_second = segment_BT[0] == 2
  attend = jax.jit(lambda *qkv: attention.causal(*qkv, 'blockwise', segment_BT))
  changed = [np.where((~is_second)[None, :, None, None], 100 - x, x) for x in inputs]
  before, after = (np.asarray(attend(*qkv))[0] for qkv in (inputs, changed))
  np.testing.assert_array_equal(before[is_second], after[is_second])
  assert np.abs(before - after)[~is_second].min(axis=(1, 2)).max() > 1


def test_bfloat16_inputs_give_bfloat16_with_a_softmax_in_float32():
  """bfloat16 scores of about 30 would be off by 0.06, and the weights by 6%."""
  query, key, value, _ = random_inputs(1, 64, 2, 1, 64, 'bfloat16')
  query *= query.dtype.type(16)
  mixed = jax.jit(attention.causal, static_argnums=3)(query, key, value, 'blockwise')
  assert mixed.dtype == jnp.bfloat16
  exact = jax.jit(jax.nn.dot_product_attention, static_argnames='is_causal')(
    *(x.astype(np.float32) for x in (query, key, value)), is_causal=True
  )
  np.testing.assert_allclose(np.float32(mixed), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.full
def test_blockwise_never_stores_all_scores_of_a_long_sequence():
  T, N = 9216, 2
  inputs = random_inputs(1, T, N, 1, 8)
  memory = (
    value_and_gradients.lower(lambda *qkv: attention.causal(*qkv, 'blockwise'), *inputs)
    .compile()
    .memory_analysis()
  )
  assert memory.temp_size_in_bytes < N * T * T * 4 / 4  # one block has 1/18 of the scores


@pytest.mark.parametrize(
  'T', tiers.full_after_first([128, 300])
)  # one kernel block; three, the last padded
@pytest.mark.parametrize('backend', tiers.full_after_first(['cudnn', 'splash']))
def test_kernels_equal_jax(monkeypatch, backend, T):
  platform = jax.default_backend()
  if backend == 'cudnn' and platform != 'gpu':
    pytest.skip('cuDNN needs a GPU')
  exact = backend == 'splash' and platform != 'tpu'
  if exact:
    interpret(monkeypatch)
  monkeypatch.setattr(attention, '_BLOCK', 256)  # which does not divide 384
  inputs = random_inputs(1, T, 4, 2, 64, 'float32' if exact else 'bfloat16')
  # A backward pass in bfloat16 sums terms with three digits.
  assert_equals_jax(backend, inputs, 1e-5 if exact else 0.05)


def interpret(monkeypatch):
  """Run the TPU kernels in interpret mode, on any platform."""
  module = attention.splash_attention
  monkeypatch.setattr(
    module,
    'make_splash_mha_single_device',
    functools.partial(module.make_splash_mha_single_device, interpret=True),
  )


@pytest.mark.full
@pytest.mark.parametrize(
  ('T', 'N', 'G', 'H', 'tensor', 'window'),
  [
    (9216, 28, 4, 128, 2, 0),  # Qwen2.5-7B at ExGRPO's sequence length
    (1000, 8, 4, 64, 8, 0),  # two devices per key/value head, and T is not a multiple of the block
    (4096, 8, 4, 256, 2, 1024),  # Gemma 3 4B
  ],
)
def test_splash_compiles_for_a_tpu(T, N, G, H, tensor, window):
  pytest.importorskip('libtpu')
  from exgrpo_jax.capacity import devices

  shape = sharding.TrainingConfig(data=1, fsdp=-1, tensor=tensor)
  mesh = sharding.make_mesh(shape, devices.slice_devices('v5e:2x4'))

  def sharded_input(heads, num_heads):
    shape = 8 // tensor, T, num_heads, H  # one row per device
    return jax.ShapeDtypeStruct(
      shape, 'bfloat16', sharding=sharding.named(mesh, ('batch', None, heads, None), shape)
    )

  query, key = sharded_input('heads', N), sharded_input('kv_heads', G)
  shape = 8 // tensor, T
  segment_BT = jax.ShapeDtypeStruct(
    shape, 'int32', sharding=sharding.named(mesh, ('batch', None), shape)
  )

  @jax.jit
  def packed_gradients(segment_BT, *inputs):
    attend = functools.partial(attention.causal, window=window, cap=50.0 if window else 0.0)
    return value_and_gradients(lambda *qkv: attend(*qkv, 'splash', segment_BT), *inputs)

  with jax.set_mesh(mesh):
    compiled = packed_gradients.lower(segment_BT, query, key, key, query).compile()
  text, memory = compiled.as_text(), compiled.memory_analysis()
  for kernel in ('fwd', 'dq', 'dkv'):
    assert f'splash_mha_{kernel}' in text
  scores = N // tensor * T * T * 4
  assert memory.temp_size_in_bytes < scores / 4
  assert compiled.output_shardings[0].is_equivalent_to(query.sharding, query.ndim)


# ---- Rotary frequencies, plain and scaled, against values computed by hand ----


@pytest.mark.parametrize(
  ('changes', 'expected', 'tolerance'),
  [
    (dict(theta=100.0), [1, 0.1], 1e-6),
    (dict(theta=100.0, scaling='linear', factor=4.0), [0.25, 0.025], 1e-6),  # all wavelengths alike
    # Over 2 pi * 100 positions, a pair with frequency x turns 100 x times: here 100, 10, 1 and .1
    # times. Fast pairs are kept, slow ones stretched. 10 turns are half way between 1 and 19, which
    # gives the mean of .1 and .1 / 8.
    (
      dict(
        theta=1e4,
        scaling='llama3',
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=19.0,
        original_positions=round(2 * np.pi * 100),
      ),
      [1, 0.05625, 0.01 / 8, 0.001 / 8],
      1e-3,
    ),
  ],
  ids=['plain', 'linear', 'llama3'],
)
def test_frequencies_match_hand_computed_values(changes, expected, tolerance):
  found = rotary.frequencies(dataclasses.replace(ROPE, **changes), 2 * len(expected))
  np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_an_empty_band_is_refused():
  values = dataclasses.asdict(ROPE) | {'scaling': 'llama3', 'high_frequency_factor': 1.0}
  with pytest.raises(InputError, match=r'low_frequency_factor=1\.0: the factor must be below'):
    config_lib.build(rotary.RopeConfig, values, 'config.model.rope')


# ---- bfloat16 as raw bits ----


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_bits_convert_back_to_the_same_values(dtype):
  x = jnp.array([-1.5, 0.0, 3e38, jnp.inf], dtype)
  stored = matmul.to_bits(x)
  assert stored.dtype == matmul.storage_dtype(dtype)
  assert matmul.from_bits(stored).dtype == x.dtype
  np.testing.assert_array_equal(matmul.from_bits(stored), x)
  assert matmul.to_bits(jnp.bfloat16(1.5)) == 0x3FC0  # the upper half of its float32 bits


# ---- Each platform's matrix products: values, and gradients against autodiff ----


@pytest.mark.parametrize(
  ('dtype', 'has_units', 'tolerance'),
  [('float32', True, 1e-5), ('bfloat16', True, 0.03), ('bfloat16', False, 0.03)],
)
@pytest.mark.parametrize('sizes', [(3, 5), (5, 3)], ids=['wider', 'narrower'])
def test_gradients_match_the_plain_product(sizes, dtype, has_units, tolerance, monkeypatch):
  monkeypatch.setattr(machine, 'has_fast_bfloat16', lambda: has_units)
  rng = np.random.default_rng(0)
  x_BTI, kernel_IO = rng.normal(size=(2, 4, sizes[0])), rng.normal(size=sizes)
  weight_BTO = rng.normal(size=(2, 4, sizes[1]))

  def gradients(product, dtype):
    return jax.grad(lambda x, kernel: (weight_BTO * product(x, kernel)).sum(), (0, 1))(
      jnp.asarray(x_BTI, dtype), jnp.asarray(kernel_IO, dtype)
    )

  expected = gradients(jnp.matmul, 'float32')
  for found, exact in zip(gradients(matmul.project, dtype), expected):
    assert found.dtype == dtype
    np.testing.assert_allclose(np.float32(found), exact, atol=tolerance * np.abs(exact).max())


def test_a_bfloat16_product_is_rounded_once(monkeypatch):
  """Sum 512 ones. Partial sums in bfloat16 would stop growing at 256."""
  monkeypatch.setattr(machine, 'has_fast_bfloat16', lambda: True)
  x = jnp.ones((1, 512), jnp.bfloat16)
  assert matmul.product(x, x.T).item() == 512


def test_the_last_two_dimensions_are_transposed():
  x = jnp.arange(2 * 3 * 6 * 192.0).reshape(2, 3, 6, 192)
  np.testing.assert_array_equal(matmul.transposed(x), x.swapaxes(2, 3))


@pytest.mark.parametrize(
  ('platform', 'dtype', 'has_units', 'stored_by_output'),
  [
    ('cpu', 'float32', False, True),
    ('cpu', 'float32', True, False),
    ('cpu', 'bfloat16', False, False),
    ('gpu', 'float32', False, False),
    ('tpu', 'float32', False, False),
  ],
)
def test_weights_are_stored_output_first_on_cpus_without_matrix_units(
  platform, dtype, has_units, stored_by_output, monkeypatch
):
  monkeypatch.setattr(machine, 'has_matrix_units', lambda: has_units)
  assert matmul.is_output_major(platform, dtype) == stored_by_output


@pytest.mark.parametrize('rows', [1, matmul._FEW_ROWS, matmul._FEW_ROWS + 1])
def test_a_product_with_an_output_first_weight_equals_the_plain_product(rows):
  rng = np.random.default_rng(0)
  x_BTI, kernel_IO = rng.normal(size=(rows, 1, 6)), rng.normal(size=(6, 5))
  stored = matmul.output_major(jnp.asarray(kernel_IO, 'float32'), num_inputs=1)
  assert stored.kernel_OI.shape == (5, 6)
  found_BTO = jax.jit(matmul.project_output_major)(jnp.asarray(x_BTI, 'float32'), stored.kernel_OI)
  np.testing.assert_allclose(found_BTO, x_BTI @ kernel_IO, atol=1e-5)
  logits_BO = matmul.logits(jnp.asarray(x_BTI[:, 0], 'float32'), stored)
  np.testing.assert_allclose(logits_BO, x_BTI[:, 0] @ kernel_IO, atol=1e-5)


def test_two_input_dimensions_stay_together(one_device):
  """[N, H, D] becomes [D, N, H], and so do its shape and sharding."""
  layout = jax.NamedSharding(one_device, jax.P('tensor', None, 'fsdp'))
  shape = jax.ShapeDtypeStruct((2, 3, 5), jnp.float32, sharding=layout)
  kernel_DNH = matmul.output_major(shape, num_inputs=2).kernel_OI
  assert kernel_DNH.shape == (5, 2, 3)
  assert kernel_DNH.sharding.spec == jax.P('fsdp', 'tensor', None)
  assert matmul.output_major(jnp.zeros((2, 3, 5)), num_inputs=2).kernel_OI.shape == (5, 2, 3)
