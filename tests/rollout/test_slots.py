"""Slots: resumed responses, caches kept between turns, and routes."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

from exgrpo_jax import packing
from exgrpo_jax.policy import kv_cache, model, sharding
from exgrpo_jax.rollout import decode_loop, resuming, routes, scheduler, scoring, token_sampling
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE, Request
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.rollout.slots import insertion_of
from tests.helpers import tiers
from tests.helpers.decoding import decoding_by, generated, plain_kernel
from tests.policy.test_kv_cache import SEVEN_B, empty_on
from tests.rollout import test_scheduler
from tests.rollout.test_scheduler import SPEC as OF_ONE_TURN
from tests.rollout.test_scheduler import assert_same_responses


def test_each_row_is_whole_in_exactly_one_pass(one_device):
  """Rows up to a quarter of the maximum length fit the short shape; others need the long one."""
  rows = {name: np.full(length, name, np.int32) for name, length in enumerate((90, 256, 80, 1, 30))}
  found = {}
  for tokens_PT, segments, starts, _ in resuming.packed(rows, 256, 8, one_device):
    assert tokens_PT.shape in ((2, 256), (8, 64))
    for name, start in starts:
      last = start + len(rows[name]) - 1
      found[name] = tokens_PT.flat[start : last + 1]
      assert segments.position_BT.flat[start] == 0
      assert segments.position_BT.flat[last] == len(rows[name]) - 1
  for name, tokens in rows.items():
    np.testing.assert_array_equal(found[name], tokens)
  assert list(resuming.packed({}, 256, 8, one_device)) == []


def test_the_layout_of_unpacked_rows_depends_only_on_their_own_length(one_device):
  def places(lengths):
    passes = resuming.packed_passes(np.array(lengths), 256, 8, one_device, shares=False)
    return {lengths[row]: one.shape.length for one in passes for (row,) in one.sequences}, sum(
      len(one.sequences) for one in passes
    )

  everything, count = places([90, 256, 80, 1, 30, 64, 65, 2, 3, 4, 5, 6, 7])
  assert count == 13 and everything == {n: 64 if n <= 64 else 256 for n in everything}
  assert places([30]) == ({30: 64}, 1)


def test_rows_that_span_steps_are_packed_with_little_padding():
  """A thousand rows with the paper's lengths, on sixteen shards."""
  mesh = jax.sharding.AbstractMesh((16, 1, 1, 4), ('data', 'fsdp', 'expert', 'tensor'))
  drawn = np.random.default_rng(0).lognormal(np.log(1024), np.log(8) / 2.33, 1000)
  length_R = 150 + drawn.astype(int).clip(1, 8192)
  passes = resuming.packed_passes(length_R, 9216, 1024, mesh)
  assert {one.shape[:2] for one in passes} == {(16, 9216), (16, 2304)}
  for one in passes:
    most = resuming.packed_rows(one.shape.count, 1024)
    assert sum(map(len, one.sequences)) <= most == 16 * 8
  assert sum(one.shape.num_tokens for one in passes) < 1.05 * length_R.sum()


# Three of sixteen slots are filled from two packed sequences of eight tokens: with tokens 2 to 5 of
# the first sequence, with the first three tokens of the second, and with its fifth token.
SLOTS = 16
SLOT, START, LENGTH = np.array([[9, 2, 4], [0, 8, 3], [SLOTS, 0, 5], [15, 12, 1]], np.int32).T


def unpacked(size):
  """Return a layer's arrays after unpacking, and the packed arrays, with axis S second."""
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


@pytest.mark.full
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
  """Three of four tokens are kept, with token p in slot p % 3."""
  with decoding_by('transposed'), jax.set_mesh(one_device):
    layer, packed = unpacked(3)
  for x, new in zip(layer, packed, strict=True):
    np.testing.assert_array_equal(x[9], new[0, [5, 3, 4]])
    np.testing.assert_array_equal(x[0], new[1, :3])


@pytest.mark.full
def test_on_a_tpu_only_one_layers_packed_cache_exists_at_a_time():
  pytest.importorskip('libtpu')
  from exgrpo_jax.capacity import devices

  config = dataclasses.replace(SEVEN_B, num_layers=12)
  mesh = sharding.make_mesh(
    sharding.DecodingConfig(data=16, tensor=4), devices.slice_devices('v5e:8x8')
  )
  spec = dataclasses.replace(OF_ONE_TURN, slots=256, max_prompt=1024, max_response=1024)
  shape, _ = resuming.packed_shapes(spec.longest_row, spec.slots, mesh)
  layout = sharding.batch(mesh, shape.count)
  tokens_PT = jax.ShapeDtypeStruct((shape.count, shape.length), 'int32', sharding=layout)
  nothing = insertion_of([], spec.slots, resuming.packed_rows(shape.count, spec.slots))
  state, params = empty_on(mesh, config, spec, spec.longest_row), model.decode_shapes(config, mesh)
  segments = packing.Segments(tokens_PT, tokens_PT)
  with jax.set_mesh(mesh):
    program = resuming.resume.lower(config, params, state, tokens_PT, segments, nothing).compile()
  # Bytes of a layer's packed keys and values of all sequences, as each chip stores them.
  layer = shape.num_tokens * 2 * config.head_size * 2
  assert len(re.findall(r' while\(', program.as_text())) == config.num_layers  # over own rows
  assert program.memory_analysis().temp_size_in_bytes < 2 * layer


