"""A whole run of a model with experts whose routes are replayed, responses of several steps too."""

import copy

import jax
import numpy as np
import pytest

from exgrpo_jax.policy import model
from tests.helpers import buffers, recording, tiny

STEPS, EXPERTS = 6, 4


@pytest.fixture(scope='module')
def run(values, make_once, compiled):
  changed = copy.deepcopy(values)
  changed.num_steps = changed.evaluation.every = changed.checkpoint.every = STEPS
  changed.rollout.update(
    dict(questions=2, slots=8, carry=True, in_flight=6, max_age=2, router_replay=True)
  )
  changed.model.update(dict(num_layers=2, num_experts=EXPERTS, experts_per_token=2, mlp_width=16))
  changed.objective.balance_coefficient = 0.01
  changed.optimizer.minibatches = changed.parity.every = 1
  folder = make_once('experts', lambda folder: recording.record(changed, folder, compiled))
  return recording.load(changed, folder, compiled)


def test_each_row_is_trained_with_the_experts_that_wrote_it(run):
  ages = set()
  for number, step in run.steps.items():
    rows = zip(step.trained.prompts, step.responses, step.replays, strict=True)
    members = [(prompt, one) for prompt, own, old in rows for one in (*own, old) if one]
    for (prompt, one), routes_TLC in zip(members, step.batch.routes_BTLC, strict=True):
      length = len(prompt) + len(one.tokens)
      assert len(one.routes) == length and one.routes.max() < EXPERTS
      np.testing.assert_array_equal(routes_TLC[:length], one.routes)
      assert (routes_TLC[length:] == 255).all()
    ages |= {number - old.step for old in step.replays if old}
  assert max(ages) > 0 and tiny.ROLLOUTS > 2


def test_what_a_response_was_drawn_from_is_what_training_computes(run):
  """Within rounding of the policies that wrote its tokens; the router's own choice is another."""
  forward = jax.jit(model.hidden_states, static_argnums=(0, 4))
  shape, gaps, of_router = run.experiment.model, [], []

  def logp(params, prompt, one, routes_TLC):
    tokens_T = np.concatenate([prompt, one.tokens])
    with jax.set_mesh(run.experiment.meshes.training):
      hidden_BTD = forward(shape, params, tokens_T[None], None, 'none', routes_TLC[None])
      logits_TV = np.float64((hidden_BTD @ model.unembedding(shape, params))[0])
    logits_TV = logits_TV[len(prompt) - 1 : -1]
    logp_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return logp_TV[np.arange(len(one.tokens)), one.tokens]

  for step in run.steps.values():
    for prompt, own in zip(step.trained.prompts, step.responses):
      one = own[0]
      for span, end in zip(one.spans, np.cumsum([span.tokens for span in one.spans])):
        params, written = run.steps[span.step].params, slice(end - span.tokens, end)
        gaps.append(np.abs(logp(params, prompt, one, one.routes) - one.logp)[written].max())
        turned = (one.routes + 1) % EXPERTS
        of_router.append(np.abs(logp(params, prompt, one, turned) - one.logp)[written].max())
  assert max(gaps) < 1e-4 < min(of_router)


def test_a_checkpoint_has_the_routes_of_buffer_and_unfinished_responses(run):
  snapshot, last = run.last_snapshot(run.workdir), run.steps[STEPS]
  buffers.assert_same(snapshot.buffer, last.after)
  stored = [one for entry in last.after.entries.values() for one in entry.trajectories]
  assert stored and all(one.routes is not None for one in stored)
  assert buffers.described(snapshot.left) == buffers.described(last.left)
  assert any(one.routes is not None for group in last.left for one in group.responses)
