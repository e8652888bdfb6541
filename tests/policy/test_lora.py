"""LoRA: which matrices get adapters, and what a policy with adapters computes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax.configs import base
from exgrpo_jax.errors import InputError
from exgrpo_jax.policy import lora, model, sharding
from tests.policy.test_model import CONFIG, VARIANTS, randomise

LORA = config_lib.build(
  lora.LoraConfig, dict(base.get_config().lora) | {'rank': 3, 'alpha': 6.0}, 'lora'
)
_forward = jax.jit(model.hidden_states, static_argnums=0)


@pytest.fixture(scope='module')
def frozen(one_device):
  return randomise(model.init(CONFIG, jax.random.key(0), one_device))


@pytest.fixture(scope='module')
def first(one_device):
  """The initial adapters of a run."""
  return lora.init(lora.shapes(LORA, model.shapes(CONFIG, one_device)), jax.random.key(1))


@pytest.fixture(scope='module')
def adapters(first):
  """Adapters after some training: B is no longer 0."""
  return randomise(first, scale=0.1)


@pytest.fixture(scope='module')
def tokens_BT():
  return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 9)).astype(np.int32)


def by_hand(frozen, adapters):
  """Merge the policy into a whole model: W + (alpha / rank) A B, in NumPy float64."""
  whole = jax.tree.map(np.array, frozen)
  for module, matrices in adapters['layers'].items():
    for name, adapter in matrices.items():
      kernel = whole['layers'][module][name]
      for layer in range(CONFIG.num_layers):
        a, b = (np.asarray(adapter[part][layer], np.float64) for part in 'ab')
        delta = np.tensordot(a, b, axes=1)  # over the rank: the last of A, the first of B
        kernel[layer] += (6 / 3 * delta).astype(np.float32)
  return whole


def test_an_adapted_product_is_the_sum_of_both():
  """Here, x W = 5 and s (x A) B = 2 * (1*3 + 2*1) * 7 = 70."""
  weight = lora.Adapted(
    kernel=jnp.array([[1.0], [2.0]]), a=jnp.array([[3.0], [1.0]]), b=jnp.array([[7.0]]), scale=2.0
  )
  x_BTI = jnp.array([[[1.0, 2.0]]])
  assert lora.product(x_BTI, weight).tolist() == [[[75.0]]]
  assert lora.merged(weight).tolist() == [[1 + 2 * 3 * 7], [2 + 2 * 1 * 7]]
  assert lora.product(x_BTI, weight.kernel).tolist() == [[[5.0]]]


def test_adapters_have_the_gradient_of_the_merged_matrix():
  """Two input dimensions of size 2 and 3 are flattened to 6. The rank is 2, with four outputs."""
  rng = np.random.default_rng(0)
  kernel, a, b = (rng.normal(size=size) for size in ((2, 3, 4), (2, 3, 2), (2, 4)))
  x_BTI, weight = rng.normal(size=(1, 5, 6)), rng.normal(size=(1, 5, 4))

  def total(product, *adapter):
    weight_IO = lora.Adapted(jnp.float32(kernel), *adapter, scale=2.0)
    return (weight * product(jnp.float32(x_BTI), weight_IO)).sum()

  found, expected = (
    jax.grad(total, (1, 2))(product, jnp.float32(a), jnp.float32(b))
    for product in (
      lambda x, adapted: lora.product(x, adapted, num_inputs=2),
      lambda x, adapted: x @ lora.merged(adapted).reshape(6, 4),
    )
  )
  for ours, theirs in zip(found, expected):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_initial_adapters_do_not_change_the_base(frozen, first, tokens_BT):
  policy = lora.joined(LORA, frozen, first)
  np.testing.assert_array_equal(
    _forward(CONFIG, policy, tokens_BT), _forward(CONFIG, frozen, tokens_BT)
  )
  # A is uniform within 1 / sqrt(inputs), as in PEFT. Here, the inputs are heads times head size.
  largest = np.abs(first['layers']['attention']['out_NHD']['a']).max()
  bound = 1 / np.sqrt(CONFIG.num_heads * CONFIG.head_size)
  assert 0.9 * bound < largest <= bound
  key, query = (first['layers']['attention'][name]['a'] for name in ('key_DGH', 'query_DNH'))
  assert not np.array_equal(key, query)


def test_a_policy_computes_the_same_as_its_merged_matrices(frozen, adapters, tokens_BT):
  policy, whole = lora.joined(LORA, frozen, adapters), by_hand(frozen, adapters)
  expected_BTD = np.asarray(_forward(CONFIG, whole, tokens_BT))
  np.testing.assert_allclose(_forward(CONFIG, policy, tokens_BT), expected_BTD, atol=2e-5)
  moved = np.abs(expected_BTD - _forward(CONFIG, frozen, tokens_BT)).max()
  assert moved > 0.1  # the adapters have an effect


def test_adapters_are_merged_in_the_decode_layout(frozen, adapters, one_device):
  meshes = sharding.Meshes(one_device, one_device)
  decoding = model.decode_layout(CONFIG, lora.joined(LORA, frozen, adapters), meshes)
  expected = model.decode_layout(CONFIG, by_hand(frozen, adapters), meshes)
  assert jax.tree.structure(decoding) == jax.tree.structure(expected)
  jax.tree.map(
    lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6), decoding, expected
  )


def test_converting_to_the_decode_layout_in_place_changes_nothing(frozen, adapters, one_device):
  meshes = sharding.Meshes(one_device, one_device)
  policy = lora.joined(LORA, frozen, adapters)
  expected = model.decode_layout(CONFIG, policy, meshes)
  given = model.copied(policy)
  decoding = model.into_decode_layout(CONFIG, given, meshes)
  assert jax.tree.structure(decoding) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, decoding, expected)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_only_targets_have_adapters(one_device, frozen, adapters):
  some = dataclasses.replace(LORA, targets=('v_proj', 'down_proj'))
  shapes = lora.shapes(some, model.shapes(CONFIG, one_device))
  assert {m: sorted(names) for m, names in shapes['layers'].items()} == {
    'attention': ['value_DGH'],
    'mlp': ['down_FD'],
  }
  policy = lora.joined(some, frozen, adapters)
  adapted = [
    name
    for module in policy['layers'].values()
    for name, weight in module.items()
    if isinstance(weight, lora.Adapted)
  ]
  assert sorted(adapted) == ['down_FD', 'value_DGH']


def test_trained_matrices_are_thin_and_float32(one_device):
  """Each has R (I + O) entries instead of I O, for any dtype of the activations."""
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  shapes = model.shapes(config, one_device)
  trained = lora.shapes(LORA, shapes)
  D, F, N, G = 32, 48, 32, 16  # N and G are multiplied by the head size
  inputs_and_outputs = 2 * (D + N) + 2 * (D + G) + 3 * (D + F)
  size = sum(leaf.size for leaf in jax.tree.leaves(trained))
  assert size == CONFIG.num_layers * LORA.rank * inputs_and_outputs
  assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {np.dtype('float32')}


@pytest.mark.full
def test_a_frozen_base_in_bfloat16_computes_the_same_bits(frozen, adapters, tokens_BT, one_device):
  """A bfloat16 forward pass casts matrices to bfloat16 anyway. Norm scales stay float32."""
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  stored = model.frozen(config, frozen, one_device)
  shapes = model.shapes(config, one_device, frozen=True)
  assert jax.tree.map(lambda x: x.dtype, stored) == jax.tree.map(lambda x: x.dtype, shapes)
  assert stored['layers']['mlp']['gate_DF'].dtype == stored['embedding_VD'].dtype == 'bfloat16'
  assert stored['layers']['mlp_norm']['scale'].dtype == 'float32'
  np.testing.assert_array_equal(
    *(
      _forward(config, lora.joined(LORA, base, adapters), tokens_BT).astype(jnp.float32)
      for base in (stored, frozen)
    )
  )


def test_with_rank_0_the_whole_model_is_trained(one_device, frozen):
  off = dataclasses.replace(LORA, rank=0)
  shapes = model.shapes(CONFIG, one_device)
  assert lora.shapes(off, shapes) is shapes and lora.joined(off, None, frozen) is frozen


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(targets=('q_prj',)), "targets has no 'q_prj'; did you mean 'q_proj'?"),
    (dict(targets=()), 'targets=(): the list must contain'),
    (dict(targets=('q_proj', 'q_proj')), "targets=('q_proj', 'q_proj'): the list must contain"),
  ],
)
def test_invalid_lora_settings_are_refused(changes, message):
  with pytest.raises(InputError, match=re.escape(f'config.lora.{message}')):
    config_lib.build(lora.LoraConfig, dict(base.get_config().lora) | changes, 'config.lora')


def test_a_rank_above_the_size_of_a_matrix_is_refused(one_device):
  shapes, narrow = model.shapes(CONFIG, one_device), CONFIG.num_kv_heads * CONFIG.head_size
  message = rf'rank={narrow + 1}: the rank must be at most {narrow}, the smaller .* of k_proj'
  with pytest.raises(InputError, match=message):
    lora.shapes(dataclasses.replace(LORA, rank=narrow + 1), shapes)


def test_experts_get_no_adapters(one_device):
  shapes = model.shapes(VARIANTS['experts'], one_device)
  message = r"'gate_proj' belongs to the experts, which do not support adapters\. Leave out"
  with pytest.raises(InputError, match=message):
    lora.shapes(LORA, shapes)
  attention = dataclasses.replace(LORA, targets=('q_proj', 'o_proj'))
  assert {*lora.shapes(attention, shapes)['layers']} == {'attention'}
