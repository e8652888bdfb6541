"""A minibatch's update does not depend on how its rows are packed into microbatches."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import attention, lora, mlp, model, sharding
from tests.helpers import losses, tiers
from tests.helpers.meshes import initial_params, one_device
from tests.policy import test_model


@pytest.fixture(autouse=True)
def two_shapes(monkeypatch):
  """Pack rows for tiny models as for large ones."""
  monkeypatch.setattr(model, 'is_tiny', lambda *_: False)


CONFIG = dataclasses.replace(
  test_model.CONFIG,
  vocab_size=64,
  num_heads=8,
  head_size=16,
  norm_epsilon=1e-6,
  query_key_norm=True,
  tied_embeddings=False,
  logit_cap=5.0,
)
ROWS, LENGTH, RESPONSE = 16, 72, 32
OBJECTIVE = objective.ObjectiveConfig()
OPTIMIZER = optimizer.OptimizerConfig()
NO_LORA = lora.LoraConfig()


def make_batch(seed=0):
  """Make groups of four rows, one of them replayed, with prompts of 1 to 40 tokens.

  Responses have 1 to 32 tokens. Two rows are empty, and the last two have their own prompts.
  """
  rng = np.random.default_rng(seed)
  group_B = np.r_[np.arange(ROWS - 2) // 4, ROWS - 2, ROWS - 1]
  prompt_B = rng.integers(1, LENGTH - RESPONSE + 1, ROWS)[group_B]
  end_B = prompt_B + rng.integers(1, RESPONSE + 1, ROWS)
  place_T = np.arange(LENGTH)
  mask_BT = ((place_T >= prompt_B[:, None]) & (place_T < end_B[:, None])).astype(np.float32)
  mask_BT[[3, 8]] = 0
  mask_BT[np.arange(ROWS), prompt_B + 1] = 0  # such as a tool's output
  tokens_BT = rng.integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
  is_prompt_BT = place_T < prompt_B[:, None]
  logp_BT = (mask_BT * -rng.uniform(2, 6, mask_BT.shape)).astype(np.float32)
  return Batch(
    tokens_BT=np.where(is_prompt_BT, tokens_BT[group_B], tokens_BT),
    response_mask_BT=mask_BT,
    old_logp_BT=logp_BT,
    advantage_B=np.where(np.arange(ROWS) % 5 == 1, 0, rng.normal(size=ROWS)).astype(np.float32),
    is_replay_B=np.arange(ROWS) % 4 == 3,
    policy_step_B=np.zeros(ROWS, np.int32),
    term_weight_BT=np.ones_like(mask_BT),
  )


BATCH = make_batch()


def make_spec(mesh, tokens=10**6, remat='none', drop=False, lora_config=NO_LORA, **changes):
  return gradients.UpdateSpec(
    microbatch=gradients.MicrobatchConfig(tokens=tokens, remat=remat, drop_zero_advantage=drop),
    objective=dataclasses.replace(OBJECTIVE, **changes),
    optimizer=OPTIMIZER,
    model=CONFIG,
    lora=lora_config,
    mesh=mesh,
    num_updates=10,
    temperature=0.8,
    longest_row=LENGTH,
    max_response=RESPONSE,
    logit_chunk=256,
  )


def update(spec, state, batch, clip, is_first):
  """Return the state after one minibatch, and the update's metrics."""
  gradient, _ = gradients.minibatch_gradient(spec, state.params, batch, clip, is_first)
  return gradients.apply_gradient(spec, state, gradient)


def make_params(mesh):
  """Return initial parameters, scaled so that no gradient is near 0."""
  return initial_params(CONFIG, mesh, lambda x: 2 * x)


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=1, tensor=-1))


@pytest.fixture(scope='module')
def params(mesh):
  return make_params(mesh)


@pytest.fixture(scope='module')
def gradient(params, mesh):
  def call(batch=BATCH, is_first=False, **changes):
    with jax.set_mesh(mesh):
      return jax.device_get(
        gradients.minibatch_gradient(make_spec(mesh, **changes), params, batch, True, is_first)
      )

  return call


@pytest.fixture(scope='module')
def whole(gradient):
  """The gradient of all rows in one pass."""
  with losses.large_passes():
    return gradient()


