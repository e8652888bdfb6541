"""GPUs by the names that people and drivers give them."""

import pytest

from exgrpo_jax.capacity import gpus
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine


@pytest.mark.parametrize(
  ('text', 'gigabytes'),
  [
    *gpus.GPUS.items(),
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
  assert gpus.usable_memory(text) == pytest.approx(machine.SHARE * 1e9 * gigabytes)


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
    gpus.usable_memory(text)


@pytest.mark.parametrize(('device', 'dtype'), [('l4', 'bfloat16'), ('t4', 'float32')])
def test_a_gpu_computes_in_its_dtypes(device, dtype):
  gpus.check_dtype(device, dtype)
  gpus.check_dtype('16gb', dtype)  # of which nothing else is known


def test_a_gpu_without_bfloat16_needs_float32():
  with pytest.raises(InputError, match=r'--device=T4 .* --config\.model\.dtype=float32'):
    gpus.check_dtype('T4', 'bfloat16')
