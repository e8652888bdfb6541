"""The experts that the sampler chose: which tokens have them, and that other passes use them."""

import dataclasses

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import routes, scoring
from exgrpo_jax.rollout.sampler import UNBEGUN
from tests.helpers.decoding import generated
from tests.rollout import test_parked, test_scheduler

CONFIG = dataclasses.replace(
  test_scheduler.CONFIG, num_layers=2, num_experts=8, experts_per_token=2, mlp_width=16
)
NONE = 255


@pytest.fixture
def params(one_device):
  return test_scheduler.make_params(CONFIG, one_device)


@pytest.fixture
def others(params):
  """Another policy, whose router chooses other experts."""
  layers = params['layers']
  turned = layers['mlp'] | {'router_DE': -layers['mlp']['router_DE']}
  return params | {'layers': layers | {'mlp': turned}}


def of_the_router(params, mesh, tokens_T):
  """What the router chooses in one pass over a row."""
  decoding = model.decode_layout(CONFIG, params, sharding.Meshes(mesh, mesh))
  prefill = jax.jit(model.prefill, static_argnums=(0, 4))
  padded_BT = np.pad(tokens_T, (0, 160 - len(tokens_T)))[None]
  with jax.set_mesh(mesh):
    *_, routes_BTLC = prefill(CONFIG, decoding, padded_BT, np.array([len(tokens_T)]), 160)
  return np.asarray(routes_BTLC)[0, : len(tokens_T)]


@pytest.mark.parametrize('parked', [0, 30])  # caches computed again after a turn, or mostly kept
def test_every_token_of_a_row_has_the_routers_choice(monkeypatch, params, one_device, parked):
  spec = dataclasses.replace(test_parked.SPEC, keeps_routes=True)
  monkeypatch.setattr(test_parked, 'SPEC', spec)
  found = test_parked.play(params, one_device, parked, config=CONFIG)
  for episode in (0, 1, 7, 35):
    response = found[episode]
    tokens_T = np.concatenate([test_parked.prompt(episode), response.tokens])
    assert response.routes.dtype == np.uint8
    np.testing.assert_array_equal(response.routes, of_the_router(params, one_device, tokens_T))


def test_resumed_responses_keep_their_routes_and_scoring_follows_them(params, others, one_device):
  """Tokens of an earlier policy stay with its experts, as the cache that later ones see."""
  mesh = one_device
  spec = dataclasses.replace(test_scheduler.SPEC, keeps_routes=True, slots=2, eos_ids=(40,))
  prompts = test_scheduler.PROMPTS[:4]

  def sample(params, **changes):
    decoding = model.decode_layout(CONFIG, params, sharding.Meshes(mesh, mesh))
    rows = prompts, test_scheduler.ROWS[:4], test_scheduler.SAMPLES[:4]
    return generated(CONFIG, decoding, *rows, test_scheduler.KEY, spec, mesh, **changes)

  limits = [3, 12, 12, 12]
  begun = sample(params, limits=limits, resumes=True, on_finish=lambda *_: True)
  assert {len(one.tokens) for one in begun} == {0, 3}  # two began, one of them is complete
  unfinished = [dataclasses.replace(one, is_complete=False) for one in begun]
  whole = sample(others, resumes=True, begun=unfinished)
  rows = [(prompt, one.tokens) for prompt, one in zip(prompts, whole)]
  known = [one.routes for one in whole]
  for prompt, one, before in zip(prompts, whole, begun):
    assert len(one.routes) == len(prompt) + 12 and one.routes.max() < CONFIG.num_experts
    if before.routes is not None:
      np.testing.assert_array_equal(one.routes[: len(before.routes)], before.routes)

  def gaps(known):
    options = dict(limit=64, tokens_per_pass=64, pad_id=0, temperature=1.0, logit_chunk=64)
    with jax.set_mesh(mesh):
      logps, _ = scoring.score(CONFIG, others, mesh, rows, known=known, **options)
    new = [len(one.tokens) for one in begun]
    return [np.abs(logp - one.logp)[start:].max() for logp, one, start in zip(logps, whole, new)]

  assert max(gaps(known)) < 1e-5
  assert max(gaps([None] * 4)[:2]) > 1e-3  # of rows that two policies wrote


def test_what_is_known_stays_and_what_was_found_fills_the_rest():
  begun_TLC = np.array([[[1, 2]], [[NONE, NONE]]], np.uint8)
  found_SLC = np.array([[[5, 6]], [[3, 4]], [[7, 0]], [[9, 9]]], np.uint8)
  whole_TLC = routes.completed(begun_TLC, found_SLC, cached=3, length=4)
  assert whole_TLC[:, 0].tolist() == [[1, 2], [3, 4], [7, 0], [NONE, NONE]]
  assert routes.completed(begun_TLC, None, 0, 4) is begun_TLC
  padded_RTLC = routes.padded(CONFIG, [whole_TLC.repeat(2, axis=1), None], 5)
  assert padded_RTLC.shape == (2, 5, 2, 2) and (padded_RTLC[1] == NONE).all()
  observed = dataclasses.replace(UNBEGUN, routes=begun_TLC).observing(np.arange(3))
  assert observed.routes[:, 0].tolist() == [[1, 2], *[[NONE, NONE]] * 4]
