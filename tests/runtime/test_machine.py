"""Freed memory stays with the process, JAX takes nine tenths of a GPU, full memory is explained."""

import os
import subprocess
import sys

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import machine

PAGE_FAULTS = """
import resource, sys

machine._DEVICE_FILES = {"cuda": (sys.argv[1],)}
machine.keep_pages()
b'x' * 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
  b'x' * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='the C library is not glibc')
def test_a_large_array_reuses_the_pages_of_the_one_before_it_unless_there_is_an_accelerator():
  def page_faults(device_file):
    command = [sys.executable, '-c', PAGE_FAULTS, device_file]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

  assert page_faults('/nowhere') < page_faults(sys.executable) / 10


@pytest.mark.parametrize(
  'name', [None, 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION']
)
def test_the_environment_goes_before_the_share(name, monkeypatch):
  chosen = {} if name is None else {name: '.5'}
  monkeypatch.setattr(os, 'environ', dict(chosen))
  machine.take_share()
  assert os.environ == (chosen or {'XLA_CLIENT_MEM_FRACTION': '0.9'})


@pytest.mark.parametrize(
  ('error', 'is_full'),
  [
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 128000000000 bytes.'), True),
    (RuntimeError('INTERNAL: std::bad_alloc'), True),
    (MemoryError(), True),
    (RuntimeError('INVALID_ARGUMENT: shapes'), False),
    (ValueError('RESOURCE_EXHAUSTED: of a store'), False),
  ],
)
def test_where_memory_is_full_the_settings_that_take_it_are_named(error, is_full):
  explained = machine.explained(lambda: 'Most is asked for by x=1.')
  with pytest.raises(InputError if is_full else type(error)) as raised, explained:
    raise error
  named = (
    'Most is asked for by x=1. Lower ',
    'config.rollout.slots',
    'config.gradient.tokens_per_microbatch',
    ' --fit`',
  )
  assert all(name in str(raised.value) for name in named) == is_full


@pytest.mark.parametrize(
  ('flags', 'has_units'), [('avx512_bf16 amx_bf16 amx_tile', True), ('avx512_bf16 amx_int8', False)]
)
def test_amx_is_read_from_the_flags_of_the_cpu(flags, has_units, tmp_path):
  (tmp_path / 'cpuinfo').write_text(f'processor : 0\nflags : fpu {flags}\nbugs :\n')
  assert machine.has_bfloat16_units(tmp_path / 'cpuinfo') == has_units
  assert not machine.has_bfloat16_units(tmp_path / 'absent')
