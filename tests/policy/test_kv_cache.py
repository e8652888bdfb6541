"""Every layout of the cache samples the same tokens, and on a TPU is written without a loop."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import decode_loop, scheduler
from tests.helpers.decoding import decoding_by
from tests.rollout import test_scheduler
from tests.rollout.test_scheduler import CONFIG, KEY, NEVER, PROMPTS, ROWS, SAMPLES, SPEC


@pytest.mark.parametrize(
  ('platform', 'backend'),
  [('cpu', 'transposed'), ('gpu', 'dense'), ('cuda', 'dense'), ('tpu', 'dense')],
)
def test_the_platform_decides_the_backend(platform, backend):
  assert kv_cache.backend_for(platform) == backend


@pytest.fixture(scope='module')
def generate(one_device):
  params = test_scheduler.make_params(CONFIG, one_device)
  decoding = model.decode_layout(CONFIG, params, one_device)

  def call(order=range(7), limits=None, **changes):
    rows = [[values[i] for i in order] for values in (PROMPTS, ROWS, SAMPLES)]
    spec = dataclasses.replace(SPEC, **changes)
    return scheduler.generate(
      CONFIG, decoding, *rows, KEY, spec, one_device, limits=limits and [limits[i] for i in order]
    )

  return call


# Rows that end early, caches that grow and shrink, and slots that are given up.
LIMITS = [1, 3, 300, 2, 80, 1, 1]
LONG = dict(limits=LIMITS, max_response=300, eos_ids=(NEVER,))


@pytest.fixture(scope='module')
def expected(generate):
  return generate(), generate(**LONG)


@pytest.mark.parametrize('backend', ['dense'])
def test_every_layout_samples_the_same_tokens_with_the_same_logp(generate, expected, backend):
  order = [6, 2, 0, 5, 3, 1, 4]
  responses, long_responses = expected
  with decoding_by(backend):
    cases = [
      (generate(), responses),
      (generate(order=order, slots=2), [responses[i] for i in order]),
      (generate(**LONG, slots=3), long_responses),
      (generate(order=order, **LONG, slots=32), [long_responses[i] for i in order]),
    ]
  for found, wanted in cases:
    for ours, theirs in zip(found, wanted, strict=True):
      np.testing.assert_array_equal(ours.tokens, theirs.tokens)
      np.testing.assert_allclose(ours.logp, theirs.logp, atol=2e-5)


def test_a_row_that_has_ended_writes_within_every_cache(monkeypatch, generate):
  """Its last position may lie beyond a cache that has become shorter."""
  free, decode = [], decode_loop.decode

  def watched(*args):
    state, decoded = decode(*args)
    free.append(np.asarray(state.position_B)[~np.asarray(state.live_B)])
    return state, decoded

  monkeypatch.setattr(decode_loop, 'decode', watched)
  generate(**LONG, slots=3)
  assert sum(map(len, free)) > 6 and not np.concatenate(free).any()


SEVEN_B = dataclasses.replace(
  CONFIG,
  vocab_size=1024,
  width=512,
  num_layers=2,
  num_heads=28,
  num_kv_heads=4,
  head_size=128,
  mlp_width=1024,
  dtype='bfloat16',
)


def compiled_for(topology, config, slots, length, data, tensor):
  """`decode_loop.decode`, compiled for the slice."""
  pytest.importorskip('libtpu')
  from exgrpo_jax.performance import chips

  mesh = sharding.make_mesh(
    sharding.Config(data=data, fsdp=1, tensor=tensor), chips.slice_devices(topology)
  )
  spec = dataclasses.replace(SPEC, slots=slots, max_prompt=length // 2, max_response=length // 2)
  with jax.set_mesh(mesh):
    layouts = decode_loop.empty.lower(config, spec, length).compile().output_shardings
    state = jax.tree.map(
      lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
      jax.eval_shape(lambda: decode_loop.empty(config, spec, length)),
      layouts,
    )
    key = jax.eval_shape(jax.random.key, 0)
    return decode_loop.decode.lower(
      config, spec, model.decode_shapes(config, mesh), key, state, 1
    ).compile()


def test_a_decode_step_on_a_tpu_has_no_loop_and_no_copy_of_the_cache():
  slots, length = 256, 2048
  program = compiled_for('v5e:8x8', SEVEN_B, slots, length, data=16, tensor=4)
  assert len(re.findall(r' while\(', program.as_text())) == 1  # over tokens
  layer = slots // 16 * length * 2 * SEVEN_B.head_size * 2  # bytes of a chip's keys and values
  memory = program.memory_analysis()
  assert memory.argument_size_in_bytes > SEVEN_B.num_layers * layer
  assert memory.temp_size_in_bytes < layer / 2
