"""Fixtures of the tests that read checkpoints."""

import pathlib
import shutil

import pytest

from exgrpo_jax.policy import sharding
from tests.helpers.paths import CHECKPOINTS


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=1, tensor=-1))


@pytest.fixture
def copy_checkpoint(tmp_path):
  """A function that copies a stored checkpoint, so that the test may damage it."""

  def copy(name):
    return pathlib.Path(shutil.copytree(CHECKPOINTS / name, tmp_path / name))

  return copy
