"""Compares the gradient of a step's rows with itself, its opposite, and held-out questions."""

import copy
import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment
from exgrpo_jax.grading import programs
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from studies import alignment
from studies.alignment import Alignment
from tests.helpers import devices, forked, losses, meshes, recording, tiny
from tests.learner import test_gradients


@pytest.fixture(scope='module')
def step(recorded):
  """Return the first step with all three parts."""

  def has_all(batch):
    parts = alignment.parts(batch, tiny.ROLLOUTS).values()
    return all(part.advantage_B.any() for part in parts)

  return next(step for step in recorded.steps.values() if has_all(step.batch))


@pytest.fixture(scope='module')
def policy(recorded, step):
  """Return the functions `measure` and `norm`, at the parameters that the step began with."""
  opened = recorded.experiment
  spec = experiment.update_spec(opened.config, opened.model, opened.meshes.training)
  params = jax.device_put(step.params, model.shardings(opened.model, opened.meshes.training))

  def measure(batch, held_out):
    with jax.set_mesh(opened.meshes.training), recorded.compiling():
      return alignment.measure(spec, params, batch, tiny.ROLLOUTS, False, held_out)

  def norm(batch):
    with jax.set_mesh(opened.meshes.training), recorded.compiling():
      gradient = alignment.policy_gradient(spec, params, batch, False)
      return math.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(gradient)))

  return types.SimpleNamespace(measure=measure, norm=norm)


def test_a_gradient_lies_along_itself_and_against_its_opposite(policy, step):
  fresh = alignment.parts(step.batch, tiny.ROLLOUTS)['fresh']
  along = policy.measure(fresh, fresh)
  against = policy.measure(fresh, dataclasses.replace(fresh, advantage_B=-2 * fresh.advantage_B))
  assert set(along) == set(against) == {'alignment/fresh', 'alignment/fresh_projection'}
  assert along['alignment/fresh'] == pytest.approx(1, abs=1e-5)
  assert against['alignment/fresh'] == pytest.approx(-1, abs=1e-5)
  # The held-out gradient's norm does not matter.
  length = along['alignment/fresh_projection']
  assert length > 0 and against['alignment/fresh_projection'] == pytest.approx(-length, rel=1e-4)


def test_the_projections_on_a_steps_own_gradient_add_up_to_its_norm(policy, step):
  found = policy.measure(step.batch, step.batch)
  assert set(found) == {
    f'alignment/{part}{ending}'
    for part in ('fresh', 'replayed', 'fresh_in_mixed_groups')
    for ending in ('', '_projection')
  }
  total = sum(value for name, value in found.items() if name.endswith('_projection'))
  assert total == pytest.approx(policy.norm(step.batch), rel=1e-4)


def test_what_has_no_gradient_is_left_out(policy, step):
  fresh = alignment.parts(step.batch, tiny.ROLLOUTS)['fresh']
  silent = dataclasses.replace(fresh, advantage_B=np.zeros_like(fresh.advantage_B))
  empty = dataclasses.replace(fresh, response_mask_BT=np.zeros_like(fresh.response_mask_BT))
  for nothing in (silent, empty):
    assert policy.measure(nothing, fresh) == policy.measure(fresh, nothing) == {}


def compare_layouts():
  """Check on eight devices that a mesh of all of them measures the same as one device."""
  actual, expected = alignment_on(meshes.make_mesh(2, 2, 2)), alignment_on(meshes.one_device())
  assert set(actual) == set(expected) and len(expected) == 6, (actual, expected)
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-4, err_msg=name)


def alignment_on(mesh):
  """Compare the first rows with the others, which are treated as fresh."""
  half = test_gradients.ROWS // 8 * 4
  first, others = (
    jax.tree.map(lambda x, rows=rows: x[rows], test_gradients.BATCH)
    for rows in (slice(half), slice(half, None))
  )
  first = dataclasses.replace(first, is_replay_B=first.is_replay_B & (np.arange(half) >= 4))
  others = dataclasses.replace(others, is_replay_B=np.zeros_like(others.is_replay_B))
  with jax.set_mesh(mesh), losses.large_passes():
    params, spec = test_gradients.make_params(mesh), test_gradients.make_spec(mesh, tokens=64)
    return alignment.measure(spec, params, first, 4, True, others)


def test_gradients_are_compared_on_eight_devices_as_on_one():
  script = 'from studies.tests import test_alignment; test_alignment.compare_layouts()'
  outcome = forked.run_one(['-c', script], **devices.devices_of(8))
  assert outcome.status == 0, outcome.err


# ---- In a real run, measuring changes nothing else ----

PARTS = ('fresh', 'replayed', 'fresh_in_mixed_groups')
NUM_STEPS, EVERY = 8, 2
QUESTIONS, SAMPLES = 7, 5  # held out


def changed(values):
  """Return a config with one minibatch per step and only policy terms in the loss."""
  config = copy.deepcopy(values)
  config.num_steps = config.evaluation.every = NUM_STEPS
  config.warm_start.num_updates = 0
  config.optimizer.minibatches = 1
  config.objective.entropy_bonus = 0.0
  config.checkpoint.update(dict(every=EVERY, keep=NUM_STEPS))
  # The evaluation set has too few questions to draw from.
  config.data.validation = (config.data.train,)
  return config


def flat(gradient):
  """Return all entries of a gradient as float64."""
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)]).astype(np.float64)


