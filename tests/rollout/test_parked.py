"""Turn after turn in the slot engine, with caches that are kept while a row has no slot."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import decode_loop, filling, scheduler, token_sampling
from exgrpo_jax.rollout.sampler import UNBEGUN, Request
from exgrpo_jax.rollout.scheduler import SlotEngine
from tests.helpers.decoding import decoding_by, plain_kernel
from tests.rollout import test_scheduler

CONFIG = dataclasses.replace(test_scheduler.CONFIG, num_layers=2)
EPISODES, TURNS, TURN = 40, 3, 12
SPEC = decode_loop.DecodeSpec(
  distribution=token_sampling.Distribution(),
  slots=32,  # so that two are refilled together, and one goes on after its end until both have
  prompts=32,
  max_prompt=8,
  max_response=120,
  eos_ids=(3, 7),
  pad_id=0,
)


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=-1, fsdp=1, tensor=1))


@pytest.fixture(scope='module')
def params(mesh):
  return test_scheduler.make_params(CONFIG, mesh)


def prompt(episode):
  return np.array([5 + episode % 30] * (1 + episode % 8), np.int32)


def observation(episode, turn):
  """Some with end tokens, one longer than what is decoded between two syncs."""
  rng = np.random.default_rng([episode, turn])
  return rng.integers(0, CONFIG.vocab_size, 70 if episode == turn else 1 + episode % 6, np.int32)


def play(params, mesh, parked, delay=lambda _: 0, config=CONFIG):
  """The last response of each episode: its turns, with what was observed after each."""
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

  def request(episode, turn, before=UNBEGUN, follows=None):
    said = observation(episode, turn) if turn else np.zeros(0, np.int32)
    begun = before.observing(said)
    limit = len(begun.tokens) + TURN
    return Request(prompt(episode), episode, 0, 0, limit, begun, follows=follows)

  engine = SlotEngine(
    config,
    dataclasses.replace(SPEC, parked=parked),
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
  """How many rows each call of `resume` fills."""
  counts, resume = [], filling.resume

  def watched(config, params, state, tokens_PT, segments, insertion, routes_PTLC):
    counts.append(int((insertion.slot_R < SPEC.slots).sum()))
    return resume(config, params, state, tokens_PT, segments, insertion, routes_PTLC)

  monkeypatch.setattr(filling, 'resume', watched)
  return counts


@pytest.mark.parametrize('layers', ['f', 'sf', 's'])  # windows shorter than a turn's observation
def test_a_cache_that_was_kept_says_what_one_computed_again_says(params, mesh, resumed, layers):
  config = dataclasses.replace(CONFIG, layers=layers, window=9 if 's' in layers else 0)
  again, computed = play(params, mesh, parked=0, config=config), sum(resumed)
  resumed.clear()
  kept = play(params, mesh, parked=30, config=config)
  assert computed == EPISODES * (TURNS - 1)
  assert sum(resumed) == (EPISODES - 30) * (TURNS - 1)  # of those without room
  for one, other in zip(kept, again, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    for name in ('logp', 'entropy'):
      np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5)


def test_the_order_of_answers_changes_no_bit(params, mesh):
  at_once = play(params, mesh, parked=EPISODES)
  later = play(params, mesh, parked=EPISODES, delay=lambda episode: episode * 7 % 5)
  for one, other in zip(at_once, later, strict=True):
    for name in ('tokens', 'logp', 'entropy'):
      np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_the_parts_in_which_turns_are_decoded_change_no_bit(params, mesh, monkeypatch):
  """Observations are read in parts, too."""
  expected = play(params, mesh, parked=EPISODES)
  monkeypatch.setattr(scheduler, '_PART', 0)
  for one, other in zip(play(params, mesh, parked=EPISODES), expected, strict=True):
    for name in ('tokens', 'logp', 'entropy'):
      np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize('backend', ['dense', 'ragged'])
def test_caches_of_accelerators_are_kept_too(params, mesh, backend):
  expected = play(params, mesh, parked=0)
  with decoding_by(backend), plain_kernel():
    found = play(params, mesh, parked=EPISODES)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-4)
