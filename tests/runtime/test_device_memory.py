"""JAX takes nine tenths of a GPU's memory, unless somebody said how much."""

import os

import pytest

from exgrpo_jax.runtime import device_memory


@pytest.mark.parametrize(
  'name', [None, 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION']
)
def test_the_environment_goes_before_the_share(name, monkeypatch):
  chosen = {} if name is None else {name: '.5'}
  monkeypatch.setattr(os, 'environ', dict(chosen))
  device_memory.take_share()
  assert os.environ == (chosen or {'XLA_CLIENT_MEM_FRACTION': '0.9'})
