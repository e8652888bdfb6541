"""Checkpoints written by make_checkpoints.py, and helpers to read and change them."""

import contextlib
import math
import pathlib
from unittest import mock

from safetensors.numpy import load_file, save_file

from exgrpo_jax.huggingface import architecture, weights
from tests.helpers.paths import CHECKPOINTS

NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
SHARDED, SINGLE = 'llama_shards', 'qwen2_seven_queries_a_key'  # in three files, and in one
INDEX = 'model.safetensors.index.json'


def read_config(folder, dtype='float32'):
  """Return the model.ShapeConfig of a checkpoint."""
  return architecture.parse(architecture.read_json(folder), str(folder), dtype)


def read_tensors(folder):
  """Return {name: array} for all safetensors files in a folder."""
  return {
    name: value
    for file in sorted(pathlib.Path(folder).glob('*.safetensors'))
    for name, value in load_file(file).items()
  }


@contextlib.contextmanager
def recorded_reads():
  """Yield a list that records each matrix slice read by `weights.load`: (tensor, its size)."""
  file_slices, reads = weights._file_slices, []

  def record(tensor, shape, index):
    slices, block_shape = file_slices(tensor, shape, index)
    reads.append((tensor, math.prod(block_shape)))
    return slices, block_shape

  with mock.patch.object(weights, '_file_slices', record):
    yield reads


def rewrite(file, change):
  """Apply `change` to the dict of a safetensors file's tensors."""
  content = load_file(file)
  change(content)
  save_file(content, file, {'format': 'pt'})