def assert_same(found, expected, tolerance=1e-5):
  """Check that all leaves and sums agree within `tolerance` times their largest entry."""
  for part, other in zip(found, expected, strict=True):
    for ours, theirs in zip(jax.tree.leaves(part), jax.tree.leaves(other), strict=True):
      np.testing.assert_allclose(
        ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max()
      )


def cut(mesh, tokens, shards=1, batch=BATCH, **changes):
  spec = make_spec(mesh, tokens=tokens, **changes)
  inputs = objective.loss_inputs(batch, spec.objective, RESPONSE)
  return gradients.microbatches(spec, batch, inputs, shards)


# ---- How rows are packed ----


@pytest.mark.parametrize('shards', [1, 4])
@pytest.mark.parametrize('tokens', [72, 200, 10**6])
def test_each_response_token_is_in_one_microbatch(mesh, tokens, shards):
  """Each occurs once, after its own prefix, with its own inputs. Other positions have weight 0."""
  whole, found, expected = objective.loss_inputs(BATCH, OBJECTIVE, RESPONSE), [], []
  for packed in cut(mesh, tokens, shards):
    count, length = packed.tokens_BT.shape
    assert count % shards == 0 and count // shards * length <= max(tokens, LENGTH)
    for b, w in np.argwhere(packed.inputs.mask_BT > 0):
      at = packed.predictor_BW[b, w] + 1
      segment_T, position_T, prefix_T = (x_BT[b, : at + 1] for x_BT in packed.segments)
      row = np.flatnonzero((segment_T == segment_T[-1]) | (segment_T == prefix_T[-1]))
      assert segment_T[-1] > 0 and position_T[row].tolist() == list(range(len(row)))
      assert packed.tokens_BT[b, at] == packed.target_BW[b, w]
      prefix = packed.tokens_BT[b, row].tolist()
      found.append((prefix, *(float(x[b, w]) for x in packed.inputs if x is not None)))
    assert not packed.inputs.weight_BT[packed.inputs.mask_BT == 0].any()
  for b, t in np.argwhere(BATCH.response_mask_BT > 0):
    prefix = BATCH.tokens_BT[b, : t + 1].tolist()
    expected.append((prefix, *(float(x[b, t]) for x in whole if x is not None)))
  assert sorted(found) == sorted(expected)


def test_shapes_do_not_depend_on_the_rows(mesh):
  """There are two stack shapes, for any lengths and any number of rows without a response."""
  shapes = set()
  for seed in range(8):
    batch = make_batch(seed)
    if seed == 7:  # few tokens are left
      keeps = np.arange(LENGTH) < 8
      batch = dataclasses.replace(batch, response_mask_BT=batch.response_mask_BT * keeps)
    for count, stack in gradients.stack_by_shape(cut(mesh, 72, 2, batch), ROWS):
      shapes.add(jax.tree.map(np.shape, stack))
      assert count <= len(stack.tokens_BT)
  # Each of two shards has a sequence of 72 tokens or a quarter of that.
  assert {packed.tokens_BT for packed in shapes} == {(8, 2, 72), (8, 2, 18)}
  assert len(shapes) == 2


def test_a_minibatch_without_tokens_is_one_empty_pass(mesh):
  empty = dataclasses.replace(BATCH, response_mask_BT=np.zeros_like(BATCH.response_mask_BT))
  (packed,) = cut(mesh, 72, 4, batch=empty)
  assert packed.tokens_BT.shape == (4, 18) and not packed.inputs.weight_BT.any()


@pytest.mark.usefixtures('large_passes')
def test_rows_with_advantage_0_can_be_left_out(mesh):
  without, rows = cut(mesh, 200, drop=True), 0
  for packed in without:
    b, w = np.nonzero(packed.inputs.mask_BT > 0)
    assert (packed.inputs.advantage_BT[b, w] != 0).all()
    rows += len(set(zip(b, packed.segments.segment_BT[b, packed.predictor_BW[b, w]])))
  assert rows == ROWS - 2 - 3  # two are empty


def test_minibatches_take_whole_groups_in_the_given_order():
  tokens_QKT = BATCH.tokens_BT.reshape(4, 4, LENGTH)
  parts = gradients.minibatches(BATCH, 2, np.array([2, 0, 3, 1]))
  for part, groups in zip(parts, ([2, 0], [3, 1]), strict=True):
    np.testing.assert_array_equal(part.tokens_BT, tokens_QKT[groups].reshape(8, LENGTH))


# ---- The gradient ----


