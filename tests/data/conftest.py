"""Fixtures of the data tests."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data import questions


@pytest.fixture
def config(tmp_path):
  """Default field names, and a cache of the test's own."""
  return questions.DataConfig(cache_dir=str(tmp_path / 'cache'))


@pytest.fixture
def parquet(tmp_path):
  """Writes rows to a file in the test's folder; returns its path."""

  def write(*rows, name='x.parquet'):
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / name)
    return str(tmp_path / name)

  return write
