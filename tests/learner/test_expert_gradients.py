"""Updates of a model with experts: packed rows are rows alone, with their routes and balance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import objective
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import mlp, model
from tests.helpers.meshes import initial_params
from tests.learner import test_gradients
from tests.learner.test_gradients import BATCH, LENGTH, RESPONSE, ROWS

CONFIG = dataclasses.replace(
  test_gradients.CONFIG, num_experts=6, experts_per_token=2, mlp_width=16, normalised_experts=True
)


def make_routes():
  """Alike for the prompts of a group, but those of its replayed row; some tokens have none."""
  rng = np.random.default_rng(3)
  shape = ROWS, LENGTH, CONFIG.num_layers
  routes_BTLC = np.argsort(rng.random((*shape, 6)), axis=-1)[..., :2].astype(np.uint8)
  prompt_B = np.argmax(BATCH.response_mask_BT, axis=1)
  for row in range(ROWS - 2):
    if row % 4 != 3:
      routes_BTLC[row, : prompt_B[row]] = routes_BTLC[row // 4 * 4, : prompt_B[row]]
  routes_BTLC[5, 20:] = 255
  return routes_BTLC


def alone(spec, params, batch):
  """The loss of each row in a pass of its own, added up."""
  inputs = objective.loss_inputs(batch, spec.objective, RESPONSE)
  rows = zip(*jax.tree.leaves((batch.tokens_BT, inputs, batch.routes_BTLC)), strict=True)
  tree = jax.tree.structure((batch.tokens_BT, inputs, batch.routes_BTLC))

  @jax.jit
  def loss_of_row(params, row):
    tokens_BT, inputs, routes_BTLC = jax.tree.map(lambda x: x[None], tree.unflatten(row))
    weight_BT = jnp.pad(inputs.entropy_weight_BT[:, 1:], ((0, 0), (0, 1)))  # the token before
    counted = mlp.Counted(weight_BT, np.ones((1, LENGTH), int))
    hidden_BTD, load = model.hidden_states_and_balance(
      CONFIG, params, tokens_BT, routes_BTLC=routes_BTLC, counted=counted
    )
    logp_BTV = jax.nn.log_softmax(hidden_BTD @ model.unembedding(CONFIG, params))[:, :-1]
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
    entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
    at_tokens = (jnp.pad(x_BT, ((0, 0), (1, 0))) for x_BT in (logp_BT, entropy_BT))
    loss, _ = objective.token_loss(*at_tokens, inputs, spec.objective, clip=True, is_first=False)
    return loss + spec.objective.balance_coefficient * load.loss.mean(), load

  losses, loads, total = 0.0, 0.0, None
  for row in rows:
    (loss, load), gradient = jax.value_and_grad(loss_of_row, has_aux=True)(params, row)
    losses, loads = losses + loss, loads + load.count_E
    total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
  return losses, loads, total


@pytest.mark.usefixtures('large_passes')
def test_packed_rows_have_the_gradient_of_rows_alone(one_device):
  mesh, params = one_device, initial_params(CONFIG, one_device, lambda x: 1.5 * x)
  spec = test_gradients.make_spec(mesh, tokens=150, balance_coefficient=0.3)
  spec = dataclasses.replace(spec, model=CONFIG)
  batch = dataclasses.replace(BATCH, routes_BTLC=make_routes())
  with jax.set_mesh(mesh):
    gradient, sums = gradients.minibatch_gradient(spec, params, batch, True, False)
    loss, load, expected = alone(spec, params, batch)
    without = dataclasses.replace(batch, routes_BTLC=None)
    _, of_router = gradients.minibatch_gradient(spec, params, without, True, False)
  np.testing.assert_allclose(sums['loss'], loss, rtol=1e-5)
  np.testing.assert_array_equal(sums['choices_LE'], load)
  assert load.sum() == 2 * CONFIG.num_layers * (BATCH.response_mask_BT > 0).sum()
  for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(ours - theirs) <= 3e-5 * np.linalg.norm(theirs)
  assert abs(of_router['loss'] - loss) > 1e-4  # other experts, another loss
  assert (np.asarray(of_router['choices_LE']) != load).any()
