"""Which slices are known."""

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.performance import chips


@pytest.mark.parametrize('name', ['v9:2x2', 'v5e', ''])
def test_an_unknown_slice_is_refused(name):
  with pytest.raises(InputError, match='generations are v5e, v6e'):
    chips.chip_of(name)
