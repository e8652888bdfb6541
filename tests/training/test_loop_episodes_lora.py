"""Episodes with replay that train LoRA's adapters: loss and gradient by the formula."""

import copy
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.huggingface import weights
from exgrpo_jax.policy import lora, model
from exgrpo_jax.reporting import metrics
from tests.helpers import recording
from tests.helpers.paths import CHECKPOINTS

pytestmark = pytest.mark.full
STEPS, RESPONSE = 4, 24


@pytest.fixture(scope='module')
def run(values, tmp_path_factory, compiled):
  folder = tmp_path_factory.mktemp('adapters')
  checkpoint = shutil.copytree(CHECKPOINTS / 'qwen2_tied', folder / 'checkpoint')
  changed = copy.deepcopy(values)
  changed.num_steps = changed.checkpoint.every = STEPS
  changed.model.path = str(checkpoint)
  changed.warm_start.num_updates = 0
  changed.lora.update(dict(rank=2, alpha=8.0))
  changed.environment.update(
    dict(name='tests.helpers.environments:Chance', workers=1, max_turns=4, max_turn_tokens=5)
  )
  changed.rollout.update(dict(slots=6, max_response=RESPONSE))
  changed.optimizer.minibatches = 1
  changed.objective.entropy_bonus = 0.0
  changed.data.evaluation = ()
  recording.record(changed, folder, compiled)
  return recording.load(changed, folder, compiled)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1)
def expected_loss(config, adapters, base, batch, own_BT):
  """docs/algorithm.md on all logits of base and adapters at once, as a function of the adapters."""
  params = lora.joined(lora.Config(rank=2, alpha=8.0), base, adapters)
  hidden_BTD = model.hidden_states(config, params, batch.tokens_BT)
  logits_BTV = hidden_BTD[:, :-1] @ model.unembedding(config, params)
  logp_BTV = jax.nn.log_softmax(logits_BTV)
  logp_BT = jnp.take_along_axis(logp_BTV, batch.tokens_BT[:, 1:, None], axis=-1)[..., 0]
  w_BT = jnp.exp(logp_BT - batch.behaviour_logp_BT[:, 1:])
  fresh_BT = jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
  term_BT = jnp.where(batch.is_replay_B[:, None], w_BT / (w_BT + 0.1), fresh_BT)
  terms_BT = own_BT[:, 1:] * term_BT * batch.advantage_B[:, None]
  return -terms_BT.sum() / (len(own_BT) * RESPONSE)


def test_loss_and_gradient_of_adapters_are_the_formulas(run):
  shape = run.experiment.model
  base = weights.load(run.values.model.path, shape, run.experiment.meshes.training)
  records = {record['step']: record for record in metrics.read(run.workdir)}
  replayed = 0
  for step in run.steps.values():
    own_BT = np.zeros(step.batch.tokens_BT.shape, np.float32)
    groups = zip(step.plan.prompts, step.responses, step.replays, strict=True)
    members = [
      (prompt, member)
      for prompt, own, replay in groups
      for member in ([*own, replay] if replay else own)
    ]
    for row_T, (prompt, member) in zip(own_BT, members, strict=True):
      begin = len(prompt)
      for turn in member.turns:
        row_T[begin : begin + turn.written] = 1
        begin += turn.written + turn.observed
      assert begin == len(prompt) + len(member.tokens)
    (update,) = step.updates
    loss, gradient = expected_loss(shape, update.params, base, step.batch, own_BT)
    norm = np.sqrt(sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(gradient)))
    assert update.sums['loss'] == pytest.approx(float(loss), abs=1e-6)
    assert records[step.plan.step]['gradient_norm'] == pytest.approx(norm, rel=1e-4, abs=1e-7)
    shifted, _ = expected_loss(shape, update.params, base, step.batch, np.roll(own_BT, 1, axis=1))
    replayed += sum(len(one.turns) > 1 for one in step.replays if one)
  assert replayed and abs(float(shifted) - float(loss)) > 1e-5
