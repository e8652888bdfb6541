"""Columns of a run's tables as arrays."""

import numpy as np
import pyarrow as pa


def known(column: pa.ChunkedArray) -> np.ndarray:
  """Numbers or booleans as float64; NaN where the column is null."""
  if pa.types.is_boolean(column.type):
    column = column.cast(pa.int8())
  return column.cast(pa.float64()).to_numpy()


def flags(column: pa.ChunkedArray) -> np.ndarray:
  """Booleans, none of them null."""
  return column.to_numpy(zero_copy_only=False)
