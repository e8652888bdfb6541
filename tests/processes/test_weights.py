"""Weights on several hosts: each host reads its share, and the first host writes the files."""

import json
import shutil

import numpy as np
import pytest

from tests.helpers.devices import on_two_hosts
from tests.helpers.paths import CHECKPOINTS
from tests.huggingface.stored_checkpoints import INDEX, SHARDED, read_tensors, rewrite

pytestmark = pytest.mark.full


def test_two_hosts_read_half_each_and_the_first_writes_all(tmp_path):
  """Parameters are sharded over eight devices, four on each host."""
  other, name = tmp_path / SHARDED, 'model.norm.weight'
  shutil.copytree(CHECKPOINTS / SHARDED, other)
  file = json.loads((other / INDEX).read_text())['weight_map'][name]
  rewrite(other / file, lambda content: content.update({name: 2 * content[name]}))
  on_two_hosts(f"""
import math, pathlib, pytest
from exgrpo_jax.commands import export
from exgrpo_jax.huggingface import architecture, weights
from exgrpo_jax.policy import sharding
from exgrpo_jax.errors import InputError
from tests.huggingface import stored_checkpoints

folder = pathlib.Path({str(CHECKPOINTS / SHARDED)!r})
config = stored_checkpoints.read_config(folder)
mesh = sharding.make_mesh(sharding.TrainingConfig(1, 8, 1))
with stored_checkpoints.recorded_reads() as reads:
  params = weights.load(folder, config, mesh)
matrices = [(tensor, size) for tensor, size in reads if len(tensor.shape) == 2]
assert len(matrices) == 4 * (2 * 7 + 2)  # devices, kernels of two layers, both embeddings
assert all(size == math.prod(tensor.shape) // 8 for tensor, size in matrices)
weights.save({str(tmp_path)!r} + f'/{{jax.process_index()}}', config, params,
             architecture.read_json(folder), 'float32', shard_bytes=30_000)
with pytest.raises(InputError, match='the weights differ between host 0 and host 1'):
  weights.load((folder, {str(other)!r})[jax.process_index()], config, mesh)
# The folder appears once the first host has written all; the others don't wait for it.
out = pathlib.Path({str(tmp_path / 'model')!r})
assert export.write_model({str(CHECKPOINTS / 'qwen2_tied')!r}, out) == 'float32'
""")
  assert sorted(path.name for path in tmp_path.iterdir()) == ['0', other.name, 'model']
  expected, written = read_tensors(CHECKPOINTS / SHARDED), read_tensors(tmp_path / '0')
  assert expected.keys() == written.keys()
  for tensor in expected:
    np.testing.assert_array_equal(expected[tensor], written[tensor], strict=True)
