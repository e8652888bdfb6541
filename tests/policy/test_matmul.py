"""The matrix product's own backward pass against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.policy import matmul


@pytest.mark.parametrize('sizes', [(3, 5), (5, 3)], ids=['wider', 'narrower'])
def test_gradients_are_those_of_the_plain_product(sizes):
  rng = np.random.default_rng(0)
  x_BTI, kernel_IO = rng.normal(size=(2, 4, sizes[0])), rng.normal(size=sizes)
  weight_BTO = rng.normal(size=(2, 4, sizes[1]))

  def gradients(product):
    return jax.grad(lambda x, kernel: (weight_BTO * product(x, kernel)).sum(), (0, 1))(
      jnp.float32(x_BTI), jnp.float32(kernel_IO)
    )

  for found, expected in zip(gradients(matmul.project), gradients(jnp.matmul)):
    np.testing.assert_allclose(found, expected, rtol=1e-5)