def alone(spec, params, batch, is_first, reference=None):
  """Compute `minibatch_gradient` with one pass per row and autodiff of all logits."""
  inputs = objective.loss_inputs(batch, spec.objective, RESPONSE)
  columns, tree = jax.tree.flatten((batch.tokens_BT, batch.routes_BTLC, inputs))

  def values(params, tokens_BT, routes_BTLC, inputs):
    """Return ([log-probability, entropy] of each token, the experts' load)."""
    weight_BT = jnp.pad(inputs.entropy_weight_BT[:, 1:], ((0, 0), (0, 1)))  # at the token before
    counted = mlp.Counted(weight_BT, np.ones((1, LENGTH), int)) if spec.model.num_experts else None
    hidden_BTD, load = model.hidden_states_and_balance(
      spec.model, params, tokens_BT, routes_BTLC=routes_BTLC, counted=counted
    )
    logits_BTV = hidden_BTD @ model.unembedding(spec.model, params)
    logits_BTV = 5.0 * jnp.tanh(logits_BTV / 5.0) / 0.8  # the cap and the temperature
    logp_BTV = jax.nn.log_softmax(logits_BTV)[:, :-1]
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], -1)[..., 0]
    entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
    return [jnp.pad(x_BT, ((0, 0), (1, 0))) for x_BT in (logp_BT, entropy_BT)], load

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss_of_row(params, row):
    *given, inputs = jax.tree.map(lambda x: x[None], tree.unflatten(row))
    at_tokens, load = values(params, *given, inputs)
    if reference is not None:
      inputs = inputs._replace(reference_logp_BT=values(reference, *given, inputs)[0][0])
    if spec.objective.importance_level != 'token':
      ones, now_BT = np.ones((1, LENGTH), int), jax.lax.stop_gradient(at_tokens[0])
      ratio_BT = objective.row_log_ratio(now_BT, inputs, ones, spec.objective, is_first)
      inputs = inputs._replace(row_log_ratio_BT=ratio_BT)
    loss, sums = objective.token_loss(
      *at_tokens, inputs, spec.objective, clip=True, is_first=is_first
    )
    if load is not None:
      loss += spec.objective.balance_coefficient * load.loss.mean()
      sums['choices_LE'] = load.count_E
    return loss, sums | {'loss': loss}

  rows = [loss_of_row(params, row) for row in zip(*columns, strict=True)]
  gradient = functools.reduce(functools.partial(jax.tree.map, jnp.add), [g for _, g in rows])
  return gradient, objective.merge_sums([sums for (_, sums), _ in rows])


@pytest.mark.usefixtures('large_passes')
@pytest.mark.parametrize(
  'options',
  tiers.full_after_first(
    [{}, dict(importance_level='sequence', aggregation='sequence_mean', kl_coefficient=0.5)]
  ),
  ids=['paper', 'gspo_and_kl'],
)
def test_packed_rows_have_the_gradient_of_single_rows(mesh, params, options):
  """The minibatch is a step's first and contains tokens from an earlier policy."""
  is_carried_BT = (BATCH.response_mask_BT > 0) & ~BATCH.is_replay_B[:, None]
  batch = dataclasses.replace(BATCH, is_carried_BT=is_carried_BT & (np.arange(LENGTH) < 30))
  spec = make_spec(mesh, tokens=150, **options)  # two sequences per pass
  reference = jax.tree.map(lambda x: 0.9 * x, params) if spec.objective.kl_coefficient else None
  with jax.set_mesh(mesh):
    found = gradients.minibatch_gradient(spec, params, batch, True, True, reference)
    found, expected = jax.device_get((found, alone(spec, params, batch, True, reference)))
  assert found[1]['carried_tokens'] > 20
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    # Differences such as k3 amplify float32 rounding, which depends on the machine.
    assert np.linalg.norm(ours - theirs) <= 3e-5 * np.linalg.norm(theirs)


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
def test_a_shared_prompt_is_computed_once_if_attention_supports_it(mesh, gradient, whole):
  """Otherwise, as on a TPU, it is computed once per row, with the same result."""
  shared = sum((packed.segments.segment_BT > 0).sum() for packed in cut(mesh, 10**6))
  with mock.patch.object(attention, '_WITH_PREFIXES', ()):
    apart = cut(mesh, 10**6)
    assert apart[0].segments.prefix_BT is None
    assert_same(gradient(), whole)
  assert shared < 0.85 * sum((packed.segments.segment_BT > 0).sum() for packed in apart)


