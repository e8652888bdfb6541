"""bfloat16 as its bits, there and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.policy import bits


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_bits_are_those_of_the_value(dtype):
  x = jnp.array([-1.5, 0.0, 3e38, jnp.inf], dtype)
  stored = bits.to_bits(x)
  assert stored.dtype == bits.dtype_of(dtype)
  assert bits.from_bits(stored).dtype == x.dtype
  np.testing.assert_array_equal(bits.from_bits(stored), x)


def test_one_and_a_half_is_the_upper_half_of_its_float32():
  assert bits.to_bits(jnp.bfloat16(1.5)) == 0x3FC0
