"""Which slices are known, and GPUs by the names that people and drivers give them."""

import pytest

from exgrpo_jax.capacity import devices
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine


@pytest.mark.parametrize('name', ['v9:2x2', 'v5e', ''])
def test_an_unknown_slice_is_refused(name):
  with pytest.raises(InputError, match='generations are v5e, v5p, v6e'):
    devices.chip_of(name)


@pytest.mark.parametrize(('name', 'units'), [('v5e', 4), ('v5p', 8), ('v6e', 4)])
def test_the_clock_gives_the_peak(name, units):
  """Each matrix unit multiplies and adds once for each of its cells in a cycle."""
  chip = devices.CHIPS[name]
  peak = 2 * units * chip.matrix_unit**2 * chip.clock
  assert peak == pytest.approx(chip.flops, rel=0.01)


@pytest.mark.parametrize(
  ('text', 'gigabytes'),
  [
    *devices.GPUS.items(),
    ('L4', 24),
    ('RTX-4090', 24),
    ('GeForce RTX 4080', 16),
    ('5090 32 GiB', 32),
    ('rtx_3090_ti', 24),
    ('RTX 6000 Ada Generation', 48),
    ('a100-80gb', 80),
    ('A100 40', 40),
    ('A100 80 GB PCIe', 80),
    ('NVIDIA A100-SXM4-80GB', 80),
    ('H100 80GB HBM3', 80),
    ('H100 NVL', 94),
    ('Tesla V100-SXM2-16GB', 16),
    ('24gb', 24),
    ('24 GB', 24),
    ('24G', 24),
    ('24', 24),
    ('24 GiB', 24 * 2**30 / 1e9),
  ],
)
def test_a_gpu_is_known_in_any_spelling(text, gigabytes):
  assert devices.usable_memory(text) == pytest.approx(machine.SHARE * 1e9 * gigabytes)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('A100', 'a100-80, a100-40'),
    ('4090 16GB', 'b200, .*; or a memory'),
    ('4090 laptop', 'b200, '),
    ('0gb', 'b200, '),
    ('', 'b200, '),
  ],
)
def test_what_names_no_gpu_is_refused(text, message):
  with pytest.raises(InputError, match=f'--device={text} .*{message}'):
    devices.usable_memory(text)


@pytest.mark.parametrize(('device', 'dtype'), [('l4', 'bfloat16'), ('t4', 'float32')])
def test_a_gpu_computes_in_its_dtypes(device, dtype):
  devices.check_dtype(device, dtype)
  devices.check_dtype('16gb', dtype)  # of which nothing else is known


def test_a_gpu_without_bfloat16_needs_float32():
  with pytest.raises(InputError, match=r'--device=T4 .* --config\.model\.dtype=float32'):
    devices.check_dtype('T4', 'bfloat16')
