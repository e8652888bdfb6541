"""Fixtures of the data tests."""

import pytest

from exgrpo_jax.data import questions


@pytest.fixture
def config(tmp_path):
  """Default field names, and a cache of the test's own."""
  return questions.Config(cache_dir=str(tmp_path / 'cache'))
