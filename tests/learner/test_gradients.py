"""The update of a minibatch: packed into microbatches in any way, it is that of its rows alone."""

import dataclasses
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
  """Has tiny models packed as large ones are."""
  monkeypatch.setattr(model, 'is_tiny', lambda *_: False)


CONFIG = dataclasses.replace(
  test_model.CONFIG,
  vocab_size=64,
  num_heads=8,
  head_size=16,
  norm_epsilon=1e-6,
  query_key_norm=True,
  tied_embeddings=False,
)
ROWS, LENGTH, RESPONSE = 16, 72, 32
OBJECTIVE = objective.ObjectiveConfig()
OPTIMIZER = optimizer.OptimizerConfig()
NO_LORA = lora.LoraConfig()


def make_batch(seed=0):
  """Groups of four rows with a prompt of 1 to 40 tokens, one replayed, responses of 1 to 32.

  Two rows are empty, and the last two have a prompt of their own.
  """
  rng = np.random.default_rng(seed)
  group_B = np.r_[np.arange(ROWS - 2) // 4, ROWS - 2, ROWS - 1]
  prompt_B = rng.integers(1, LENGTH - RESPONSE + 1, ROWS)[group_B]
  end_B = prompt_B + rng.integers(1, RESPONSE + 1, ROWS)
  place_T = np.arange(LENGTH)
  mask_BT = ((place_T >= prompt_B[:, None]) & (place_T < end_B[:, None])).astype(np.float32)
  mask_BT[[3, 8]] = 0
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
    temperature=1.0,
    longest_row=LENGTH,
    max_response=RESPONSE,
    logit_chunk=256,
  )


def update(spec, state, batch, clip, is_first):
  """The state after one minibatch, and the norms of its gradient."""
  gradient, _ = gradients.minibatch_gradient(spec, state.params, batch, clip, is_first)
  return gradients.apply_gradient(spec, state, gradient)


def make_params(mesh):
  """Initial parameters, wide enough apart that no gradient is near 0."""
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
  """Every leaf within `tolerance` of its largest entry; sums likewise."""
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
  """Once, after its own prefix, with its own weight and advantage; nothing else has weight."""
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


def rows_with_targets(packed):
  """(sequence, segment) of each row of a microbatch."""
  b, w = np.nonzero(packed.inputs.mask_BT > 0)
  return set(zip(b, packed.segments.segment_BT[b, packed.predictor_BW[b, w]], strict=True))


def test_shapes_do_not_depend_on_the_rows(mesh):
  """Two of tokens and of stacks, whatever the lengths and however many rows have no response."""
  shapes = set()
  for seed in range(8):
    batch = make_batch(seed)
    if seed == 7:  # few tokens are left
      keeps = np.arange(LENGTH) < 8
      batch = dataclasses.replace(batch, response_mask_BT=batch.response_mask_BT * keeps)
    for count, stack in gradients.stack_by_shape(cut(mesh, 72, 2, batch), ROWS):
      shapes.add(jax.tree.map(np.shape, stack))
      assert count <= len(stack.tokens_BT)
  # A sequence of 72 tokens, or of a quarter of them, in each of two shards.
  assert {packed.tokens_BT for packed in shapes} == {(8, 2, 72), (8, 2, 18)}
  assert len(shapes) == 2


def test_a_minibatch_without_tokens_is_one_empty_pass(mesh):
  empty = dataclasses.replace(BATCH, response_mask_BT=np.zeros_like(BATCH.response_mask_BT))
  (packed,) = cut(mesh, 72, 4, batch=empty)
  assert packed.tokens_BT.shape == (4, 18) and not packed.inputs.weight_BT.any()


@pytest.mark.usefixtures('large_passes')
def test_rows_of_advantage_0_may_be_left_out(mesh):
  without = cut(mesh, 200, drop=True)
  assert all((p.inputs.advantage_BT[p.inputs.mask_BT > 0] != 0).all() for p in without)
  num_rows = sum(len(rows_with_targets(packed)) for packed in without)
  assert num_rows == ROWS - 2 - 3  # two are empty


# ---- The gradient ----


@jax.jit
def logp_and_entropy(params):
  """[2, B, T], of the rows of BATCH alone, aligned with their tokens."""
  hidden_BTD = model.hidden_states(CONFIG, params, BATCH.tokens_BT)
  logp_BTV = jax.nn.log_softmax(hidden_BTD @ model.unembedding(CONFIG, params))[:, :-1]
  logp_BT = jnp.take_along_axis(logp_BTV, BATCH.tokens_BT[:, 1:, None], -1)[..., 0]
  entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(-1)
  return jnp.pad(jnp.stack([logp_BT, entropy_BT]), ((0, 0), (0, 0), (1, 0)))


def alone(spec, params, batch, clip, is_first, reference=None):
  """`gradients.minibatch_gradient` of rows of BATCH that stand alone, by autodiff of all logits."""
  inputs = objective.loss_inputs(batch, spec.objective, RESPONSE)

  def loss_of(params, inputs):
    return objective.token_loss(
      *logp_and_entropy(params), inputs, spec.objective, clip=clip, is_first=is_first
    )

  @jax.jit
  def value_and_gradient(params, inputs):
    if reference is not None:
      inputs = inputs._replace(reference_logp_BT=logp_and_entropy(reference)[0])
    if spec.objective.importance_level != 'token':
      logp_BT, row_BT = logp_and_entropy(params)[0], np.ones(BATCH.tokens_BT.shape, int)
      ratio_BT = objective.row_log_ratio(logp_BT, inputs, row_BT, spec.objective, is_first)
      inputs = inputs._replace(row_log_ratio_BT=ratio_BT)
    return jax.value_and_grad(loss_of, has_aux=True)(params, inputs)

  (loss, sums), gradient = value_and_gradient(params, inputs)
  return gradient, sums | {'loss': loss}