def train(values, workdir, compiled, callbacks):
  """Train in this process. Return the compared gradients, and the applied gradient of each step."""
  opened = experiment.open_experiment(values, str(workdir))
  run = recording.Recording(workdir, compiled, values, steps={})
  compared, applied = [], []
  with pytest.MonkeyPatch.context() as patch, run.compiling():
    patch.setattr(programs, 'COMMAND', tiny.WORKER)
    policy_gradient, apply_gradient = alignment.policy_gradient, gradients.apply_gradient

    def note_compared(spec, params, batch, clip, initial):
      gradient = policy_gradient(spec, params, batch, clip, initial)
      compared.append((len(applied) + 1, batch, flat(gradient)))
      return gradient

    def note_applied(spec, state, gradient, *measured):
      applied.append(flat(gradient))
      return apply_gradient(spec, state, gradient, *measured)

    patch.setattr(alignment, 'policy_gradient', note_compared)
    patch.setattr(gradients, 'apply_gradient', note_applied)
    recording.run_training(opened, values=values, callbacks=callbacks)
  return compared, applied


@pytest.fixture(scope='module')
def run(values, compiled, tmp_path_factory):
  """Train a run that compares every other step."""
  config, workdir = changed(values), tmp_path_factory.mktemp('held_out') / 'run'
  compared, applied = train(config, workdir, compiled, [Alignment(EVERY, QUESTIONS, SAMPLES)])
  return types.SimpleNamespace(
    config=config,
    workdir=workdir,
    compared=compared,
    applied=applied,
    records={record['step']: record for record in metrics.read(workdir)},
  )


def test_every_other_step_says_how_its_parts_lie_to_the_held_out_gradient(run):
  all_parts = 0
  for step in range(1, NUM_STEPS + 1):
    names = {name for name in run.records[step] if name.startswith('alignment/')}
    names -= {'alignment/zero_variance'}
    of_step = [(batch, gradient) for number, batch, gradient in run.compared if number == step]
    assert 'time/callbacks' in run.records[step]
    assert bool(of_step) == (step % EVERY == 0)
    if of_step:
      (held_out, towards), *parts = of_step
      assert len(held_out.advantage_B) == QUESTIONS * SAMPLES and not held_out.is_replay_B.any()
      assert len(names) == 2 * len(parts)
      silent = [not any(group) for group in np.split(held_out.advantage_B, QUESTIONS)]
      assert run.records[step]['alignment/zero_variance'] == pytest.approx(np.mean(silent))
      cosines = [part @ towards / np.sqrt(part @ part * (towards @ towards)) for _, part in parts]
      projections = [part @ towards / np.sqrt(towards @ towards) for _, part in parts]
      for ending, expected in (('', cosines), ('_projection', projections)):
        found = [run.records[step].get(f'alignment/{name}{ending}') for name in PARTS]
        np.testing.assert_allclose([x for x in found if x is not None], expected, rtol=1e-3)
      all_parts += len(parts) == 3
  assert all_parts > 1


def test_the_parts_add_up_to_the_steps_gradient(run):
  """The sum is the gradient that the optimizer received."""
  steps = 0
  for step in range(EVERY, NUM_STEPS + 1, EVERY):
    (_, *parts) = [gradient for number, _, gradient in run.compared if number == step]
    step_gradient = run.applied[step - 1]
    np.testing.assert_allclose(sum(parts), step_gradient, atol=1e-5 * np.abs(step_gradient).max())
    norm = run.records[step]['gradient_norm']
    assert np.linalg.norm(sum(parts)) == pytest.approx(norm, rel=1e-4)
    steps += len(parts) == 3
  assert steps > 1


def test_each_row_of_a_step_is_in_one_part(run):
  for step in range(EVERY, NUM_STEPS + 1, EVERY):
    (_, *parts) = [batch for number, batch, _ in run.compared if number == step]
    is_replay_B = parts[0].is_replay_B
    is_mixed_B = np.repeat(is_replay_B.reshape(-1, tiny.ROLLOUTS).any(axis=1), tiny.ROLLOUTS)
    for part in parts:
      inside_B = part.advantage_B != 0
      kinds = np.unique(np.stack([is_mixed_B, is_replay_B])[:, inside_B], axis=1)
      assert kinds.shape == (2, 1)
      # The normalizer counts all rows.
      np.testing.assert_array_equal(part.response_mask_BT, parts[0].response_mask_BT)


def test_measuring_changes_nothing_else(run, values, compiled, tmp_path):
  compared, _ = train(changed(values), tmp_path / 'off', compiled, ())
  assert compared == []
  without = [
    {name: value for name, value in record.items() if not name.startswith('alignment/')}
    for record in tiny.untimed_records(run.workdir)
  ]
  assert tiny.untimed_records(tmp_path / 'off') == without


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    ((), r'--align_every=1 needs held-out questions\. Set config\.data\.validation'),
    (('few',), r'needs 32 distinct questions for a comparison, but few has only 4 questions'),
  ],
)
def test_too_few_held_out_questions_are_refused_in_the_first_step(data, message):
  evaluations = tuple(types.SimpleNamespace(questions=range(4), spec=spec) for spec in data)
  run = types.SimpleNamespace(evaluations=evaluations)
  with pytest.raises(InputError, match=message):
    Alignment(1)._check(run)