# ---- Several turns in the slot engine, with parked caches ----


CONFIG = dataclasses.replace(test_scheduler.CONFIG, num_layers=2)
EPISODES, TURNS, TURN = 40, 3, 12
SPEC = decode_loop.DecodeSpec(
  distribution=token_sampling.Distribution(),
  slots=32,  # so that two slots are refilled together
  prompts=32,
  max_prompt=8,
  max_response=120,
  eos_ids=(3, 7),
  pad_id=0,
)


@pytest.fixture(scope='module')
def params(mesh):
  return test_scheduler.make_params(CONFIG, mesh)


def prompt(episode):
  return np.array([5 + episode % 30] * (1 + episode % 8), np.int32)


def observation(episode, turn):
  """Make an observation. Some contain end tokens, and one is longer than a sync's decoding."""
  rng = np.random.default_rng([episode, turn])
  return rng.integers(0, CONFIG.vocab_size, 70 if episode == turn else 1 + episode % 6, np.int32)


def play(params, mesh, parked, delay=lambda _: 0, config=CONFIG, keeps_routes=False, drafts='0'):
  """Play all episodes and return each one's final response, including observations."""
  found, turns, waiting, syncs = {}, collections.Counter(), [], collections.Counter()
  episodes = list(range(EPISODES))  # of each request

  def on_finish(index, response):
    episode = episodes[index]
    found[episode] = response
    turns[episode] += 1
    if turns[episode] < TURNS:
      waiting.append((syncs[''] + delay(episode), episode, index))

  def more(is_idle):
    syncs[''] += 1
    due = [one for one in waiting if is_idle or one[0] <= syncs['']]
    waiting[:] = [one for one in waiting if one not in due]
    episodes.extend(episode for _, episode, _ in due)
    return [request(episode, turns[episode], found[episode], index) for _, episode, index in due]

  def request(episode, turn, before=EMPTY_RESPONSE, follows=None):
    said = observation(episode, turn) if turn else np.zeros(0, np.int32)
    begun = before.observing(said)
    limit = len(begun.tokens) + TURN
    return Request(prompt(episode), episode, 0, 0, limit, begun, follows=follows)

  engine = SlotEngine(
    config,
    dataclasses.replace(SPEC, parked=parked, keeps_routes=keeps_routes, drafts=drafts),
    mesh,
    lambda _: jax.random.key(5),
    resumes=True,
  )
  decoding = model.decode_layout(config, params, sharding.Meshes(mesh, mesh))
  engine.generate(decoding, [request(e, 0) for e in range(EPISODES)], on_finish, more)
  assert all(turns[episode] == TURNS for episode in range(EPISODES))
  return [found[episode] for episode in range(EPISODES)]


@pytest.fixture
def resumed(monkeypatch):
  """Record how many rows each call of `resume` fills."""
  counts, resume = [], resuming.resume

  def watched(config, params, state, tokens_PT, segments, insertion, routes_PTLC):
    counts.append(int((insertion.slot_R < SPEC.slots).sum()))
    return resume(config, params, state, tokens_PT, segments, insertion, routes_PTLC)

  monkeypatch.setattr(resuming, 'resume', watched)
  return counts


@pytest.mark.full
@pytest.mark.parametrize(
  'layers', tiers.full_after_first(['f', 'sf', 's'])
)  # windows shorter than a turn's observation
def test_parked_caches_give_the_same_responses_as_prefilling_again(params, mesh, resumed, layers):
  config = dataclasses.replace(CONFIG, layers=layers, window=9 if 's' in layers else 0)
  again, computed = play(params, mesh, parked=0, config=config), sum(resumed)
  resumed.clear()
  kept = play(params, mesh, parked=30, config=config)
  assert computed == EPISODES * (TURNS - 1)
  assert sum(resumed) == (EPISODES - 30) * (TURNS - 1)  # episodes that were not parked
  assert_same_responses(kept, again, 1e-5)


@pytest.mark.full
def test_the_order_of_answers_changes_no_bit(params, mesh):
  at_once = play(params, mesh, parked=EPISODES)
  later = play(params, mesh, parked=EPISODES, delay=lambda episode: episode * 7 % 5)
  assert_same_responses(at_once, later)


@pytest.mark.full
@pytest.mark.parametrize('drafts', ['0', '3'])
def test_decoding_turns_in_parts_changes_no_bit(params, mesh, monkeypatch, drafts):
  """Observations are read in parts, too."""
  expected = play(params, mesh, parked=EPISODES, drafts=drafts)
  monkeypatch.setattr(scheduler, '_PART', 0)
  assert_same_responses(play(params, mesh, parked=EPISODES, drafts=drafts), expected)


