"""The optimizer against hand-computed numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from exgrpo_jax.learner import optimizer
from exgrpo_jax.policy import sharding

PLAIN = optimizer.OptimizerConfig(
  minibatches=1,
  learning_rate=0.1,
  b2=0.99,
  epsilon=1e-8,
  weight_decay=0.0,
  clip_norm=math.inf,
  skip_above_norm=math.inf,
)
PARAMS = {'a': np.array([1.0, -2.0], np.float32), 'b': {'c': np.array([[0.5]], np.float32)}}
GRADIENT = {  # norm 5
  'a': np.array([3.0, 0.0], np.float32),
  'b': {'c': np.array([[-4.0]], np.float32)},
}

MOMENTUM = optax.trace(0.9)


def changed(**values):
  return dataclasses.replace(PLAIN, **values)


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))


@pytest.fixture
def apply(mesh):
  """Return (config, *gradients) -> (state, metrics) after one of 100 updates per gradient."""

  def apply_all(config, *gradients, params=PARAMS):
    state = optimizer.init(config, 100, jax.device_put(params, sharding.replicated(mesh)))
    for gradient in gradients:
      state, metrics = optimizer.apply_gradient(
        config, 100, state, jax.tree.map(jnp.asarray, gradient)
      )
    return state, metrics

  return apply_all


def scaled(factor):
  return jax.tree.map(lambda x: x * np.float32(factor), GRADIENT)


def adamw(config, rates, gradients, x):
  """AdamW (Loshchilov and Hutter) for a single number, in float64."""
  m = v = 0.0
  for t, (rate, g) in enumerate(zip(rates, gradients), start=1):
    m, v = config.b1 * m + (1 - config.b1) * g, config.b2 * v + (1 - config.b2) * g**2
    direction = m / (1 - config.b1**t) / (math.sqrt(v / (1 - config.b2**t)) + config.epsilon)
    x -= rate * (direction + config.weight_decay * x)
  return x


@pytest.mark.parametrize(
  'config',
  [PLAIN, changed(weight_decay=0.5), changed(epsilon=2.0), changed(b1=0.0, b2=0.5)],
  ids=['plain', 'decay', 'epsilon', 'momenta'],
)
def test_updates_follow_adamw(apply, config):
  state, _ = apply(config, scaled(1), scaled(-0.5), scaled(2))
  for value, start, g in (
    (state.params['a'][0], 1.0, 3.0),
    (state.params['a'][1], -2.0, 0.0),
    (state.params['b']['c'][0, 0], 0.5, -4.0),
  ):
    assert value == pytest.approx(adamw(config, [0.1] * 3, [g, -0.5 * g, 2 * g], start), rel=1e-4)


@pytest.mark.parametrize(('clip_norm', 'factor'), [(2.5, 0.5), (5.01, 1.0), (math.inf, 1.0)])
def test_a_gradient_above_clip_norm_is_scaled_down(apply, clip_norm, factor):
  # With a large epsilon, an update is rate / epsilon times the gradient.
  config = changed(clip_norm=clip_norm, epsilon=1e6, learning_rate=1e4)
  state, metrics = apply(config, GRADIENT)
  np.testing.assert_allclose(state.params['a'], [1.0 - 0.03 * factor, -2.0], rtol=1e-5)
  assert metrics['gradient_norm'] == 5.0 and metrics['skipped'] == 0  # the norm before clipping


@pytest.mark.parametrize(
  ('skip_norm', 'bad'),
  [
    (9.9, scaled(2.0)),
    (math.inf, {**GRADIENT, 'a': np.array([math.nan, 0.0], np.float32)}),
    (math.inf, {**GRADIENT, 'a': np.array([0.0, -math.inf], np.float32)}),
    (math.inf, scaled(1e30)),
  ],
  ids=['above_skip_norm', 'nan', 'inf', 'norm_overflows'],
)
def test_a_skipped_update_is_counted_and_changes_nothing(apply, skip_norm, bad):
  config = changed(skip_above_norm=skip_norm, clip_norm=1.0, weight_decay=0.1, schedule='cosine')
  before, metrics = apply(config, GRADIENT)
  assert metrics['skipped'] == 0
  after, metrics = apply(config, GRADIENT, bad)
  assert metrics['skipped'] == 1
  jax.tree.map(np.testing.assert_array_equal, after, before)
  counts = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim == 0]
  assert counts and all(count == 1 for count in counts)
  jax.tree.map(
    np.testing.assert_array_equal,
    apply(config, GRADIENT, bad, GRADIENT)[0],
    apply(config, GRADIENT, GRADIENT)[0],
  )


def test_the_learning_rate_is_reported_and_a_skipped_update_does_not_advance_it(apply):
  assert apply(changed(skip_above_norm=5.0), GRADIENT)[1]['skipped'] == 0  # exactly at the limit
  # A warm-up over 4 updates to .1 starts at .1 / 5 and rises by (.1 - .02) / 4 per update.
  config = changed(warmup_updates=4, skip_above_norm=9.9)
  assert apply(config, GRADIENT)[1]['learning_rate'] == pytest.approx(0.02)
  assert apply(config, GRADIENT, scaled(2.0), GRADIENT)[1]['learning_rate'] == pytest.approx(0.04)


# ---- Learning rates ----


@pytest.mark.parametrize(
  ('values', 'steps', 'expected'),
  [
    ({}, [0, 5, 100], [0.1, 0.1, 0.1]),
    # Warm-up over four updates: 1/5, 2/5, 3/5 and 4/5 of the peak; the fifth update has the peak.
    (dict(warmup_updates=4), range(6), [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]),
    (dict(schedule='linear', warmup_updates=2), [2, 6, 10], [0.1, 0.05, 0]),
    (dict(schedule='cosine', warmup_updates=2), [2, 6, 10], [0.1, 0.05, 0]),
    # A quarter of the way down, the factors are 3/4 and (1 + cos(pi / 4)) / 2.
    (dict(schedule='linear', warmup_updates=2), [4], [0.075]),
    (dict(schedule='cosine', warmup_updates=2), [4], [0.1 * (1 + math.cos(math.pi / 4)) / 2]),
  ],
)
def test_rates_match_hand_computed_rates(values, steps, expected):
  schedule = optimizer.learning_rate(changed(**values), num_updates=10)
  assert [float(schedule(step)) for step in steps] == pytest.approx(expected, abs=1e-8)


def test_the_schedule_counts_applied_updates(apply):
  config = changed(schedule='linear')
  state, _ = apply(config, GRADIENT, GRADIENT)
  expected = adamw(config, [0.1, 0.099], [3.0, 3.0], 1.0)
  assert state.params['a'][0] == pytest.approx(expected, rel=1e-5)


def test_an_update_is_traced_once(mesh):
  """A state with changed types or shardings would recompile, which takes minutes at scale."""
  traces = []

  @jax.jit
  def update(state, gradient):
    traces.append(1)
    return optimizer.apply_gradient(PLAIN, 100, state, gradient)[0]

  state = optimizer.init(PLAIN, 100, jax.device_put(PARAMS, sharding.replicated(mesh)))
  gradient = jax.device_put(GRADIENT, sharding.replicated(mesh))
  update(update(state, gradient), gradient)
  assert len(traces) == 1


# ---- Optimizers of a config file ----


def test_a_moment_is_sharded_like_its_parameter_if_it_has_its_shape(mesh, monkeypatch):
  """Adafactor's moments of a matrix are vectors: one per row and one per column."""
  factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
  monkeypatch.setitem(optimizer.OPTIMIZERS, 'both', lambda _: optax.chain(MOMENTUM, factored))
  layout = jax.sharding.NamedSharding(mesh, jax.P(None, 'fsdp'))
  state = optimizer.init(
    changed(name='both'), 9, jax.device_put({'kernel': jnp.ones((2, 24))}, layout)
  )
  layouts = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(state.opt_state)}
  assert layouts[2, 24] == layout.spec and layouts[2,] == layouts[24,] == jax.P()


