"""The peak rates of a device: published, or where its kind is unknown what it reaches here."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from exgrpo_jax.performance import gpus
from exgrpo_jax.performance.chips import CHIPS
from exgrpo_jax.performance.timing import median_seconds
from exgrpo_jax.policy import sharding

# Of jax.Device.device_kind.
_TPUS = {'TPU v5( lite|e)': 'v5e', 'TPU v5p?': 'v5p', 'TPU v6( lite|e)': 'v6e'}
_REPEATS = 3
_WIDTHS = {'cpu': 1024}  # of the product's matrices
_WIDTH = 8192  # on an accelerator
_BYTES = {'cpu': 2**27}  # of the array that is copied, far more than a cache holds
_ACCELERATOR_BYTES = 2**31


class Peaks(NamedTuple):
  """Of one device."""

  flops: float  # per second
  bandwidth: float  # of its memory, in bytes per second
  source: str  # 'published', or 'measured' by a plain product and a plain copy

  @property
  def note(self) -> str:
    """For the reader of a share of these."""
    return f'the {self.source} {"peak" if self.source == "published" else "rate"}'


def published(kind: str) -> Peaks | None:
  """The peaks in bfloat16 of a `device_kind`, from vendors' documents; None if there are none."""
  for pattern, chip in _TPUS.items():
    if re.fullmatch(pattern, kind):
      return Peaks(CHIPS[chip].flops, CHIPS[chip].bandwidth, 'published')
  gpu = gpus.gpu_of_kind(kind)
  if gpu and gpu.dtype == 'bfloat16':
    return Peaks(gpu.flops, gpu.bandwidth, 'published')
  return None


def measured(dtype: str) -> Peaks:
  """What the first device reaches in a plain matrix product and a plain copy."""
  device = jax.devices()[0]
  width = _WIDTHS.get(device.platform, _WIDTH)
  size = _BYTES.get(device.platform, _ACCELERATOR_BYTES)
  alone = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=1, tensor=1), [device])
  with jax.set_mesh(alone):
    matrix, array = jnp.ones((width, width), dtype), jnp.zeros(size // 4, jnp.int32)
    multiply, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x ^ 1)  # XLA would skip a mere copy
    for_product, for_copy = median_seconds(
      _REPEATS,
      lambda: jax.block_until_ready(multiply(matrix, matrix)),
      lambda: jax.block_until_ready(copy(array)),
    )
  return Peaks(2 * width**3 / for_product, 2 * size / for_copy, 'measured')


def of_devices(dtype: str) -> Peaks:
  """The published peaks, for what computes in bfloat16 on a known device; else measured ones."""
  known = published(jax.devices()[0].device_kind) if dtype == 'bfloat16' else None
  return known or measured(dtype)
