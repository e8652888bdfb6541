"""Specifications of TPU chips, TPU slices and NVIDIA GPUs. Compiling for a slice needs no TPU."""

import importlib.util
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine

GIB = 2**30


class Chip(NamedTuple):
  """A TPU chip's specifications.

  The memory size comes from libtpu's messages, and the other values come from Google Cloud's
  documentation. The clock is derived from peak FLOPs: each matrix unit performs
  `matrix_unit`^2 multiply-adds per cycle; v5e and v6e have four units, and v5p has eight.
  """

  memory: float  # bytes that programs can use, slightly less than the chip's memory
  flops: float  # per second, in bfloat16
  bandwidth: float  # of the chip's memory, in bytes per second
  link: float  # of one link to a neighboring chip, in bytes per second per direction
  clock: float  # cycles per second
  matrix_unit: int  # number of rows, equal to the number of columns


CHIPS = {  # memory, flops, bandwidth, link, clock, matrix_unit
  'v5e': Chip(15.75 * GIB, 197e12, 819e9, 50e9, 1.5e9, 128),
  'v5p': Chip(95.74 * GIB, 459e12, 2765e9, 100e9, 1.75e9, 128),
  'v6e': Chip(31.25 * GIB, 918e12, 1640e9, 100e9, 1.75e9, 256),
}


def chip_of(topology: str) -> Chip:
  """Return the chip of a topology such as 'v5e:4x4'; raise InputError if the chip is unknown."""
  generation, _, shape = topology.partition(':')
  if generation not in CHIPS or not shape:
    raise InputError(
      f'--topology={topology}: the value must be a chip generation and a slice, such as v5e:4x4. '
      f'Supported generations: {", ".join(CHIPS)}.'
    )
  return CHIPS[generation]


def slice_devices(topology: str) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
  """Return a slice's devices, for compilation only: programs cannot run on them.

  Raises InputError if libtpu is not installed or does not support the slice.
  """
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # skip the cloud's metadata server
  # Another process may be using this machine's TPU. That is fine, because nothing runs here.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  if importlib.util.find_spec('libtpu') is None:
    raise InputError(
      f'--topology={topology}: the capacity command compiles with libtpu, which is not '
      "installed. Run pip install -e '.[tpu]'; this does not require a TPU."
    )
  try:
    return list(topologies.get_topology_desc(platform='tpu', topology_name=topology).devices)
  except Exception as error:  # libtpu raises its own types
    raise InputError(
      f'--topology={topology}: libtpu does not support this slice ({str(error).splitlines()[0]}). '
      'Choose another slice.'
    ) from error


# ---- GPUs ----

# Memory in GB (10^9 bytes) on the data sheet -> GPU names; drivers report roughly the same.
_NAMES = {
  180: 'b200',
  141: 'h200',
  94: 'h100-nvl',
  80: 'h100 a100-80',
  48: 'l40s l40 a40 a6000 rtx6000-ada',
  40: 'a100-40',
  32: 'rtx5090 v100-32',
  24: 'l4 a30 a10g a10 rtx4090 rtx3090ti rtx3090',
  16: 'rtx4080 v100-16 t4',
}
GPUS = {name: memory for memory, names in _NAMES.items() for name in names.split()}
# Older than Ampere: XLA converts bfloat16 products to float32; cuDNN's attention rejects bfloat16.
_WITHOUT_BFLOAT16 = ('v100-32', 'v100-16', 't4')

# Words to ignore in a name such as 'NVIDIA A100-SXM4-80GB'.
_OTHER_WORDS = re.compile(
  r'nvidia|tesla|geforce|quadro|rtx|generation|gpu|pcie|sxm[0-9]?|hbm[0-9]e?'
)
_MEMORY = re.compile(r'(?<![a-z0-9])([1-9][0-9]{0,2})\s*(gib|gb|g)?\b')


def usable_memory(device: str) -> float:
  """Return how many bytes of a GPU's memory JAX reserves for arrays and programs.

  `device` is one of GPUS in any spelling ('RTX 4090', 'A100-SXM4-80GB'), or a memory size: '24gb',
  '24G' or '24' (units of 10^9 bytes), or '24 GiB'. Raises InputError if `device` is neither a
  complete GPU name nor a memory size.
  """
  if match := _MEMORY.fullmatch(_lower(device)):
    size = int(match[1]) * (2**30 if match[2] == 'gib' else 1e9)
  else:
    size = 1e9 * GPUS[_name_of(device)]
  return machine.SHARE * size


def has_bfloat16(device: str) -> bool:
  """Return True unless `device` names a GPU that does not support bfloat16."""
  try:
    return _name_of(device) not in _WITHOUT_BFLOAT16
  except InputError:
    return True


def check_dtype(device: str, dtype: str) -> None:
  """Raise InputError if the GPU does not support `dtype`."""
  if dtype == 'bfloat16' and not has_bfloat16(device):
    raise InputError(
      f'--device={device}: this GPU does not support config.model.dtype=bfloat16. Choose an Ampere '
      'or newer GPU (A100, A10G, RTX 3090), or set --config.model.dtype=float32, which doubles the '
      'memory used by activations, cache and decode weights.'
    )


def _name_of(device: str) -> str:
  device_words = _words(device)
  for name, memory in GPUS.items():
    words = _words(name)
    if words <= device_words and device_words - words <= {str(memory)}:
      return name
  matches = [name for name in GPUS if device_words and device_words <= _words(name)]
  if matches:
    raise InputError(
      f'--device={device}: this GPU name is incomplete. Choose one of {", ".join(matches)}.'
    )
  raise InputError(
    f'--device={device}: the value must be one of {", ".join(GPUS)}, or the memory size of any '
    'GPU, such as 24gb.'
  )


def _lower(device: str) -> str:
  return device.lower().replace('_', ' ').strip()


def _words(name: str) -> set[str]:
  """Split a name into words that are the same in every spelling; '80GB' becomes '80'."""
  text = _MEMORY.sub(r' \1 ', _OTHER_WORDS.sub(' ', _lower(name)))
  return set(re.findall(r'[a-z]+[0-9]+[a-z]*|[0-9]+|[a-z]+', text))
