"""The load-balancing loss against loops over rows and experts, and its gradient's direction."""

import dataclasses

import jax
import numpy as np

from exgrpo_jax.policy import mlp
from exgrpo_jax.policy.mlp import Routing
from tests.policy import test_model

E, C = 5, 2
CONFIG = dataclasses.replace(test_model.CONFIG, num_experts=E, experts_per_token=C)
RNG = np.random.default_rng(0)
ROW_BT = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [3, 3, 3, 3, 3, 1, 1, 1]])
COUNTS_BT = RNG.random(ROW_BT.shape) < 0.7
WEIGHT_BT = (COUNTS_BT * RNG.uniform(0.1, 1, ROW_BT.shape)).astype(np.float32)
LOGITS_BTE = RNG.normal(size=(*ROW_BT.shape, E)).astype(np.float32)
CHOSEN_BTC = np.argsort(-LOGITS_BTE, axis=-1)[..., :C]


def of_layer(logits_BTE, weight_BT=WEIGHT_BT, row_BT=ROW_BT, chosen_BTC=CHOSEN_BTC):
  routing = Routing(chosen_BTC, jax.nn.softmax(logits_BTE))
  return mlp.balance_of_layer(CONFIG, routing, mlp.Counted(weight_BT, row_BT))


def test_the_balance_is_that_of_loops_over_rows():
  probability_BTE = np.exp(LOGITS_BTE) / np.exp(LOGITS_BTE).sum(-1, keepdims=True)
  total, count_E = 0.0, np.zeros(E)
  for b in range(2):
    for row in range(1, 4):
      tokens = [t for t in range(8) if ROW_BT[b, t] == row and COUNTS_BT[b, t]]
      choices = [e for t in tokens for e in CHOSEN_BTC[b, t]]
      count_E += np.bincount(choices, minlength=E)
      for e in range(E):
        share = choices.count(e) / len(choices) if choices else 0
        total += sum(E * share * probability_BTE[b, t, e] * WEIGHT_BT[b, t] for t in tokens)
  found = of_layer(LOGITS_BTE)
  np.testing.assert_allclose(found.loss, total, rtol=1e-6)
  np.testing.assert_array_equal(found.count_E, count_E)


def test_even_routing_has_one_and_a_step_down_is_more_even():
  chosen_BTC = np.array([[[t % E, (t + 1) % E] for t in range(5)]])
  even = of_layer(np.zeros((1, 5, E)), np.full((1, 5), 0.2), np.ones((1, 5), int), chosen_BTC)
  np.testing.assert_allclose(even.loss, 1, rtol=1e-6)
  slope = jax.grad(lambda logits: of_layer(logits).loss)(LOGITS_BTE)
  assert of_layer(LOGITS_BTE - slope).loss < of_layer(LOGITS_BTE).loss


def test_weights_are_put_at_their_positions():
  position_BW, weight_BW = np.array([[0, 3], [2, 4]]), np.float32([[1, 2], [0, 3]])
  weight_BT, row_BT = mlp.counted_balance(position_BW, weight_BW, ROW_BT)
  assert weight_BT.tolist() == [[1, 0, 0, 2, *[0] * 4], [0, 0, 0, 0, 3, *[0] * 3]]
  assert row_BT is ROW_BT
