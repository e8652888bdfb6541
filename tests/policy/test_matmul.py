"""The matrix product's own backward pass against autodiff, in the forms of both dtypes."""

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
