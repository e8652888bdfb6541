"""NVIDIA's GPUs, as its data sheets have them."""

import re
from typing import NamedTuple

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine

# Of the peaks below: what decoding and an update are to reach, and estimates assume of them. No GPU
# was at hand to measure either; `benchmark all` says on one whether they do.
SHARE_OF_BANDWIDTH = 0.5
SHARE_OF_FLOPS = 0.4


class Gpu(NamedTuple):
  """One GPU."""

  kind: str  # a pattern of jax.Device.device_kind
  memory: float  # bytes, a gigabyte of the data sheet as 10^9; a driver reports about as many
  flops: float  # per second, in `dtype` with float32 sums, without sparsity; 0 is not known
  bandwidth: float  # of its memory, in bytes per second; 0 is not known
  # GPUs before Ampere have no bfloat16: XLA converts its products to float32, and cuDNN's attention
  # refuses them.
  dtype: str = 'bfloat16'

  @property
  def usable(self) -> float:
    """Bytes that JAX takes for arrays and programs."""
    return machine.SHARE * self.memory


# By the names of --device. A kind may fit several patterns: the first is meant.
GPUS = {
  'b200': Gpu('.* B200', 180e9, 2250e12, 8.0e12),
  'h200': Gpu('.*H200.*', 141e9, 989e12, 4.8e12),
  'h100-nvl': Gpu('.*H100.*NVL.*', 94e9, 835e12, 3.9e12),
  'h100-pcie': Gpu('.*H100.*PCIe.*', 80e9, 756e12, 2.0e12),
  'h100': Gpu('.*H100.*', 80e9, 989e12, 3.35e12),
  'a100-80-pcie': Gpu('.*A100.*PCI.*80GB.*|.*A100.*80GB.*PCI.*', 80e9, 312e12, 1.935e12),
  'a100-80': Gpu('.*A100.*80GB.*', 80e9, 312e12, 2.039e12),
  'a100-40': Gpu('.*A100.*', 40e9, 312e12, 1.555e12),
  'l40s': Gpu('.* L40S', 48e9, 362e12, 864e9),
  'l40': Gpu('.* L40', 48e9, 181e12, 864e9),
  # Its data sheet gives 242 TFLOP/s with sparsity.
  'l4': Gpu('.* L4', 24e9, 121e12, 300e9),
  'a40': Gpu('.* A40', 48e9, 149.7e12, 696e9),
  'a30': Gpu('.* A30', 24e9, 165e12, 933e9),
  # The A10 of AWS, by a data sheet of its own.
  'a10g': Gpu('.* A10G', 24e9, 70e12, 600e9),
  'a10': Gpu('.* A10', 24e9, 125e12, 600e9),
  # From "NVIDIA Ampere GA102 GPU Architecture", appendix A: with sums in float32 a GeForce has half
  # the rate.
  'a6000': Gpu('.*RTX A6000', 48e9, 154.8e12, 768e9),
  'rtx3090ti': Gpu('.*RTX 3090 Ti', 24e9, 80e12, 1.008e12),
  'rtx3090': Gpu('.*RTX 3090', 24e9, 71e12, 936e9),
  # From "NVIDIA Ada GPU Architecture", appendix A.
  'rtx6000-ada': Gpu('.*RTX 6000 Ada.*', 48e9, 364.2e12, 960e9),
  'rtx4090': Gpu('.*RTX 4090', 24e9, 165.2e12, 1.008e12),
  'rtx4080': Gpu('.*RTX 4080', 16e9, 97.5e12, 716.8e9),
  # From "NVIDIA RTX Blackwell GPU Architecture", appendix A.
  'rtx5090': Gpu('.*RTX 5090', 32e9, 209.5e12, 1.792e12),
  'v100-32': Gpu('.*V100-SXM.*32GB', 32e9, 15.7e12, 900e9, 'float32'),
  'v100-16': Gpu('.*V100-SXM.*16GB', 16e9, 15.7e12, 900e9, 'float32'),
  't4': Gpu('.* T4', 16e9, 8.1e12, 320e9, 'float32'),
}
# What a name may have besides, as in 'NVIDIA A100-SXM4-80GB'.
_OTHER_WORDS = re.compile(r'nvidia|tesla|geforce|quadro|rtx|generation|gpu|sxm[0-9]?|hbm[0-9]e?')
_MEMORY = re.compile(r'(?<![a-z0-9])([1-9][0-9]{0,2})\s*(gib|gb|g)?\b')


def gpu_named(name: str) -> Gpu:
  """The GPU that --device means: a name of GPUS in any spelling, or a memory, of any GPU.

  'RTX 4090', 'A100-SXM4-80GB' and 'l4' are in GPUS. A memory is '24gb', '24G' or '24', of 10^9
  bytes each, or '24 GiB'; then nothing is known of how fast it is.

  Raises:
    InputError: no GPU is meant, or several are.
  """
  text = name.lower().replace('_', ' ').strip()
  if memory := _MEMORY.fullmatch(text):
    return Gpu('', int(memory[1]) * (2**30 if memory[2] == 'gib' else 1e9), flops=0, bandwidth=0)
  given = _words(text)
  found = [gpu for key, gpu in GPUS.items() if _means(given, key, gpu)]
  if found:
    return found[0]
  several = [key for key in GPUS if given and given <= _words(key)]
  if several:
    raise InputError(f'--device={name} may be one of {", ".join(several)}; say which.')
  raise InputError(
    f'--device={name} must be one of: {", ".join(GPUS)}; or a memory, such as 24gb, of any GPU.'
  )


def _words(text: str) -> set[str]:
  """The parts of a name in any spelling; a memory is a number alone."""
  text = _MEMORY.sub(r' \1 ', _OTHER_WORDS.sub(' ', text))
  return set(re.findall(r'[a-z]+[0-9]+[a-z]*|[0-9]+|[a-z]+', text))


def _means(given: set[str], key: str, gpu: Gpu) -> bool:
  """Whether these words are those of a name of GPUS, with or without its memory."""
  name = _words(key)
  return name <= given and given - name <= {f'{gpu.memory / 1e9:.0f}'}


def gpu_of_kind(kind: str) -> Gpu | None:
  """The GPU of a `device_kind`; None if it is not in GPUS."""
  return next((gpu for gpu in GPUS.values() if re.fullmatch(gpu.kind, kind)), None)
