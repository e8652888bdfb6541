"""What the tests of the room share."""

import pytest

from exgrpo_jax.configs import qwen2_5_math_1_5b
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.policy import sharding


@pytest.fixture(scope='package')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))


@pytest.fixture(scope='package')
def parsed():
  """The configuration of the smallest backbone."""
  return parse_config(qwen2_5_math_1_5b.get_config())