# ---- Moments in bfloat16 ----


def second_moments(b2, *squares, size=4000):
  """Return the second moments of `size` equal parameters after gradients with these squares."""
  config = changed(b2=b2, moment_dtype='bfloat16')
  transform = optimizer.make(config, 100)
  params = {'a': jnp.ones(size)}
  state = transform.init(params)
  update = jax.jit(transform.update)
  for square in squares:
    _, state = update({'a': jnp.full(size, math.sqrt(square))}, state, params)
  (moments,) = jax.tree.leaves(optax.tree.get(state, 'nu'))
  assert moments.dtype == optax.tree.get(state, 'mu')['a'].dtype == jnp.bfloat16
  return np.asarray(moments, np.float64)


def test_second_moments_in_bfloat16_are_right_on_average_and_decay():
  """A gradient of 1 and 99 of 0 give .001 * .999^99. Rounding to nearest would keep .001."""
  moments = second_moments(0.999, 1.0, *[0.0] * 99)
  expected = 0.001 * 0.999**99
  assert moments.mean() == pytest.approx(expected, rel=2e-3)
  assert 0.01 < moments.std() / expected < 0.05
  assert np.abs(moments / second_moments(0.999, 1.0) - 1).min() > 0


def test_a_second_moment_is_rounded_to_one_of_its_two_neighbors():
  """3 + 2^-8 is 1/4 of the way from 3 to the next bfloat16, 3 + 2^-6, so 1/4 are rounded up."""
  moments = second_moments(0.0, 3 + 2**-8)
  assert set(moments) == {3.0, 3 + 2**-6}
  assert np.mean(moments > 3) == pytest.approx(0.25, abs=0.03)


def test_updates_with_bfloat16_moments_nearly_follow_adamw(apply):
  config = changed(moment_dtype='bfloat16', weight_decay=0.5)
  state, _ = apply(config, scaled(1), scaled(-0.5), scaled(2))
  assert state.params['a'][0] == pytest.approx(
    adamw(config, [0.1] * 3, [3.0, -1.5, 6.0], 1.0), abs=2e-3
  )
  assert state.params['a'].dtype == np.float32
