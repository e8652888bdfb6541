"""TPU chips, and slices of them to compile for on a machine without a TPU."""

import importlib.util
import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from exgrpo_jax.errors import InputError

GIB = 2**30


class Chip(NamedTuple):
  """One chip. Memory as in libtpu's messages, the rest from Google Cloud's documentation.

  The clock follows from the peak: each matrix unit makes `matrix_unit` squared multiply-adds a
  cycle, and a v5e or v6e has four units, a v5p eight.
  """

  memory: float  # bytes that programs can use, a little less than the chip has
  flops: float  # per second, in bfloat16
  bandwidth: float  # of its memory, in bytes per second
  link: float  # of one link to a neighbouring chip, in bytes per second and direction
  clock: float  # cycles per second
  matrix_unit: int  # rows, and columns


CHIPS = {
  'v5e': Chip(
    memory=15.75 * GIB, flops=197e12, bandwidth=819e9, link=50e9, clock=1.5e9, matrix_unit=128
  ),
  'v5p': Chip(
    memory=95.74 * GIB, flops=459e12, bandwidth=2765e9, link=100e9, clock=1.75e9, matrix_unit=128
  ),
  'v6e': Chip(
    memory=31.25 * GIB, flops=918e12, bandwidth=1640e9, link=100e9, clock=1.75e9, matrix_unit=256
  ),
}


def chip_of(topology: str) -> Chip:
  """The chip of a topology such as 'v5e:4x4'; InputError for an unknown generation."""
  generation, _, shape = topology.partition(':')
  if generation not in CHIPS or not shape:
    raise InputError(
      f'--topology={topology} must be a generation and a slice, such as v5e:4x4; '
      f'generations are {", ".join(CHIPS)}.'
    )
  return CHIPS[generation]


def slice_devices(topology: str) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]  # for pyright jax.Device is a variable
  """Devices of a slice, which programs can be compiled for but not run on.

  Raises:
    InputError: libtpu is not installed, or has no such slice.
  """
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # do not query the cloud's metadata server
  # Another process may hold this machine's TPU. Nothing runs here, so it keeps it.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  if importlib.util.find_spec('libtpu') is None:
    raise InputError(
      "capacity compiles with libtpu, which is not installed: run pip install -e '.[tpu]'. It "
      'needs no TPU.'
    )
  try:
    return list(topologies.get_topology_desc(platform='tpu', topology_name=topology).devices)
  except Exception as error:  # libtpu raises types of its own
    raise InputError(
      f'--topology={topology}: libtpu does not have this slice ({str(error).splitlines()[0]}).'
    ) from error
