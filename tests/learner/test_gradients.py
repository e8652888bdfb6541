"""The update of a minibatch: cut into microbatches, in any order, it is the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax import config as config_lib
from exgrpo_jax import experiment
from exgrpo_jax.algorithm import objective
from exgrpo_jax.configs import base
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.policy import model, sharding
from tests.helpers.tiny import ROPE

CONFIG = model.Config(
  vocab_size=64,
  width=32,
  num_layers=2,
  num_heads=8,
  num_kv_heads=2,
  head_size=16,
  mlp_width=64,
  rope=ROPE,
  norm_epsilon=1e-6,
  attention_bias=True,
  query_key_norm=True,
  tied_embeddings=False,
  dtype='float32',
)
ROWS, LENGTH, RESPONSE = 16, 72, 32
VALUES = base.get_config()
OBJECTIVE = config_lib.build(objective.Config, VALUES.objective, 'config.objective')
OPTIMIZER = config_lib.build(optimizer.Config, VALUES.optimizer, 'config.optimizer')


def make_batch():
  """Prompts of 1 to 40 tokens, responses of 1 to 32, every fourth row replayed; two are empty."""
  rng = np.random.default_rng(0)
  prompt_B = rng.integers(1, LENGTH - RESPONSE + 1, ROWS)
  end_B = prompt_B + rng.integers(1, RESPONSE + 1, ROWS)
  place_T = np.arange(LENGTH)
  mask_BT = ((place_T >= prompt_B[:, None]) & (place_T < end_B[:, None])).astype(np.float32)
  mask_BT[[3, 8]] = 0
  logp_BT = (mask_BT * -rng.uniform(2, 6, mask_BT.shape)).astype(np.float32)
  return Batch(
    tokens_BT=rng.integers(0, 64, (ROWS, LENGTH)).astype(np.int32),
    response_mask_BT=mask_BT,
    behaviour_logp_BT=logp_BT,
    advantage_B=np.where(np.arange(ROWS) % 5 == 1, 0, rng.normal(size=ROWS)).astype(np.float32),
    is_replay_B=np.arange(ROWS) % 4 == 3,
    policy_step_B=np.zeros(ROWS, np.int32),
    tis_weight_BT=np.ones_like(mask_BT),
  )


BATCH = make_batch()


def make_spec(mesh, tokens=10**6, remat='none', drop=False, **changes):
  return gradients.UpdateSpec(
    gradient=gradients.Config(tokens_per_microbatch=tokens, remat=remat, drop_zero_advantage=drop),
    objective=dataclasses.replace(OBJECTIVE, **changes),
    optimizer=OPTIMIZER,
    model=CONFIG,
    mesh=mesh,
    num_updates=10,
    temperature=1.0,
    max_response=RESPONSE,
    logit_chunk=256,
  )


def update(spec, state, batch, clip, is_first):
  """The state after one minibatch, and the norms of its gradient."""
  gradient, _ = gradients.minibatch_gradient(spec, state.params, batch, clip, is_first)
  return gradients.apply_gradient(spec, state, gradient)


def make_params(mesh):
  """Initial parameters, wide enough apart that no gradient is near 0."""
  return jax.tree.map(lambda x: 2 * x, model.init(CONFIG, jax.random.key(0), mesh))


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
  return gradient()


def assert_same(found, expected, tolerance=1e-5):
  """Every leaf within `tolerance` of its largest entry; sums likewise."""
  for part, other in zip(found, expected, strict=True):
    for ours, theirs in zip(jax.tree.leaves(part), jax.tree.leaves(other), strict=True):
      np.testing.assert_allclose(
        ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max()
      )


def cut(tokens, shards=1, drop=False, batch=BATCH):
  return gradients.microbatches(
    gradients.Config(tokens, 'none', drop),
    batch,
    objective.loss_inputs(batch, OBJECTIVE, RESPONSE),
    shards,
  )


# ---- How rows are cut ----


@pytest.mark.parametrize('shards', [1, 4])
@pytest.mark.parametrize('tokens', [72, 200, 400, 10**6])
def test_each_response_token_is_in_one_microbatch(tokens, shards):
  """With its own target, weight and advantage; nothing else has weight."""
  whole, found, expected = objective.loss_inputs(BATCH, OBJECTIVE, RESPONSE), [], []
  for rows in cut(tokens, shards):
    count, length = rows.tokens_BT.shape
    assert count % shards == 0 and count // shards * length <= max(tokens, length)
    for row, place in np.argwhere(rows.inputs.mask_BT > 0):
      at = rows.first_B[row] + place
      assert rows.tokens_BT[row, at] == rows.target_BW[row, place]
      found.append(
        (
          rows.target_BW[row, place],
          rows.inputs.weight_BT[row, place],
          rows.inputs.old_logp_BT[row, place],
          rows.inputs.advantage_B1[row, 0],
        )
      )
    assert not rows.inputs.weight_BT[rows.inputs.mask_BT == 0].any()
  for row, place in np.argwhere(BATCH.response_mask_BT > 0):
    expected.append(
      (
        BATCH.tokens_BT[row, place],
        whole.weight_BT[row, place],
        whole.old_logp_BT[row, place],
        whole.advantage_B1[row, 0],
      )
    )
  assert sorted(found) == sorted(expected)


def test_long_rows_come_first_and_short_ones_share_a_pass():
  sizes = [rows.tokens_BT.shape for rows in cut(200)]
  assert len(sizes) > 2
  assert [length for _, length in sizes] == sorted((s[1] for s in sizes), reverse=True)
  assert max(count for count, _ in sizes) > sizes[0][0]


def test_a_minibatch_without_tokens_is_one_empty_pass():
  empty = dataclasses.replace(BATCH, response_mask_BT=np.zeros_like(BATCH.response_mask_BT))
  (rows,) = cut(200, 4, batch=empty)
  assert len(rows.first_B) == 4 and not rows.inputs.weight_BT.any()


def test_rows_of_advantage_0_may_be_left_out(gradient):
  left = np.concatenate(
    [rows.inputs.advantage_B1[rows.inputs.mask_BT.any(1)] for rows in cut(200, drop=True)]
  )
  assert len(left) == ROWS - 2 - 3 and (left != 0).all()  # two are empty
  assert_same(gradient(drop=True, entropy_bonus=0.0)[:1], gradient(entropy_bonus=0.0)[:1])


def test_leaving_them_out_is_refused_where_a_term_pulls_at_them():
  values = base.get_config()
  values.gradient.drop_zero_advantage = True
  with pytest.raises(InputError, match=r'needs config\.objective\.entropy_bonus=0, not 0\.0001'):
    experiment.parse_config(values)


# ---- The gradient ----


@pytest.mark.parametrize(('tokens', 'count'), [(600, 2), (220, 4)])
def test_microbatches_change_nothing(gradient, whole, tokens, count):
  assert len(cut(tokens)) == count
  assert_same(gradient(tokens=tokens), whole)


def test_more_layers_are_no_more_to_compile(mesh):
  def lowered(num_layers):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    settings = dataclasses.replace(make_spec(mesh), model=config)
    shapes = model.shapes(config, mesh)
    with jax.set_mesh(mesh):
      nothing = jax.eval_shape(functools.partial(gradients.zero_accumulator, settings), shapes)
      ((_, rows_M),) = gradients.stack_by_shape(cut(10**6), ROWS)
      return (
        gradients.accumulate.lower(settings, shapes, nothing, rows_M, 1, False, True, None)
        .as_text()
        .count('\n')
      )

  assert lowered(28) == lowered(4)


def test_microbatches_change_nothing_where_ratios_are_of_sequences(gradient, whole):
  """Which a first pass over each microbatch gives."""
  changes = dict(ratio='sequence', aggregation='sequence_mean')
  expected = gradient(**changes)
  assert np.abs(expected[0]['unembedding_DV'] - whole[0]['unembedding_DV']).max() > 1e-7
  assert_same(gradient(tokens=600, **changes), expected)


def test_the_order_of_rows_changes_nothing(gradient, whole):
  order = np.random.default_rng(1).permutation(ROWS)
  assert_same(gradient(jax.tree.map(lambda x: x[order], BATCH), tokens=600), whole)


@pytest.mark.parametrize('remat', ['all', 'all_but_products'])
def test_what_is_computed_again_changes_nothing(gradient, whole, remat):
  assert_same(gradient(remat=remat), whole)


def test_every_parameter_is_pulled_at(whole):
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole[0]))


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(params, mesh, value):
  advantage_B = BATCH.advantage_B.copy()
  advantage_B[0] = value
  state = optimizer.init(OPTIMIZER, 10, jax.tree.map(jnp.copy, params))
  before = jax.tree.map(np.array, state)
  with jax.set_mesh(mesh):
    after, sums = update(
      make_spec(mesh), state, dataclasses.replace(BATCH, advantage_B=advantage_B), False, True
    )
  assert sums['skipped'] == 1
  jax.tree.map(np.testing.assert_array_equal, after, before)
