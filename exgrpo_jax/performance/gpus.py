"""NVIDIA's GPUs, as its data sheets have them."""

import re
from typing import NamedTuple

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import device_memory

# Of the peaks below: what decoding and an update are to reach, and estimates assume of them. No GPU
# was at hand to measure either; `benchmark all` says on one whether they do.
SHARE_OF_BANDWIDTH = 0.5
SHARE_OF_FLOPS = 0.4


class Gpu(NamedTuple):
  """One GPU."""

  kind: str  # a pattern of jax.Device.device_kind
  memory: float  # bytes, a gigabyte of the data sheet as 10^9; a driver reports about as many
  flops: float  # per second, in bfloat16 with float32 sums, without sparsity
  bandwidth: float  # of its memory, in bytes per second

  @property
  def usable(self) -> float:
    """Bytes that JAX takes for arrays and programs."""
    return device_memory.SHARE * self.memory


# By the names of --device. A kind may fit several patterns: the first is meant.
GPUS = {
  'h200': Gpu('.*H200.*', 141e9, 989e12, 4.8e12),
  'h100-nvl': Gpu('.*H100.*NVL.*', 94e9, 835e12, 3.9e12),
  'h100-pcie': Gpu('.*H100.*PCIe.*', 80e9, 756e12, 2.0e12),
  'h100': Gpu('.*H100.*', 80e9, 989e12, 3.35e12),
  'a100-80-pcie': Gpu('.*A100.*PCI.*80GB.*|.*A100.*80GB.*PCI.*', 80e9, 312e12, 1.935e12),
  'a100-80': Gpu('.*A100.*80GB.*', 80e9, 312e12, 2.039e12),
  'a100-40': Gpu('.*A100.*', 40e9, 312e12, 1.555e12),
  # Its data sheet gives 242 TFLOP/s with sparsity.
  'l4': Gpu('.* L4', 24e9, 121e12, 300e9),
  # From "NVIDIA Ada GPU Architecture", appendix A.
  'rtx4090': Gpu('.*RTX 4090', 24e9, 165.2e12, 1.008e12),
}


def gpu_named(name: str) -> Gpu:
  """The GPU of a name of --device; InputError if it is not in GPUS."""
  if name not in GPUS:
    raise InputError(f'--device={name} must be one of: {", ".join(GPUS)}.')
  return GPUS[name]


def gpu_of_kind(kind: str) -> Gpu | None:
  """The GPU of a `device_kind`; None if it is not in GPUS."""
  return next((gpu for gpu in GPUS.values() if re.fullmatch(gpu.kind, kind)), None)