@pytest.mark.usefixtures('large_passes')
@pytest.mark.parametrize(
  'options',
  tiers.full_after_first(
    [{}, dict(importance_level='sequence', aggregation='sequence_mean', kl_coefficient=0.5)]
  ),
  ids=['paper', 'gspo_and_kl'],
)
def test_packed_rows_have_the_gradient_of_rows_alone(mesh, params, options):
  """In a step's first minibatch, some of whose tokens an earlier policy wrote."""
  is_carried_BT = (BATCH.response_mask_BT > 0) & ~BATCH.is_replay_B[:, None]
  batch = dataclasses.replace(BATCH, is_carried_BT=is_carried_BT & (np.arange(LENGTH) < 30))
  spec = make_spec(mesh, tokens=150, **options)  # two sequences a pass
  reference = jax.tree.map(lambda x: 0.9 * x, params) if spec.objective.kl_coefficient else None
  with jax.set_mesh(mesh):
    found = gradients.minibatch_gradient(spec, params, batch, True, True, reference)
    found, expected = jax.device_get((found, alone(spec, params, batch, True, True, reference)))
  assert found[1]['carried_tokens'] > 20
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    # float32's rounding shows in differences, such as k3's, and depends on the machine.
    assert np.linalg.norm(ours - theirs) <= 3e-5 * np.linalg.norm(theirs)


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
def test_a_prompt_is_computed_once_for_its_rows_where_attention_can(mesh, gradient, whole):
  """And otherwise, as on a TPU, once for each row, which changes nothing."""
  shared = sum((packed.segments.segment_BT > 0).sum() for packed in cut(mesh, 10**6))
  with mock.patch.object(attention, '_WITH_PREFIXES', ()):
    apart = cut(mesh, 10**6)
    assert apart[0].segments.prefix_BT is None
    assert_same(gradient(), whole)
  assert shared < 0.85 * sum((packed.segments.segment_BT > 0).sum() for packed in apart)


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
def test_microbatches_change_nothing(gradient, whole, mesh):
  assert len(cut(mesh, 72)) == 9
  assert_same(gradient(tokens=72), whole)


@pytest.mark.full
def test_passes_of_two_lengths_and_another_order_of_rows_change_nothing(gradient, whole, mesh):
  assert len({packed.tokens_BT.shape for packed in cut(mesh, 10**6)}) == 2
  order = np.random.default_rng(1).permutation(ROWS)
  assert_same(gradient(jax.tree.map(lambda x: x[order], BATCH)), whole)


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
@pytest.mark.parametrize('remat', tiers.full_after_first(['all', 'all_but_products']))
def test_what_is_computed_again_changes_nothing(gradient, whole, remat):
  assert_same(gradient(remat=remat), whole)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole[0]))


@pytest.mark.usefixtures('large_passes')
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(params, mesh):
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
  """Random adapters."""
  shapes = gradients.trained_shapes(make_spec(mesh, lora_config=LORA))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda like: jax.device_put(np.float32(rng.normal(size=like.shape) / 10), like.sharding), shapes
  )


def test_a_tiny_model_on_one_cpu_has_one_shape(monkeypatch):
  monkeypatch.undo()  # what `two_shapes` has set
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
  """Alike for the prompts of a group, but those of its replayed row; some tokens have none."""
  rng = np.random.default_rng(3)
  shape = ROWS, LENGTH, EXPERTS.num_layers
  routes_BTLC = np.argsort(rng.random((*shape, 6)), axis=-1)[..., :2].astype(np.uint8)
  prompt_B = np.argmax(BATCH.response_mask_BT, axis=1)
  for row in range(ROWS - 2):
    if row % 4 != 3:
      routes_BTLC[row, : prompt_B[row]] = routes_BTLC[row // 4 * 4, : prompt_B[row]]
  routes_BTLC[5, 20:] = 255
  return routes_BTLC


def experts_alone(spec, params, batch):
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
      EXPERTS, params, tokens_BT, routes_BTLC=routes_BTLC, counted=counted
    )
    logp_BTV = jax.nn.log_softmax(hidden_BTD @ model.unembedding(EXPERTS, params))[:, :-1]
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


@pytest.mark.full
@pytest.mark.usefixtures('large_passes')
def test_packed_rows_of_experts_have_the_gradient_of_rows_alone(one_device):
  mesh, params = one_device, initial_params(EXPERTS, one_device, lambda x: 1.5 * x)
  spec = make_spec(mesh, tokens=150, balance_coefficient=0.3)
  spec = dataclasses.replace(spec, model=EXPERTS)
  batch = dataclasses.replace(BATCH, routes_BTLC=make_routes())
  with jax.set_mesh(mesh):
    gradient, sums = gradients.minibatch_gradient(spec, params, batch, True, False)
    loss, load, expected = experts_alone(spec, params, batch)
    without = dataclasses.replace(batch, routes_BTLC=None)
    _, of_router = gradients.minibatch_gradient(spec, params, without, True, False)
  np.testing.assert_allclose(sums['loss'], loss, rtol=1e-5)
  np.testing.assert_array_equal(sums['choices_LE'], load)
  assert load.sum() == 2 * EXPERTS.num_layers * (BATCH.response_mask_BT > 0).sum()
  for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(ours - theirs) <= 3e-5 * np.linalg.norm(theirs)
  assert abs(of_router['loss'] - loss) > 1e-4  # other experts, another loss
  assert (np.asarray(of_router['choices_LE']) != load).any()