@pytest.mark.full
@pytest.mark.parametrize('backend', ['dense', 'ragged'])
def test_parking_works_with_accelerator_caches(params, mesh, backend):
  expected = play(params, mesh, parked=0)
  with decoding_by(backend), plain_kernel():
    found = play(params, mesh, parked=EPISODES)
  assert_same_responses(found, expected, 1e-4)


# ---- The experts that the sampler chose ----


EXPERTS = dataclasses.replace(
  test_scheduler.CONFIG, num_layers=2, num_experts=8, experts_per_token=2, mlp_width=16
)
NONE = 255


@pytest.fixture
def routed(one_device):
  return test_scheduler.make_params(EXPERTS, one_device)


@pytest.fixture
def others(routed):
  """Another policy, whose router chooses other experts."""
  layers = routed['layers']
  turned = layers['mlp'] | {'router_DE': -layers['mlp']['router_DE']}
  return routed | {'layers': layers | {'mlp': turned}}


def of_the_router(routed, mesh, tokens_T):
  """Return the router's choices in one pass over a row."""
  decoding = model.decode_layout(EXPERTS, routed, sharding.Meshes(mesh, mesh))
  prefill = jax.jit(model.prefill, static_argnums=(0, 4))
  padded_BT = np.pad(tokens_T, (0, 160 - len(tokens_T)))[None]
  with jax.set_mesh(mesh):
    *_, routes_BTLC = prefill(EXPERTS, decoding, padded_BT, np.array([len(tokens_T)]), 160)
  return np.asarray(routes_BTLC)[0, : len(tokens_T)]


@pytest.mark.full
@pytest.mark.parametrize('parked', [0, 30])  # no episodes parked, or most of them
def test_every_token_stores_the_routers_choice(routed, one_device, parked):
  found = play(routed, one_device, parked, config=EXPERTS, keeps_routes=True)
  for episode in (0, 1, 7, 35):
    response = found[episode]
    tokens_T = np.concatenate([prompt(episode), response.tokens])
    assert response.routes.dtype == np.uint8
    np.testing.assert_array_equal(response.routes, of_the_router(routed, one_device, tokens_T))


@pytest.mark.full
def test_resumed_responses_keep_their_routes_and_scoring_uses_them(routed, others, one_device):
  """Tokens from an earlier policy keep its experts in the cache and in later passes."""
  mesh = one_device
  spec = dataclasses.replace(test_scheduler.SPEC, keeps_routes=True, slots=2, eos_ids=(40,))
  prompts = test_scheduler.PROMPTS[:4]

  def sample(routed, **changes):
    decoding = model.decode_layout(EXPERTS, routed, sharding.Meshes(mesh, mesh))
    rows = prompts, test_scheduler.ROWS[:4], test_scheduler.SAMPLES[:4]
    return generated(EXPERTS, decoding, *rows, test_scheduler.KEY, spec, mesh, **changes)

  limits = [3, 12, 12, 12]
  begun = sample(routed, limits=limits, resumes=True, on_finish=lambda *_: True)
  assert {len(one.tokens) for one in begun} == {0, 3}  # two have begun, and one of them is complete
  unfinished = [dataclasses.replace(one, is_complete=False) for one in begun]
  whole = sample(others, resumes=True, begun=unfinished)
  rows = [(prompt, one.tokens) for prompt, one in zip(prompts, whole)]
  known = [one.routes for one in whole]
  for prompt, one, before in zip(prompts, whole, begun):
    assert len(one.routes) == len(prompt) + 12 and one.routes.max() < EXPERTS.num_experts
    if before.routes is not None:
      np.testing.assert_array_equal(one.routes[: len(before.routes)], before.routes)

  def gaps(known):
    with jax.set_mesh(mesh):
      spec = scoring.ScoreSpec(EXPERTS, mesh, 64, 64, 1.0, 64, keeps_routes=True)
      logps, _ = scoring.score(spec, others, rows, known)
    new = [len(one.tokens) for one in begun]
    return [np.abs(logp - one.logp)[start:].max() for logp, one, start in zip(logps, whole, new)]

  assert max(gaps(known)) < 1e-5
  assert max(gaps([None] * 4)[:2]) > 1e-3  # rows with tokens from both policies


def test_known_routes_are_kept_and_recorded_routes_fill_the_rest():
  begun_TLC = np.array([[[1, 2]], [[NONE, NONE]]], np.uint8)
  found_SLC = np.array([[[5, 6]], [[3, 4]], [[7, 0]], [[9, 9]]], np.uint8)
  whole_TLC = routes.completed(begun_TLC, found_SLC, cached=3, length=4)
  assert whole_TLC[:, 0].tolist() == [[1, 2], [3, 4], [7, 0], [NONE, NONE]]
  assert routes.completed(begun_TLC, None, 0, 4) is begun_TLC
  padded_RTLC = routes.padded(EXPERTS, [whole_TLC.repeat(2, axis=1), None], 5)
  assert padded_RTLC.shape == (2, 5, 2, 2) and (padded_RTLC[1] == NONE).all()
  observed = dataclasses.replace(EMPTY_RESPONSE, routes=begun_TLC).observing(np.arange(3))
  assert observed.routes[:, 0].tolist() == [[1, 2], *[[NONE, NONE]] * 4]
