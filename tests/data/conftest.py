"""Fixtures of the data tests."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data import questions


@pytest.fixture
def config(tmp_path):
  """Default column settings, with a separate cache for each test."""
  return questions.DataConfig(cache_dir=str(tmp_path / 'cache'))


@pytest.fixture
def parquet(tmp_path):
  """A function that writes rows to a parquet file and returns its path."""

  def write(*rows, name='x.parquet'):
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / name)
    return str(tmp_path / name)

  return write