@pytest.mark.full
def test_neither_two_pass_lengths_nor_the_order_of_rows_change_the_gradient(gradient, whole, mesh):
  assert len({packed.tokens_BT.shape for packed in cut(mesh, 10**6)}) == 2
  order = np.random.default_rng(1).permutation(ROWS)
  assert_same(gradient(jax.tree.map(lambda x: x[order], BATCH)), whole)


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
@pytest.mark.parametrize('remat', tiers.full_after_first(['all', 'all_but_products']))
def test_recomputation_does_not_change_the_gradient(gradient, whole, remat):
  assert_same(gradient(remat=remat), whole)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole[0]))


@pytest.mark.usefixtures('large_passes')
def test_a_non_finite_gradient_is_skipped_and_counted(params, mesh):
  advantage_B = BATCH.advantage_B.copy()
  advantage_B[0] = np.nan
  state = optimizer.init(OPTIMIZER, 10, jax.tree.map(jnp.copy, params))
  before = jax.tree.map(np.array, state)
  with jax.set_mesh(mesh):
    after, sums = update(
      make_spec(mesh), state, dataclasses.replace(BATCH, advantage_B=advantage_B), False, True
    )
  assert sums['skipped'] == 1
  jax.tree.map(np.testing.assert_array_equal, after, before)


LORA = dataclasses.replace(NO_LORA, rank=4, alpha=8.0)


def make_adapters(mesh):
  """Return random adapters."""
  shapes = gradients.trained_shapes(make_spec(mesh, lora_config=LORA))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda like: jax.device_put(np.float32(rng.normal(size=like.shape) / 10), like.sharding), shapes
  )


def test_a_tiny_model_on_one_cpu_has_one_shape(monkeypatch):
  monkeypatch.undo()  # undo `two_shapes`
  spec = make_spec(one_device())
  long, short = gradients.pass_shapes(spec, 1, 8)
  assert long == short
  large = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=10**6))
  long, short = gradients.pass_shapes(large, 1, 8)
  assert short.length == -(-long.length // 4)


# ---- Updates of a model with experts, with routes and balance ----


EXPERTS = dataclasses.replace(
  CONFIG, num_experts=6, experts_per_token=2, mlp_width=16, normalised_experts=True
)


def make_routes():
  """Make routes that a group's fresh rows share in the prompt. Some tokens have no routes."""
  rng = np.random.default_rng(3)
  shape = ROWS, LENGTH, EXPERTS.num_layers
  routes_BTLC = np.argsort(rng.random((*shape, 6)), axis=-1)[..., :2].astype(np.uint8)
  prompt_B = np.argmax(BATCH.response_mask_BT, axis=1)
  for row in range(ROWS - 2):
    if row % 4 != 3:
      routes_BTLC[row, : prompt_B[row]] = routes_BTLC[row // 4 * 4, : prompt_B[row]]
  routes_BTLC[5, 20:] = 255
  return routes_BTLC


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
def test_packed_rows_with_experts_have_the_gradient_of_single_rows(one_device):
  mesh, params = one_device, initial_params(EXPERTS, one_device, lambda x: 1.5 * x)
  spec = make_spec(mesh, tokens=150, balance_coefficient=0.3)
  spec = dataclasses.replace(spec, model=EXPERTS)
  batch = dataclasses.replace(BATCH, routes_BTLC=make_routes())
  with jax.set_mesh(mesh):
    gradient, sums = gradients.minibatch_gradient(spec, params, batch, True, False)
    expected, sums_alone = alone(spec, params, batch, False)
    without = dataclasses.replace(batch, routes_BTLC=None)
    _, of_router = gradients.minibatch_gradient(spec, params, without, True, False)
  loss, load = sums_alone['loss'], np.asarray(sums_alone['choices_LE'])
  np.testing.assert_allclose(sums['loss'], loss, rtol=1e-5)
  np.testing.assert_array_equal(sums['choices_LE'], load)
  assert load.sum() == 2 * EXPERTS.num_layers * (BATCH.response_mask_BT > 0).sum()
  for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(ours - theirs) <= 3e-5 * np.linalg.norm(theirs)
  assert abs(of_router['loss'] - loss) > 1e-4  # other experts give another loss
  assert (np.asarray(of_router['choices_LE']) != load).any()
