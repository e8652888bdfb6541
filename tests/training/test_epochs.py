"""Several epochs over a step's rows, compared with the formula and a plain AdamW."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import lora, model
from exgrpo_jax.runtime.clock import Clock
from exgrpo_jax.training import loop
from tests.helpers import tiny
from tests.helpers.meshes import initial_params, one_device

Q, K, T, PROMPT, VOCABULARY, LIMIT = 4, 2, 9, 3, 11, 6
SEED, STEP, BETA, EPSILON, BONUS = 7, 3, 0.1, 0.2, 0.01
EPOCHS, MINIBATCHES, EPOCH_ORDER = 2, 2, 18
SHAPE = dataclasses.replace(
  tiny.SMALL,
  **dict(vocab_size=VOCABULARY, width=16, num_layers=1, num_heads=2, num_kv_heads=1),
  **dict(head_size=8, mlp_width=16),
)
OBJECTIVE = objective.ObjectiveConfig(
  clip_schedule='always', beta=BETA, clip_epsilon=EPSILON, entropy_bonus=BONUS
)
ADAM = optimizer.OptimizerConfig(
  epochs=EPOCHS,
  minibatches=MINIBATCHES,
  learning_rate=0.05,
  schedule='linear',
  warmup_updates=2,
  epsilon=1e-3,
  weight_decay=0.1,
  clip_norm=0.03,
)
NUM_UPDATES = 3 * EPOCHS * MINIBATCHES  # for a run of three steps


@functools.cache
def start():
  """Return the initial parameters on the host."""
  return jax.device_get(initial_params(SHAPE, one_device(), lambda x: 2 * x))


def policy(params, tokens_BT):
  """Return [log-probability, entropy], each [B, T], from all logits; 0 for the first token."""
  hidden_BTD = model.hidden_states(SHAPE, params, tokens_BT)
  logp_BTV = jax.nn.log_softmax(hidden_BTD[:, :-1] @ model.unembedding(SHAPE, params))
  logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
  entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
  return [jnp.pad(x_BT, ((0, 0), (1, 0))) for x_BT in (logp_BT, entropy_BT)]


@functools.cache
def rows():
  """Return a step's batch, in which two of four groups end with a row from another policy.

  The sampler's rounding differs from the trainer's, and some terms have weights.
  """
  rng, B = np.random.default_rng(0), Q * K
  tokens_BT = rng.integers(0, VOCABULARY, (B, T)).astype(np.int32)
  end_B = PROMPT + rng.integers(2, LIMIT + 1, (B, 1))
  mask_BT = ((np.arange(T) >= PROMPT) & (np.arange(T) < end_B)).astype(np.float32)
  is_replay_B = np.arange(B) % (2 * K) == K - 1
  noise_BT = rng.normal(size=(B, T)) * np.where(is_replay_B, 0.7, 0.02)[:, None]
  with jax.set_mesh(one_device()):
    logp_BT = np.asarray(policy(start(), tokens_BT)[0])
  return Batch(
    tokens_BT=tokens_BT,
    response_mask_BT=mask_BT,
    old_logp_BT=(mask_BT * (logp_BT + noise_BT)).astype(np.float32),
    advantage_B=rng.normal(size=B).astype(np.float32),
    is_replay_B=is_replay_B,
    policy_step_B=np.zeros(B, np.int32),
    term_weight_BT=rng.choice(np.float32([0.5, 1]), (B, T)),
  )


# ---- The formula ----


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.value_and_grad, has_aux=True)
def loss_of(params, batch, first):
  """Return (loss, log-ratio of each token [B, T]) as defined in docs/algorithm.md."""
  mask_BT, advantage_B1 = batch.response_mask_BT, batch.advantage_B[:, None]
  logp_BT, entropy_BT = policy(params, batch.tokens_BT)
  own_BT = jax.lax.stop_gradient(logp_BT) if first else batch.old_logp_BT
  is_replay_B1 = batch.is_replay_B[:, None]
  gap_BT = mask_BT * (logp_BT - jnp.where(is_replay_B1, batch.old_logp_BT, own_BT))
  ratio_BT = jnp.exp(gap_BT)
  fresh_BT = jnp.minimum(
    ratio_BT * advantage_B1, jnp.clip(ratio_BT, 1 - EPSILON, 1 + EPSILON) * advantage_B1
  )
  term_BT = jnp.where(is_replay_B1, ratio_BT / (ratio_BT + BETA) * advantage_B1, fresh_BT)
  loss = -(mask_BT * batch.term_weight_BT * term_BT).sum() / (len(mask_BT) * LIMIT)
  return loss - BONUS * (mask_BT * entropy_BT).sum() / mask_BT.sum(), gap_BT


def adamw(params, moments, gradient, count):
  """Apply AdamW in float64: clipping by norm, warm-up over two updates, then linear decay to 0."""
  leaves, tree = jax.tree.flatten(params)
  gradients_64 = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient)]
  norm = np.sqrt(sum((leaf**2).sum() for leaf in gradients_64))
  warm, peak = ADAM.warmup_updates, ADAM.learning_rate
  rate = peak * (count + 1) / 3 if count < 2 else peak * (1 - (count - 2) / (NUM_UPDATES - warm))
  updated = []
  for place, (leaf, slope) in enumerate(zip(leaves, gradients_64, strict=True)):
    slope = slope * min(1, ADAM.clip_norm / norm)
    first, second = moments.get(place, (0.0, 0.0))
    first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
    moments[place] = first, second
    step = first / (1 - 0.9 ** (count + 1))
    step = step / (np.sqrt(second / (1 - 0.999 ** (count + 1))) + ADAM.epsilon)
    updated.append(np.float64(leaf) - rate * (step + ADAM.weight_decay * np.float64(leaf)))
  return tree.unflatten(updated), norm


@dataclasses.dataclass
class Expected:
  """An expected update: the parameters after it, and the measurements before it."""

  params: object
  loss: float
  norm: float
  kl: float
  ratio: float
  replayed_ratio: float
  clipped: float


@functools.cache
def expected():
  """Return the expected updates of all epochs."""
  params, moments, found = jax.tree.map(np.float64, start()), {}, []
  for epoch in range(EPOCHS):
    order_Q = np.arange(Q)
    if epoch:
      key = np.random.SeedSequence(SEED, spawn_key=(EPOCH_ORDER, STEP, epoch))
      order_Q = np.random.default_rng(key).permutation(Q)
      assert set(order_Q[:2]) not in ({0, 1}, {2, 3})  # so the minibatches change
    for groups in np.split(order_Q, MINIBATCHES):
      part_B = np.concatenate([np.arange(K) + group * K for group in groups])
      batch = jax.tree.map(lambda x, part_B=part_B: x[part_B], rows())
      (loss, gap_BT), gradient = loss_of(jax.tree.map(np.float32, params), batch, not found)
      params, norm = adamw(params, moments, gradient, len(found))
      is_token_BT = batch.response_mask_BT > 0
      gaps, of_replay = (
        np.float64(gap_BT)[is_token_BT & (batch.is_replay_B[:, None] == yes)] for yes in (0, 1)
      )
      sign = np.sign(np.broadcast_to(batch.advantage_B[:, None], is_token_BT.shape))
      sign = sign[is_token_BT & ~batch.is_replay_B[:, None]]
      is_clipped = np.where(sign > 0, gaps > np.log(1 + EPSILON), gaps < np.log(1 - EPSILON))
      k3, ratio = np.exp(gaps) - gaps - 1, np.exp(gaps)
      measured = k3, ratio, np.exp(of_replay), is_clipped
      found.append(Expected(params, float(loss), norm, *measured))
  return found


# ---- The loop ----


def learn(**changes):
  """Run loop.learn; return (parameters after the step, sums by epoch)."""
  config, mesh = dataclasses.replace(ADAM, **changes), one_device()
  spec = gradients.UpdateSpec(
    microbatch=gradients.MicrobatchConfig(),
    objective=OBJECTIVE,
    optimizer=config,
    model=SHAPE,
    lora=lora.LoraConfig(),
    mesh=mesh,
    num_updates=NUM_UPDATES,
    temperature=1.0,
    longest_row=T,
    max_response=LIMIT,
    logit_chunk=256,
  )
  rollout = types.SimpleNamespace(questions=Q)
  of_run = types.SimpleNamespace(objective=OBJECTIVE, optimizer=config, rollout=rollout, seed=SEED)
  run = types.SimpleNamespace(
    experiment=types.SimpleNamespace(config=of_run), update=spec, initial=None, clock=Clock()
  )
  plan = types.SimpleNamespace(replay_started=True, step=STEP)
  with jax.set_mesh(mesh):
    params = jax.device_put(start(), model.shardings(SHAPE, mesh))
    state = optimizer.init(config, NUM_UPDATES, params)
    state, sums = loop.learn(run, state, types.SimpleNamespace(plan=plan, batch=rows()))
    return jax.device_get((state.params, sums))


def assert_moved(params, expected_params):
  """Assert that the error is below a thousandth of the distance from the start."""

  def distance(tree, other):
    gaps = jax.tree.map(lambda x, y: np.sum((np.float64(x) - y) ** 2), tree, other)
    return np.sqrt(sum(jax.tree.leaves(gaps)))

  way = distance(expected_params, start())
  assert way > 0.1 and distance(params, expected_params) < 1e-3 * way


def mean(values):
  return np.concatenate(values).mean()


def test_two_epochs_of_two_minibatches_are_four_updates_of_the_formula():
  """Loss, gradient and parameters match. Some ratios are clipped, and replayed rows differ."""
  params, sums = learn()
  assert_moved(params, expected()[-1].params)
  for number, own in enumerate(sums):
    updates = expected()[number * MINIBATCHES :][:MINIBATCHES]
    assert own['updates'] == MINIBATCHES
    assert own['loss'] == pytest.approx(sum(one.loss for one in updates), rel=1e-3)
    assert own['gradient_norm'] == pytest.approx(sum(one.norm for one in updates), rel=1e-3)
    values = objective.loss_metrics({name: float(value) for name, value in own.items()})
    assert values['policy/approx_kl'] == pytest.approx(mean([one.kl for one in updates]), rel=1e-3)
    found = values['policy/ratio_mean'], values['policy/ratio_max'], values['replay/ratio_mean']
    ratios = np.concatenate([one.ratio for one in updates])
    of_replay = mean([one.replayed_ratio for one in updates])
    assert found == pytest.approx((ratios.mean(), ratios.max(), of_replay), rel=1e-3)
    assert values['policy/clip_fraction'] == pytest.approx(mean([one.clipped for one in updates]))
  assert sums[1]['clipped'] > 3


@pytest.mark.parametrize('stop', [1, 2, 3])
def test_no_update_follows_once_the_kl_exceeds_its_limit(stop):
  """The policy after `stop` updates is the first one that has moved too far."""
  kl = [one.kl.mean() for one in expected()]
  assert kl == sorted(kl) and kl[0] == 0
  params, sums = learn(max_kl=(kl[stop - 1] + kl[stop]) / 2)
  assert_moved(params, expected()[stop - 1].params)
  assert [own['updates'] for own in sums] == [2, max(0, stop - 1)]
  assert sum(own['skipped_by_kl'] for own in sums) == EPOCHS * MINIBATCHES - stop
  measured = expected()[: stop + 1]  # including the minibatch that exceeded the limit
  assert sum(own['loss'] for own in sums) == pytest.approx(
    sum(one.loss for one in measured), rel=1e-3
  )
  assert sum(own['learning_rate'] for own in sums) > 0
