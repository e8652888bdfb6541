"""JAX takes nine tenths of a GPU, unless told otherwise; full memory is told in one line."""

import os

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import device_memory


@pytest.mark.parametrize(
  'name', [None, 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION']
)
def test_the_environment_goes_before_the_share(name, monkeypatch):
  chosen = {} if name is None else {name: '.5'}
  monkeypatch.setattr(os, 'environ', dict(chosen))
  device_memory.take_share()
  assert os.environ == (chosen or {'XLA_CLIENT_MEM_FRACTION': '0.9'})


@pytest.mark.parametrize(
  'error',
  [
    RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 128000000000 bytes.\nDetails'),
    RuntimeError('INTERNAL: std::bad_alloc'),
    MemoryError(),
  ],
)
def test_where_memory_is_full_the_settings_that_take_it_are_named(error):
  with pytest.raises(InputError) as refused, device_memory.explained():
    raise error
  for name in ('config.rollout.slots', 'config.gradient.tokens_per_microbatch', ' --fit`'):
    assert name in str(refused.value)
  assert 'Details' not in str(refused.value)


@pytest.mark.parametrize(
  'error', [RuntimeError('INVALID_ARGUMENT: shapes'), ValueError('RESOURCE_EXHAUSTED: of a store')]
)
def test_other_errors_are_not_taken_for_full_memory(error):
  with pytest.raises(type(error), match=str(error)), device_memory.explained():
    raise error
