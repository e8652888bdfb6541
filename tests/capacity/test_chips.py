"""Which slices are known."""

import pytest

from exgrpo_jax.capacity import chips
from exgrpo_jax.errors import InputError


@pytest.mark.parametrize('name', ['v9:2x2', 'v5e', ''])
def test_an_unknown_slice_is_refused(name):
  with pytest.raises(InputError, match='generations are v5e, v5p, v6e'):
    chips.chip_of(name)


@pytest.mark.parametrize(('name', 'units'), [('v5e', 4), ('v5p', 8), ('v6e', 4)])
def test_the_clock_gives_the_peak(name, units):
  """Each matrix unit multiplies and adds once for each of its cells in a cycle."""
  chip = chips.CHIPS[name]
  peak = 2 * units * chip.matrix_unit**2 * chip.clock
  assert peak == pytest.approx(chip.flops, rel=0.01)
