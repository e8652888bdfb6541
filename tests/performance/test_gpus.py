"""GPUs by the names that people and drivers give them."""

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.performance import gpus, peaks


@pytest.mark.parametrize(
  ('text', 'name'),
  [
    ('L4', 'l4'),
    ('l4', 'l4'),
    ('L4 24GB', 'l4'),
    ('RTX-4090', 'rtx4090'),
    ('GeForce RTX 4090', 'rtx4090'),
    ('4090 24 GiB', 'rtx4090'),
    ('3090', 'rtx3090'),
    ('rtx_3090_ti', 'rtx3090ti'),
    ('A10G', 'a10g'),
    ('a10', 'a10'),
    ('RTX A6000', 'a6000'),
    ('a100-80gb', 'a100-80'),
    ('A100 40', 'a100-40'),
    ('A100 80 GB PCIe', 'a100-80-pcie'),
    ('NVIDIA A100-SXM4-80GB', 'a100-80'),
    ('H100 80GB HBM3', 'h100'),
    ('H100 NVL', 'h100-nvl'),
    ('Tesla V100-SXM2-16GB', 'v100-16'),
    ('T4', 't4'),
  ],
)
def test_a_gpu_is_known_in_any_spelling(text, name):
  assert gpus.gpu_named(text) == gpus.GPUS[name]


@pytest.mark.parametrize('name', gpus.GPUS)
def test_names_are_understood_as_they_are_listed(name):
  assert gpus.gpu_named(name) == gpus.GPUS[name]


@pytest.mark.parametrize('text', ['24gb', '24GB', '24 gb', '24G', '24'])
def test_a_memory_is_known_in_any_spelling(text):
  assert gpus.gpu_named(text).memory == 24e9
  assert gpus.gpu_named('24 GiB').memory == 24 * 2**30


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('A100', 'may be one of a100-80-pcie, a100-80, a100-40; say which'),
    ('4090 16GB', 'must be one of: b200, .*; or a memory'),
    ('4090 laptop', 'must be one of'),
    ('0gb', 'must be one of'),
    ('', 'must be one of'),
  ],
)
def test_what_names_no_gpu_is_refused(text, message):
  with pytest.raises(InputError, match=message):
    gpus.gpu_named(text)


@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    ('NVIDIA H100 80GB HBM3', 'h100'),
    ('NVIDIA A100-PCIE-40GB', 'a100-40'),
    ('NVIDIA A10G', 'a10g'),
    ('NVIDIA L40S', 'l40s'),
    ('NVIDIA RTX A6000', 'a6000'),
    ('NVIDIA RTX 6000 Ada Generation', 'rtx6000-ada'),
    ('NVIDIA GeForce RTX 3090 Ti', 'rtx3090ti'),
    ('Tesla T4', 't4'),
    ('Tesla V100-SXM2-32GB', 'v100-32'),
  ],
)
def test_a_driver_name_is_known(kind, name):
  assert gpus.gpu_of_kind(kind) == gpus.GPUS[name]


def test_a_laptop_has_another_gpu_than_its_name_says():
  assert gpus.gpu_of_kind('NVIDIA GeForce RTX 4090 Laptop GPU') is None


def test_a_gpu_without_bfloat16_has_no_published_peak_in_it():
  assert peaks.published('Tesla T4') is None
  assert peaks.published('NVIDIA A10G') == (70e12, 600e9, 'published')
