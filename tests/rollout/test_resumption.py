"""Responses that go on are prefilled together, packed, each right into its slot."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from exgrpo_jax import packing
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import decode_loop, filling, slots
from exgrpo_jax.rollout.slots import insertion_of
from tests.helpers.decoding import decoding_by
from tests.policy.test_kv_cache import SEVEN_B
from tests.rollout.test_scheduler import SPEC


def test_every_row_is_in_a_pass_once_and_whole(one_device):
  """Four of at most a quarter of the longest, and one that is longer."""
  rows = {name: np.full(length, name, np.int32) for name, length in enumerate((90, 256, 80, 1, 30))}
  found = {}
  for tokens_PT, segments, starts, _ in slots.packed(rows, 256, 8, one_device):
    assert tokens_PT.shape in ((2, 256), (8, 64))
    for name, start in starts:
      last = start + len(rows[name]) - 1
      found[name] = tokens_PT.flat[start : last + 1]
      assert segments.position_BT.flat[start] == 0
      assert segments.position_BT.flat[last] == len(rows[name]) - 1
  for name, tokens in rows.items():
    np.testing.assert_array_equal(found[name], tokens)
  assert list(slots.packed({}, 256, 8, one_device)) == []


def test_rows_alone_are_laid_out_by_their_own_length_whatever_is_beside_them(one_device):
  def places(lengths):
    passes = slots.packed_passes(np.array(lengths), 256, 8, one_device, alone=True)
    return {lengths[row]: one.shape.length for one in passes for (row,) in one.sequences}, sum(
      len(one.sequences) for one in passes
    )

  everything, count = places([90, 256, 80, 1, 30, 64, 65, 2, 3, 4, 5, 6, 7])
  assert count == 13 and everything == {n: 64 if n <= 64 else 256 for n in everything}
  assert places([30]) == ({30: 64}, 1)


def test_rows_that_span_steps_are_packed_with_little_padding():
  """A thousand of the paper's, on sixteen shards."""
  mesh = jax.sharding.AbstractMesh((16, 1, 1, 4), ('data', 'fsdp', 'expert', 'tensor'))
  drawn = np.random.default_rng(0).lognormal(np.log(1024), np.log(8) / 2.33, 1000)
  length_R = 150 + drawn.astype(int).clip(1, 8192)
  passes = slots.packed_passes(length_R, 9216, 1024, mesh)
  assert {one.shape[:2] for one in passes} == {(16, 9216), (16, 2304)}
  for one in passes:
    most = slots.packed_rows(one.shape.count, 1024)
    assert sum(map(len, one.sequences)) <= most == 16 * 8
  assert sum(one.shape.num_tokens for one in passes) < 1.05 * length_R.sum()


# Keys and values of sixteen slots of which three are filled: with tokens 2 to 5 of the first of two
# sequences of eight, with the first three of the second, and with its fifth.
SLOTS = 16
SLOT, START, LENGTH = np.array([[9, 2, 4], [0, 8, 3], [SLOTS, 0, 5], [15, 12, 1]], np.int32).T


def unpacked(size):
  """A layer's arrays, by position along their axis S, and those that were packed."""
  rng = np.random.default_rng(0)
  key_PTGH, value_PTGH = rng.normal(size=(2, 2, 8, 2, 4)).astype(np.float32)
  layer = kv_cache.empty(SLOTS, 2, 4, size, 'float32')
  packed = kv_cache.from_sequence(key_PTGH, value_PTGH)
  copy = jax.jit(kv_cache.unpack_rows, static_argnums=5)
  layer = copy(layer, packed, SLOT, START, LENGTH, size)

  def positions_first(part):
    return [
      np.moveaxis(np.asarray(x), kv_cache._axes(name).index('S'), 1)
      for name, x in part._asdict().items()
    ]

  return positions_first(layer), positions_first(packed)


@pytest.mark.parametrize('backend', ['transposed', 'dense', 'ragged'])
def test_packed_rows_are_copied_to_their_slots(one_device, backend):
  with decoding_by(backend), jax.set_mesh(one_device):
    layer, packed = unpacked(8)
  for x, new in zip(layer, packed, strict=True):
    np.testing.assert_array_equal(x[9, :4], new[0, 2:6])
    np.testing.assert_array_equal(x[0, :3], new[1, :3])
    np.testing.assert_array_equal(x[15, :1], new[1, 4:5])
    assert not x[1:9].any() and not x[10:15].any()


def test_a_window_keeps_the_last_tokens_of_packed_rows(one_device):
  """Three of four, token p in place p % 3."""
  with decoding_by('transposed'), jax.set_mesh(one_device):
    layer, packed = unpacked(3)
  for x, new in zip(layer, packed, strict=True):
    np.testing.assert_array_equal(x[9], new[0, [5, 3, 4]])
    np.testing.assert_array_equal(x[0], new[1, :3])


@pytest.mark.full
def test_on_a_tpu_the_packed_caches_of_all_layers_never_exist_at_once():
  pytest.importorskip('libtpu')
  from exgrpo_jax.capacity import devices

  config = dataclasses.replace(SEVEN_B, num_layers=12)
  mesh = sharding.make_mesh(
    sharding.DecodingConfig(data=16, tensor=4), devices.slice_devices('v5e:8x8')
  )
  spec = dataclasses.replace(SPEC, slots=256, max_prompt=1024, max_response=1024)
  shape, _ = slots.packed_shapes(spec.longest_row, spec.slots, mesh)
  layout = sharding.batch(mesh, shape.count)
  tokens_PT = jax.ShapeDtypeStruct((shape.count, shape.length), 'int32', sharding=layout)
  nothing = insertion_of([], spec.slots, slots.packed_rows(shape.count, spec.slots))
  with jax.set_mesh(mesh):
    empty = functools.partial(decode_loop.empty, config, spec, spec.longest_row)
    layouts, _ = jax.jit(empty).lower().compile().output_shardings
    state = jax.tree.map(
      lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
      jax.eval_shape(empty)[0],
      layouts,
    )
    program = filling.resume.lower(
      config,
      model.decode_shapes(config, mesh),
      state,
      tokens_PT,
      packing.Segments(tokens_PT, tokens_PT),
      nothing,
    ).compile()
  # Bytes of a layer's packed keys and values, which each chip has of all sequences.
  layer = shape.num_tokens * 2 * config.head_size * 2
  assert len(re.findall(r' while\(', program.as_text())) == config.num_layers  # over own rows
  assert program.memory_analysis().temp_size_in_bytes < 2 * layer
