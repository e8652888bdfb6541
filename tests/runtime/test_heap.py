"""Freed memory stays with the process: counted by the pages that the kernel has to provide."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from exgrpo_jax.runtime import hardware, heap

hardware._FILES = {"cuda": (sys.argv[1],)}
heap.keep_pages()
b'x' * 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
  b'x' * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(accelerators):
  """Those of four arrays of 64 MiB, after a first one, with accelerators at a pattern of paths."""
  command = [sys.executable, '-c', SCRIPT, accelerators]
  return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != 'linux', reason='the C library is not glibc')
def test_a_large_array_reuses_the_pages_of_the_one_before_it_unless_there_is_an_accelerator():
  kept, left_alone = page_faults('/nowhere'), page_faults(sys.executable)
  assert kept < left_alone / 10
