"""Experts against a sum over all of them, token by token; and whose choice counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from exgrpo_jax.policy.mlp import Experts
from tests.policy import test_model

CONFIG = dataclasses.replace(
  test_model.CONFIG, width=6, mlp_width=5, num_experts=4, experts_per_token=2
)
X_BTD = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)


@pytest.fixture
def experts(one_device):
  with jax.set_mesh(one_device):
    yield Experts(CONFIG, nnx.Rngs(0))


def expected(experts, x_BTD, chosen_BTC, *, normalised):
  """A weighted sum over all experts, most of them with weight 0; differentiable."""
  logits_BTE = x_BTD @ experts.router_DE[...]
  probability_BTE = jnp.exp(logits_BTE) / jnp.exp(logits_BTE).sum(-1, keepdims=True)
  weight_BTE = probability_BTE * jax.nn.one_hot(chosen_BTC, 4).sum(axis=-2)
  if normalised:
    weight_BTE /= weight_BTE.sum(-1, keepdims=True)
  gate, up, down = (k[...] for k in (experts.gate_EDF, experts.up_EDF, experts.down_EFD))
  gate_BTEF, up_BTEF = (jnp.einsum('btd,edf->btef', x_BTD, kernel) for kernel in (gate, up))
  hidden_BTEF = gate_BTEF / (1 + jnp.exp(-gate_BTEF)) * up_BTEF
  return jnp.einsum('btef,efd,bte->btd', hidden_BTEF, down, weight_BTE)


@pytest.mark.parametrize('normalised', [True, False])
@pytest.mark.parametrize('given', [False, True])
def test_experts_are_a_weighted_sum_and_have_its_gradient(experts, normalised, given):
  experts.config = dataclasses.replace(CONFIG, normalised_experts=normalised)
  chosen_BTC = np.argsort(-(X_BTD @ experts.router_DE[...]), axis=-1)[..., :2]
  if given:  # some that the router would not choose; nobody has expert 3
    chosen_BTC = np.array([[[0, 1], [1, 2], [2, 0]], [[1, 0], [0, 2], [2, 1]]], np.uint8)
  graph, state = nnx.split(experts)

  def total(state, x_BTD, apply):
    mixed_BTD = apply(nnx.merge(graph, state), x_BTD)
    return jnp.sum(mixed_BTD**3), mixed_BTD

  def gradients(apply):
    return jax.grad(total, (0, 1), has_aux=True)(state, jnp.array(X_BTD), apply)

  actual = gradients(lambda module, x: module(x, chosen_BTC if given else None)[0])
  wanted = gradients(lambda module, x: expected(module, x, chosen_BTC, normalised=normalised))
  # Relative too: entries are up to 20, and CPUs round differently.
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, wanted)
  assert np.abs(actual[0][0]['router_DE'][...]).max() > 1e-3


def test_tokens_without_a_recorded_choice_have_the_routers(experts):
  _, own = experts(X_BTD)
  chosen_BTC = np.full((2, 3, 2), 255, np.uint8)
  chosen_BTC[1, 2] = 3, 0
  _, routing = experts(X_BTD, chosen_BTC)
  np.testing.assert_array_equal(routing.chosen_BTC[1, 2], [3, 0])
  np.testing.assert_array_equal(routing.chosen_BTC[0], own.chosen_BTC[0])
  np.testing.assert_array_equal(routing.probability_BTE, own.probability_BTE)
  np.testing.assert_array_equal(
    own.chosen_BTC, np.argsort(-np.asarray(own.probability_BTE), axis=-1)[..., :2]
  )
