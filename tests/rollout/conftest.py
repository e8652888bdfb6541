"""Fixtures shared by the rollout tests."""

import pytest

from exgrpo_jax.policy import sharding


@pytest.fixture(scope='session')
def mesh():
  """A mesh that splits rows over all devices."""
  return sharding.make_mesh(sharding.TrainingConfig(data=-1, fsdp=1, tensor=1))
