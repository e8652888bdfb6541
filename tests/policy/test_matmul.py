"""The matrix product in the forms of each platform: values, and gradients against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.policy import matmul
from exgrpo_jax.runtime import machine


@pytest.mark.parametrize(
  ('dtype', 'has_units', 'tolerance'),
  [('float32', True, 1e-5), ('bfloat16', True, 0.03), ('bfloat16', False, 0.03)],
)
@pytest.mark.parametrize('sizes', [(3, 5), (5, 3)], ids=['wider', 'narrower'])
def test_gradients_are_those_of_the_plain_product(sizes, dtype, has_units, tolerance, monkeypatch):
  monkeypatch.setattr(machine, 'has_bfloat16_units', lambda: has_units)
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


def test_a_product_of_bfloat16_is_rounded_once(monkeypatch):
  """512 ones: partial sums in bfloat16 would stop growing at 256."""
  monkeypatch.setattr(machine, 'has_bfloat16_units', lambda: True)
  x = jnp.ones((1, 512), jnp.bfloat16)
  assert matmul.product(x, x.T).item() == 512


def test_the_transpose_is_that_of_the_last_two_dimensions():
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
def test_weights_are_stored_by_output_on_cpus_without_matrix_units(
  platform, dtype, has_units, stored_by_output, monkeypatch
):
  monkeypatch.setattr(machine, 'has_bfloat16_units', lambda: has_units)
  assert matmul.is_output_major(platform, dtype) == stored_by_output


@pytest.mark.parametrize('rows', [1, matmul._FEW_ROWS, matmul._FEW_ROWS + 1])
def test_a_product_with_a_weight_stored_by_output_is_the_plain_one(rows):
  rng = np.random.default_rng(0)
  x_BTI, kernel_IO = rng.normal(size=(rows, 1, 6)), rng.normal(size=(6, 5))
  stored = matmul.output_major(jnp.asarray(kernel_IO, 'float32'), num_inputs=1)
  assert stored.kernel_OI.shape == (5, 6)
  found_BTO = jax.jit(matmul.project_output_major)(jnp.asarray(x_BTI, 'float32'), stored.kernel_OI)
  np.testing.assert_allclose(found_BTO, x_BTI @ kernel_IO, atol=1e-5)
  logits_BO = matmul.logits(jnp.asarray(x_BTI[:, 0], 'float32'), stored)
  np.testing.assert_allclose(logits_BO, x_BTI[:, 0] @ kernel_IO, atol=1e-5)


def test_two_input_dimensions_stay_together(one_device):
  """[N, H, D] becomes [D, N, H], and its shape is laid out alike."""
  layout = jax.NamedSharding(one_device, jax.P('tensor', None, 'fsdp'))
  shape = jax.ShapeDtypeStruct((2, 3, 5), jnp.float32, sharding=layout)
  kernel_DNH = matmul.output_major(shape, num_inputs=2).kernel_OI
  assert kernel_DNH.shape == (5, 2, 3)
  assert kernel_DNH.sharding.spec == jax.P('fsdp', 'tensor', None)
  assert matmul.output_major(jnp.zeros((2, 3, 5)), num_inputs=2).kernel_OI.shape == (5, 2, 3)
