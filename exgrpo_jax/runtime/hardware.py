"""Which accelerators this machine has by its device files, whatever JAX can use of them.

JAX is not asked, for that would start its threads.
"""

import glob
import pathlib
import re

# By JAX's names of platforms.
_FILES = {
  'cuda': ('/dev/nvidia[0-9]*',),
  'tpu': ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*'),
  'rocm': ('/dev/kfd',),
}
_NVIDIA = pathlib.Path('/proc/driver/nvidia/version')


def platforms() -> list[str]:
  """Of 'cuda', 'tpu' and 'rocm' those that have a device here, or may: not only TPUs use vfio."""
  return [
    platform
    for platform, patterns in _FILES.items()
    if any(glob.glob(pattern) for pattern in patterns)
  ]


def nvidia_driver() -> str:
  """The version of NVIDIA's kernel module, such as '550.54.15'; '' where there is none."""
  text = _NVIDIA.read_text() if _NVIDIA.exists() else ''
  found = re.search(r'Kernel Module.*?(\d+\.[\d.]+)', text)
  return found[1] if found else ''
